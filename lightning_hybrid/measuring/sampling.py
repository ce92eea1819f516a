"""One step under torch's profiler: which part of the work was exposed communication, and over which axis."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType, _profiler_enabled  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_hybrid.metrics.breakdown import Span
from lightning_hybrid.metrics.collectives import Event, exposed_on_cpu, exposed_on_device

__all__ = ["StepSample"]

_log = logging.getLogger(__name__)
_ANCHOR = "hybrid3d::sample"


class StepSample:
    """Profiles from :meth:`start` to :meth:`stop` on this rank and returns the exposed communication.

    Only names and times are recorded: no shapes, no stacks, no memory.

    Args:
        device: where the model runs; on CUDA the kernels are recorded too.
        axes: see :func:`~lightning_hybrid.metrics.collectives.exposed_on_cpu`.
    """

    def __init__(self, device: torch.device, axes: Collection[str]) -> None:
        self._cuda, self._axes = device.type == "cuda", tuple(axes)
        self._profile: profile | None = None
        self._events: list[Event] = []
        self._shift = 0.0

    def start(self) -> bool:
        """Begin. Returns whether it did: a profiler of the user's, or another sample, may be running already."""
        if _profiler_enabled():
            return False
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        try:
            with _quiet_kineto():
                self._profile = profile(activities=activities)
                self._profile.start()
        except RuntimeError as error:  # the driver lets one profiler in at a time
            _log.warning("A step could not be sampled: %s", error)
            self._profile = None
            return False
        with record_function(_ANCHOR):  # says by its event which thread this is
            pass
        return True

    def stop(self) -> list[Span] | None:
        """End; returns spans on the clock of ``time.perf_counter``, or ``None`` if nothing was sampled."""
        if self._profile is None:
            return None
        if self._cuda:
            torch.cuda.synchronize()
        with _quiet_kineto():
            self._profile.stop()
        events, self._profile = self._read(self._profile), None
        self._events, self._shift = events, (shift := _unix_to_perf_counter())
        anchor = next((event for event in events if event.name == _ANCHOR), None)
        if anchor is None:
            return None
        if self._cuda:
            spans = exposed_on_device(events, axes=self._axes)
        else:
            spans = exposed_on_cpu(events, anchor.thread, axes=self._axes)
        return [Span(part, start + shift, end + shift) for part, start, end in spans]

    @property
    def events(self) -> list[Event]:
        """All operators and kernels of the step that ended last, on the clock of ``time.perf_counter``."""
        shift = self._shift
        return [event._replace(start=event.start + shift, end=event.end + shift) for event in self._events]

    def cancel(self) -> None:
        """End without reading anything (training ended before the step did)."""
        if self._profile is not None:
            with _quiet_kineto():
                self._profile.stop()
            self._profile = None

    def _read(self, finished: profile) -> list[Event]:
        assert finished.profiler is not None
        results = finished.profiler.kineto_results  # the parsed form costs ten times as much, and is a tree
        assert results is not None
        if not self._cuda:  # each property of an event costs a microsecond, and there are thousands of events
            return [
                Event(e.name(), e.start_ns() / 1e9, e.end_ns() / 1e9, e.start_thread_id()) for e in results.events()
            ]
        return [
            Event(
                name=event.name(),
                start=event.start_ns() / 1e9,
                end=event.end_ns() / 1e9,
                thread=event.device_resource_id() if on_device else event.start_thread_id(),
                on_device=on_device,
                operator=event.linked_correlation_id() if on_device else event.correlation_id(),
            )
            for event in results.events()
            for on_device in (event.device_type() != DeviceType.CPU,)
        ]


def _unix_to_perf_counter() -> float:
    """Return what to add to the profiler's times (seconds since 1970) to have those of ``time.perf_counter``."""
    shifts = []
    for _ in range(5):
        before = time.perf_counter()
        unix = time.time()
        after = time.perf_counter()
        shifts.append((after - before, (before + after) / 2 - unix))
    return min(shifts)[1]  # the reading that was interrupted least


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep the profiler from printing a line for each start and stop, unless the user asked for its log."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "6"
    try:
        yield
    finally:
        del os.environ[name]
