"""Schedules as data: which rank runs which stage's forward or backward of which micro-batch, in which order. Pure.

To add a schedule, add a :class:`ScheduleSpec` to :data:`SCHEDULES` whose ``build`` returns a :data:`Table`.
The orders themselves are torch's own, read through :mod:`lightning_hybrid.pipeline.torch_schedules`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hybrid.errors import ConfigurationError

__all__ = ["SCHEDULES", "Action", "Kind", "ScheduleSpec", "Table", "find_schedule", "forward_only"]


class Kind(str, enum.Enum):
    """What an action does; the values are torch's letters."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Action(NamedTuple):
    """One stage's work on one micro-batch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


#: Schedule rank -> the actions that it runs, in order.
Table = dict[int, list[Action]]
