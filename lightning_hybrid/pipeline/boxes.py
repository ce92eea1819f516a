"""What a picture of a pipeline's step shows, and in which colours. Pure: for PNG, HTML and traces alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hybrid.metrics.breakdown import PARTS, spans_of_marks
from lightning_hybrid.pipeline.timeline import ACTIONS, COMPUTE, Mark, Timeline

__all__ = ["LOOKS", "Look", "boxes_of", "look_of", "row_name"]


@dataclass(frozen=True, kw_only=True)
class Look:
    """How one kind of box is drawn."""

    label: str
    """In the legend."""
    colour: str
    """Of the box."""
    text: str = "white"
    """Of the micro-batch's number in it."""


#: By kind of mark, and by part of a step for what is no action; in the order of the legend.
LOOKS = {
    "F": Look(label="forward", colour="#2f6fb5"),
    "PROLOGUE": Look(label="forward, before the stage's first block", colour="#a9c8e8", text="#333333"),
    "B": Look(label="backward", colour="#2e8b6f"),
    "I": Look(label="backward, input", colour="#2e8b6f"),
    "W": Look(label="backward, weight", colour="#8fcdb0", text="#333333"),
    "optimizer": Look(label="optimizer", colour="#7d5ba6"),
    "communication": Look(label="exposed communication", colour="#e8883a"),
    "bubble": Look(label="idle (bubble)", colour="#e4e4e4"),
}

_NOT_DRAWN = ("compute", "bubble")  # drawn as actions; as what is left


def boxes_of(timeline: Mapping[int, Sequence[Mark]], *, reduce_part: str = "communication_data_shard") -> Timeline:
    """Return what is drawn of each rank, in order of time: its actions, and what it did beside them.

    What is no action becomes a mark whose kind is one of :data:`~lightning_hybrid.metrics.breakdown.PARTS`
    (``optimizer``, ``communication_*``, ...); waiting for another stage is left out, as what no box covers is idle.
    Boxes of boxes are these boxes. ``reduce_part`` is the part that a ``REDUCE`` mark belongs to.
    """
    boxes: Timeline = {}
    for rank, marks in timeline.items():
        spans = spans_of_marks(marks, pipeline=timeline.values(), reduce_part=reduce_part)
        kept = [mark for mark in marks if mark.kind in COMPUTE or mark.kind in PARTS]
        kept += [Mark(span.part, -1, -1, span.start, span.end) for span in spans if span.part not in _NOT_DRAWN]
        boxes[rank] = sorted(kept, key=lambda mark: mark.start)
    return boxes


def look_of(kind: str) -> str:
    """Return the key in :data:`LOOKS` of a box's kind; all axes of communication look alike."""
    return "communication" if kind.startswith("communication") else kind


def row_name(rank: int, marks: Sequence[Mark]) -> str:
    """Return what the row of a rank is called: its stages."""
    stages = sorted({mark.stage for mark in marks if mark.kind in ACTIONS})
    if stages == [rank]:
        return f"stage {rank}"
    return f"rank {rank}: stages {', '.join(map(str, stages))}"
