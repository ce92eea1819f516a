"""The contract of micro-batches, checked once: the loss of a batch follows from the losses of its parts.

[Note: losses that couple samples]
A pipeline computes the loss of each micro-batch and combines them by their weights (:mod:`~.loss`). That is the loss
of the batch for anything that is a mean or a sum over samples. It is not for a loss that compares samples with each
other (contrastive ones, statistics over the batch), or where a weight was misread. Nothing would fail then: the run
would only learn something else. So in the first training step the last stage runs a micro-batch whole and in two
parts, each without a trace, and compares. The step runs in ``eval`` mode, where dropout does not draw. If it draws
numbers nevertheless, or cannot run so, nothing is said.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.pipeline.loss import MicrobatchLoss, combine
from lightning_hybrid.pipeline.probe import StepFacts
from lightning_hybrid.pipeline.stage import Cut, StageRun
from lightning_hybrid.randomness import random_mark

__all__ = ["LossCheck", "cut_point", "disagreement"]

logger = logging.getLogger(__name__)


_WAY_OUT = (
    "So it compares samples with each other, or its weight was misread, and what micro-batches make of it is not the"
    " loss of the batch. Use Hybrid3DStrategy(whole_batch_loss=True), which gives the code after the last block the"
    ' whole batch; or return {"loss": ..., "loss_weight": n}, if the loss is a mean over n of something; or use'
    ' num_microbatches=1 with schedule="GPipe", or pipeline_parallel_size=1.'
)


class _UnclearError(Exception):
    """Nothing can be said."""


def cut_point(size: int) -> int:
    """Return where a micro-batch is cut in two: unevenly, so that wrong weights show, but not into lone samples."""
    return max(min(2, size // 2), size // 2 - 1)


def disagreement(whole: MicrobatchLoss, parts: Sequence[MicrobatchLoss], *, is_rounded: bool = False) -> str | None:
    """Compare a loss with the combination of its parts' losses. Returns what differs, or ``None``.

    Losses that are not finite are equal to anything. The tolerance is 1e-4 of the largest of the losses in float32 on
    CPU, 2e-3 on other devices (TF32), and 3e-2 where 16-bit numbers take part (``is_rounded``): kernels, and hence
    rounding, depend on the size of the batch.
    """
    together = float(combine([part.value for part in parts], parts))
    alone, *each = (float(one.value.detach()) for one in (whole, *parts))
    if not all(math.isfinite(value) for value in (alone, together, *each)):
        return None
    tolerance = 3e-2 if is_rounded or whole.value.element_size() == 2 else 1e-4 if whole.value.is_cpu else 2e-3
    if abs(alone - together) <= tolerance * max(map(abs, (alone, *each))) + 1e-7:
        return None
    weights = " and ".join(f"{part.weight:g}" for part in parts)
    values = " and ".join(f"{value:.6g}" for value in each)
    return (
        f"is {alone:.6g} for some samples, but {values} for two parts of them, which (weights {weights}, rule"
        f" {parts[0].rule!r}) make {together:.6g}"
    )


@dataclass(kw_only=True)
class LossCheck:
    """One check: watches what the last stage receives, then runs the step on parts of it."""

    cut: Cut
    facts: StepFacts
    inside: Callable[[Callable[[], Any]], Any]
    """Runs a function in the root's forward."""
    quiet: Callable[[], AbstractContextManager[None]]
    """Within it the module's steps leave no trace."""
    step: Callable[[Any], Any]
    """Runs the user's step on a piece of a batch."""
    read_loss: Callable[[Any, int], MicrobatchLoss]
    """Finds the loss in the step's output, given the number of samples."""
    pieces: Sequence[tuple[Any, int, int]]
    """``(batch, first row, last row)``: some micro-batches together, then the two parts of these."""
    num_units: int
    """How many micro-batches the first piece is."""
    _first: int = 0
    _whole: list[Tensor] = field(default_factory=list)
    _received: dict[int, list[Tensor]] = field(default_factory=dict)

    def watch(self, microbatch: int) -> None:
        """Keep a copy of what the stage that now runs receives, if it is the last one and this belongs to a piece."""
        run = self.cut.current
        if run is None or run.last < len(self.facts.blocks) or microbatch >= self.num_units:
            return
        self._first, receive = run.first, run.receive

        def keep(local: list[Tensor]) -> list[Tensor]:
            real = receive(local)
            self._received[microbatch] = [tensor.detach().clone() for tensor in real]
            return real

        run.receive = keep

    def find(self) -> str | None:
        """Run the step on the pieces. Returns what is wrong with the loss, as a sentence that says the way out."""
        surrounding, self.cut.inside = self.cut.inside, nullcontext  # what blocks draw is to be seen too
        try:
            whole, *parts = [self._run(*piece) for piece in self.pieces]
        except Exception as error:
            logger.debug("The loss of micro-batches could not be checked: %s: %s", type(error).__name__, error)
            return None
        finally:
            self.cut.inside = surrounding
        received = [tensor for tensors in self._received.values() for tensor in tensors]
        is_rounded = torch.is_autocast_enabled(whole.value.device.type) or any(t.element_size() == 2 for t in received)
        found = disagreement(whole, parts, is_rounded=is_rounded)
        return f"The loss of training_step {found}. {_WAY_OUT}" if found else None

    def _run(self, batch: Any, first: int, last: int) -> MicrobatchLoss:
        run = StageRun(
            first=self._first,
            last=len(self.facts.blocks),
            facts=self.facts,
            keep=self.cut.placeholders,
            receive=lambda local: self._rows(local, first, last),
        )
        device = next((t.device for tensors in self._received.values() for t in tensors if t.is_cuda), None)
        with self.quiet(), torch.random.fork_rng(devices=[] if device is None else [device]), torch.enable_grad():
            for part in self.cut.module.modules():
                part.training = False
            before = random_mark(device)
            output = self.inside(lambda: self.cut.run(run, lambda: self.step(batch)))
            if before != random_mark(device):
                raise _UnclearError("the step draws random numbers")
        loss = self.read_loss(output, last - first)
        return MicrobatchLoss(value=loss.value.detach(), weight=loss.weight, rule=loss.rule)

    def _rows(self, local: list[Tensor], first: int, last: int) -> list[Tensor]:
        """Rows of what was received, shaped like ``local``. The first call is for the whole, and joins the units."""
        if not self._whole:
            units = [self._received[i] for i in sorted(self._received)]
            self._whole = [_joined(like, [unit[i] for unit in units]) for i, like in enumerate(local)]
        return [_rows(whole, like, first, last) for whole, like in zip(self._whole, local, strict=True)]


def _joined(like: Tensor, units: list[Tensor]) -> Tensor:
    """Join what was received for several micro-batches to the shape of ``like``."""
    if like.shape == units[0].shape:  # one unit, or no row per sample
        return units[0]
    return torch.cat(units, _sample_dim(like, units[0]))


def _rows(whole: Tensor, like: Tensor, first: int, last: int) -> Tensor:
    if like.shape == whole.shape:
        return whole.clone()
    dim = _sample_dim(like, whole)
    if like.shape[dim] != last - first:  # several rows per sample, in an unknown order
        raise _UnclearError(f"{last - first} samples have {like.shape[dim]} rows")
    return whole.narrow(dim, first, last - first).clone()


def _sample_dim(one: Tensor, other: Tensor) -> int:
    dims = [d for d, (a, b) in enumerate(zip(one.shape, other.shape, strict=False)) if a != b]
    if one.dim() != other.dim() or len(dims) != 1:
        raise _UnclearError(f"no single dimension tells {tuple(one.shape)} from {tuple(other.shape)}")
    return dims[0]
