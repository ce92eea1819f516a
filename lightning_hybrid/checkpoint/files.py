"""Reading checkpoint files on many ranks at once."""

from __future__ import annotations

import os
import zipfile
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

__all__ = ["read_checkpoint"]


def read_checkpoint(path: Any, checkpoint_io: CheckpointIO, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a checkpoint on every rank, with tensors on the CPU.

    A local file is mapped into memory: ranks of one host share its pages, and each reads only the bytes that it keeps.
    (Read the ordinary way, eight ranks hold eight copies of the whole model and its optimizer.) Files elsewhere, of
    old formats, and a user's own ``checkpoint_io`` are read as in any Trainer.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    ordinary = type(checkpoint_io) is TorchCheckpointIO
    if ordinary and os.path.isfile(path) and zipfile.is_zipfile(path):
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return checkpoint
    checkpoint = checkpoint_io.load_checkpoint(path, weights_only=weights_only)
    return checkpoint
