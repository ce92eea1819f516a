"""What loggers have not written yet, when a process ends by other ways than Python's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.loggers import WandbLogger

__all__ = ["wandb_runs_ended", "write_last_rows"]


def write_last_rows(trainer: Any) -> None:
    """Have a Trainer's loggers write what they hold. Files are closed, and W&B's runs end as failed."""
    for logger in trainer.loggers:
        with contextlib.suppress(Exception):  # the process ends in any case, and the first cause is told
            logger.finalize("failed")
            _end_run(logger, exit_code=1)


@contextlib.contextmanager
def wandb_runs_ended(trainer: Any) -> Iterator[None]:
    """End the runs of W&B that begin in the ``with`` block: forked processes end without the hook that would.

    A run that the parent has begun is the parent's to end.
    """
    begun = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger) and logger._experiment is None]
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        for logger in begun:
            _end_run(logger, exit_code=exit_code)


def _end_run(logger: Any, *, exit_code: int) -> None:
    if isinstance(logger, WandbLogger) and logger._experiment is not None:  # on rank 0
        logger.experiment.finish(exit_code=exit_code)
