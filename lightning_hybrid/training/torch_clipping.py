"""torch's and Lightning's own norms and clipping, asked for the gradients of a part of a module: refused by name.

``clip_grad_norm_(self.parameters(), 1.0)``, ``get_total_norm`` and Lightning's ``grad_norm`` look at one pipeline
stage, or fail on shards or a mix of split and whole parameters. An exchange in their place could leave ranks waiting,
where only some call them.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities import grads
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from lightning_hybrid.errors import UnsupportedError

__all__ = ["checked_grad_norm", "refuse_lightnings_norms", "refuse_norms_of"]

_parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_norms_of(module: nn.Module) -> None:
    """Have torch's functions refuse the gradients of ``module``, which is cut or split."""
    _have_torch_ask()
    _parts.add(module)


@functools.cache
def refuse_lightnings_norms() -> None:
    """Once. Modules import the function by name before a strategy is made, so its code is what is replaced."""

    def grad_norm(module, norm_type, group_separator="/"):  # type: ignore[no-untyped-def]
        from lightning_hybrid.training.torch_clipping import checked_grad_norm

        return checked_grad_norm(module, norm_type, group_separator)

    _LIGHTNINGS.append(types.FunctionType(grads.grad_norm.__code__, grads.__dict__, "grad_norm"))
    grads.grad_norm.__code__ = grad_norm.__code__


_LIGHTNINGS: list[Any] = []
"""Lightning's ``grad_norm``, as it was."""


def checked_grad_norm(module: nn.Module, norm_type: float, group_separator: str) -> Any:
    """Lightning's ``grad_norm``.

    Raises:
        UnsupportedError: if the module holds a part of the gradients.
    """
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    held = {id(parameter) for part in _parts for parameter in part.parameters()}
    if any(isinstance(g, DTensor) for g in gradients) or any(id(p) in held for p in module.parameters()):
        raise UnsupportedError(
            "Lightning's grad_norm sees this rank's part of the gradients only (a pipeline stage, shards). Log"
            " lightning_hybrid.grad_norm(self), the norm of the whole model's gradient, on all ranks."
        )
    return _LIGHTNINGS[0](module, norm_type, group_separator)


@functools.cache
def _have_torch_ask() -> None:
    """Once. ``clip_grad_norm_``, wherever it was imported to, calls the function of its module that is replaced."""
    checked = _refusing(clip_grad._get_total_norm)
    for owner, name in ((clip_grad, "_get_total_norm"), (torch.nn.utils, "get_total_norm")):
        setattr(owner, name, checked)


def _refusing(function: Any) -> Any:
    @functools.wraps(function)
    def total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        _check(tensors)
        return function(tensors, *args, **kwargs)

    return total_norm


def _check(tensors: Iterable[Tensor]) -> None:
    """See above.

    Raises:
        UnsupportedError: if one of them is a gradient of a part.
    """
    asked = {id(tensor) for tensor in tensors}
    for module in _parts:
        if any(id(parameter.grad) in asked for parameter in module.parameters() if parameter.grad is not None):
            raise UnsupportedError(
                "torch's clip_grad_norm_ and get_total_norm see this rank's part of the gradients only (one pipeline"
                " stage, or a tensor rank's shares). Use lightning_hybrid.grad_norm(self) for the norm, and"
                " Trainer(gradient_clip_val=...) or self.clip_gradients(optimizer, ...) to clip, on all ranks."
            )
