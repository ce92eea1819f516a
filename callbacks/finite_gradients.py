"""Stops, or passes over a step, when a gradient or the loss is no number on any rank."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_hybrid.errors import ConfigurationError, NonFiniteError

__all__ = ["FiniteGradients"]

_log = logging.getLogger(__name__)


class FiniteGradients(Callback):
    """Looks at the loss and all gradients before each optimizer step, and has all ranks decide alike.

    Without it, NaN or infinity does what it does in one process: it spreads with the reductions, and training goes on.
    The check costs one pass over the gradients (as clipping by norm does) and one exchange of a number over the world,
    which the host waits for. Works under any strategy.

    Args:
        action: ``"stop"`` raises :class:`~lightning_hybrid.errors.NonFiniteError` on all ranks, which names parameters,
            ranks and pipeline stages; ``"skip"`` leaves weights and optimizer states as they are (learning-rate
            schedules go on), and warns.
        most_in_a_row: So many steps may be skipped one after the other; then it stops.

    Raises:
        ConfigurationError: for other values.
    """

    def __init__(self, action: Literal["stop", "skip"] = "stop", *, most_in_a_row: int = 10) -> None:
        if action not in ("stop", "skip"):
            raise ConfigurationError(f'action={action!r} must be "stop" or "skip".')
        if type(most_in_a_row) is not int or most_in_a_row < 1:
            raise ConfigurationError(f"most_in_a_row={most_in_a_row!r} must be an integer of at least 1.")
        self.action, self.most_in_a_row = action, most_in_a_row
        self.num_skipped = 0
        """Steps that were passed over so far."""
        self._in_a_row = 0
        self._loss: Tensor | None = None

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._loss = loss.detach()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        found = _worst(pl_module, self._loss)
        worst = torch.zeros(1, device=trainer.strategy.root_device) if found is None else found.reshape(1)
        bad = (~torch.isfinite(worst)).to(torch.int32)
        if trainer.world_size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        if not bad.item():
            self._in_a_row = 0
            return
        message = f"optimizer step {trainer.global_step + 1}: {_describe(trainer, pl_module, self._loss)}"
        self._in_a_row += 1
        if self.action == "stop" or self._in_a_row > self.most_in_a_row:
            in_a_row = f" in {self._in_a_row} steps one after the other" if self._in_a_row > 1 else ""
            raise NonFiniteError(
                f"Not finite{in_a_row}, {message}. Lower the learning rate, clip gradients (gradient_clip_val=1.0),"
                ' look for bad samples, or pass over such steps by FiniteGradients("skip").'
            )
        self.num_skipped += 1
        if trainer.is_global_zero:
            _log.warning("Not finite, and passed over: %s.", message)
        for parameter in pl_module.parameters():
            parameter.grad = None


def _worst(module: LightningModule, loss: Tensor | None) -> Tensor | None:
    """A number that is not finite if the loss, or any of this rank's gradients, is not."""
    gradients = [g for _, g in _gradients(module) if g.numel()]
    norms = torch._foreach_norm(gradients, torch.inf, dtype=torch.float32) if gradients else []
    numbers = [*norms, *([] if loss is None else [loss.float().reshape(())])]
    device = numbers[0].device if numbers else None
    return torch.stack([number.to(device) for number in numbers]).abs().max() if numbers else None


def _gradients(module: LightningModule) -> list[tuple[str, Tensor]]:
    """Names and this rank's parts of the gradients."""
    found = [(name, parameter.grad) for name, parameter in module.named_parameters() if parameter.grad is not None]
    return [(name, g.to_local() if isinstance(g, DTensor) else g) for name, g in found]


def _describe(trainer: Trainer, module: LightningModule, loss: Tensor | None) -> str:
    """Say what is not finite, and where: losses first, which gradients follow. A collective.

    All ranks have agreed that something is not finite.
    """
    names = [name for name, gradient in _gradients(module) if not bool(torch.isfinite(gradient).all())]
    strategy: Any = trainer.strategy
    place = ""
    if hasattr(strategy, "coordinate"):
        at = strategy.coordinate
        place = f" (data {at.data}, tensor {at.tensor}, pipeline {at.pipeline})"
    mine = (f"rank {trainer.global_rank}{place}", names, None if loss is None else float(loss))
    told: list[Any] = [mine]
    if trainer.world_size > 1:
        told = [None] * trainer.world_size
        dist.all_gather_object(told, mine)
    parts = [f"the loss ({value}) on {rank}" for rank, _, value in told if value is not None and value - value != 0]
    for rank, bad, _ in told:
        if bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            parts.append(f"gradients of {', '.join(bad[:3])}{more} on {rank}")
    more = f"; and {len(parts) - 4} more" if len(parts) > 4 else ""
    return "; ".join(parts[:4]) + more
