"""Checkpoint directories for loggers that upload checkpoints. Lightning's own code for that passes directories over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.checkpoint.format import MARKER
from lightning_hybrid.checkpoint.whole import local_path
from lightning_hybrid.errors import UnsupportedError

__all__ = ["upload_directories"]


def upload_directories(trainer: Any) -> None:
    """Let ``WandbLogger(log_model=...)`` log each checkpoint directory as one artifact. To be called before training.

    Raises:
        UnsupportedError: for other loggers that would upload checkpoints, and upload nothing; the same on all ranks.
    """
    for logger in trainer.loggers:
        if not getattr(logger, "_log_model", False):
            continue
        if not isinstance(logger, WandbLogger):
            raise UnsupportedError(
                f"{type(logger).__name__}(log_model=...) uploads files, and with save_distributed_checkpoint=True"
                " checkpoints are directories. Use log_model=False, or save_distributed_checkpoint=False."
            )
        vars(logger)["_scan_and_log_checkpoints"] = partial(_log_when_whole, trainer.strategy, logger)


def _log_when_whole(strategy: Any, logger: Any, callback: Any) -> None:
    """What there is to log is asked now: when it is whole, the next one's name stands there already."""
    scores = {path: callback.best_k_models[path] for path in callback.best_k_models}
    scores |= {callback.last_model_path: callback.current_score, callback.best_model_path: callback.best_model_score}
    strategy.when_saved(partial(_log_directories, logger, scores, callback.best_model_path))


def _log_directories(logger: Any, scores: Mapping[str, Any], best: str) -> None:
    """As Lightning's, with whole directories; ``model.ckpt`` in the artifact is the directory."""
    import wandb

    for path, score in scores.items():
        if not path:
            continue
        marker = os.path.join(local_path(path), MARKER)
        if not os.path.exists(marker):
            rank_zero_warn(f"{path} is not logged as an artifact: it is no directory on a local disk.")
            continue
        written = os.stat(marker).st_mtime_ns
        if logger._logged_model_time.get(path) == written:
            continue
        metadata = {"score": None if score is None else float(score), "original_filename": os.path.basename(path)}
        name = logger._checkpoint_name or f"model-{logger.experiment.id}"
        artifact = wandb.Artifact(name=name, type="model", metadata=metadata)
        artifact.add_dir(os.path.dirname(marker), name="model.ckpt", policy=logger.add_file_policy)
        aliases = ["latest", "best"] if path == best else ["latest"]
        logger.experiment.log_artifact(artifact, aliases=aliases)
        logger._logged_model_time[path] = written
