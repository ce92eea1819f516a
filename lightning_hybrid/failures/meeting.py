"""A batch before which all ranks talk, agreed on without a collective.

[Note: ranks that agree on a batch]
Replicas that exchange now and then stand at different batches, and know nothing of each other for long. So a rank with
a signal for all cannot begin a collective: the others would not come, or come for something else. It tells the hub
(:mod:`lightning_hybrid.failures.watch_hub`). The hub has every rank's watching thread say which batch has begun there;
from then on a rank waits before it begins the next. The answer to all is the batch after the last one that has begun
anywhere: all ranks talk before that batch. None has begun it, and all of them come to it: until then each makes the
collectives that it would have made. Threads answer, so nobody waits for longer than messages take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Meeting", "Meetings"]


class Meeting:
    """One rank's part."""

    def __init__(self, send: Callable[..., None]) -> None:
        """``send``: to the hub, a message by its parts."""
        self._send = send
        self._lock = threading.Condition()
        self._begun = 0
        self._at: int | None = None
        self._has_asked = self._is_over = False
        self.is_held = False
        """Whether the next batch waits for the hub's answer."""

    # ---- called by the main thread -------------------------------------------------------------------------------

    def ask(self) -> None:
        """Have all ranks talk soon."""
        if not self._has_asked:
            self._has_asked = True
            self._send(kind="meet?")

    def is_due(self) -> bool:
        """Before each batch, on all ranks: whether they talk first, or :meth:`talked`; if not, the batch has begun."""
        with self._lock:
            self._await_answer()
            if self._at is not None and self._begun + 1 >= self._at:
                return True
            self._begun += 1
            return False

    def talked(self) -> None:
        """All ranks have talked before the same batch; it has begun."""
        with self._lock:
            self._await_answer()
            self._begun += 1
            self._has_asked = False
            if self._at is not None and self._begun >= self._at:
                self._at = None

    def _await_answer(self) -> None:
        self._lock.wait_for(lambda: not self.is_held or self._is_over)

    # ---- called by the watching thread ---------------------------------------------------------------------------

    def hear(self, message: dict[str, Any]) -> None:
        """Take a message of the hub about a meeting."""
        with self._lock:
            self.is_held = message["kind"] == "hold"
            if self.is_held:
                self._send(kind="begun", batch=self._begun)
            else:
                self._at = int(message["at"]) or None
            self._lock.notify_all()

    def end(self) -> None:
        """There will be no answer any more."""
        with self._lock:
            self._is_over = True
            self._lock.notify_all()


class Meetings:
    """The hub's part."""

    def __init__(self, num_ranks: int, tell: Callable[..., None]) -> None:
        """``tell``: all ranks, a message by its parts."""
        self._num_ranks, self._tell = num_ranks, tell
        self._begun: dict[int, int] | None = None

    def ask(self, num_here: int) -> None:
        """A rank asks. Nothing happens if not all ranks can be asked: they meet after their next exchange."""
        if self._begun is None and num_here == self._num_ranks:
            self._begun = {}
            self._tell(kind="hold")

    def note(self, rank: int, batch: int) -> None:
        """A rank says which batch has begun."""
        if self._begun is not None:
            self._begun[rank] = batch
            if len(self._begun) == self._num_ranks:
                self._answer(1 + max(self._begun.values()))

    def cancel(self) -> None:
        """A rank is gone, and does not answer."""
        if self._begun is not None:
            self._answer(0)

    def _answer(self, at: int) -> None:
        self._begun = None
        self._tell(kind="meet", at=at)
