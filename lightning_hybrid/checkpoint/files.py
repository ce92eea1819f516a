"""Reading checkpoints on many ranks at once, and writing a plain file so that it is never half there."""

from __future__ import annotations

import os
import zipfile
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_hybrid.checkpoint.directory import read_directory
from lightning_hybrid.checkpoint.whole import begin_aside, is_directory, put_in_place, remove, to_disk

__all__ = ["read_checkpoint", "write_file"]


def read_checkpoint(path: Any, checkpoint_io: CheckpointIO, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a checkpoint, a plain file or a directory, on every rank, with tensors on the CPU.

    A local file is mapped into memory: ranks of one host share its pages, and each reads only the bytes that it keeps.
    (Read the ordinary way, eight ranks hold eight copies of the whole model and its optimizer.) Files elsewhere, of
    old formats, and a user's own ``checkpoint_io`` are read as in any Trainer.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    if is_directory(path):
        return read_directory(path, weights_only)
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
