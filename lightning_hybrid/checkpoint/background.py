"""Directories that are written while training goes on.

What is to be written is copied to the host's memory first: that is how long training stands still. A thread on each
rank then does what :func:`~lightning_hybrid.checkpoint.directory.write_parts` does, over a process group of its own, so
that its messages never meet those of training. One checkpoint is on its way at a time: the next one waits for it. What
is to be removed once the new one is whole is removed then, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.checkpoint.directory import Parts, write_parts
from lightning_hybrid.checkpoint.tensors import Share
from lightning_hybrid.errors import CheckpointError

__all__ = ["Background"]


class Background:
    """Writes checkpoints one after the other; each method but :meth:`afterwards` is a collective over the world."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._afterwards: list[Callable[[], Any]] = []
        self._group: dist.ProcessGroup | None = None
        self._copies: dict[Any, Tensor] = {}

    def save(self, parts: Parts, path: Any) -> None:
        """Copy what is to be written, and write it in the background.

        Raises:
            CheckpointError: if the one before could not be saved.
        """
        self.wait()
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        parts = Parts(parts.meta, parts.facts, parts.wanted, self._copied(parts.shares))
        self._thread = threading.Thread(target=self._run, args=(parts, path), name="checkpoint", daemon=True)
        self._thread.start()

    def afterwards(self, function: Callable[[], Any]) -> None:
        """Call a function when :meth:`wait` has found the checkpoint whole that is on its way; now if there is none."""
        if self._thread is None:
            function()
        else:
            self._afterwards.append(function)

    def wait(self) -> None:
        """Return when nothing is on its way.

        Raises:
            CheckpointError: on every rank, if it could not be saved.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        (error, functions), self._error, self._afterwards = (self._error, self._afterwards), None, []
        if error is not None:  # what the new one was to replace stays
            raise CheckpointError(f"In the background: {error}") from error
        for function in functions:
            function()

    def finish_if_possible(self, seconds: float = 10.0) -> None:
        """Give what is on its way a last chance after a failure elsewhere. Not a collective; errors are not shown."""
        if self._thread is not None:
            self._thread.join(seconds)
        self._thread, self._afterwards = None, []

    def _run(self, parts: Parts, path: Any) -> None:
        try:
            write_parts(parts, path, self._group)
        except BaseException as error:  # surfaces at the next save, or when the trainer ends
            self._error = error

    def _copied(self, shares: dict[str, Any]) -> dict[str, Any]:
        """The shares with pieces that training does not change; their memory is used again by the next save."""
        copies, devices, copied = {}, set(), {}
        for key, share in shares.items():
            pieces = []
            for start, piece in share.pieces:
                copy = self._copies.get((key, start))
                if copy is None or copy.shape != piece.shape or copy.dtype != piece.dtype:
                    is_remote = piece.device.type != "cpu"
                    copy = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=is_remote)
                copies[key, start] = copy.copy_(piece, non_blocking=True)
                devices.add(piece.device)
                pieces.append((start, copy))
            copied[key] = Share.make(share.shape, share.dtype, pieces, share.key)
        for device in devices:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
        self._copies = copies
        return copied
