"""Cheap marks of when each action of a step ran.

To mark something new, wrap it in :meth:`Clock.mark`; what a mark means is decided in ``metrics/``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_hybrid.pipeline.timeline import Mark

__all__ = ["Clock", "Spans"]


class Clock:
    """Collects the marks of one rank.

    On CPU a mark is two readings of ``time.perf_counter``. On CUDA, where actions run after they are issued, it is two
    events on the current stream; they are turned into seconds when the marks are taken, never while a step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, int, int, Any, Any]] = []
        self._origin: tuple[Any, float] | None = None

    def now(self) -> Any:
        """A point in time: seconds on CPU, an event on CUDA."""
        if not self._cuda:
            return time.perf_counter()
        if self._origin is None:  # ties the device's clock to the host's, once
            torch.cuda.synchronize()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            self._origin = (event, time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, kind: str, stage: int, microbatch: int, start: Any, end: Any) -> None:
        """Note one span between two points of :meth:`now`."""
        self._marks.append((kind, stage, microbatch, start, end))

    @contextmanager
    def mark(self, kind: str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
        """Note the span of a ``with`` block."""
        start = self.now()
        yield
        self.add(kind, stage, microbatch, start, self.now())

    def clear(self) -> None:
        """Forget all marks without looking at them."""
        self._marks = []

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Within the ``with`` block marks are made for nobody; those from before stay."""
        kept, self._marks = self._marks, []
        try:
            yield
        finally:
            self._marks = kept

    def spans(self, stage: int, microbatch: int) -> Spans:
        """Spans that follow each other without gaps within one action."""
        return Spans(self, stage, microbatch)

    def take(self) -> list[Mark]:
        """Return all marks since the last call, in the order of their ends, and forget them."""
        marks = self.peek()
        self._marks = []
        return marks

    def peek(self) -> list[Mark]:
        """Return all marks since :meth:`take` was last called."""
        if self._cuda and self._marks:
            torch.cuda.synchronize()
        return [Mark(kind, stage, mb, self._seconds(a), self._seconds(b)) for kind, stage, mb, a, b in self._marks]

    def _seconds(self, point: Any) -> float:
        if not self._cuda:
            return float(point)
        assert self._origin is not None
        event, seconds = self._origin
        return float(seconds + event.elapsed_time(point) / 1e3)


class Spans:
    """Consecutive spans of one action: beginning one ends the one before it."""

    def __init__(self, clock: Clock, stage: int, microbatch: int) -> None:
        self._clock, self._stage, self._microbatch = clock, stage, microbatch
        self._kind: str | None = None
        self._start: Any = None

    def begin(self, kind: str) -> None:
        """End the current span and begin another."""
        point = self._clock.now()
        self._close(point)
        self._kind, self._start = kind, point

    def end(self) -> None:
        """End the current span."""
        self._close(self._clock.now())
        self._kind = None

    def _close(self, point: Any) -> None:
        if self._kind is not None:
            self._clock.add(self._kind, self._stage, self._microbatch, self._start, point)
