"""When each action of a step ran: marks, and what an ideal run of the same schedule would look like. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMPUTE", "Mark"]

#: Kinds of marks during which a rank works for the model.
COMPUTE = frozenset({"F", "B", "I", "W", "PROLOGUE"})


@dataclass(frozen=True, slots=True)
class Mark:
    """One span of one rank's step. ``start`` and ``end`` are seconds on a clock that all ranks of a host share."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.end - self.start
