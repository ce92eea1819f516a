"""Runs one rank's row of a schedule: which action, on what, in which order; sends and receives beside it.

torch's own runtime is not used, for four measured reasons (docs/design.md): it fixes shapes at the first step, it
weighs all micro-batches alike, it gives no times of its actions, and its errors do not say where they happened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.failures.watch import suspect
from lightning_hybrid.measuring.clock import Clock
from lightning_hybrid.pipeline.activations import Activations
from lightning_hybrid.pipeline.boxes import LOOKS
from lightning_hybrid.pipeline.channels import Channels
from lightning_hybrid.pipeline.loss import MicrobatchLoss
from lightning_hybrid.pipeline.probe import StepFacts
from lightning_hybrid.pipeline.schedule import Action, Kind, ScheduleSpec
from lightning_hybrid.pipeline.stage import Cut, StageRun
from lightning_hybrid.pipeline.torch_schedules import backward_of_inputs, backward_of_weights
from lightning_hybrid.pipeline.whole_batch import WholeBatch

__all__ = ["PipelineRank", "StepInputs"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What a schedule works on."""

    num_microbatches: int
    looks: Sequence[Hashable]
    """For each micro-batch what shapes depend on."""
    facts: StepFacts
    step: Callable[[int], Any]
    """Runs the user's step on one micro-batch, given its index."""
    read_loss: Callable[[int, Any], MicrobatchLoss] | None = None
    """Finds the loss in the output of one micro-batch; ``None`` in evaluation."""
    whole_step: Callable[[], Any] | None = None
    """Runs the step on the whole batch; given where the code after the last block gets it (``whole_batch.py``)."""
    on_outputs: Callable[[list[Any], list[MicrobatchLoss]], None] = lambda outputs, losses: None
    """Called on the last stage as soon as all micro-batches have gone through."""
    on_failure: Callable[[Exception], None] | None = None
    """Called on the last stage instead, once the schedule has been run to its end, if something failed there behind the
    last block; if it is given. So the other stages do not wait in vain, and may be told why."""


@dataclass(kw_only=True)
class _Flight:
    """One micro-batch on its way through one stage."""

    run: StageRun
    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    arrivals: list[Any] = field(default_factory=list)
    loss: MicrobatchLoss | None = None
    weights_left: Any = None
    """What the backward of the inputs left for the backward of the weights."""


#: In the place of a loss that could not be had.
_NOTHING = MicrobatchLoss(value=torch.zeros(()), weight=0.0, rule="samples")


class PipelineRank:
    """This rank's part of the pipeline."""

    def __init__(
        self,
        *,
        cut: Cut,
        spec: ScheduleSpec,
        rank: int,
        num_ranks: int,
        stages: dict[int, range],
        num_stages: int,
        channels: Channels,
        device: torch.device,
        clock: Clock,
        inside: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """``stages`` maps this rank's stages to their blocks; ``inside`` runs a function in the root's forward."""
        self.cut, self.spec, self.rank, self.num_ranks = cut, spec, rank, num_ranks
        self.stages, self.num_stages = stages, num_stages
        self.channels, self.clock, self._inside = channels, clock, inside
        self.activations, self._device = Activations(channels, device), device
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._local: dict[tuple[str, int, int], list[Tensor]] = {}
        self._outputs: list[Any] = []
        self._losses: list[MicrobatchLoss] = []
        self._whole: WholeBatch | None = None
        self._failures: list[Exception] = []
        self.reference = 1.0
        self.now: Action | None = None
        self._coming: Action | None = None

    def run(self, actions: Sequence[Action], inputs: StepInputs) -> None:
        """Run the actions in order.

        Every micro-batch's backward is seeded with its weight over :attr:`reference`; the caller divides all gradients
        by the sum of the weights over ``reference`` afterwards. On an error the action is noted on the exception.
        """
        self._flights.clear()
        self._local.clear()
        self._outputs, self._losses, self.reference, self._whole, self._failures = [], [], 1.0, None, []
        self.activations.begin(inputs.looks)
        try:
            self._coming, *later = self._arrivals(actions)
            self._receive_ahead()
            for self.now, self._coming in zip(actions, later, strict=True):
                action = self.now
                if not self._is_fed_by_another(action):  # it receives its own first: order matters to NCCL
                    self._receive_ahead()
                if action.kind is Kind.FORWARD:
                    self._forward(action, inputs)
                else:
                    with torch.autocast(self._device.type, enabled=False):  # as in one process, after the step
                        self._backward(action)
        except Exception as error:
            self._place(error)
            raise
        self._flights.clear()
        self._whole = None
        if self._failures:
            suspect(None)
        if self._failures and inputs.on_failure is not None:
            inputs.on_failure(self._failures[0])

    def _arrivals(self, actions: Sequence[Action]) -> list[Action | None]:
        """Before and after each action the next forward whose input another rank sends."""
        coming: list[Action | None] = [None]
        for action in reversed(actions):
            coming.append(action if self._is_fed_by_another(action) else coming[-1])
        return coming[::-1]

    def _is_fed_by_another(self, action: Action) -> bool:
        return action.kind is Kind.FORWARD and action.stage > 0 and self._source(action.stage) != self.rank

    def _receive_ahead(self) -> None:
        if (action := self._coming) is not None:
            self.activations.receive_ahead(self._source(action.stage), action.stage, action.microbatch)

    def _source(self, stage: int) -> int:
        """The schedule rank that feeds ``stage``."""
        return self.spec.rank_of_stage(stage - 1, self.num_ranks)

    def flush(self) -> None:
        """Wait for the sends of the last step."""
        with self.clock.mark("SEND"):
            self.channels.flush()

    def _forward(self, action: Action, inputs: StepInputs) -> None:
        _, stage, microbatch = action
        blocks = self.stages[stage]
        marks = self.clock.spans(stage, microbatch)
        run = StageRun(
            first=blocks.start,
            last=blocks.stop,
            facts=inputs.facts,
            keep=self.cut.placeholders,
            leaves=self.spec.splits_backward,
            captures=inputs.whole_step is not None and stage == self.num_stages - 1,
            receive=lambda local: self._receive(stage, microbatch, local, marks),
        )
        marks.begin("F" if stage == 0 else "PROLOGUE")
        flight = self._flights[stage, microbatch] = _Flight(run=run)
        if stage == self.num_stages - 1:
            with self._failing_later(run, inputs):
                result = self._inside(lambda: self.cut.run(run, lambda: inputs.step(microbatch)))
                self._finish(flight, microbatch, result, inputs)
        else:
            flight.outputs = list(self._inside(lambda: self.cut.run(run, lambda: inputs.step(microbatch))))
            self._hand_over("F", flight.outputs, stage + 1, microbatch)
            if inputs.read_loss is not None:
                self._expect_gradients(flight, stage, microbatch)
        marks.end()
        if inputs.read_loss is None:
            self._flights.pop((stage, microbatch)).run.forget()

    @contextmanager
    def _failing_later(self, run: StageRun, inputs: StepInputs) -> Iterator[None]:
        """On the last stage: what fails once its input is there leaves a micro-batch without gradients at first."""
        try:
            yield
        except Exception as error:
            if inputs.on_failure is None or not run.entered:
                raise
            self._place(error)
            self._failures.append(error)
            suspect(error)  # ranks that split these blocks with this one wait for it

    def _place(self, error: Exception) -> None:
        if self.now is None:
            return
        kind, stage, microbatch = self.now
        place = f"in stage {stage}'s {LOOKS[kind.value].label} of micro-batch {microbatch}"
        if hasattr(error, "add_note"):
            error.add_note(place)
        else:  # Python 3.10
            logger.error("%s: %s", type(error).__name__, place)

    def _finish(self, flight: _Flight, microbatch: int, output: Any, inputs: StepInputs) -> None:
        self._outputs.append(output)
        if inputs.whole_step is not None:
            flight.outputs = output
            if len(self._outputs) == inputs.num_microbatches:
                self._finish_whole(inputs, inputs.whole_step)
            return
        if inputs.read_loss is not None:
            flight.loss = inputs.read_loss(microbatch, output)
            self._losses.append(flight.loss)
            if len(self._losses) == 1:
                self.reference = flight.loss.weight * inputs.num_microbatches or 1.0
        if len(self._outputs) == inputs.num_microbatches:
            inputs.on_outputs(self._outputs, self._losses)
            self._outputs = []

    def _finish_whole(self, inputs: StepInputs, step: Callable[[], Any]) -> None:
        whole = self._whole = WholeBatch(cut=self.cut, facts=inputs.facts, parts=self._outputs)
        output = self._inside(lambda: whole.forward(step))
        losses = []
        if inputs.read_loss is not None:
            losses = [replace(inputs.read_loss(0, output), weight=1.0, rule="batch", doubt="")]
            whole.backward(losses[0].value)
        inputs.on_outputs([output], losses)
        self._outputs = []

    def _backward(self, action: Action) -> None:
        kind, stage, microbatch = action
        flight = self._flights[stage, microbatch]
        marks = self.clock.spans(stage, microbatch)
        if self._failures and stage == self.num_stages - 1:
            flight.loss = _NOTHING
        elif flight.loss is None and kind is not Kind.BACKWARD_WEIGHT:
            marks.begin("WAIT_B")
            self._await_gradients(flight, stage, microbatch)
        marks.begin(kind.value)
        if self._whole is not None and not self._failures and stage == self.num_stages - 1:
            flight.gradients = self._whole.gradients_of(microbatch)
        with self.cut.resume(flight.run):
            self._differentiate(kind, stage, flight)
        if stage > 0 and kind is not Kind.BACKWARD_WEIGHT:
            received = flight.run.received
            found = flight.run.gradients or [None] * len(received)
            gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(received, found, strict=True)]
            self._hand_over("B", gradients, stage - 1, microbatch)
        if kind is not Kind.BACKWARD_INPUT:
            self._flights.pop((stage, microbatch)).run.forget()
        marks.end()

    def _differentiate(self, kind: Kind, stage: int, flight: _Flight) -> None:
        """Run the whole backward of a stage, or its inputs' part, or its weights' part.

        The first stage has no inputs: all of its backward counts as weights. Where several tensors enter a stage (a
        decoder's), all of it counts as inputs: torch's split gives wrong gradients of weights that several of them
        reach (T5, torch 2.13).
        """
        outputs, gradients = self._roots(flight)
        part = Kind.BACKWARD_INPUT if len(flight.run.inputs) > 1 else Kind.BACKWARD_WEIGHT if stage == 0 else None
        if kind in (Kind.BACKWARD, part):
            if outputs:
                torch.autograd.backward(outputs, gradients)
            if self.spec.splits_backward:
                flight.run.gradients = [leaf.grad for leaf in flight.run.inputs]
        elif part is None and kind is Kind.BACKWARD_INPUT:
            if outputs:
                flight.run.gradients, flight.weights_left = backward_of_inputs(
                    outputs, gradients, flight.run.inputs, self.cut.module.parameters()
                )
        elif part is None and flight.weights_left is not None:
            backward_of_weights(self.cut.module.parameters(), flight.weights_left)

    def _roots(self, flight: _Flight) -> tuple[list[Tensor], list[Tensor]]:
        """What a backward starts from: the weighted loss, or the stage's outputs with the gradients that came."""
        if flight.loss is None:
            pairs = [(o, g) for o, g in zip(flight.outputs, flight.gradients, strict=True) if o.requires_grad]
            return [o for o, _ in pairs], [g for _, g in pairs]
        value, weight = flight.loss.value, flight.loss.weight
        # a micro-batch without any target has a loss of NaN and no gradient
        if not weight or not value.requires_grad:
            return [], []
        return [value], [torch.full_like(value, weight / self.reference)]

    def _hand_over(self, kind: str, tensors: list[Tensor], stage: int, microbatch: int) -> None:
        rank = self.spec.rank_of_stage(stage, self.num_ranks)
        if rank == self.rank:
            self._local[kind, stage, microbatch] = [tensor.detach() for tensor in tensors]
        elif kind == "F":
            self.activations.send(tensors, rank, stage, microbatch)
        else:
            self.channels.send(kind, tensors, rank, stage, microbatch)

    def _receive(self, stage: int, microbatch: int, local: list[Tensor], marks: Any) -> list[Tensor]:
        """Get the differentiable arguments of a stage's first block; ``local`` has their shapes."""
        if (here := self._local.pop(("F", stage, microbatch), None)) is None:
            marks.begin("WAIT_F")
            here = self.activations.receive(local, self._source(stage), stage, microbatch)
            self._receive_ahead()
        marks.begin("F")
        return here

    def _expect_gradients(self, flight: _Flight, stage: int, microbatch: int) -> None:
        """Post the receives of a stage's output gradients right after the outputs have left."""
        source = self.spec.rank_of_stage(stage + 1, self.num_ranks)
        if source != self.rank:
            flight.gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in flight.outputs]
            flight.arrivals = self.channels.post("B", flight.gradients, source, stage, microbatch)

    def _await_gradients(self, flight: _Flight, stage: int, microbatch: int) -> None:
        if not flight.arrivals:
            flight.gradients = self._local.pop(("B", stage, microbatch), flight.gradients)
        for work in flight.arrivals:
            work.wait()
