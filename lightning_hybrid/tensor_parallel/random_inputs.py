"""Random weights and arguments for trying blocks: the same on all ranks, and hiding nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_hybrid.training.snapshots import as_it_is

__all__ = ["float_dtype", "random_call", "random_weights"]


def float_dtype(block: nn.Module) -> torch.dtype:
    """The dtype that a block computes in: that of its first parameter which is not an integer (quantised, a count)."""
    found = (parameter.dtype for parameter in block.parameters() if parameter.is_floating_point())
    return next(found, torch.get_default_dtype())


def random_weights(block: nn.Module) -> nn.Module:
    """Weights that let every part of the block be seen in its output; the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        values = noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1.0 + 0.5 * noise
        parameter.data = values.to(parameter)  # not in place: a weight that is still to come has no memory of its own
        parameter.requires_grad_(parameter.is_floating_point())
    return block


def random_call(call: Any, dtype: torch.dtype) -> Any:
    """Arguments like those of ``call``, with random hidden states that require a gradient; the same on all ranks."""
    generator = torch.Generator().manual_seed(1)

    def prepare(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return as_it_is(x)
        if not x.is_floating_point():
            return x
        if not x.requires_grad:
            return x.detach().to(dtype)
        return torch.randn(x.shape, generator=generator).to(x.device, dtype).requires_grad_()

    return tree_map(prepare, call)
