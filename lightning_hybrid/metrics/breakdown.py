"""Where the time of a step goes. Pure: spans of time in, seconds by part out.

What is known of a rank's step are spans of time, each of one *part* (:data:`PARTS`). Spans may overlap, as when a
collective runs beside a matrix product. Each instant counts once, for the first of :data:`PARTS` that covers it; what
no span covers is ``other``. So communication is *exposed* communication (no computation covers it), and the parts add
up to the step by construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hybrid.pipeline.timeline import COMPUTE, Mark

__all__ = [
    "COMMUNICATION",
    "PARTS",
    "Breakdown",
    "Span",
    "break_down",
    "cut",
    "mean",
    "message_seconds",
    "overlap",
    "split_wait",
    "spans_of_marks",
]

#: Parts that are exposed communication, by mesh axis; "world" are exchanges of all ranks (the global gradient norm),
#: "unknown" are collectives that nothing explains.
COMMUNICATION = (
    "communication_tensor",
    "communication_data_shard",
    "communication_data_replicate",
    "communication_pipeline",
    "communication_world",
    "communication_unknown",
)
#: Parts of a step; an instant that several spans cover counts for the first of them.
PARTS = ("compute", "optimizer", *COMMUNICATION, "data_wait", "bubble", "other")

#: The two halves of a backward send on from the first one.
_DIRECTION = {"F": "F", "B": "B", "I": "B"}


class Span(NamedTuple):
    """A stretch of time that belongs to one of :data:`PARTS`; seconds."""

    part: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds of one rank's step by part."""

    seconds: Mapping[str, float]
    """Every one of :data:`PARTS`; 0 where there was none. They add up to :attr:`step`."""

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())

    @property
    def communication(self) -> float:
        """Seconds of exposed communication over all axes."""
        return sum(self.seconds[part] for part in COMMUNICATION)

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in the step; all 0 for a step without length."""
        step = self.step
        return {part: seconds / step if step else 0.0 for part, seconds in self.seconds.items()}

    def move(self, part: str, shares: Mapping[str, float]) -> Breakdown:
        """Return a breakdown in which ``shares[other]`` of ``part``'s seconds count for each ``other`` instead."""
        seconds = dict(self.seconds)
        for other, share in shares.items():
            seconds[other] += share * self.seconds[part]
            seconds[part] -= share * self.seconds[part]
        return Breakdown(seconds=seconds)


def break_down(
    spans: Iterable[Span], *, start: float, end: float, exclude: Iterable[tuple[float, float]] = ()
) -> Breakdown:
    """Count each instant between ``start`` and ``end`` for the first of :data:`PARTS` that covers it.

    Args:
        spans: in any order; they may overlap and reach beyond the step.
        start: seconds, on the clock of the spans.
        end: seconds.
        exclude: stretches that do not count at all (validation, checkpointing).

    Raises:
        ValueError: if a span names no part, or ``end`` lies before ``start``.
    """
    if end < start:
        raise ValueError(f"The step ends at {end} s, before its start at {start} s.")
    for span in (spans := list(spans)):
        if span.part not in PARTS:
            raise ValueError(f'A span names "{span.part}", which is no part of a step; use one of {", ".join(PARTS)}.')
    seconds = dict.fromkeys(PARTS, 0.0)
    for _, left, right in cut([Span("other", start, end)], exclude):
        for part, moments in zip(PARTS, _sweep(spans, left, right), strict=True):
            seconds[part] += moments
    return Breakdown(seconds=seconds)


def _sweep(spans: Iterable[Span], start: float, end: float) -> list[float]:
    """Return the seconds of each of :data:`PARTS` between ``start`` and ``end``."""
    place_of = {part: place for place, part in enumerate(PARTS)}
    edges: list[tuple[float, int, int]] = []
    for part, left, right in spans:
        left, right = max(left, start), min(right, end)
        if left < right:
            edges += [(left, place_of[part], 1), (right, place_of[part], -1)]
    edges.sort()
    seconds, open_spans, before = [0.0] * len(PARTS), [0] * len(PARTS), start
    open_spans[-1] = 1  # "other" covers everything
    for moment, place, change in [*edges, (end, len(PARTS) - 1, 0)]:
        if moment > before:
            seconds[next(i for i, count in enumerate(open_spans) if count)] += moment - before
            before = moment
        open_spans[place] += change
    return seconds


def cut(spans: Iterable[Span], holes: Iterable[tuple[float, float]]) -> list[Span]:
    """Return what is left of ``spans`` outside of ``holes``, as when a thread computes except while it waits."""
    merged, left = _merge(holes), list[Span]()
    for part, start, end in spans:
        for hole_start, hole_end in merged:
            if hole_end <= start or hole_start >= end:
                continue
            if hole_start > start:
                left.append(Span(part, start, hole_start))
            start = hole_end
        if start < end:
            left.append(Span(part, start, end))
    return left


def overlap(spans: Iterable[Span], windows: Iterable[Span]) -> dict[str, float]:
    """Return the seconds of ``spans`` by part that lie inside of any of ``windows``.

    Spans do not overlap each other. Windows may: with manual optimization backwards lie inside of the training step.
    """
    seconds: dict[str, float] = {}
    ordered = _merge((window.start, window.end) for window in windows)
    first = 0
    for part, start, end in sorted(spans, key=lambda span: span.start):
        while first < len(ordered) and ordered[first][1] <= start:
            first += 1
        for window_start, window_end in ordered[first:]:
            if window_start >= end:
                break
            seconds[part] = seconds.get(part, 0.0) + min(end, window_end) - max(start, window_start)
    return seconds


def _merge(stretches: Iterable[tuple[float, float]]) -> list[list[float]]:
    """Return in order the stretches that together cover the same instants, each once."""
    merged: list[list[float]] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return merged


def mean(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """Return the mean seconds of each part over several steps or ranks (at least one)."""
    return Breakdown(seconds={p: sum(b.seconds[p] for b in breakdowns) / len(breakdowns) for p in PARTS})


def split_wait(wait: Mark, ended: float | None) -> list[Span]:
    """Split a wait at the moment when what it waited for had been computed.

    Before it there was nothing to send: ``bubble``. After it, the message was on its way: ``communication_pipeline``.

    Args:
        wait: the mark of the wait.
        ended: when the other stage's action ended, on the same clock; ``None`` (not known) counts all as bubble.
    """
    moment = wait.end if ended is None else min(max(ended, wait.start), wait.end)
    spans = [Span("bubble", wait.start, moment), Span("communication_pipeline", moment, wait.end)]
    return [span for span in spans if span.start < span.end]


def spans_of_marks(
    marks: Sequence[Mark], *, pipeline: Iterable[Sequence[Mark]] = (), reduce_part: str = "communication_data_shard"
) -> list[Span]:
    """Turn one rank's marks into spans.

    Actions compute. ``WAIT_F`` and ``WAIT_B`` are split at the end of the action they waited for. ``SEND`` is a bubble
    while a neighbouring stage computes (it takes the message when it is done), else pipeline communication. ``SYNC``
    (an exchange of all ranks, as for the global norm; it may lie inside of ``OPTIMIZER``) is a bubble while another
    stage still computes, else ``communication_world``. ``REPLICAS``, which may lie there too, is an exchange that is
    not made at every step. The time before the rank's first and after its last action is a
    bubble while another stage computes.

    Args:
        marks: the rank's own marks of one batch (one run of the schedule).
        pipeline: the marks of each rank of its pipeline for that batch, its own among them or not.
        reduce_part: the part that a ``REDUCE`` mark belongs to.
    """
    others = [mark for rank_marks in pipeline for mark in rank_marks if mark.kind in COMPUTE]
    sent = [mark for mark in others if mark.kind in _DIRECTION]
    ended = {(_DIRECTION[mark.kind], mark.stage, mark.microbatch): mark.end for mark in sent}
    own = {mark.stage for mark in marks if mark.kind in COMPUTE}
    near = [mark for mark in others if mark.stage not in own and {mark.stage - 1, mark.stage + 1} & own]
    syncs = [(mark.start, mark.end) for mark in marks if mark.kind in ("SYNC", "REPLICAS")]
    # With manual optimization these lie inside of the training step, whose mark is one of computation.
    within = [*syncs, *((mark.start, mark.end) for mark in marks if mark.kind == "OPTIMIZER")]
    spans: list[Span] = []
    for mark in marks:
        if mark.kind in COMPUTE:
            spans += cut([Span("compute", mark.start, mark.end)], within)
        elif mark.kind == "WAIT_F":
            spans += split_wait(mark, ended.get(("F", mark.stage - 1, mark.microbatch)))
        elif mark.kind == "WAIT_B":
            spans += split_wait(mark, ended.get(("B", mark.stage + 1, mark.microbatch)))
        elif mark.kind == "SEND":
            spans += _split_by_work(mark.start, mark.end, near, rest="communication_pipeline")
        elif mark.kind == "SYNC":
            spans += _split_by_work(mark.start, mark.end, others, rest="communication_world")
        elif mark.kind == "REPLICAS":
            spans.append(Span("communication_data_replicate", mark.start, mark.end))
        elif mark.kind == "REDUCE":
            spans.append(Span(reduce_part, mark.start, mark.end))
        elif mark.kind == "OPTIMIZER":
            spans += cut([Span("optimizer", mark.start, mark.end)], syncs)
    return spans + _outside(marks, others)


def message_seconds(timeline: Mapping[int, Sequence[Mark]], rank: int) -> dict[int, float]:
    """Return the seconds that a rank waited for messages on their way, by the rank that had sent them.

    Waiting for a stage that still computes does not count.

    Args:
        timeline: marks of one run by schedule rank.
        rank: one of these.
    """
    ended = {
        (_DIRECTION[mark.kind], mark.stage, mark.microbatch): (mark.end, sender)
        for sender, marks in timeline.items()
        for mark in marks
        if mark.kind in _DIRECTION
    }
    seconds: dict[int, float] = {}
    for mark in timeline[rank]:
        if mark.kind in ("WAIT_F", "WAIT_B"):
            sent = ("F", mark.stage - 1) if mark.kind == "WAIT_F" else ("B", mark.stage + 1)
            moment, sender = ended.get((*sent, mark.microbatch), (mark.end, None))
            if sender is not None:
                seconds[sender] = seconds.get(sender, 0.0) + max(0.0, mark.end - max(moment, mark.start))
    return seconds


def _split_by_work(start: float, end: float, work: Iterable[Mark], *, rest: str) -> list[Span]:
    """Return bubble where ``work`` goes on between ``start`` and ``end``, and ``rest`` elsewhere."""
    busy = [(max(mark.start, start), min(mark.end, end)) for mark in work if mark.start < end and mark.end > start]
    return [Span("bubble", *stretch) for stretch in busy] + cut([Span(rest, start, end)], busy)


def _outside(marks: Sequence[Mark], others: Sequence[Mark]) -> list[Span]:
    """Return bubbles before a rank's first and after its last action, while the pipeline's other stages compute."""
    own = [mark for mark in marks if mark.kind in COMPUTE]
    if not own or not others:
        return []
    first, last = min(mark.start for mark in own), max(mark.end for mark in own)
    head = Span("bubble", min(mark.start for mark in others), first)
    tail = Span("bubble", last, max(mark.end for mark in others))
    return [span for span in (head, tail) if span.start < span.end]
