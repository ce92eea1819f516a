"""Fits the planner's constants to measured step times: Gauss-Newton on logarithms, held near what is likely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from benchmarks.planner_rows import Case
from lightning_hybrid.planner.constants import Constants
from lightning_hybrid.planner.step import head_in_blocks, step_parts

#: Not told apart from others by step times; no number.
FIXED = ("memory", "replicas_as_shards")
#: How far (as a factor) a constant is expected to lie from where the fit starts.
SPREAD = 1.5
#: Residuals beyond this factor count less and less (Cauchy), so that rows that were something else do not decide.
OUTLIER = 0.2
#: How many rows it takes to move a constant by its spread.
STRENGTH = 0.05


def predict(case: Case, constants: Constants) -> float:
    """Seconds of a step."""
    layers = case.setup.layers_of_stages(case.profile.num_layers, head_in_blocks(case.profile))
    return sum(step_parts(case.profile, case.cluster, case.setup, layers, constants).values())


def fit(cases: Sequence[Case], start: Constants, *, rounds: int = 6) -> Constants:
    """Return the constants that fit best; sources count by the square root of their rows.

    Args:
        cases: Measured steps.
        start: Where to begin, and near what to stay.
        rounds: Gauss-Newton steps.
    """
    names = [field.name for field in fields(Constants) if field.name not in FIXED]
    per_source = Counter(case.row["source"] for case in cases)
    weights = np.array([per_source[case.row["source"]] ** -0.25 for case in cases])  # squared: rows ** -0.5
    measured = np.log([case.seconds for case in cases])
    origin = np.log([getattr(start, name) for name in names])
    tightness = np.sqrt(STRENGTH * float((weights**2).sum())) / len(names) / np.log(SPREAD)

    def residuals(point: np.ndarray) -> np.ndarray:
        constants = _moved(start, names, point)
        return np.array([np.log(predict(case, constants)) for case in cases]) - measured

    point, errors = origin.copy(), residuals(origin)
    damping = 0.01
    for _ in range(rounds):
        steps = np.eye(len(names)) * 0.02
        slopes = np.stack([(residuals(point + step) - errors) / 0.02 for step in steps], axis=1)
        while damping < 100:
            robust = weights**2 / (1 + (errors / OUTLIER) ** 2)
            normal = slopes.T @ (robust[:, None] * slopes) + tightness**2 * np.eye(len(names))
            pull = slopes.T @ (robust * errors) + tightness**2 * (point - origin)
            moved = point - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull)
            found = residuals(moved)
            if _loss(found, weights, moved - origin, tightness) < _loss(errors, weights, point - origin, tightness):
                point, errors, damping = moved, found, damping / 4
                break
            damping *= 8
    return _moved(start, names, point)


def _moved(start: Constants, names: Sequence[str], point: np.ndarray) -> Constants:
    values: Mapping[str, float] = dict(zip(names, np.exp(point).tolist(), strict=True))
    return Constants(**{**vars(start), **values})


def _loss(errors: np.ndarray, weights: np.ndarray, moved: np.ndarray, tightness: float) -> float:
    robust = OUTLIER**2 * np.log1p((errors / OUTLIER) ** 2)
    return float((weights**2 * robust).sum() + tightness**2 * (moved**2).sum())
