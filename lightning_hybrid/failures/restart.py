"""Jobs that are killed and started again: where Lightning would overlook a checkpoint, or take several for one."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lightning_hybrid.checkpoint.whole import latest_checkpoint, moved_aside, remove, unfinished_checkpoints

__all__ = ["group_options", "prepare_for_restarts"]


def prepare_for_restarts(trainer: Any) -> None:
    """Have a trainer find the newest whole checkpoint where ``last.ckpt`` is gone, and on all ranks the same one.

    To be called where Lightning starts ranks: it looks for checkpoints before any hook of a strategy.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback.dirpath = _path_of_url(callback.dirpath)
            vars(callback)["_find_last_checkpoints"] = partial(_find_last, callback)
    connector = trainer._checkpoint_connector
    vars(connector)["resume_start"] = partial(_resume_start, connector)


def _path_of_url(folder: Any) -> Any:
    """Return the folder that was meant: Lightning (2.6) makes ``<working directory>/file:/x`` of ``file:///x``."""
    meant = os.fspath(folder or "").partition(f"{os.sep}file:{os.sep}")[2]
    return os.sep + meant if meant else folder


def _find_last(callback: Any, trainer: Any) -> set[str]:
    """Of a ``ModelCheckpoint``: Lightning's own, or what is whole in the folder.

    A kill may come when the first ``last.ckpt`` is half written, between the two renames that replace a directory, or
    when a link has been taken away and not yet made anew. Lightning would start anew.
    """
    folder = callback._ModelCheckpoint__resolve_ckpt_dir(trainer)
    if unfinished := unfinished_checkpoints(folder):
        removed = trainer.state.fn == TrainerFn.FITTING
        done = "removed" if removed else "passed over"
        rank_zero_warn(f"Saving was interrupted, and these are {done}: {', '.join(unfinished)}.")
        if removed:
            _remove(folder, unfinished)
    found = {path for path in type(callback)._find_last_checkpoints(callback, trainer) if callback._fs.exists(path)}
    name = callback.CHECKPOINT_NAME_LAST
    found |= {path for path in moved_aside(folder) if os.path.basename(path).startswith(name)}
    if found:  # the newest is taken, and there may be last-v1.ckpt of long ago
        return found
    other = latest_checkpoint(folder)
    if other is None:
        return set()
    rank_zero_warn(f"There is no {name}.ckpt in {folder}. Resuming from {other}, the newest whole checkpoint there.")
    return {other}


@rank_zero_only
def _remove(folder: Any, names: list[str]) -> None:
    """A job that trains on from the last checkpoint of a folder is the one that was interrupted there."""
    for name in names:
        try:
            remove(os.path.join(folder, name))
        except OSError as error:
            rank_zero_warn(f"{name} cannot be removed: {error}")


def _resume_start(connector: Any, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
    """Of a trainer: what global rank 0 found is for all, since another node may see a folder later. A collective."""
    path = connector.trainer.strategy.broadcast(checkpoint_path)
    type(connector).resume_start(connector, path, weights_only)


def group_options(device: torch.device, timeout: timedelta | None) -> dict[str, Any]:
    """Return options of ``init_process_group``; ``store`` is among them where ``torchrun`` has started ranks again.

    The agent's store outlives the ranks, and torch (2.13) does not tell attempts apart in it: a rank that is faster
    than others finds the addresses of those that were killed, and cannot connect. Only on one node: agents of several
    nodes count restarts differently.
    """
    of, options = os.environ, {"timeout": timeout, "device_id": device if device.type != "cpu" else None}
    attempt = of.get("TORCHELASTIC_RESTART_COUNT", "0")
    if of.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or attempt == "0" or of.get("GROUP_WORLD_SIZE") != "1":
        return options
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store = TCPStore(of["MASTER_ADDR"], int(of["MASTER_PORT"]), int(of["WORLD_SIZE"]), is_master=False, **limit)
    return {**options, "store": PrefixStore(f"attempt {attempt}", store)}
