"""The charts of a report as matplotlib figures, for loggers and slides that take pictures only. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_hybrid.metrics.breakdown import PARTS
from lightning_hybrid.report.charts import Point
from lightning_hybrid.report.parts import COLOURS, label_of, parts_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_breakdown", "draw_devices"]

_SIGNS = ("#1f2430", "#2f6fb5", "#e8883a", "#2e8b6f", "#7d5ba6")


def draw_breakdown(rows: Sequence[tuple[int, Mapping[str, float]]], *, title: str = "") -> Figure | None:
    """Draw the parts of a step over the run, stacked; ``None`` for fewer than two measurements.

    Args:
        rows: (step, values under the names that ``StepBreakdown`` logs).
        title: above it.
    """
    found = [(step, parts) for step, values in rows if (parts := parts_of(values))]
    if len(found) < 2:
        return None
    used = [part for part in PARTS if any(part in parts for _, parts in found)]
    figure, axes = _figure(title)
    factor, unit = (1e3, "ms") if max(sum(parts.values()) for _, parts in found) < 10 else (1.0, "s")
    axes.stackplot(
        [step for step, _ in found],
        [[factor * parts.get(part, 0.0) for _, parts in found] for part in used],
        colors=[COLOURS[part] for part in used],
        labels=[label_of(part) for part in used],
        linewidth=0,
    )
    axes.set_xlim(found[0][0], found[-1][0])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.set_ylabel(f"mean over ranks ({unit})", fontsize=9)
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=8.5, handlelength=1.2)
    return figure


def draw_devices(points: Sequence[Point], baseline: Point, unit: str, *, title: str = "") -> Figure | None:
    """Draw throughput against devices with the ideal line; ``None`` where all runs have as many devices.

    Args:
        points: the runs that compare with the baseline.
        baseline: where the ideal line begins.
        unit: of the throughput.
        title: above it.
    """
    counts = sorted({point.num_devices for point in (baseline, *points)})
    if len(counts) < 2:
        return None
    figure, axes = _figure(title)
    ideal = [baseline.value * count / baseline.num_devices for count in counts]
    axes.plot(counts, ideal, color="#626b7a", linewidth=1.2, linestyle=(0, (5, 3)), label="ideal")
    for order, kind in enumerate(dict.fromkeys(point.kind for point in (baseline, *points))):
        alike = [point for point in (baseline, *points) if point.kind == kind]
        axes.scatter(
            [point.num_devices for point in alike],
            [point.value for point in alike],
            color=_SIGNS[min(order, len(_SIGNS) - 1)],
            label=kind,
            s=36,
            zorder=3,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.grid(color="#e1e4ea", linewidth=0.8)
    axes.set_xlabel("devices", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    figure.legend(loc="outside lower left", ncols=6, frameon=False, fontsize=8.5)
    return figure


def _figure(title: str) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors="#555555")
    axes.set_title(title, loc="left", fontsize=11)
    return figure, axes
