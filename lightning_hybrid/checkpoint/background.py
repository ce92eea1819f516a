"""Directories that are written while training goes on.

What is to be written is copied to the host's memory first (:mod:`~lightning_hybrid.checkpoint.host_copies`): while
parameters are, training stands still. A thread on each rank copies the rest, and does what
:func:`~lightning_hybrid.checkpoint.directory.write_parts` does, over a process group of its own, so that its messages
never meet those of training. One checkpoint is on its way at a time: the next one waits for it. What is to be removed
once the new one is whole is removed then, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from lightning_hybrid.checkpoint.directory import Parts, begin_directory, write_parts
from lightning_hybrid.checkpoint.host_copies import HostCopies
from lightning_hybrid.errors import CheckpointError

__all__ = ["Background"]


class Background:
    """Writes checkpoints one after the other; each method but :meth:`afterwards` is a collective over the world."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._afterwards: list[Callable[[], Any]] = []
        self._group: dist.ProcessGroup | None = None
        self._copies = HostCopies()

    def save(
        self, parts: Parts, path: Any, around_wait: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """Copy what is to be written, and write it in the background.

        Args:
            parts: of the checkpoint.
            path: where it is to lie.
            around_wait: makes a context around each wait of an optimizer's step for its states to be copied.

        Raises:
            CheckpointError: on every rank, if the one before could not be saved, or this one cannot be begun.
        """
        self.wait()
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        aside = begin_directory(path)  # now: whoever links to the new one expects a folder
        parts = Parts(parts.meta, parts.facts, parts.wanted, self._copies.begin(parts.shares, around_wait))
        self._thread = threading.Thread(target=self._run, args=(parts, aside, path), name="checkpoint", daemon=True)
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
        self._copies.release()
        (error, functions), self._error, self._afterwards = (self._error, self._afterwards), None, []
        if error is not None:  # what the new one was to replace stays
            raise CheckpointError(f"In the background: {error}") from error
        for function in functions:
            function()

    def finish_if_possible(self, seconds: float = 10.0) -> None:
        """Give what is on its way a last chance after a failure elsewhere. Not a collective; errors are not shown."""
        if self._thread is not None:
            self._thread.join(seconds)
            self._copies.release()
        self._thread, self._afterwards = None, []

    def _run(self, parts: Parts, aside: str, path: Any) -> None:
        try:
            write_parts(parts, aside, path, self._group, self._copies.finish)
        except BaseException as error:  # surfaces at the next save, or when the trainer ends
            self._error = error
