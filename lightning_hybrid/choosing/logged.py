"""What was chosen for a run, in its loggers' hyperparameters, where runs are compared."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_hybrid.choosing.run_choice import RunChoice

__all__ = ["chosen_values", "log_choice"]

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
