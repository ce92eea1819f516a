"""What real steps took over what was predicted, part by part: the next prediction is corrected by it. Pure.

[Note: how much a run is believed]
A part's factor is the geometric mean of measured over predicted among runs, drawn towards 1 as if one more run had been
exactly as predicted: one run counts half, on a logarithmic scale. Parts that were predicted to be less than
:data:`LEAST` of a step say nothing (their ratio is noise), and no ratio beyond :data:`MOST` is believed: something else
than the part was measured. Predictions are of the slowest rank, measurements the mean over ranks.

A part that no run speaks of gets the factor of the other parts together: left alone it would look cheaper than those
that ran on a slow machine, and only for not having been tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

__all__ = ["LEAST", "MOST", "TERMS", "Observed", "calibrate", "correct"]

#: Parts of a step as the planner names them -> as ``StepBreakdown`` names what is the same of a real step.
TERMS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("compute", "recompute"): ("compute",),
    ("tensor",): ("communication_tensor",),
    ("data",): ("communication_data_shard", "communication_data_replicate"),
    ("pipeline",): ("communication_pipeline",),
    ("bubble",): ("bubble",),
    ("optimizer",): ("optimizer",),
}
#: Parts that no real step shows by themselves.
OTHERS = ("context", "host")
#: Share of the predicted step below which a part says nothing.
LEAST = 0.02
#: Largest ratio, either way, that one run may show.
MOST = 4.0


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One run: seconds of a step by part."""

    predicted: Mapping[str, float]
    """Under the planner's names."""
    measured: Mapping[str, float]
    """Under the names that ``StepBreakdown`` logs: ``"step/compute_s"``."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By which ``predicted`` was corrected already."""


def calibrate(runs: Iterable[Observed]) -> dict[str, float]:
    """Return the factor of each part, for :func:`correct`; nothing without runs. They must be of like devices."""
    ratios: dict[tuple[str, ...], list[float]] = {}
    whole: list[float] = []
    for run in runs:
        raw = {part: seconds / run.factors.get(part, 1.0) for part, seconds in run.predicted.items()}
        step, spoken = sum(raw.values()), [0.0, 0.0]
        for parts, names in TERMS.items():
            predicted = sum(raw.get(part, 0.0) for part in parts)
            measured = sum(run.measured.get(f"step/{name}_s", 0.0) for name in names)
            if predicted > LEAST * step and measured > 0:
                ratios.setdefault(parts, []).append(_believed(measured / predicted))
                spoken = [spoken[0] + measured, spoken[1] + predicted]
        if spoken[1]:
            whole.append(_believed(spoken[0] / spoken[1]))
    factors = dict.fromkeys(OTHERS, _mean(whole)) if whole else {}
    for parts in TERMS if whole else ():
        factors |= dict.fromkeys(parts, _mean(ratios.get(parts, whole)))
    return factors


def _believed(ratio: float) -> float:
    return min(max(ratio, 1 / MOST), MOST)


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(fmean(map(math.log, ratios)) * len(ratios) / (len(ratios) + 1))


def correct(parts: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by part, each times its factor."""
    return {part: seconds * factors.get(part, 1.0) for part, seconds in parts.items()}
