"""Reading checkpoints on many ranks at once, and writing a plain file so that it is never half there."""

from __future__ import annotations

import os
import re
import zipfile
from functools import wraps
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.core import saving

from lightning_hybrid.checkpoint.directory import read_directory
from lightning_hybrid.checkpoint.tensors import Stored
from lightning_hybrid.checkpoint.whole import (
    begin_aside,
    is_directory,
    local_path,
    put_in_place,
    remove,
    to_disk,
    why_not_whole,
)
from lightning_hybrid.errors import CheckpointError

#: What torch says of files that it cannot read at all; objects that it does not trust are another matter.
_DAMAGED = re.compile("EOFError|PytorchStreamReader|invalid load key|Ran out of input|truncated|Unsupported operand")

__all__ = ["load_from_directories", "read_checkpoint", "write_file"]


def read_checkpoint(path: Any, checkpoint_io: CheckpointIO, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a checkpoint, a plain file or a directory, on every rank, with tensors on the CPU.

    A local file is mapped into memory: ranks of one host share its pages, and each reads only the bytes that it keeps.
    (Read the ordinary way, eight ranks hold eight copies of the whole model and its optimizer.) Files elsewhere, of
    old formats, and a user's own ``checkpoint_io`` are read as in any Trainer.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if it is no checkpoint, or a damaged one.
    """
    if is_directory(path):
        return read_directory(path, weights_only)
    try:
        return _read_file(path, checkpoint_io, weights_only)
    except (EOFError, RuntimeError, UnpicklingError) as error:
        if _DAMAGED.search(f"{type(error).__name__} {error}"):
            raise CheckpointError(
                f"{path} is no checkpoint, or a damaged one ({str(error).splitlines()[0] if str(error) else 'empty'})."
                " Use another one: lightning_hybrid.latest_checkpoint(folder) finds the newest that is whole."
            ) from error
        raise


def _read_file(path: Any, checkpoint_io: CheckpointIO, weights_only: bool | None) -> dict[str, Any]:
    ordinary = type(checkpoint_io) is TorchCheckpointIO
    if ordinary and os.path.isfile(path) and zipfile.is_zipfile(path):
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return checkpoint
    checkpoint = checkpoint_io.load_checkpoint(path, weights_only=weights_only)
    return checkpoint


def write_file(checkpoint: dict[str, Any], path: Any, checkpoint_io: CheckpointIO, storage_options: Any = None) -> None:
    """Write a plain file, by one process: aside, then in its place. A user's own ``checkpoint_io`` is simply called.

    Raises:
        OSError: if the disk is full, or the folder may not be written; then no trace is left.
    """
    if type(checkpoint_io) is not TorchCheckpointIO or storage_options is not None or "://" in os.fspath(path):
        checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        return
    aside = begin_aside(path, is_folder=False)
    try:
        with open(aside, "wb") as file:
            torch.save(checkpoint, file)
            to_disk(file)
        put_in_place(aside, path)
    except BaseException:
        remove(aside)
        raise


def load_from_directories() -> None:
    """Let ``LightningModule.load_from_checkpoint`` read directories as well as files (it opens what it gets)."""
    load_file = vars(saving)["pl_load"]
    if hasattr(load_file, "_reads_directories"):
        return

    @wraps(load_file)
    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        is_path = isinstance(path, (str, os.PathLike)) and not os.fspath(path).startswith("http")
        if not is_path or not is_directory(path):
            return load_file(path, map_location=map_location, weights_only=weights_only)
        return _whole_state(path, map_location, bool(weights_only))  # None is False, as for local files

    load.__dict__["_reads_directories"] = True
    vars(saving)["pl_load"] = load


def _whole_state(path: Any, map_location: Any, weights_only: bool) -> dict[str, Any]:
    """The dict of a directory, its weights in memory: where ``map_location`` says if that is a device, else on the CPU.

    Raises:
        CheckpointError: if it is not whole, or not one of ours.
    """
    if (reason := why_not_whole(path)) is not None:
        raise CheckpointError(f"The checkpoint {local_path(path)} {reason}.")
    checkpoint = read_directory(path, weights_only)
    device = torch.device("cpu" if map_location is None or callable(map_location) else map_location)
    state = checkpoint["state_dict"]
    whole: dict[int, Any] = {id(v): v.whole().to(device) for v in state.values() if isinstance(v, Stored)}
    for key, value in state.items():  # tied weights stay one tensor
        state[key] = whole.get(id(value), value)
    return checkpoint
