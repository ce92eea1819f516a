"""Gradients of a pipelined step, brought to Lightning's order of hooks.

[Note: backward inside of training_step]
Lightning's closure runs ``training_step``, then ``zero_grad``, then ``backward``. A schedule runs forwards and
backwards together inside of ``training_step``, so ``zero_grad`` would erase its gradients. Therefore the schedule's
gradients are kept apart, and the loss that ``training_step`` returns is a node whose backward adds them to the
parameters, multiplied with the gradient that arrives there. Accumulation, loss scaling and a user's own ``backward``
then mean what they always mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

__all__ = ["GradientLedger", "zeroes_unseen"]


def zeroes_unseen(trainer: Any) -> bool:
    """Whether Lightning erases the last window's gradients before anybody could look at them.

    Then they need not be kept while a pipelined step makes new ones.
    """
    module = trainer.lightning_module
    if is_overridden("optimizer_zero_grad", module) or is_overridden("on_before_zero_grad", module):
        return False
    return not any(is_overridden("on_before_zero_grad", callback) for callback in trainer.callbacks)


class GradientLedger:
    """Keeps one step's gradients apart from those that are already there."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._earlier: list[Tensor | None] = []
        self._new: list[Tensor | None] = []

    def open(self) -> None:
        """Set the gradients that are already there aside."""
        self._earlier = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        """Take the step's gradients away and put the earlier ones back."""
        self._new = [p.grad for p in self._parameters]
        for parameter, gradient in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = gradient
        self._earlier = []

    def loss(self, value: Tensor) -> Tensor:
        """Return a loss of that value whose backward adds the step's gradients to the parameters."""
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        with torch.enable_grad():
            result: Tensor = _Deposit.apply(  # type: ignore[no-untyped-call]
                anchor, value, self._deposit
            )
        return result

    @torch.no_grad()
    def _deposit(self, factor: Tensor) -> None:
        known_to_be_one = factor.device.type == "cpu" and factor == 1  # elsewhere to look would be to wait
        for parameter, gradient in zip(self._parameters, self._new, strict=True):
            if gradient is None:
                continue
            if not known_to_be_one:
                gradient.mul_(factor.to(gradient.device))  # which may be offloaded
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self._new = [None] * len(self._parameters)


class _Deposit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, deposit: Callable[[Tensor], None]) -> Tensor:
        ctx.deposit = deposit
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.deposit(gradient)
        return None, None, None
