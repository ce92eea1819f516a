"""How much of a pipeline's step its ranks stand idle, and why. Pure.

Between the first and the last action of the step over all stages lies the *window*. The measured bubble is the share of
``ranks x window`` in which no action runs. Beside it stand two simulated runs of the same schedule in which no message
takes time: one with the action times that were measured (*ideal*), one in which every stage is as fast as the average
(*schedule*: what the schedule itself costs, ``(p - 1) / (m + p - 1)`` for 1F1B and GPipe). Hence

    measured = schedule + imbalance + overhead

with ``imbalance = ideal - schedule`` (stages unequally fast) and ``overhead = measured - ideal`` (messages, jitter, the
runtime between actions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hybrid.pipeline.schedule import Table
from lightning_hybrid.pipeline.timeline import COMPUTE, Mark, mean_durations, simulate, window

__all__ = ["Bubble", "idle_share", "measure_bubble"]


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """Idle shares of one pipeline's step; each between 0 and 1, the differences may be slightly negative."""

    measured: float
    """Idle share of the measured step."""
    ideal: float
    """Idle share of a run without delays at the measured action times."""
    schedule: float
    """Idle share of a run without delays in which all stages are equally fast."""
    slowest_stage: int
    """The stage with the most work for one micro-batch."""
    slowdown: float
    """Work of the slowest stage over the mean of all stages; 1 when balanced."""

    @property
    def imbalance(self) -> float:
        """What the stages' unequal work adds."""
        return self.ideal - self.schedule

    @property
    def overhead(self) -> float:
        """What messages, jitter and the runtime add."""
        return self.measured - self.ideal


def idle_share(timeline: Mapping[int, Sequence[Mark]]) -> float:
    """Return the share of ``ranks x window`` in which no action runs; 0 without actions.

    Args:
        timeline: marks by rank; marks of one rank do not overlap.
    """
    start, end = window(timeline)
    if end <= start:
        return 0.0
    busy = sum(mark.end - mark.start for marks in timeline.values() for mark in marks if mark.kind in COMPUTE)
    return max(0.0, 1.0 - busy / (len(timeline) * (end - start)))


def measure_bubble(timeline: Mapping[int, Sequence[Mark]], table: Table) -> Bubble:
    """Compare a measured step with the ideal of its own schedule.

    Args:
        timeline: the measured marks of every schedule rank.
        table: the schedule that ran.

    Raises:
        PipelineError: if an action of the table was not measured on any micro-batch.
    """
    durations = mean_durations(mark for marks in timeline.values() for mark in marks)
    ideal = simulate(table, durations)
    schedule = simulate(table, balanced(durations))
    work: dict[int, float] = {}
    for (_, stage), seconds in durations.items():
        work[stage] = work.get(stage, 0.0) + seconds
    slowest = max(work, key=work.__getitem__, default=0)
    mean = sum(work.values()) / len(work) if work else 0.0
    return Bubble(
        measured=idle_share(timeline),
        ideal=idle_share(ideal),
        schedule=idle_share(schedule),
        slowest_stage=slowest,
        slowdown=work[slowest] / mean if mean else 1.0,
    )


def balanced(durations: Mapping[tuple[str, int], float]) -> dict[tuple[str, int], float]:
    """Give every stage the average work of all stages, kind by kind; prologues become part of the forwards."""
    stages = {stage for _, stage in durations}
    totals: dict[str, float] = {}
    for (kind, _), seconds in durations.items():
        kind = "F" if kind == "PROLOGUE" else kind
        totals[kind] = totals.get(kind, 0.0) + seconds
    return {(kind, stage): total / len(stages) for kind, total in totals.items() for stage in stages}
