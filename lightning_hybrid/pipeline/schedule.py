"""Schedules as data: which rank runs which stage's forward or backward of which micro-batch, in which order. Pure.

To add a schedule, add a :class:`ScheduleSpec` to :data:`SCHEDULES` whose ``build`` returns a :data:`Table`.
The orders of the schedules with virtual stages are torch's own, read through
:mod:`lightning_hybrid.pipeline.torch_schedules`; a user's own come from a file
(:mod:`lightning_hybrid.pipeline.schedule_file`).
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lightning_hybrid.errors import ConfigurationError

__all__ = ["SCHEDULES", "Action", "Kind", "ScheduleSpec", "Sizes", "Table", "find_schedule"]


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


class Sizes(NamedTuple):
    """How large a table is."""

    num_ranks: int
    num_stages: int
    num_microbatches: int


def in_rounds(stage: int, num_ranks: int) -> int:
    """Place stages on ranks 0, 1, ..., and again from 0."""
    return stage % num_ranks


def down_and_up(stage: int, num_ranks: int) -> int:
    """Place stages on ranks 0, 1, ..., and back again: rank 0 holds the first and the last of two laps."""
    lap, place = divmod(stage, num_ranks)
    return num_ranks - 1 - place if lap % 2 else place


def _no_problem(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """What one schedule needs, and how its order is made. Pickles."""

    name: str
    """torch's name of the schedule, or a file's."""
    build: Callable[[int, int, int], Table]
    """``(num_ranks, num_microbatches, stages_per_rank) -> Table``."""
    stages_per_rank: int = 1
    """Stages that each rank runs unless the user says otherwise (more than 1: virtual stages)."""
    multiple_stages: bool = False
    """Whether ``stages_per_rank`` may be chosen."""
    placement: Callable[[int, int], int] = in_rounds
    """``(stage, num_ranks)`` -> the schedule rank that runs the stage."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are separate actions (zero-bubble schedules)."""
    forwards_first: bool = False
    """Whether all forwards come before the first backward."""
    problem: Callable[[int, int, int], str | None] = _no_problem
    """Says what is wrong with ``(num_ranks, num_microbatches, stages_per_rank)``, and the remedy, or ``None``."""
    sizes: Sizes | None = None
    """The only sizes that it runs, where the order was written out and not made."""
    text: str | None = None
    """The file that the order was read from."""

    def num_stages(self, num_ranks: int, stages_per_rank: int) -> int:
        """Return the number of stages over all ranks."""
        return num_ranks * stages_per_rank if self.sizes is None else self.sizes.num_stages

    def rank_of_stage(self, stage: int, num_ranks: int) -> int:
        """Return the schedule rank that runs ``stage``."""
        return self.placement(stage, num_ranks)

    def ranks_of_stages(self, num_ranks: int, stages_per_rank: int) -> list[int]:
        """Return for each stage the schedule rank that runs it."""
        return [self.rank_of_stage(stage, num_ranks) for stage in range(self.num_stages(num_ranks, stages_per_rank))]

    def stages_of_rank(self, rank: int, num_ranks: int, stages_per_rank: int) -> list[int]:
        """Return the stages that a schedule rank runs, in ascending order."""
        ranks = self.ranks_of_stages(num_ranks, stages_per_rank)
        return [stage for stage, found in enumerate(ranks) if found == rank]

    def rank_at(self, coordinate: int, num_ranks: int, stages_per_rank: int) -> int:
        """Return the schedule rank at a pipeline coordinate, and the coordinate of a schedule rank: its own inverse.

        Coordinate 0, where global rank 0 stands, has the last stage: the loss and the logging are there. The others
        follow so that neighbours in the schedule stay neighbours on the mesh.
        """
        last = self.rank_of_stage(self.num_stages(num_ranks, stages_per_rank) - 1, num_ranks)
        return (last - coordinate) % num_ranks if last else coordinate

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


def _one_forward_one_backward(num_ranks: int, num_microbatches: int, stages_per_rank: int, *, ahead: int = 0) -> Table:
    """Warm up until the first backward can come, then alternate (https://arxiv.org/abs/2006.09503).

    ``ahead`` is how many more forwards all ranks but the last begin with (https://arxiv.org/abs/2211.05322).
    Written here because the order that torch 2.13 gives for pictures counts the last rank's forwards from 1.
    """
    table: Table = {}
    for rank in range(num_ranks):
        warmup = min(num_ranks - 1 - rank + ahead * (rank < num_ranks - 1), num_microbatches)
        actions = [Action(Kind.FORWARD, rank, mb) for mb in range(warmup)]
        for mb in range(num_microbatches):
            if warmup + mb < num_microbatches:
                actions.append(Action(Kind.FORWARD, rank, warmup + mb))
            actions.append(Action(Kind.BACKWARD, rank, mb))
        table[rank] = actions
    return table


def _torch_order(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Table:
    from lightning_hybrid.pipeline import torch_schedules  # it imports torch.distributed; this module must not

    return torch_schedules.read_order(name, num_ranks, num_microbatches, stages_per_rank)


#: Every schedule by its lower-case name.
SCHEDULES: dict[str, ScheduleSpec] = {
    spec.name.lower(): spec
    for spec in (
        ScheduleSpec(name="GPipe", build=_gpipe, forwards_first=True),
        ScheduleSpec(name="1F1B", build=_one_forward_one_backward, problem=_at_least_ranks),
        ScheduleSpec(
            # keeps one micro-batch more, and need not wait for messages or for a slower first micro-batch behind it
            name="Eager1F1B",
            build=partial(_one_forward_one_backward, ahead=1),
            problem=_at_least_ranks,
        ),
        ScheduleSpec(
            name="Interleaved1F1B",
            build=partial(_torch_order, "Interleaved1F1B"),
            stages_per_rank=2,
            multiple_stages=True,
            problem=_whole_rounds,
        ),
        ScheduleSpec(
            name="LoopedBFS",
            build=partial(_torch_order, "LoopedBFS"),
            stages_per_rank=2,
            multiple_stages=True,
            forwards_first=True,
        ),
        ScheduleSpec(
            name="InterleavedZeroBubble",
            build=partial(_torch_order, "InterleavedZeroBubble"),
            stages_per_rank=2,
            multiple_stages=True,
            splits_backward=True,
            problem=_whole_rounds,
        ),
        ScheduleSpec(
            name="ZBVZeroBubble",
            build=partial(_torch_order, "ZBVZeroBubble"),
            stages_per_rank=2,
            placement=down_and_up,
            splits_backward=True,
        ),
        ScheduleSpec(
            name="DualPipeV",
            build=partial(_torch_order, "DualPipeV"),
            stages_per_rank=2,
            placement=down_and_up,
            splits_backward=True,
            problem=_at_least_stages,
        ),
    )
}


def find_schedule(name: str | os.PathLike[str]) -> ScheduleSpec:
    """Return the schedule of that name, whatever its case, or the one in a file ``*.csv``.

    Raises:
        ConfigurationError: if there is none, with a list of those that there are, or if the file cannot be run.
    """
    if isinstance(name, os.PathLike) or (isinstance(name, str) and name.lower().endswith(".csv")):
        from lightning_hybrid.pipeline.schedule_file import read_schedule  # which builds on this module

        return read_schedule(name)
    if not isinstance(name, str) or name.lower() not in SCHEDULES:
        known = ", ".join(f'"{spec.name}"' for spec in SCHEDULES.values())
        raise ConfigurationError(
            f"schedule={name!r} is unknown; use one of {known}, or the path of a table in torch's CSV form (*.csv)."
        )
    return SCHEDULES[name.lower()]
