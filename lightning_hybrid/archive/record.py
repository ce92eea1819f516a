"""What an entry keeps of a run's course, as lines that a person can read and that have a bound. Pure.

A timeline has one line for each pipeline rank, in milliseconds since the step's first action::

    "0": "0F0 0 12.204; 0F1 12.21 24.4; communication_pipeline 24.4 25; ... optimizer 80.1 84"

(stage, kind and micro-batch of an action as torch writes them, start, end). A history has one line for each value,
``"-"`` where it was not measured::

    "steps": "4 10 20", "step/compute_s": "0.01204 0.01199 -"

Both come back from files that anybody may have written: what cannot be read is refused, never guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from lightning_hybrid.errors import ArchiveError
from lightning_hybrid.metrics.breakdown import PARTS
from lightning_hybrid.pipeline.boxes import boxes_of
from lightning_hybrid.pipeline.timeline import ACTIONS, COMPUTE, Mark, Timeline, window

__all__ = ["MAX_BOXES", "MAX_ROWS", "read_history", "read_timeline", "write_history", "write_timeline"]

#: Most boxes of a timeline that an entry keeps, about 50 kB: 16 stages with 64 micro-batches have so many actions.
MAX_BOXES = 2048
#: Most steps of a history that are read.
MAX_ROWS = 1024
_ACTION = re.compile(r"(\d{1,5})(F|B|I|W|PROLOGUE)(\d{1,6})")


def write_timeline(timeline: Mapping[int, Sequence[Mark]]) -> dict[str, str]:
    """Return the lines of a step; without the shortest boxes that are no actions where there are too many.

    Empty where the actions alone exceed :data:`MAX_BOXES`.
    """
    boxes = boxes_of(timeline)
    origin, _ = window(boxes)
    actions = sum(mark.kind in ACTIONS for marks in boxes.values() for mark in marks)
    if not actions or actions > MAX_BOXES:
        return {}
    rest = sorted(
        (mark.duration for marks in boxes.values() for mark in marks if mark.kind not in ACTIONS), reverse=True
    )
    room = MAX_BOXES - actions
    shortest = rest[room] if len(rest) > room else -1.0
    return {
        str(rank): "; ".join(
            f"{_name(mark)} {_milliseconds(mark.start - origin)} {_milliseconds(mark.end - origin)}"
            for mark in marks
            if mark.kind in ACTIONS or mark.duration > shortest
        )
        for rank, marks in sorted(boxes.items())
    }


def _name(mark: Mark) -> str:
    return f"{mark.stage}{mark.kind}{mark.microbatch}" if mark.kind in COMPUTE else mark.kind


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}".rstrip("0").rstrip(".")


def read_timeline(lines: Mapping[str, str]) -> Timeline:
    """Return the boxes that :func:`write_timeline` wrote, in seconds.

    Raises:
        ArchiveError: if a line cannot be read, boxes of one rank overlap by more than a rounding, or there are
            too many.
    """
    timeline: Timeline = {}
    for rank, line in lines.items():
        if not re.fullmatch(r"\d{1,5}", rank):
            raise ArchiveError(f"result.timeline has a row {rank[:20]!r}, which is no rank.")
        boxes = [_read_box(text) for text in line.split("; ") if text]
        ends = 0.0
        for box in boxes:
            if box.kind in COMPUTE:
                if box.start < ends - 1e-5:
                    raise ArchiveError(f"result.timeline.{rank} has actions that overlap at {1e3 * box.start:g} ms.")
                ends = box.end
        timeline[int(rank)] = boxes
    if sum(map(len, timeline.values())) > MAX_BOXES:
        raise ArchiveError(f"result.timeline has more than {MAX_BOXES} boxes.")
    return timeline


def _read_box(text: str) -> Mark:
    name, *times = text.split(" ")
    try:
        start, end = (float(time) / 1e3 for time in times)
    except ValueError:
        raise ArchiveError(f"result.timeline has {text[:40]!r}, which is not 'name start end'.") from None
    if not (math.isfinite(start) and math.isfinite(end) and start <= end):
        raise ArchiveError(f"result.timeline has {text[:40]!r}, which ends before it starts.")
    if found := _ACTION.fullmatch(name):
        stage, kind, microbatch = found.groups()
        return Mark(kind, int(stage), int(microbatch), start, end)
    if name not in PARTS:
        raise ArchiveError(f"result.timeline has {name[:40]!r}, which is neither an action nor a part of a step.")
    return Mark(name, -1, -1, start, end)


def write_history(rows: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, str]:
    """Return the lines of (step, values) rows, which may come from several callbacks; rows of one step are joined."""
    steps: dict[int, dict[str, float]] = {}
    for step, values in rows:
        steps.setdefault(step, {}).update(values)
    if not steps:
        return {}
    order = sorted(steps)
    lines = {"steps": " ".join(map(str, order))}
    for key in sorted({key for values in steps.values() for key in values}):
        lines[key] = " ".join(_number(steps[step].get(key)) for step in order)
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"


def read_history(lines: Mapping[str, str]) -> list[tuple[int, dict[str, float]]]:
    """Return the rows that :func:`write_history` wrote.

    Raises:
        ArchiveError: if a line cannot be read, or lines differ in length.
    """
    if not lines:
        return []
    try:
        steps = [int(text) for text in lines.get("steps", "").split()]
        columns = {
            key: [None if text == "-" else float(text) for text in line.split()]
            for key, line in lines.items()
            if key != "steps"
        }
    except ValueError as error:
        raise ArchiveError(f"result.history cannot be read: {error}") from None
    if not steps or len(steps) > MAX_ROWS or steps != sorted(set(steps)):
        raise ArchiveError(f"result.history.steps must be 1 to {MAX_ROWS} ascending numbers.")
    for key, column in columns.items():
        if len(column) != len(steps):
            raise ArchiveError(f"result.history.{key[:60]} has {len(column)} numbers for {len(steps)} steps.")
    return [
        (
            step,
            {
                key: value
                for key, column in columns.items()
                if (value := column[i]) is not None and math.isfinite(value)
            },
        )
        for i, step in enumerate(steps)
    ]
