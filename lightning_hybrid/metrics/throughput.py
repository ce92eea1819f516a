"""Samples and tokens per second, each counted once. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning_hybrid.layout import Layout

__all__ = ["StepClock", "Throughput", "count_once"]


def count_once(counts: list[int], layout: Layout) -> int:
    """Add up what the ranks read, each sample once.

    Ranks of one tensor and pipeline group read the same samples, so only one rank of each data coordinate counts.

    Args:
        counts: samples (or tokens) by global rank; length ``layout.world_size``.
        layout: the degrees of the run.
    """
    if len(counts) != layout.world_size:
        raise ValueError(f"{len(counts)} counts were given for {layout.world_size} ranks; give one for each rank.")
    coordinates = map(layout.coordinate, range(layout.world_size))
    return sum(n for n, at in zip(counts, coordinates, strict=True) if at.pipeline == 0 and at.tensor == 0)


class StepClock:
    """Times optimizer steps without what is no part of them (validation, checkpointing, start-up).

    Args:
        clock: seconds; any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start: float | None = None
        self._excluded: list[tuple[float, float]] = []
        self._paused: dict[str, float] = {}

    @property
    def start(self) -> float | None:
        """When the present step began; ``None`` before the first one."""
        return self._start

    @property
    def excluded(self) -> list[tuple[float, float]]:
        """Stretches of the present step that do not count, so far."""
        return list(self._excluded)

    def pause(self, reason: str) -> None:
        """Stop counting; pausing twice for the same reason is pausing once."""
        self._paused.setdefault(reason, self._clock())

    def resume(self, reason: str) -> None:
        """Count again, unless there is another reason not to."""
        began = self._paused.pop(reason, None)
        if began is not None:
            self._excluded.append((began, self._clock()))

    def lap(self, now: float | None = None) -> float | None:
        """End a step and begin the next one. Returns its seconds, or ``None`` if none had begun.

        Args:
            now: when the step ended, if it was not just now; time excluded after that counts for the next step.
        """
        now = self._clock() if now is None else now
        open_spans = [(began, now) for began in self._paused.values()]
        begin, excluded = self._start, self._excluded + open_spans
        self._start = now
        self._excluded = [(max(left, now), right) for left, right in self._excluded if right > now]
        self._paused = {reason: max(began, now) for reason, began in self._paused.items()}
        return None if begin is None else now - begin - _covered(excluded, begin, now)

    def reset(self) -> None:
        """Forget the present step; the next :meth:`lap` begins one."""
        self._start = None
        self._excluded.clear()
        self._paused.clear()


def _covered(spans: list[tuple[float, float]], start: float, end: float) -> float:
    """Return the seconds between ``start`` and ``end`` that any span covers."""
    total, reached = 0.0, start
    for left, right in sorted(spans):
        left, right = max(left, reached), min(right, end)
        if left < right:
            total, reached = total + right - left, right
    return total


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What the whole job gets through."""

    num_devices: int
    """Devices of the job."""
    seconds: float
    """Time of the steps that were counted."""
    num_steps: int
    """Optimizer steps that were counted."""
    samples: int
    """Samples in these steps, over all data ranks, each once."""
    tokens: int | None = None
    """Tokens in these steps, likewise; ``None`` if the batches have none."""

    def __add__(self, other: Throughput) -> Throughput:
        """Return what both counted together, one after the other on the same devices."""
        none = self.tokens is None and other.tokens is None
        return Throughput(
            num_devices=self.num_devices,
            seconds=self.seconds + other.seconds,
            num_steps=self.num_steps + other.num_steps,
            samples=self.samples + other.samples,
            tokens=None if none else (self.tokens or 0) + (other.tokens or 0),
        )

    @property
    def samples_per_second(self) -> float:
        """Samples per second of the whole job; 0 if nothing was timed."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of the whole job; ``None`` if the batches have none."""
        if self.tokens is None:
            return None
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / self.num_steps if self.num_steps else 0.0

    @property
    def batch_size(self) -> float:
        """Mean samples in an optimizer step over all data ranks (the global batch, accumulation included)."""
        return self.samples / self.num_steps if self.num_steps else 0.0
