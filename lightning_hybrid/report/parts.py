"""The parts of a step as a report shows them: label, and class of the colour in ``report.css``. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_hybrid.metrics.breakdown import COMMUNICATION, PARTS

__all__ = ["COLOURS", "LABELS", "communication_of", "css_class", "label_of", "parts_of"]

LABELS = {
    "compute": "compute",
    "optimizer": "optimizer",
    "communication_tensor": "communication, tensor",
    "communication_data_shard": "communication, data (shards)",
    "communication_data_replicate": "communication, data (replicas)",
    "communication_pipeline": "communication, pipeline",
    "communication_world": "communication, all ranks",
    "communication_unknown": "communication, unexplained",
    "data_wait": "waiting for data",
    "bubble": "bubble (idle)",
    "other": "other",
}
#: The colours that ``report.css`` gives the parts on white paper.
COLOURS = {
    "compute": "#2f6fb5",
    "optimizer": "#7d5ba6",
    "communication_tensor": "#c8502a",
    "communication_data_shard": "#e8883a",
    "communication_data_replicate": "#f2b866",
    "communication_pipeline": "#d9a514",
    "communication_world": "#a8643c",
    "communication_unknown": "#8a4a5e",
    "data_wait": "#3f9fb0",
    "bubble": "#e4e6ea",
    "other": "#b3bac6",
}


def label_of(part: str) -> str:
    """Return what a part is called."""
    return LABELS.get(part, part.replace("_", " "))


def css_class(part: str) -> str:
    """Return the class that gives a part its colour."""
    return f"p-{part.replace('_', '-')}" if part in LABELS else "p-other"


def parts_of(values: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each part that took any time, from values under the names that the callbacks log."""
    seconds = {part: values.get(f"step/{part}_s", 0.0) for part in PARTS}
    return {part: value for part, value in seconds.items() if 0 < value < 1e9}


def communication_of(values: Mapping[str, float]) -> float | None:
    """Return the share of a step that is exposed communication; ``None`` where it was not measured."""
    parts = parts_of(values)
    total = sum(parts.values())
    return sum(parts.get(part, 0.0) for part in COMMUNICATION) / total if total else None
