"""Draws the timeline of a pipeline's step: rows are ranks, boxes are actions with the number of their micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_hybrid.metrics.bubble import idle_share
from lightning_hybrid.pipeline.boxes import LOOKS, boxes_of, look_of, row_name
from lightning_hybrid.pipeline.timeline import ACTIONS, COMPUTE, Mark, window

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_timeline"]


_BOX = 0.8  # of a row


def draw_timeline(
    measured: Mapping[int, Sequence[Mark]],
    ideal: Mapping[int, Sequence[Mark]] | None = None,
    *,
    title: str = "",
    captions: tuple[str, str] = ("measured", "ideal at the same action times"),
    width: float = 12.0,
) -> Figure:
    """Draw a step, and below it, on the same scale, its ideal.

    Both begin with their first action. Numbers are left out of boxes that are too narrow for them; virtual stages of
    one rank differ in lightness.

    Args:
        measured: marks by schedule rank, seconds.
        ideal: likewise, as :func:`~lightning_hybrid.pipeline.timeline.simulate` returns them.
        title: above everything.
        captions: above each panel, before its time and its bubble.
        width: in inches; the height follows from the number of ranks.

    Returns:
        A figure that no window system and no global state of matplotlib knows of; save it with ``savefig``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timelines = [measured] if ideal is None else [measured, ideal]
    row = 0.42 if len(measured) <= 8 else 0.24  # inches
    height = 1.15 + sum(len(timeline) * row + 0.62 for timeline in timelines)
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [max(1, len(timeline)) for timeline in timelines]
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    longest = max(_extent(timeline)[1] - _extent(timeline)[0] for timeline in timelines) or 1.0
    unit, name = (1e3, "ms") if longest < 10 else (1.0, "s")
    used: set[str] = set()
    for axes, timeline, caption in zip(panels, timelines, captions, strict=False):
        axes.set_xlim(0, longest * unit * 1.005)
        used |= _draw_panel(axes, timeline, unit, pixels_per_second=width * 0.92 * 100 / (longest * 1.005))
        start, end = window(timeline)
        text = f"{caption}: {_digits((end - start) * unit)} {name}, {idle_share(timeline):.1%} of it idle (bubble)"
        axes.set_title(text, loc="left", fontsize=10, color="#333333")
    panels[-1].set_xlabel(f"time since the step's first action ({name})", fontsize=9)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    _draw_legend(figure, used)
    return figure


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _extent(timeline: Mapping[int, Sequence[Mark]]) -> tuple[float, float]:
    start, end = window(timeline)
    return start, max([end, *(mark.end for marks in timeline.values() for mark in marks)])


def _draw_panel(
    axes: Axes, timeline: Mapping[int, Sequence[Mark]], unit: float, *, pixels_per_second: float
) -> set[str]:
    """Draw one timeline; returns the kinds of boxes that it has."""
    (origin, end), used, boxes = window(timeline), {"bubble"}, _Boxes(axes, unit)
    ranks, drawn = sorted(timeline), boxes_of(timeline)
    for row, rank in enumerate(ranks):
        marks = drawn[rank]
        stages = sorted({mark.stage for mark in marks if mark.kind in ACTIONS})
        boxes.add(row, LOOKS["bubble"].colour, 0.0, end - origin)  # what nothing covers is idle
        for mark in marks:
            if mark.kind not in COMPUTE and (kind := look_of(mark.kind)) in LOOKS:
                used.add(kind)
                boxes.add(row, LOOKS[kind].colour, mark.start - origin, mark.end - origin)
        for mark in marks:
            if mark.kind in COMPUTE:
                used.add(mark.kind)
                look = LOOKS[mark.kind]
                place = stages.index(mark.stage) if mark.stage in stages else 0
                wide = mark.kind in ACTIONS and mark.duration * pixels_per_second > 8 + 5 * len(str(mark.microbatch))
                number = str(mark.microbatch) if wide else ""
                colour = _lighten(look.colour, place, len(stages))
                boxes.add(row, colour, mark.start - origin, mark.end - origin, number, look.text)
    boxes.draw()
    names = [row_name(rank, timeline[rank]) for rank in ranks]
    axes.set_yticks(range(len(ranks)), names, fontsize=9)
    axes.set_ylim(max(1, len(ranks)) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors="#555555")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.axvline((end - origin) * unit, color="#c0392b", linewidth=1, linestyle=(0, (3, 2)), zorder=3)
    return used


class _Boxes:
    """Collects boxes and draws those of one colour at once, which is much faster than one by one."""

    def __init__(self, axes: Axes, unit: float) -> None:
        self._axes, self._unit = axes, unit
        self._boxes: dict[Any, list[tuple[int, float, float]]] = {}

    def add(self, row: int, colour: Any, start: float, end: float, number: str = "", text: str = "white") -> None:
        """Add a box from ``start`` to ``end`` seconds; later colours lie above earlier ones."""
        left, right = start * self._unit, end * self._unit
        self._boxes.setdefault(colour, []).append((row, left, right))
        if number:
            middle = (left + right) / 2
            self._axes.text(middle, row, number, color=text, ha="center", va="center", fontsize=8, clip_on=True)

    def draw(self) -> None:
        from matplotlib.collections import PolyCollection

        half = _BOX / 2
        for order, (colour, boxes) in enumerate(self._boxes.items()):
            corners = [
                ((left, row - half), (left, row + half), (right, row + half), (right, row - half))
                for row, left, right in boxes
            ]
            above = 1 + order / (len(self._boxes) + 1)
            self._axes.add_collection(
                PolyCollection(corners, facecolors=[colour], edgecolors="white", linewidths=0.4, zorder=above)
            )


def _lighten(colour: str, place: int, num_stages: int) -> tuple[float, float, float]:
    """Mix a colour with white: the later stages of a rank are lighter, so that virtual stages can be told apart."""
    share = 0.0 if num_stages < 2 else 0.38 * place / (num_stages - 1)
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share


def _draw_legend(figure: Figure, used: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=look.colour, label=look.label) for kind, look in LOOKS.items() if kind in used]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8.5, handlelength=1.2
    )
