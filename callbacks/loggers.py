"""What each kind of logger gets: values by any, pictures and charts by those that can show them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

__all__ = ["log_values", "show"]

_log = logging.getLogger(__name__)

#: What W&B's summary (the columns of the table of runs) keeps, by the beginning of a key; the first that fits. Without
#: kinds it is the last value under the key itself.
SUMMARIES = (
    ("step_worst/", None),
    ("step", "mean,min,last"),
    ("bubble/slowest_", None),
    ("bubble/", "mean,min,last"),
    ("throughput/batch_size", None),
    ("throughput/step_s", "mean,min,last"),
    ("throughput/", "mean,max,last"),
    ("scaling/num_devices", None),
    ("scaling/", "mean,max,last"),
)
_defined: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_failed: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def log_values(loggers: Iterable[Logger], values: Mapping[str, float], step: int) -> None:
    """Send values to every logger. Call it on global rank 0.

    A W&B run is told of each key that its axis is the Trainer's step, also where the user's own values of the run have
    another one, and what its summary is.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            _define(logger, values)
        logger.log_metrics(dict(values), step=step)


def _define(logger: WandbLogger, values: Iterable[str]) -> None:
    run: Any = logger.experiment
    done = _defined.setdefault(run, set())
    for key in values:
        if key not in done:
            done.add(key)
            summary = next((kinds for beginning, kinds in SUMMARIES if key.startswith(beginning)), None)
            run.define_metric(f"{_prefix(logger)}{key}", step_metric="trainer/global_step", summary=summary)


def _prefix(logger: WandbLogger) -> str:
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""


def show(loggers: Iterable[Logger], folder: Path, key: str, figure: Any, page: str, step: int) -> Path:
    """Write a picture below ``folder`` and show it in the loggers that can; returns its path. On global rank 0.

    W&B gets the picture as ``key`` and, as ``key_chart``, a page with hover; TensorBoard the picture; MLflow both as
    files. Other loggers have the file in their folder.

    Args:
        loggers: the Trainer's.
        folder: is made if need be.
        key: such as ``"bubble/timeline"``, of which the file has the last part as its name.
        figure: matplotlib's.
        page: the same as HTML that needs nothing else.
        step: the Trainer's step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key.rpartition('/')[2]}.png"
    figure.savefig(path)
    for logger in loggers:
        _try(logger, key, _show_picture, key, path, figure, step)
        _try(logger, key, _show_chart, f"{key}_chart", page, step)
    return path


def _show_picture(logger: Any, key: str, path: Path, figure: Any, step: int) -> None:
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(logger, "log_image"):  # W&B
        logger.log_image(key=key, images=[str(path)], step=step)
    elif hasattr(experiment, "add_figure"):  # TensorBoard
        experiment.add_figure(key, figure, global_step=step, close=False)
    elif hasattr(experiment, "log_artifact") and hasattr(logger, "run_id"):  # MLflow
        experiment.log_artifact(logger.run_id, str(path), key.rpartition("/")[0])


def _show_chart(logger: Any, key: str, html: str, step: int) -> None:
    experiment: Any = getattr(logger, "experiment", None)
    if isinstance(logger, WandbLogger):
        import wandb  # dear to import, and only users of its logger need it

        logger.log_metrics({key: wandb.Html(html, inject=False)}, step=step)  # type: ignore[dict-item]
    elif hasattr(experiment, "log_text") and hasattr(logger, "run_id"):
        experiment.log_text(logger.run_id, html, f"{key}.html")


def _try(logger: Any, key: str, show: Any, *arguments: Any) -> None:
    """A picture that cannot be shown costs one warning, not the run."""
    try:
        show(logger, *arguments)
    except Exception as error:  # loggers are plug-ins and raise what they like
        failed = _failed.setdefault(logger, set())
        if key not in failed:
            failed.add(key)
            _log.warning("%s did not take the picture %s, and training goes on: %s", type(logger).__name__, key, error)
