"""A step of all ranks as a trace for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``. Pure.

Form: "Trace Event Format" of the Chromium project: one process for each rank, times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hybrid.metrics.breakdown import Span
from lightning_hybrid.metrics.collectives import Event
from lightning_hybrid.pipeline.boxes import LOOKS
from lightning_hybrid.pipeline.timeline import ACTIONS, COMPUTE, Mark

__all__ = ["RankTrace", "build_trace", "longest"]

_STEP, _EXPOSED, _OPERATORS = 0, 1, 10  # threads; operators have a thread for each of theirs
_NAMES = {
    "WAIT_F": "wait for forward",
    "WAIT_B": "wait for backward",
    "SEND": "send",
    "SYNC": "exchange of all ranks",
    "REDUCE": "reduce gradients",
    "OPTIMIZER": "optimizer",
}


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What is known of one rank's step; seconds on a clock that all ranks share."""

    rank: int
    """Global rank."""
    data: int
    """Coordinate."""
    tensor: int
    """Coordinate."""
    start: float
    """When the step began."""
    end: float
    """When it ended."""
    runs: Sequence[Sequence[Mark]]
    """Marks by run of the schedule: several when gradients are accumulated."""
    data_waits: Sequence[tuple[float, float]] = ()
    """When it waited for data."""
    exposed: Sequence[Span] = ()
    """Exposed communication inside of actions, from a profiler."""
    events: Sequence[Event] = ()
    """Operators and kernels, from a profiler."""

    @property
    def name(self) -> str:
        """``stage 1, data 0, tensor 1``."""
        stages = sorted({mark.stage for run in self.runs for mark in run if mark.kind in ACTIONS})
        what = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}, " if stages else ""
        return f"{what}data {self.data}, tensor {self.tensor}"


def longest(events: Iterable[Event], start: float, end: float, most: int) -> list[Event]:
    """Return the ``most`` longest events within a step, in order of time."""
    within = sorted(
        (event for event in events if event.start >= start and event.end <= end),
        key=lambda event: event.start - event.end,
    )
    return sorted(within[:most], key=lambda event: event.start)


def build_trace(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the document; its time 0 is when the first rank's step began.

    Each rank has a row of its actions and waits, one of exposed communication, and one for each thread or stream of its
    operators; arrows lead from an action to the one that its message lets begin.
    """
    origin = min((rank.start for rank in ranks), default=0.0)
    events: list[dict[str, Any]] = []
    for order, rank in enumerate(sorted(ranks, key=_place)):
        events += _about(rank, order)
        events += [_slice(rank.rank, _STEP, *box, origin) for box in _step_boxes(rank)]
        events += [_slice(rank.rank, _EXPOSED, span.part, span.start, span.end, {}, origin) for span in rank.exposed]
        threads = _threads(rank.events)
        for event in rank.events:
            thread = threads[event.on_device, event.thread]
            events.append(_slice(rank.rank, thread, event.name, event.start, event.end, {}, origin))
    return {"traceEvents": events + _arrows(ranks, origin), "displayTimeUnit": "ms"}


def _place(rank: RankTrace) -> tuple[int, int, int, int]:
    stages = [mark.stage for run in rank.runs for mark in run if mark.kind in ACTIONS]
    return rank.data, rank.tensor, min(stages, default=0), rank.rank


def _about(rank: RankTrace, order: int) -> list[dict[str, Any]]:
    """Return the names of a rank's rows, and where it stands."""
    names = {_STEP: "step", _EXPOSED: "exposed communication"}
    for (on_device, thread), number in _threads(rank.events).items():
        names[number] = f"stream {thread}" if on_device else f"operators, thread {thread}"
    found = [
        {"ph": "M", "pid": rank.rank, "name": "process_name", "args": {"name": rank.name}},
        {"ph": "M", "pid": rank.rank, "name": "process_labels", "args": {"labels": f"rank {rank.rank}"}},
        {"ph": "M", "pid": rank.rank, "name": "process_sort_index", "args": {"sort_index": order}},
    ]
    for number, name in names.items():
        found.append({"ph": "M", "pid": rank.rank, "tid": number, "name": "thread_name", "args": {"name": name}})
        found.append(
            {"ph": "M", "pid": rank.rank, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
        )
    return found


def _threads(events: Iterable[Event]) -> dict[tuple[bool, int], int]:
    keys = dict.fromkeys((event.on_device, event.thread) for event in events)
    return {key: _OPERATORS + number for number, key in enumerate(keys)}


def _step_boxes(rank: RankTrace) -> list[tuple[str, float, float, dict[str, int]]]:
    found: list[tuple[str, float, float, dict[str, int]]] = []
    for start, end in rank.data_waits:
        found.append(("wait for data", start, end, {}))
    for number, run in enumerate(rank.runs):
        for mark in run:
            about = {"run": number} if len(rank.runs) > 1 else {}
            if mark.microbatch >= 0:
                about |= {"stage": mark.stage, "microbatch": mark.microbatch}
            found.append((_name(mark), mark.start, mark.end, about))
    return found


def _name(mark: Mark) -> str:
    if mark.kind in COMPUTE:
        return f"{LOOKS[mark.kind].label} {mark.microbatch}"
    return _NAMES.get(mark.kind, mark.kind)


def _slice(
    process: int, thread: int, name: str, start: float, end: float, about: dict[str, int], origin: float
) -> dict[str, Any]:
    times = {"ts": round(1e6 * (start - origin), 3), "dur": round(1e6 * (end - start), 3)}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, **times, **({"args": about} if about else {})}


def _arrows(ranks: Sequence[RankTrace], origin: float) -> list[dict[str, Any]]:
    """Return arrows between ranks: forwards to the next stage's, backwards to that of the stage before.

    A message leaves a little before its action's box ends: on a busy machine the receiver may begin before that.
    """
    actions = {
        (rank.data, rank.tensor, number, "B" if mark.kind == "I" else mark.kind, mark.stage, mark.microbatch): (
            rank,
            mark,
        )
        for rank in ranks
        for number, run in enumerate(rank.runs)
        for mark in run
        if mark.kind in ("F", "B", "I")
    }
    found: list[dict[str, Any]] = []
    for key, (rank, mark) in actions.items():
        data, tensor, number, kind, stage, microbatch = key
        after = actions.get((data, tensor, number, kind, stage + (1 if kind == "F" else -1), microbatch))
        if after is None or after[0] is rank:
            continue
        about = {"cat": "message", "name": "message", "id": len(found) // 2 + 1}
        left = max(mark.start, min(mark.end, after[1].start))
        leaves = round(1e6 * (left - origin) - 0.001, 3)  # within the box
        arrives = round(1e6 * (after[1].start - origin), 3)
        found.append({"ph": "s", "pid": rank.rank, "tid": _STEP, "ts": leaves, **about})
        found.append({"ph": "f", "bp": "e", "pid": after[0].rank, "tid": _STEP, "ts": arrives, **about})
    return found
