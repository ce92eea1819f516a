"""Pure metrics: numbers in, values out. No torch, no process group."""

from lightning_hybrid.metrics.breakdown import COMMUNICATION, PARTS, Breakdown, Span, break_down, spans_of_marks
from lightning_hybrid.metrics.bubble import Bubble, idle_share, measure_bubble
from lightning_hybrid.metrics.scaling import Reference, Scaling, compare
from lightning_hybrid.metrics.throughput import StepClock, Throughput, count_once

__all__ = [
    "COMMUNICATION",
    "PARTS",
    "Breakdown",
    "Bubble",
    "Reference",
    "Scaling",
    "Span",
    "StepClock",
    "Throughput",
    "break_down",
    "compare",
    "count_once",
    "idle_share",
    "measure_bubble",
    "spans_of_marks",
]
