"""What counts as a linear layer: ``nn.Linear``, and the ``Conv1D`` of transformers, whose weight is ``[in, out]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["features_of", "is_linear", "is_transposed", "product"]


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a linear layer with a weight ``[in, out]`` (GPT-2's layers)."""
    classes = ((c.__name__, c.__module__.partition(".")[0]) for c in type(module).__mro__)
    return ("Conv1D", "transformers") in classes


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of either kind, with a weight of its own."""
    kind = isinstance(module, nn.Linear) or is_transposed(module)
    return kind and module._parameters.get("weight") is not None


def features_of(module: nn.Module) -> tuple[int, int]:
    """Output and input features of a linear layer; zeros for what is none."""
    names = ("nf", "nx") if is_transposed(module) else ("out_features", "in_features")
    out, inner = (getattr(module, name, 0) for name in names)
    return out, inner


def product(module: Any, x: Tensor) -> Tensor:
    """What a transposed layer computes, of this rank's share; its own code knows the whole width, and wants a bias."""
    out = torch.matmul(x, module.weight)
    return out if module.bias is None else out + module.bias
