"""The contract of micro-batches, checked now and then: the loss of a batch follows from the losses of its parts.

[Note: losses that couple samples]
A pipeline computes the loss of each micro-batch and combines them by their weights (:mod:`~.loss`). That is the loss
of the batch for anything that is a mean or a sum over samples. It is not for a step that compares samples with each
other (contrastive losses, statistics over the batch, rows that are joined or re-ordered), or where a weight was
misread. Nothing would fail then: the run would only learn something else. So before the first training step, and those
after 1, 2, 4, 8, ... others (a loss may change with time, a weight with the data), some samples go through the pipeline
twice, forward only and without a trace: in one piece, and as the step would cut them. The losses must agree. The step
runs in ``eval`` mode, where dropout does not draw. If it draws numbers nevertheless, or its loss fails, that is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_hybrid.batches.randomness import random_mark
from lightning_hybrid.errors import HybridError
from lightning_hybrid.logged_values import LogRecorder
from lightning_hybrid.pipeline.activations import look_of
from lightning_hybrid.pipeline.loss import MicrobatchLoss, combine
from lightning_hybrid.pipeline.probe import StepFacts
from lightning_hybrid.pipeline.schedule import Action
from lightning_hybrid.pipeline.step import PipelineRank, StepInputs
from lightning_hybrid.training.log_rules import LoggedFact, LogRules, fitting_rules

__all__ = ["Rehearsal", "disagreement", "rehearsed_sizes"]

_APART = (
    "So it compares samples with each other, or its weight was misread, and what micro-batches make of it is not the"
    " loss of the batch. Use Hybrid3DStrategy(whole_batch_loss=True), which gives the code after the last block the"
    ' whole batch; or return {"loss": ..., "loss_weight": n}, if the loss is a mean over n of something; or use'
    ' num_microbatches=1 with schedule="GPipe", or pipeline_parallel_size=1.'
)
_JOINED = (
    "So the code before the blocks mixes samples too, or re-orders or multiplies rows, and whole_batch_loss=True, which"
    " joins micro-batches after the last block, cannot give what one process gives. Keep a sample's rows together"
    " (torch.stack([a, b], 1).flatten(0, 1) instead of torch.cat([a, b])), mix samples in the data or after the blocks,"
    ' or use num_microbatches=1 with schedule="GPipe", or pipeline_parallel_size=1.'
)


def rehearsed_sizes(sizes: Sequence[int]) -> list[int]:
    """Return how many of the first samples each of two parts gets, given the sizes of micro-batches.

    They are two micro-batches; of lone samples, which have no variance and nothing to be compared with, two each.
    """
    if sizes[0] > 1 or len(sizes) < 3:
        return list(sizes[:2])
    return [min(2, len(sizes) - 2), min(2, len(sizes) - 1)]


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
    if abs(alone - together) <= _tolerance(whole, is_rounded) * max(map(abs, (alone, *each))) + 1e-7:
        return None
    if len(parts) == 1:
        return f"is {alone:.6g} for some samples in one piece, but {together:.6g} if they are cut and joined again"
    weights = " and ".join(f"{part.weight:g}" for part in parts)
    values = " and ".join(f"{value:.6g}" for value in each)
    return (
        f"is {alone:.6g} for some samples, but {values} for two parts of them, which (weights {weights}, rule"
        f" {parts[0].rule!r}) make {together:.6g}"
    )


def _tolerance(whole: MicrobatchLoss, is_rounded: bool) -> float:
    return 3e-2 if is_rounded or whole.value.element_size() == 2 else 1e-4 if whole.value.is_cpu else 2e-3


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Some samples of a batch, in one piece and as a step would cut them."""

    rank: PipelineRank
    facts: StepFacts
    step: Callable[[Any, LogRecorder, int], Any]
    """Runs the user's step on a piece of a batch, noting what it logs as that of a micro-batch of this number."""
    log_rules: LogRules
    whole: Any
    parts: Sequence[Any]
    sizes: Sequence[int]
    """Samples in each part."""
    joins: bool
    """Whether the code after the last block gets all parts at once."""
    logged: list[LogRecorder] = field(default_factory=list)
    """What was logged for the whole, then for the parts."""
    failures: list[Exception] = field(default_factory=list)
    forward_only: Callable[[int], Sequence[Action]]
    """This rank's actions for so many micro-batches."""
    device: torch.device
    gather: Callable[[Any], list[Any]]
    """Returns what every rank of the world gives. All of them decide alike: those of other data coordinates would wait
    for the gathering of sharded parameters that a rehearsal, or a step after it, asks for."""

    def find(self, read_loss: Callable[[Any, int], MicrobatchLoss]) -> tuple[str | None, bool]:
        """Return what is wrong with the loss, with the way out, and whether anything can be said.

        A collective over the world.
        """
        cut = self.rank.cut
        before = random_mark(self.device if self.device.type == "cuda" else None)
        for part in cut.module.modules():
            part.training = False
        surrounding, cut.inside = cut.inside, nullcontext  # what blocks draw is to be seen too
        try:
            with torch.no_grad():
                found = self._losses([self.whole], read_loss, joins=False)
            if not self._is_clear():
                return None, False
            with torch.enable_grad():
                found += self._losses(self.parts, read_loss, joins=self.joins)
        finally:
            cut.inside = surrounding
        draws = before != random_mark(self.device if self.device.type == "cuda" else None)
        if not self._is_clear("it draws random numbers" if draws else ""):
            return None, False
        return self._verdict(found), True

    def _is_clear(self, problem: str = "") -> bool:
        """Whether no rank has a problem, this one or a failure. A collective over the world.

        Raises:
            HybridError: on all ranks, if it is one of ours that a last stage has met.
        """
        for error in self.failures:
            problem = problem or f"{type(error).__name__}: {error}"
        refusals = [error for error in self.failures if isinstance(error, HybridError)]
        told = self.gather((problem, *refusals[:1]))
        for _, *errors in told:
            for error in errors:
                raise error
        problems = [problem for problem, *_ in told if problem]
        if problems:
            rank_zero_info(
                "lightning_hybrid: whether training_step compares samples with each other could not be checked"
                f" ({problems[0]}). If it does, use whole_batch_loss=True."
            )
        return not problems

    def _losses(
        self, pieces: Sequence[Any], read_loss: Callable[[Any, int], MicrobatchLoss], *, joins: bool
    ) -> list[MicrobatchLoss]:
        found: list[MicrobatchLoss] = []
        self.logged.append(LogRecorder())

        def note(outputs: list[Any], _: Any) -> None:
            sizes = self.sizes if len(outputs) == len(self.sizes) else [sum(self.sizes)]
            losses = [read_loss(output, size) for output, size in zip(outputs, sizes, strict=True)]
            found.extend(replace(loss, value=loss.value.detach()) for loss in losses)

        inputs = StepInputs(
            num_microbatches=len(pieces),
            looks=[("rehearsal", look_of(piece)) for piece in pieces],
            facts=self.facts,
            step=lambda i: self.step(pieces[i], self.logged[-1], i),
            whole_step=(lambda: self.step(self.whole, LogRecorder(), 0)) if joins else None,
            on_outputs=note,
            on_failure=self.failures.append,
        )
        self.rank.run(self.forward_only(len(pieces)), inputs)
        return found

    def _verdict(self, found: list[MicrobatchLoss]) -> str | None:
        """Tell all ranks what a last stage found."""
        refusal: str | None = None
        logged: dict[str, Any] = {}
        if found:
            whole, *parts = found
            is_rounded = torch.is_autocast_enabled(self.device.type) or any(
                p.element_size() == 2 for p in self.rank.cut.module.parameters()
            )
            if not self.joins:
                logged = self._compare_logged(parts, _tolerance(whole, is_rounded))
            else:
                parts = [replace(parts[0], weight=1.0)]
            if difference := disagreement(whole, parts, is_rounded=is_rounded):
                refusal = f"The loss of training_step {difference}. {_JOINED if self.joins else _APART}"
        told = self.gather((refusal, logged))
        self.rank.flush()
        refusals = [refusal for refusal, _ in told] + [self.log_rules.learn(logged) for _, logged in told]
        return next((refusal for refusal in refusals if refusal), None)

    def _compare_logged(self, losses: Sequence[MicrobatchLoss], tolerance: float) -> dict[str, LoggedFact]:
        """Return for each name that was logged for the whole and for all parts which rules combine it."""
        whole, parts = (notes.numbers() for notes in self.logged)
        facts = {}
        for name in whole.keys() & parts.keys():  # not what only some parts log
            if len(parts[name]) == len(losses):
                value, *values = (float(v) for v in (whole[name][0], *(parts[name][i] for i in range(len(losses)))))
                facts[name] = LoggedFact(
                    rules=fitting_rules(value, values, losses, self.sizes, tolerance),
                    is_tensor=isinstance(whole[name][0], Tensor),
                    text=f"is {value:.6g} for some samples, {values[0]:.6g} and {values[1]:.6g} for two parts of them",
                )
        return facts
