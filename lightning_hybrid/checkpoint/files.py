"""Reading checkpoints on many ranks at once, and writing a plain file so that it is never half there."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from functools import wraps
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins.io import torch_io
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
    """Let every Trainer and ``LightningModule.load_from_checkpoint`` read directories as well as files.

    Both open what they get by a function of Lightning's. A Trainer with another strategy, or with one device and none,
    so resumes from a directory: it gets all of it in memory, as of a file. Our own strategy reads its parts only.
    """
    for user in (saving, torch_io):
        load_file = vars(user)["pl_load"]
        if not hasattr(load_file, "_reads_directories"):
            vars(user)["pl_load"] = _reading_directories(load_file, with_optimizers=user is torch_io)


def _reading_directories(load_file: Callable[..., Any], *, with_optimizers: bool) -> Callable[..., Any]:
    @wraps(load_file)
    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        is_path = isinstance(path, (str, os.PathLike)) and not os.fspath(path).startswith("http")
        if not is_path or not is_directory(path):
            return load_file(path, map_location=map_location, weights_only=weights_only)
        # None is False, as for local files
        return _whole_state(path, map_location, bool(weights_only), with_optimizers=with_optimizers)

    load.__dict__["_reads_directories"] = True
    return load


def _whole_state(path: Any, map_location: Any, weights_only: bool, *, with_optimizers: bool) -> dict[str, Any]:
    """The dict of a directory, its weights in memory: where ``map_location`` says if that is a device, else on the CPU.

    Raises:
        CheckpointError: if it is not whole, or not one of ours.
    """
    if (reason := why_not_whole(path)) is not None:
        raise CheckpointError(f"The checkpoint {local_path(path)} {reason}.")
    checkpoint = read_directory(path, weights_only)
    device = torch.device("cpu" if map_location is None or callable(map_location) else map_location)
    whole: dict[int, Any] = {}  # tied weights stay one tensor

    def read(value: Any) -> Any:
        if isinstance(value, Stored):
            if id(value) not in whole:
                whole[id(value)] = value.whole().to(device)
            return whole[id(value)]
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = read(item)
            return value
        return type(value)(map(read, value)) if type(value) in (list, tuple) else value

    return read(checkpoint) if with_optimizers else {**checkpoint, "state_dict": read(checkpoint["state_dict"])}
