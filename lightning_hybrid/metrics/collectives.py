"""From a profiler's events to spans of exposed communication by axis. Pure.

On CPU the thread that runs the model is blocked inside of a collective's operators (``c10d::*``,
``_c10d_functional::*``), and after them for as long as it runs nothing while gloo's own event for the collective lasts:
``Work.wait()`` leaves no event of its own. On CUDA a collective is a kernel on a stream of its own, exposed where no
other kernel runs.

gloo's events do not name their process group, so the axis follows from the ranges around them: FSDP marks its own
(``FSDP::*``; an all-reduce inside is the sum over replicas), functional collectives come from DTensor, and this
library's tensor-parallel exchanges are autograd functions, whose names are ranges too. Point-to-point messages are the
pipeline's. What none of these explains is counted as ``communication_unknown`` and not hidden.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from lightning_hybrid.metrics.breakdown import Span, cut

__all__ = ["Event", "exposed_on_cpu", "exposed_on_device"]

#: Autograd functions of :mod:`lightning_hybrid.tensor_parallel.collectives`, as the profiler names them.
TENSOR_RANGES = (
    "_EnterSplitBackward",
    "_LeavePartial",
    "_JoinShares",
    "_JoinSharesBackward",
    "_KeepShareBackward",
    "_GatherTokens",
    "_GatherTokensBackward",
    "_ScatterPartial",
    "_ScatterPartialBackward",
)
_CALLS = ("c10d::", "_c10d_functional::")
_MESSAGES = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")
_NO_COMMUNICATION = ("_c10d_functional::_wrap_tensor_autograd",)


class Event(NamedTuple):
    """One event of a profiler."""

    name: str
    start: float
    """Seconds."""
    end: float
    """Seconds."""
    thread: int = 0
    """Thread, or stream of a device."""
    on_device: bool = False
    """Whether it is work of the device itself (a kernel, a copy)."""
    operator: int = 0
    """For work of the device: the number of the operator that launched it; for an operator: its own number."""


def exposed_on_cpu(events: Iterable[Event], thread: int, *, axes: Collection[str] = ()) -> list[Span]:
    """Return the time that ``thread`` spent inside of collectives or waiting for them, by axis; no spans overlap.

    Args:
        events: in any order.
        thread: the one that runs the model.
        axes: the axes of more than one rank, named like the parts ("tensor", "data_shard", "data_replicate"). If there
            is but one, collectives that nothing else explains are its own.
    """
    events = [event for event in events if not event.on_device]
    own = [event for event in events if event.thread == thread]
    calls = [span for span, _ in _calls(own, axes)]
    if not calls:
        return []
    starts = [call.start for call in calls]
    moments = sorted({moment for event in own for moment in (event.start, event.end)})
    operators = _without_overlap(Span("compute", e.start, e.end) for e in own if e.name.startswith("aten::"))
    begun = [operator.start for operator in operators]
    waits = []
    for work in events:
        place = bisect_right(starts, work.start) - 1
        if work.thread == thread or place < 0 or not work.name.startswith("gloo:"):
            continue
        running = bisect_right(begun, work.end) - 1
        if running >= 0 and operators[running].end > work.end:
            continue  # it ended behind an operator
        last = moments[bisect_right(moments, work.end) - 1]
        waits.append(Span(calls[place].part, max(last, work.start), work.end))
    return _without_overlap([*calls, *waits])


def exposed_on_device(events: Sequence[Event], *, axes: Collection[str] = ()) -> list[Span]:
    """Return the time in which collectives' kernels ran on a device and no other kernel did, by axis."""
    parts: dict[int, str] = {}
    for thread in {event.thread for event in events if not event.on_device}:
        for span, operators in _calls((e for e in events if e.thread == thread and not e.on_device), axes):
            parts.update(dict.fromkeys(operators, span.part))
    kernels = [event for event in events if event.on_device]
    collectives = [event for event in kernels if event.name.startswith("nccl")]
    work = [(event.start, event.end) for event in kernels if not event.name.startswith("nccl")]
    spans = [Span(parts.get(event.operator, _only(axes)), event.start, event.end) for event in collectives]
    return cut(_without_overlap(spans), work)


def _without_overlap(spans: Iterable[Span]) -> list[Span]:
    """Count each instant for the span that began first."""
    left: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        start = max(span.start, left[-1].end) if left else span.start
        if start < span.end:
            left.append(Span(span.part, start, span.end))
    return left


def _calls(events: Iterable[Event], axes: Collection[str]) -> list[tuple[Span, list[int]]]:
    """Return the outermost calls of collectives on one thread, each with the numbers of the operators inside of it."""
    found: list[tuple[Span, list[int]]] = []
    around: list[Event] = []
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        while around and around[-1].end <= event.start:
            around.pop()
        if event.name.startswith(_CALLS) and event.name not in _NO_COMMUNICATION:
            if found and event.start < found[-1][0].end:
                found[-1][1].append(event.operator)
            else:
                part = _part(event.name, [outer.name for outer in around], axes)
                found.append((Span(part, event.start, event.end), [event.operator]))
        around.append(event)
    return found


def _part(name: str, around: Sequence[str], axes: Collection[str]) -> str:
    if any(outer.startswith("FSDP::") for outer in around):  # messages too: on gloo shards go straight to their ranks
        is_sum = "allreduce" in name and "data_replicate" in axes
        return "communication_data_replicate" if is_sum else "communication_data_shard"
    if name in _MESSAGES:
        return "communication_pipeline"
    if "tensor" in axes and any(outer in TENSOR_RANGES for outer in around):
        return "communication_tensor"
    if "tensor" in axes and name.startswith("_c10d_functional::"):
        return "communication_tensor"
    return _only(axes)


def _only(axes: Collection[str]) -> str:
    return f"communication_{next(iter(axes))}" if len(axes) == 1 else "communication_unknown"
