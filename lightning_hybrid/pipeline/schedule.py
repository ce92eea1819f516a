"""Schedules as data: which rank runs which stage's forward or backward of which micro-batch, in which order. Pure.

To add a schedule, add a :class:`ScheduleSpec` to :data:`SCHEDULES` whose ``build`` returns a :data:`Table`.
The orders of the schedules with virtual stages are torch's own, read through
:mod:`lightning_hybrid.pipeline.torch_schedules`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hybrid.errors import ConfigurationError

__all__ = ["SCHEDULES", "Action", "Kind", "ScheduleSpec", "Table", "find_schedule"]


class Kind(str, enum.Enum):
    """What an action does; the values are torch's letters."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Action(NamedTuple):
    """One stage's work on one micro-batch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


#: Schedule rank -> the actions that it runs, in order.
Table = dict[int, list[Action]]


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """What one schedule needs, and how its order is made."""

    name: str
    """torch's name of the schedule."""
    build: Callable[[int, int, int], Table]
    """``(num_ranks, num_microbatches, stages_per_rank) -> Table``."""
    stages_per_rank: int = 1
    """Stages that each rank runs unless the user says otherwise (more than 1: virtual stages)."""
    multiple_stages: bool = False
    """Whether ``stages_per_rank`` may be chosen."""
    v_shaped: bool = False
    """Whether stages are placed down and up again (rank 0 holds the first and the last) instead of in rounds."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are separate actions (zero-bubble schedules)."""
    forwards_first: bool = False
    """Whether all forwards come before the first backward."""
    problem: Callable[[int, int, int], str | None] = lambda num_ranks, num_microbatches, stages_per_rank: None
    """Says what is wrong with a combination of sizes, and the remedy, or ``None``."""

    def rank_of_stage(self, stage: int, num_ranks: int) -> int:
        """Return the schedule rank that runs ``stage``."""
        lap, place = divmod(stage, num_ranks)
        return num_ranks - 1 - place if self.v_shaped and lap % 2 else place

    def stages_of_rank(self, rank: int, num_ranks: int, stages_per_rank: int) -> list[int]:
        """Return the stages that a schedule rank runs, in ascending order."""
        return [s for s in range(num_ranks * stages_per_rank) if self.rank_of_stage(s, num_ranks) == rank]

    def table(self, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Table:
        """Return the order of actions of every rank.

        Raises:
            ConfigurationError: if the schedule cannot run these numbers of ranks, micro-batches and stages.
        """
        if problem := self.problem(num_ranks, num_microbatches, stages_per_rank):
            raise ConfigurationError(f'schedule="{self.name}": {problem}')
        return self.build(num_ranks, num_microbatches, stages_per_rank)

    def all_forward_then_backward(self, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Table:
        """Return the GPipe-like order on this schedule's placement of stages; runs any number of micro-batches."""
        table = self.forward_only(num_ranks, num_microbatches, stages_per_rank)
        for actions in table.values():
            actions += [Action(Kind.BACKWARD, stage, mb) for _, stage, mb in reversed(actions)]
        return table

    def forward_only(self, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Table:
        """Return the order for evaluation: each rank runs its stages one after the other over all micro-batches."""
        return {
            rank: [
                Action(Kind.FORWARD, stage, microbatch)
                for stage in self.stages_of_rank(rank, num_ranks, stages_per_rank)
                for microbatch in range(num_microbatches)
            ]
            for rank in range(num_ranks)
        }


def _fewer_microbatches_than(num_needed: int, num_microbatches: int, what: str) -> str | None:
    if num_microbatches >= num_needed:
        return None
    return (
        f"num_microbatches={num_microbatches} is fewer than the {num_needed} {what};"
        f" use num_microbatches={num_needed} or more (twice as many keeps the bubble small), or fewer pipeline stages."
    )


def _at_least_ranks(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    return _fewer_microbatches_than(num_ranks, num_microbatches, "pipeline ranks")


def _whole_rounds(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        return (
            f"num_microbatches={num_microbatches} cannot be dealt in {rounds} equal rounds to {num_ranks} pipeline"
            f" ranks; use num_microbatches={rounds * num_ranks} or {(rounds + 1) * num_ranks}."
        )
    return _at_least_ranks(num_ranks, num_microbatches, stages_per_rank)


def _at_least_stages(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    return _fewer_microbatches_than(num_ranks * stages_per_rank, num_microbatches, "pipeline stages")


def _gpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Table:
    """All forwards, then all backwards (https://arxiv.org/abs/1811.06965)."""
    return {
        rank: [Action(kind, rank, mb) for kind in (Kind.FORWARD, Kind.BACKWARD) for mb in range(num_microbatches)]
        for rank in range(num_ranks)
    }


def _one_forward_one_backward(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Table:
    """Warm up until the first backward can come, then alternate (https://arxiv.org/abs/2006.09503).

    Written here because the order that torch 2.13 gives for pictures counts the last rank's forwards from 1.
    """
    table: Table = {}
    for rank in range(num_ranks):
        warmup = min(num_ranks - 1 - rank, num_microbatches)
        actions = [Action(Kind.FORWARD, rank, mb) for mb in range(warmup)]
        for mb in range(num_microbatches):
            if warmup + mb < num_microbatches:
                actions.append(Action(Kind.FORWARD, rank, warmup + mb))
            actions.append(Action(Kind.BACKWARD, rank, mb))
        table[rank] = actions
    return table


def _torch_order(name: str) -> Callable[[int, int, int], Table]:
    def build(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Table:
        from lightning_hybrid.pipeline import (
            torch_schedules,  # the adapter imports torch.distributed; this module must not
        )

        return torch_schedules.read_order(name, num_ranks, num_microbatches, stages_per_rank)

    return build


#: Every schedule by its lower-case name.
SCHEDULES: dict[str, ScheduleSpec] = {
    spec.name.lower(): spec
    for spec in (
        ScheduleSpec(name="GPipe", build=_gpipe, forwards_first=True),
        ScheduleSpec(name="1F1B", build=_one_forward_one_backward, problem=_at_least_ranks),
        ScheduleSpec(
            name="Interleaved1F1B",
            build=_torch_order("Interleaved1F1B"),
            stages_per_rank=2,
            multiple_stages=True,
            problem=_whole_rounds,
        ),
        ScheduleSpec(
            name="LoopedBFS",
            build=_torch_order("LoopedBFS"),
            stages_per_rank=2,
            multiple_stages=True,
            forwards_first=True,
        ),
        ScheduleSpec(
            name="InterleavedZeroBubble",
            build=_torch_order("InterleavedZeroBubble"),
            stages_per_rank=2,
            multiple_stages=True,
            splits_backward=True,
            problem=_whole_rounds,
        ),
        ScheduleSpec(
            name="ZBVZeroBubble",
            build=_torch_order("ZBVZeroBubble"),
            stages_per_rank=2,
            v_shaped=True,
            splits_backward=True,
        ),
        ScheduleSpec(
            name="DualPipeV",
            build=_torch_order("DualPipeV"),
            stages_per_rank=2,
            v_shaped=True,
            splits_backward=True,
            problem=_at_least_stages,
        ),
    )
}


def find_schedule(name: str) -> ScheduleSpec:
    """Return the schedule of that name, whatever its case.

    Raises:
        ConfigurationError: if there is none; the message lists those that there are.
    """
    if not isinstance(name, str) or name.lower() not in SCHEDULES:
        known = ", ".join(f'"{spec.name}"' for spec in SCHEDULES.values())
        raise ConfigurationError(f"schedule={name!r} is unknown; use one of {known}.")
    return SCHEDULES[name.lower()]
