"""What the measuring callbacks have in common: when they measure, and where the numbers go."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_hybrid.callbacks.loggers import log_values
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.measuring.recorder import RecordedStep, StepRecorder
from lightning_hybrid.metrics.history import History

__all__ = ["Measurement"]

_log = logging.getLogger(__name__)


class Measurement(Callback):
    """Base of the measuring callbacks.

    All ranks measure at the same steps, which follow from their number alone: the second step after the warm-up, and
    then every ``every_n_steps``.

    Args:
        every_n_steps: optimizer steps between measurements; ``None`` takes the Trainer's ``log_every_n_steps``, 0 never
            measures.
        num_warmup_steps: first optimizer steps that never count (lazy initialisation, compilation, caches).
        prog_bar: whether the progress bar shows the callback's main figure too (then it is also among the Trainer's
            ``callback_metrics``).
    """

    in_prog_bar: ClassVar[tuple[str, ...]] = ()
    """Keys of the main figure: the first that was measured is shown."""
    in_history: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the keys whose course over the run is kept."""

    def __init__(self, *, every_n_steps: int | None = None, num_warmup_steps: int = 2, prog_bar: bool = False) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("num_warmup_steps", num_warmup_steps)):
            if not (type(value) is int and value >= 0) and (value is not None or name == "num_warmup_steps"):
                raise ConfigurationError(f"{name}={value!r} must be an integer of at least 0.")
        self.every_n_steps = every_n_steps
        self.num_warmup_steps = num_warmup_steps
        self.prog_bar = prog_bar
        self.latest: dict[str, float] = {}
        """The values that were logged last."""
        self.history = History()
        """Values of the run, for pictures and the archive; at most 65 steps, evenly spaced."""
        self._folder: Path | None = None
        self._first_step = 0
        self._measured = 0

    def recorder(self, trainer: Trainer) -> StepRecorder:
        """Return the step recorder that all callbacks of this Trainer share."""
        return StepRecorder.of(trainer)

    def is_active(self, trainer: Trainer) -> bool:
        """Whether this callback can measure under the Trainer's strategy."""
        return True

    def is_due(self, trainer: Trainer, step: int) -> bool:
        """Whether the optimizer step of that number (from 1 on) is measured; the same on all ranks."""
        every = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps  # type: ignore[attr-defined]
        first = self._first_step + self.num_warmup_steps + 2
        return bool(every) and (step == first or (step > first and step % every == 0))

    def ordinary_steps(self, trainer: Trainer) -> list[RecordedStep]:
        """Return the latest steps after warm-up and after the last measurement in which nothing was measured."""
        first = max(self._measured, self._first_step + self.num_warmup_steps)
        return [step for step in self.recorder(trainer).steps if step.index > first]

    @contextmanager
    def measuring(self, trainer: Trainer, step: RecordedStep) -> Iterator[None]:
        """Around a measurement of a step: all ranks make it together, and it is no part of the step after it."""
        with self.recorder(trainer).measuring():
            if (meet := getattr(trainer.strategy, "meet_to_measure", None)) is not None:
                meet(step.index)
            yield

    def publish(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Send values to every logger of the Trainer, from global rank 0."""
        self.latest = dict(values)
        step = self.recorder(trainer).num_steps
        self.history.add(step, {key: value for key, value in values.items() if key.startswith(self.in_history)})
        if trainer.is_global_zero:
            log_values(trainer.loggers, self.latest, step)

    def on_step(self, trainer: Trainer, step: RecordedStep) -> None:
        """Called on every rank when an optimizer step has ended."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        others: list[Any] = [other for other in trainer.callbacks if other is not self]  # type: ignore[attr-defined]
        for other in others:
            if isinstance(other, Measurement) and {*other.in_history} & {*self.in_history}:
                raise ConfigurationError(
                    f"The Trainer has two callbacks, {type(self).__name__} and {type(other).__name__}, that log"
                    f" the same keys ({', '.join(self.in_history)}); loggers keep one value a step. Give one of them."
                )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.latest, self.history = {}, History()
        folder = trainer.log_dir or trainer.default_root_dir  # a collective: some ranks may have no logger
        self._folder = Path(folder) if trainer.loggers else None
        self.recorder(trainer).begin(trainer)
        self._first_step = self._measured = self.recorder(trainer).num_steps

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = self.recorder(trainer).end_batch(trainer)
        if step is None or not self.is_active(trainer):
            return
        before = self.latest
        self.on_step(trainer, step)
        if self.prog_bar and self.latest is not before:
            key = next((key for key in self.in_prog_bar if key in self.latest), None)
            if key is not None:
                pl_module.log(key, self.latest[key], prog_bar=True, logger=False, batch_size=1)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder(trainer).pause("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder(trainer).resume("validation")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder(trainer).finish()
        if self.in_history and not self.latest and self.every_n_steps != 0 and self.is_active(trainer):
            rank_zero_info(
                f"lightning_hybrid: {type(self).__name__} measured nothing: training ended after step"
                f" {self.recorder(trainer).num_steps}, and the first measurement is at step"
                f" {self._first_step + self.num_warmup_steps + 2} (num_warmup_steps={self.num_warmup_steps})."
            )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.recorder(trainer).finish()


def has_marks(trainer: Trainer, callback: Callback) -> bool:
    """Whether the strategy marks its actions; if not, say once that ``callback`` has nothing to measure."""
    if hasattr(trainer.strategy, "take_marks"):
        return True
    if not getattr(callback, "_said", False):
        callback._said = True  # type: ignore[attr-defined]
        _log.warning(
            '%s logs nothing: it reads the marks of strategy="hybrid3d", and this Trainer runs %s.',
            type(callback).__name__,
            type(trainer.strategy).__name__,
        )
    return False
