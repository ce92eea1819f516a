"""The timeline of a pipeline's step as a chart with hover. Pure.

Positions along the time are in percent, heights in pixels: the chart fills its page at any width, and text keeps its
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_hybrid.errors import PipelineError
from lightning_hybrid.metrics.bubble import idle_share
from lightning_hybrid.pipeline.boxes import LOOKS, boxes_of, look_of, row_name
from lightning_hybrid.pipeline.timeline import ACTIONS, COMPUTE, Mark, Timeline, ideal_of, window
from lightning_hybrid.report.html import Html, tag
from lightning_hybrid.report.numbers import seconds, share, ticks
from lightning_hybrid.report.parts import label_of

__all__ = ["ideal_or_none", "timeline_chart"]

CAPTIONS = ("Measured", "Ideal, at the same action times and without delays")
_AXIS = 26  # pixels below the rows
_ASSUMED_WIDTH = 900  # pixels, for what is too narrow for its number


def timeline_chart(
    measured: Mapping[int, Sequence[Mark]],
    ideal: Mapping[int, Sequence[Mark]] | None = None,
    *,
    captions: tuple[str, str] = CAPTIONS,
) -> Html:
    """Return a figure: a step, and below it, on the same scale, its ideal.

    Args:
        measured: marks by schedule rank, seconds.
        ideal: likewise.
        captions: before the time and the bubble of each.
    """
    panels = [boxes_of(timeline) for timeline in (measured, ideal) if timeline]
    longest = max((_extent(panel) for panel in panels), default=0.0) or 1.0
    used: set[str] = {"bubble"}
    children = [_panel(panel, longest, caption, used) for panel, caption in zip(panels, captions, strict=False)]
    return tag("figure", _legend(used), children, class_="timeline")


def ideal_or_none(timeline: Timeline) -> Timeline | None:
    """Return the ideal run of a timeline; ``None`` for one from a file whose order cannot be run."""
    try:
        return ideal_of(timeline)
    except PipelineError:
        return None


def _extent(timeline: Timeline) -> float:
    start, end = window(timeline)
    return max([end, *(mark.end for marks in timeline.values() for mark in marks)]) - start


def _panel(timeline: Timeline, longest: float, caption: str, used: set[str]) -> Html:
    origin, end = window(timeline)
    row = 26 if len(timeline) <= 8 else 15
    drawing: list[Html] = []
    for place, rank in enumerate(sorted(timeline)):
        drawing += _row(timeline[rank], rank, place * row, row, origin, end, longest, used)
    height = row * len(timeline)
    drawing += _axis(longest, height)
    finish = _percent((end - origin) / longest)
    drawing.append(tag("line", class_="end", x1=finish, x2=finish, y1=0, y2=height))
    text = f"{caption}: {seconds(end - origin)}, {share(idle_share(timeline))} of it idle (bubble)"
    plot = tag("svg", drawing, class_="plot rows", height=height + _AXIS, role="img", aria_label=text)
    return tag("div", tag("figcaption", text), tag("div", plot, class_="scroll"), class_="panel")


def _row(
    boxes: Sequence[Mark], rank: int, top: int, height: int, origin: float, end: float, longest: float,
    used: set[str],
) -> list[Html]:  # fmt: skip
    """Return one rank's name, boxes and numbers; ``used`` takes in the kinds that it has."""
    stages = sorted({box.stage for box in boxes if box.kind in ACTIONS})
    inner, found = height - 4, []
    found.append(tag("text", row_name(rank, boxes), class_="name", x=-8, y=top + height / 2))
    found.append(_rect(0.0, (end - origin) / longest, top + 2, inner, "k-bubble", None))
    for box in sorted(boxes, key=lambda box: box.kind in COMPUTE):  # actions lie above
        kind = look_of(box.kind)
        if kind not in LOOKS:
            continue
        used.add(kind)
        left, width = (box.start - origin) / longest, box.duration / longest
        later = stages.index(box.stage) if box.stage in stages else 0
        shade = f" s{min(later, 3)}" if later else ""
        microbatch = box.microbatch if box.kind in COMPUTE else None
        found.append(_rect(left, width, top + 2, inner, f"k-{kind}{shade}", _tip(box, origin), microbatch))
        if box.kind in ACTIONS and width * _ASSUMED_WIDTH > 7 + 7 * len(str(box.microbatch)) and height > 20:
            found.append(
                tag("text", box.microbatch, class_=f"n k-{kind}", x=_percent(left + width / 2), y=top + height / 2)
            )
    return found


def _rect(
    left: float, width: float, top: float, height: float, class_: str, tip: str | None, microbatch: int | None = None
) -> Html:
    title = None if tip is None else tag("title", tip)
    return tag(
        "rect", title, class_=class_, x=_percent(left), width=_percent(width), y=top, height=height, data_m=microbatch
    )


def _tip(box: Mark, origin: float) -> str:
    look = LOOKS[look_of(box.kind)].label if box.kind in COMPUTE else label_of(box.kind)
    what = f"{look}, stage {box.stage}, micro-batch {box.microbatch}" if box.kind in COMPUTE else look
    return f"{what}\n{seconds(box.duration)}, from {seconds(box.start - origin)}"


def _axis(longest: float, top: float) -> list[Html]:
    factor, name = (1e3, "ms") if longest < 10 else (1.0, "s")
    marks = ticks(longest * factor, 8)
    digits = 1 if all(mark == int(mark) for mark in marks) else 2
    found: list[Html] = []
    for mark in marks:
        place = _percent(mark / factor / longest)
        text = f"{mark:,.0f}" if digits == 1 else f"{mark:g}"
        found.append(tag("line", class_="grid", x1=place, x2=place, y1=0, y2=top))
        found.append(tag("text", text if mark else f"0 {name}", class_="tick", x=place, y=top + 16))
    return found


def _legend(used: set[str]) -> Html:
    kinds = [kind for kind in LOOKS if kind in used and not (kind == "I" and "B" in used)]
    buttons = [
        tag("button", tag("i", class_=f"swatch k-{kind}"), LOOKS[kind].label, type="button", data_k=f"k-{kind}")
        for kind in kinds
    ]
    return tag("div", buttons, class_="legend", title="Click to hide or show")


def _percent(part: float) -> str:
    return f"{100 * part:.3f}".rstrip("0").rstrip(".") + "%"
