"""Bars, courses over a run, and throughput against devices. Pure; positions in percent, as in :mod:`timeline`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.metrics.breakdown import PARTS
from lightning_hybrid.report.html import Html, tag
from lightning_hybrid.report.numbers import seconds, share, ticks
from lightning_hybrid.report.parts import css_class, label_of, parts_of

__all__ = ["Point", "area_chart", "devices_chart", "line_chart", "share_bar"]

_HEIGHT = 200  # pixels of a plot without its axis
Row = tuple[int, Mapping[str, float]]


def share_bar(parts: Mapping[str, float], *, small: bool = False) -> Html:
    """Return seconds by part as one bar of 100 %."""
    total = sum(parts.values()) or 1.0
    pieces = [
        tag(
            "span",
            share(seconds_ / total) if seconds_ / total > 0.09 and not small else "",
            class_=css_class(part),
            style=f"width:{100 * seconds_ / total:.2f}%",
            data_tip=f"{label_of(part)}\n{seconds(seconds_)}, {share(seconds_ / total)} of the step",
        )
        for part, seconds_ in parts.items()
    ]
    return tag("div", pieces, class_="bar small" if small else "bar")


def area_chart(rows: Sequence[Row]) -> Html | None:
    """Return the parts of a step over the run, stacked; ``None`` for fewer than two measurements."""
    found = [(step, parts) for step, values in rows if (parts := parts_of(values))]
    if len(found) < 2:
        return None
    first, last = found[0][0], found[-1][0]
    most = max(sum(parts.values()) for _, parts in found)
    factor, unit = (1e3, "ms") if most < 10 else (1.0, "s")
    used = [part for part in PARTS if any(part in parts for _, parts in found)]
    floor, areas = [0.0] * len(found), []
    for part in used:
        top = [low + parts.get(part, 0.0) for low, (_, parts) in zip(floor, found, strict=True)]
        places = [1000 * (step - first) / (last - first) for step, _ in found]
        upper = [f"{x:.1f},{100 - 100 * y / most:.2f}" for x, y in zip(places, top, strict=True)]
        lower = [f"{x:.1f},{100 - 100 * y / most:.2f}" for x, y in zip(places, floor, strict=True)]
        areas.append(tag("polygon", class_=css_class(part), points=" ".join([*upper, *reversed(lower)])))
        floor = top
    shape = tag("svg", areas, viewBox="0 0 1000 100", preserveAspectRatio="none", width="100%", height=_HEIGHT)

    def tip(step: int, parts: Mapping[str, float]) -> str:
        lines = [f"{label_of(part)}: {seconds(parts[part])}" for part in reversed(used) if part in parts]
        return "\n".join([f"step {step}: {seconds(sum(parts.values()))}", *lines])

    tips = [(step, tip(step, parts)) for step, parts in found]
    axes = [*_y_axis(most * factor, unit), shape, *_x_axis(first, last), *_hovers(tips)]
    legend = [tag("span", tag("i", class_=f"swatch {css_class(part)}"), label_of(part)) for part in used]
    return tag(
        "figure",
        tag("div", legend, class_="legend"),
        tag("div", tag("svg", axes, class_="plot", height=_HEIGHT + 38, role="img"), class_="scroll"),
        class_="area",
    )


def line_chart(
    rows: Sequence[Row], lines: Mapping[str, str], write: Callable[[float], str], *, factor: float = 1.0, unit: str = ""
) -> Html | None:
    """Return values over the run as lines from zero; ``None`` where none was measured twice.

    Args:
        rows: (step, values).
        lines: key -> its label; the first is drawn strongest.
        write: a value, with its unit, in the tooltip.
        factor: of the values on the axis.
        unit: of the axis.
    """
    found = [(step, values) for step, values in rows if any(key in values for key in lines)]
    if len(found) < 2:
        return None
    first, last = found[0][0], found[-1][0]
    most = max(values[key] for _, values in found for key in lines if key in values)
    top = (ticks(most) or [most])[-1]
    top = most * 1.05 if most > top else top
    if not top > 0:
        return None
    drawn: list[Html] = []
    for order, key in enumerate(lines):
        places = [
            f"{1000 * (step - first) / (last - first):.1f},{100 - 100 * max(0.0, values[key]) / top:.2f}"
            for step, values in found
            if key in values
        ]
        drawn.append(tag("polyline", class_=f"l{order}", points=" ".join(places)))
    shape = tag("svg", drawn, viewBox="0 0 1000 100", preserveAspectRatio="none", width="100%", height=_HEIGHT)
    tips = [
        (step, "\n".join([f"step {step}", *(f"{lines[k]}: {write(values[k])}" for k in lines if k in values)]))
        for step, values in found
    ]
    axes = [*_y_axis(top * factor, unit), shape, *_x_axis(first, last), *_hovers(tips)]
    legend = [tag("span", tag("i", class_=f"swatch l{order}"), label) for order, label in enumerate(lines.values())]
    return tag(
        "figure",
        tag("div", legend, class_="legend"),
        tag("div", tag("svg", axes, class_="plot", height=_HEIGHT + 38, role="img"), class_="scroll"),
        class_="lines",
    )


def _y_axis(most: float, unit: str) -> list[Html]:
    found: list[Html] = []
    for mark in ticks(most, 5):
        y = _HEIGHT * (1 - mark / most)
        found.append(tag("line", class_="grid", x1="0", x2="100%", y1=f"{y:.1f}", y2=f"{y:.1f}"))
        text = f"{mark:,.10g} {unit}" if mark else "0"
        found.append(tag("text", text, class_="name", x=-8, y=f"{y:.1f}"))
    return found


def _x_axis(first: int, last: int) -> list[Html]:
    step = max(1, round(ticks(last - first, 8)[1] if last - first > 1 else 1))
    marks = range(math.ceil(first / step) * step, last + 1, step)
    found = [
        tag("text", f"{mark:,}", class_="tick", x=f"{100 * (mark - first) / (last - first):.2f}%", y=_HEIGHT + 16)
        for mark in marks
    ]
    return [*found, tag("text", "optimizer step", class_="axis", x="50%", y=_HEIGHT + 33)]


def _hovers(tips: Sequence[tuple[int, str]]) -> list[Html]:
    """Return a column for each measurement, from the middle between it and the one before to that after it."""
    steps = [step for step, _ in tips]
    first, last = steps[0], steps[-1]
    edges = [first, *((a + b) / 2 for a, b in itertools.pairwise(steps)), last]
    return [
        tag(
            "rect",
            tag("title", text),
            class_="hover",
            x=f"{100 * (left - first) / (last - first):.3f}%",
            width=f"{100 * (right - left) / (last - first):.3f}%",
            y=0,
            height=_HEIGHT,
        )
        for (left, right), (_, text) in zip(itertools.pairwise(edges), tips, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run in :func:`devices_chart`."""

    num_devices: int
    """Devices."""
    value: float
    """Throughput, more than 0."""
    kind: str
    """``"baseline"``, ``"weak"``, ``"strong"``, ...: one sign for each."""
    tip: str
    """What is said of it."""
    efficiency: float | None = None
    """Scaling efficiency."""
    link: str | None = None
    """Where a click leads."""


def devices_chart(points: Sequence[Point], baseline: Point, unit: str) -> Html | None:
    """Return throughput against devices, both logarithmic, with the line of ideal scaling from the baseline.

    ``None`` where all runs have as many devices: there is nothing to see.
    """
    everyone = [baseline, *points]
    counts = sorted({point.num_devices for point in everyone})
    if len(counts) < 2:
        return None
    low, high = math.log2(counts[0]), math.log2(counts[-1])
    everyone = [replace(point, value=min(max(point.value, _LEAST), _MOST)) for point in everyone]
    ideal = min(baseline.value * counts[-1] / baseline.num_devices, _MOST)
    start = max(baseline.value * counts[0] / baseline.num_devices, _LEAST)
    bottom = math.log2(min(start, *(point.value for point in everyone))) - 0.2
    top = math.log2(max(ideal, *(point.value for point in everyone))) + 0.2
    height = 300

    def x(num_devices: float) -> str:
        return f"{4 + 92 * (math.log2(num_devices) - low) / (high - low):.2f}%"

    def y(value: float) -> str:
        return f"{height * (1 - (math.log2(value) - bottom) / (top - bottom)):.1f}"

    drawn: list[Html] = []
    for mark in _log_ticks(2**bottom, 2**top):
        drawn.append(tag("line", class_="grid", x1="0", x2="100%", y1=y(mark), y2=y(mark)))
        drawn.append(tag("text", f"{mark:,.10g}", class_="name", x=-8, y=y(mark)))
    for count in counts:
        drawn.append(tag("line", class_="grid", x1=x(count), x2=x(count), y1=0, y2=height))
        drawn.append(tag("text", f"{count:,}", class_="tick", x=x(count), y=height + 16))
    drawn.append(tag("text", "devices", class_="axis", x="50%", y=height + 34))
    drawn.append(tag("line", class_="ideal", x1=x(counts[0]), x2=x(counts[-1]), y1=y(start), y2=y(ideal)))
    kinds = list(dict.fromkeys(point.kind for point in everyone))
    for point in everyone:
        sign = tag(
            "circle",
            tag("title", point.tip),
            class_=f"dot d{kinds.index(point.kind)}",
            r=6,
            cx=x(point.num_devices),
            cy=y(point.value),
        )
        drawn.append(tag("a", sign, href=point.link) if point.link else sign)
    for count in counts:
        best = max(
            (point for point in points if point.num_devices == count), key=lambda point: point.value, default=None
        )
        if best is not None and best.efficiency is not None:
            text = f"{100 * best.efficiency:.0f} %"
            drawn.append(tag("text", text, class_="best", x=x(count), dx=11, y=y(best.value), dy=6))
    legend = [tag("span", tag("i", class_=f"swatch round d{i}"), kind) for i, kind in enumerate(kinds)]
    legend.append(tag("span", tag("i", class_="swatch dash"), "ideal"))
    return tag(
        "figure",
        tag("figcaption", f"Throughput ({unit}) against devices; both axes are logarithmic"),
        tag("div", legend, class_="legend"),
        tag("div", tag("svg", drawn, class_="plot", height=height + 40, role="img"), class_="scroll"),
        class_="devices",
    )


#: Throughputs beyond these are drawn at them: an archive from strangers may say anything that is a number.
_LEAST, _MOST = 1e-60, 1e60


def _log_ticks(bottom: float, top: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten within the range, or powers of ten alone where these are many."""
    powers = range(math.floor(math.log10(bottom)), math.ceil(math.log10(top)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    marks = [factor * 10.0**power for power in powers for factor in factors]
    return [mark for mark in marks if bottom <= mark <= top]
