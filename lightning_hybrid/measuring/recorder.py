"""What one rank saw of each optimizer step, shared by all callbacks of a Trainer."""

from __future__ import annotations

import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_hybrid.metrics.throughput import StepClock
from lightning_hybrid.pipeline.timeline import Mark, Timeline, split_runs

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["RecordedStep", "StepRecorder", "gather_timelines"]

#: Ordinary steps that are kept; a measurement is the mean over the latest of them.
NUM_KEPT = 8
_CHECKPOINT = "save_checkpoint"  # names of actions that Lightning tells its profiler
_DATA = ".train_dataloader_next"


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One optimizer step of one rank; seconds on the clock of ``time.perf_counter``."""

    index: int
    """Its number, from 1 on and over resumed runs; ``trainer.global_step`` after it where there is one optimizer."""
    start: float
    """When the optimizer step before it ended."""
    end: float
    """When its own optimizer step ended."""
    seconds: float
    """Its length without validation, checkpointing and what callbacks measured."""
    excluded: tuple[tuple[float, float], ...]
    """What does not count between start and end."""
    data_waits: tuple[tuple[float, float], ...]
    """When the rank waited for the dataloader."""
    runs: tuple[tuple[Mark, ...], ...]
    """The strategy's marks by run of the schedule: several when gradients are accumulated."""
    ordinary: bool
    """Whether nothing was measured meanwhile: it shows what a step costs by itself."""


class StepRecorder:
    """Records the steps of one rank. Get the Trainer's own by :meth:`of`; callbacks may call all methods repeatedly."""

    _of_trainer: ClassVar[weakref.WeakKeyDictionary[Trainer, StepRecorder]] = weakref.WeakKeyDictionary()

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps: deque[RecordedStep] = deque(maxlen=NUM_KEPT)
        """The latest ordinary steps."""
        self._now = clock
        self._clock = StepClock(clock)
        self._fetching = 0.0
        self._data_waits: list[tuple[float, float]] = []
        self._ordinary = True
        self.num_steps = 0
        """Optimizer steps so far, those before a resume too; several optimizers' steps of one batch are one, as on the
        axis of what ``self.log`` logs."""
        self._global_step = 0
        self._seen: tuple[int, RecordedStep | None] = (-1, None)
        self._restore: Callable[[], None] | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> StepRecorder:
        """Return the recorder of a Trainer; the first call makes it."""
        return cls._of_trainer.setdefault(trainer, cls())

    def begin(self, trainer: Trainer) -> None:
        """Start to watch, as training starts."""
        if self._restore is None:
            profiler = trainer.profiler  # type: ignore[attr-defined]  # set by a helper, so mypy does not see it
            self._restore = _listen(profiler, self._started, self._stopped)
            self._global_step = trainer.global_step
            self.num_steps = trainer.fit_loop.epoch_loop._batches_that_stepped
            self.steps.clear()
            self._seen, self._data_waits = (-1, None), []  # a resumed run's batches may have numbers that were seen
            self._clock.reset()
            self._clock.lap()
            self._ordinary = False  # the first step has no step before it

    def finish(self) -> None:
        """Stop to watch."""
        if self._restore is not None:
            self._restore()
            self._restore = None

    def pause(self, reason: str) -> None:
        """What follows is no part of a step."""
        self._clock.pause(reason)

    def resume(self, reason: str) -> None:
        """What follows is part of a step again."""
        self._clock.resume(reason)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Leave a ``with`` block out of the steps; the step that it falls into is no ordinary one."""
        self._ordinary = False
        self._clock.pause("measuring")
        try:
            yield
        finally:
            self._clock.resume("measuring")

    def end_batch(self, trainer: Trainer) -> RecordedStep | None:
        """Take in the batch that has just ended. Returns the optimizer step if that ended with it."""
        number = trainer.fit_loop.total_batch_idx
        if self._seen[0] != number:
            self._seen = (number, self._end_batch(trainer))
        return self._seen[1]

    def _end_batch(self, trainer: Trainer) -> RecordedStep | None:
        if trainer.global_step == self._global_step:  # gradients are accumulated
            return None
        self._global_step, self.num_steps = trainer.global_step, self.num_steps + 1
        strategy: Any = trainer.strategy
        marks: list[Mark] = strategy.take_marks() if hasattr(strategy, "take_marks") else []
        end = max((mark.end for mark in marks if mark.kind == "OPTIMIZER"), default=self._now())
        start, excluded = self._clock.start, tuple(self._clock.excluded)
        seconds = self._clock.lap(end)
        step = None
        if start is not None and seconds is not None:
            step = RecordedStep(
                index=self.num_steps,
                start=start,
                end=end,
                seconds=seconds,
                excluded=excluded,
                data_waits=tuple(self._data_waits),
                runs=tuple(map(tuple, split_runs(marks))),
                ordinary=self._ordinary,
            )
            if step.ordinary:
                self.steps.append(step)
        self._data_waits, self._ordinary = [], True
        return step

    def _started(self, action: str) -> None:
        if action == _CHECKPOINT:
            self._clock.pause(action)
        elif action.endswith(_DATA):
            self._fetching = self._now()

    def _stopped(self, action: str) -> None:
        if action == _CHECKPOINT:
            self._clock.resume(action)
        elif action.endswith(_DATA):
            self._data_waits.append((self._fetching, self._now()))


def _listen(profiler: Any, started: Callable[[str], None], stopped: Callable[[str], None]) -> Callable[[], None]:
    """Hear of the actions that Lightning reports to its profiler, whichever that is; returns how to stop it.

    There are no hooks around fetching a batch or around the writing of a checkpoint, but these two reports. The methods
    are replaced on the instance, so that the profiler stays the user's own object.
    """
    start, stop = profiler.start, profiler.stop
    before = {name: vars(profiler)[name] for name in ("start", "stop") if name in vars(profiler)}

    def new_start(action_name: str) -> None:
        start(action_name)
        started(action_name)

    def new_stop(action_name: str) -> None:
        stopped(action_name)
        stop(action_name)

    def restore() -> None:
        for name in ("start", "stop"):
            vars(profiler).pop(name, None)
        vars(profiler).update(before)

    profiler.start, profiler.stop = new_start, new_stop
    return restore


def gather_timelines(strategy: Any, steps: Sequence[RecordedStep]) -> list[list[Timeline]]:
    """Gather the marks of this rank's pipeline. A collective over the ranks of the pipeline.

    Args:
        strategy: the running ``Hybrid3DStrategy``.
        steps: this rank's records of some steps; the same steps on all ranks of the pipeline.

    Returns:
        For each step and each run of the schedule in it, the marks by schedule rank, on this rank's clock. Clocks of
        one host are one clock; those of different hosts are aligned by their time of day.
    """
    host, to_wall = socket.gethostname(), time.time() - time.perf_counter()
    marks = [[[_as_tuple(mark) for mark in run] for run in step.runs] for step in steps]
    payload = (strategy.schedule_rank, host, to_wall, marks)
    single = strategy.layout.pipeline_parallel_size == 1
    everyone = [payload] if single else strategy.all_gather_object(payload, axis="pipeline_parallel")
    timelines: list[list[Timeline]] = [[{} for _ in step.runs] for step in steps]
    for rank, their_host, their_wall, their_steps in everyone:
        shift = 0.0 if their_host == host else their_wall - to_wall
        for runs, their_runs in zip(timelines, their_steps, strict=True):
            for timeline, run in zip(runs, their_runs, strict=True):
                timeline[rank] = [Mark(k, stage, mb, start + shift, end + shift) for k, stage, mb, start, end in run]
    return timelines


def _as_tuple(mark: Mark) -> tuple[str, int, int, float, float]:
    return mark.kind, mark.stage, mark.microbatch, mark.start, mark.end
