"""What was chosen for a run: in its loggers' hyperparameters, and beside a failure that may be due to the choice."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid.failures.failure import status_of
from lightning_hybrid.planner.setup import describe

if TYPE_CHECKING:
    from lightning_hybrid.choosing.run_choice import RunChoice

__all__ = ["advice_to_record", "chosen_values", "log_choice", "remark_on_failure"]

_log = logging.getLogger(__name__)


def chosen_values(choice: RunChoice) -> dict[str, Any]:
    """Return degrees, where they came from, and predictions (seconds, GiB); nothing where the user gave the degrees."""
    layout, planned = choice.layout, choice.planned
    if layout is None or not choice.source:
        return {}
    values: dict[str, Any] = {f"hybrid3d/{name}": size for name, size in vars(layout).items()}
    values["hybrid3d/chosen_by"] = choice.source
    if planned is not None:
        values |= {
            "hybrid3d/predicted_step_s": planned.step_time,
            "hybrid3d/predicted_samples_per_s": planned.samples_per_second,
            "hybrid3d/predicted_tokens_per_s": planned.tokens_per_second,
            "hybrid3d/predicted_memory_gib": planned.memory_bytes / 2**30,
            "hybrid3d/runner_up": planned.runner_up or "none",
        }
    return values


def log_choice(strategy: Any) -> None:
    """Give loggers what was chosen, from global rank 0, after Lightning has given them the module's hyperparameters."""
    values = chosen_values(strategy.choice)
    if not values or strategy.global_rank != 0 or strategy.lightning_module is None:
        return
    module = strategy.lightning_module
    for logger in module.trainer.loggers:
        # TensorBoard shows one table of hyperparameters for a run: the latest
        before = dict(getattr(module, "hparams_initial", None) or {}) if isinstance(logger, TensorBoardLogger) else {}
        try:
            logger.log_hyperparams({**before, **values})
        except Exception as error:  # loggers are plug-ins and raise what they like; the run is worth more
            _log.warning("%s does not take the chosen degrees: %s", type(logger).__name__, error)


def _records(trainer: Any) -> str | None:
    """Return the archive in which a Trainer's runs leave entries; ``None`` if there is none."""
    callbacks = getattr(trainer, "callbacks", None) or ()
    found = (
        callback for callback in callbacks if any(kind.__name__ == "ConfigArchive" for kind in type(callback).mro())
    )
    return next((str(callback.archive) for callback in found), None)


def advice_to_record(module: Any) -> str | None:
    """Return what a fit should be told that leaves nothing to the next one."""
    trainer = getattr(module, "_trainer", None)
    if trainer is None or trainer.state.fn != TrainerFn.FITTING or _records(trainer) is not None:
        return None
    return (
        "nothing records how this run goes: with ConfigArchive() among the callbacks the next one starts from it, or"
        " passes over degrees that failed"
    )


def remark_on_failure(strategy: Any, trainer: Any, error: BaseException) -> str | None:
    """Return what to know of an error before the end of the first step, where the degrees were chosen."""
    choice = strategy.choice
    ended = isinstance(error, (KeyboardInterrupt, SystemExit, SIGTERMException))
    if not choice.source or choice.layout is None or trainer is None or trainer.global_step or ended:
        return None
    other = choice.planned.runner_up if choice.planned is not None else None
    next_best = f" (the runner-up is {other})" if other else ""
    archive = _records(trainer)
    if archive is None:
        what = (
            "Nothing records this, so the next start would take the same degrees: add ConfigArchive() to the callbacks,"
            f" or give degrees{next_best}"
        )
    elif status_of(error) == "error":
        what = (
            f"Archive {archive} has it as an error of the program or its data, not of these degrees: the next start"
            f" takes them again. If they are to blame, give others{next_best}"
        )
    else:
        what = (
            f"Archive {archive} has it as a failure of these degrees: the next start takes others{next_best}."
            " If they are not to blame, one run that works with them, given explicitly, clears it"
        )
    return f"The degrees ({describe(choice.layout)}) were chosen by: {choice.source}. {what}."
