"""Every rank watches over the others, so that none waits for one that has gone, and the first cause is said once.

[Note: how a run ends]
Each rank has one thread with one connection to the hub (:mod:`lightning_hybrid.failures.watch_hub`), and sends nothing
in ordinary training: once a second it reads how long the main thread has computed. Only if that has not does it look at
its frames, and only if those have stood still in a communication for five seconds it says so. What fails is told to the
hub by the rank on which it failed; a process that is killed ends its connection. The hub tells all ranks what came
first. Then

1. the rank that failed raises its exception, with a note that says rank, coordinate and action;
2. the others mostly see a broken connection, which is raised as
   :class:`~lightning_hybrid.failures.failure.PeerFailedError` with the first cause, and not printed again;
3. who has done neither a second after the failed process is gone, or five seconds after the failure, cannot: it waits
   in a call that does not return. Its watching thread writes the archive's entry (on one rank) and ends the process.

No collective is needed for any of it. Where a rank cannot connect, it says so and trains unwatched.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from lightning_hybrid.failures.failure import Failure, PeerFailedError, is_consequence
from lightning_hybrid.failures.last_rows import write_last_rows
from lightning_hybrid.failures.meeting import Meeting
from lightning_hybrid.failures.sent_bytes import sent_and_received
from lightning_hybrid.failures.watch_hub import Hub, Wire, how_it_ended, keep_alive, of_lost
from lightning_hybrid.failures.whereabouts import Whereabouts, frames_of, frames_of_traceback, look

__all__ = ["Watch", "start_watch", "suspect"]

logger = logging.getLogger(__name__)

#: Seconds that a rank has to fail by itself after another has; and after that one's process has gone.
PATIENCE, AFTER_GONE = 5.0, 1.0
#: Seconds that a rank which has failed may take for callbacks (``on_exception``) and for leaving.
LEAVING = 20.0
#: Seconds of standing still after which a rank says that it waits.
QUIET = 5.0
#: The same while a rank is known to fail at the end of its step; and until that one is ended, if it cannot come there.
CLOSE_QUIET = 0.5
#: Seconds after which ranks that all wait for each other are ended, if nothing is sent or computed (CPU only).
DEADLOCK = 15.0
#: Share of the time up to which a main thread counts as not computing.
IDLE = 0.002

_open: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """One rank's connection to the hub, and the thread that looks after it."""

    def __init__(
        self,
        wire: Wire,
        *,
        rank: int,
        place: Callable[[int], str],
        progress: Callable[[], Any],
        hub: Hub | None = None,
        of_hub: tuple[int, str] = (0, ""),
    ) -> None:
        """Connect the thread, and start it.

        Args:
            wire: The connection to the hub.
            rank: The global rank.
            place: Says where a rank stands.
            progress: Returns what changes whenever a batch is done.
            hub: On global rank 0.
            of_hub: Process id and name of the machine on which the hub runs.
        """
        self.rank, self._wire, self.hub, self._of_hub = rank, wire, hub, of_hub
        self._place, self._progress = place, progress
        self._main = threading.main_thread().ident or 0
        self._computed = _processor_time(self._main), time.monotonic()
        self._wake, self._waker = socket.socketpair()
        self._lock = threading.Condition()
        self.meeting = Meeting(wire.send)
        """A batch before which all ranks talk, if one of them asks for it."""
        self.first: Failure | None = None
        """What came first, once the hub has said so."""
        self.own: Failure | None = None
        """What this rank has reported."""
        self._left = False
        self._ends_at: float | None = None
        self._seen: tuple[Any, ...] = ()
        self._since, self._said = time.monotonic(), False
        self._closely = False
        self._used: tuple[float, int] = (0.0, 0)
        self.last_wishes: list[Callable[[Failure], None]] = []
        """Called before the process is ended from here; on global rank 0, or the next one if that is gone."""
        self.children: Callable[[], None] = lambda: None
        """Kills the ranks that this process has started."""
        self.last_rows: Callable[[], None] = lambda: None
        """Has loggers write what they hold; called last, as it may take long."""
        self._thread = threading.Thread(target=self._run, name="lightning_hybrid.failures.watch", daemon=True)
        _open.add(self)
        self._thread.start()

    # ---- what the main thread says -------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> BaseException:
        """Tell the others that this rank fails; return what is to be raised: the error, or what came before it."""
        where = look(frames_of_traceback(error))
        failure = Failure.of(error, rank=self.rank, place=self._place(self.rank), action=where.action)
        if isinstance(error, PeerFailedError) and error.failure.rank != self.rank:
            failure = error.failure
        follows = is_consequence(error)
        with self._lock:
            self.own = failure
            self._ends_at = time.monotonic() + LEAVING
        self._wire.send(kind="fail", failure=failure.to_dict(), consequence=follows)
        if follows:
            with self._lock:
                self._lock.wait_for(lambda: self.first is not None or self._left, timeout=PATIENCE)
        elif isinstance(error, SystemExit | KeyboardInterrupt):  # Python prints nothing of these
            with self._lock:
                self._lock.wait_for(lambda: self.first is not None, timeout=1.0)
            if self.first is None or self.first.rank == self.rank:
                self.say_once(failure)
        if follows and self.first is None:
            self._end_silent_hub()
        if not follows or self.first is None or self.first.rank == self.rank:
            add_note(error, f"On rank {self.rank} ({failure.place}): {where.action or 'outside of the loops'}")
            return error
        if self.rank == self.first.scribe:
            self.say_once(self.first)
        return PeerFailedError(self.first)

    def _end_silent_hub(self) -> None:
        """The hub has decided nothing: end its process if it is here, of which no thread runs any more."""
        with self._lock:
            known = self._lock.wait_for(lambda: self.first is not None or self._left, timeout=PATIENCE)
            pid, host = self._of_hub
            if known or self.rank == 0 or host != socket.gethostname():
                return
            cause = "no progress: it does not answer (stopped, or busy in C code that holds the interpreter's lock)"
            self.first = Failure(rank=0, place=self._place(0), action="", cause=cause)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)

    def suspect(self, error: BaseException | None) -> None:
        """Say that this rank will fail, but goes on for now; or, with ``None``, that all know by now.

        If others wait in vain meanwhile, that is the first cause.
        """
        self._send_about("suspect", "withdraw", error)

    def hint(self, error: BaseException | None) -> None:
        """Say what this rank has done that others may wait for in vain; ``None``: they do not.

        It is the first cause if ranks are ended for waiting, and ends none before that.
        """
        self._send_about("hint", "no hint", error)

    def _send_about(self, kind: str, back: str, error: BaseException | None) -> None:
        if error is None:
            self._wire.send(kind=back)
            return
        place, where = self._place(self.rank), look(frames_of(self._main))
        if error.__traceback__ is not None:
            where = look(frames_of_traceback(error))
        failure = Failure.of(error, rank=self.rank, place=place, action=where.action)
        self._wire.send(kind=kind, failure=failure.to_dict())

    @property
    def has_left(self) -> bool:
        """Whether the run is over on this rank."""
        return self._left

    def leave(self) -> None:
        """The run is over on this rank, well or not."""
        if not self._left:
            self._left = True
            if self.hub is not None and self.own is not None:
                self.hub.kill_silent()
            self._wire.send(kind="left")
            with contextlib.suppress(OSError):  # the thread has seen it already
                self._waker.send(b"x")
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=2.0)
            _open.discard(self)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._left:
                seconds = 1.0 if self._ends_at is None and not self._closely else 0.1
                ready, _, _ = select.select([self._wire.sock, self._wake], [], [], seconds)
                if self._wire.sock in ready and not self._hear():
                    break
                if self._ends_at is not None and time.monotonic() > self._ends_at:
                    self._end()
                self._look()
        except (OSError, ValueError):  # the connection was closed by a fork of this process, or at the very end
            logger.debug("The watch over other ranks has ended.", exc_info=True)
        finally:
            self.meeting.end()
            self._wire.close()
            self._wake.close()
            self._waker.close()

    def _hear(self) -> bool:
        """Take the hub's messages; False if there will be none any more."""
        messages = self._wire.receive()
        for message in messages or ():
            kind = message.get("kind")
            if kind == "first":
                self._learn(Failure.read(message["failure"]))
            elif kind == "gone":
                self._hurry(int(message["rank"]))
            elif kind == "closely":
                self._closely = bool(message["closely"])
            elif kind == "report?":
                self._report()
            elif kind in ("hold", "meet"):
                self.meeting.hear(message)
        if messages is None and not self._left:
            self._lose_hub()
        return messages is not None or not self._left

    def _learn(self, failure: Failure) -> None:
        with self._lock:
            if self.first is None:
                self.first = failure
                if self.own is None:
                    is_stuck = failure.raised and failure.rank == self.rank  # it cannot raise what it has told
                    self._ends_at = time.monotonic() + (CLOSE_QUIET if is_stuck else PATIENCE)
                self._lock.notify_all()
        self.meeting.end()

    def _hurry(self, rank: int) -> None:
        with self._lock:
            if self.first is not None and self.first.rank == rank and self.own is None and self._ends_at is not None:
                self._ends_at = min(self._ends_at, time.monotonic() + AFTER_GONE)

    def _lose_hub(self) -> None:
        """The hub is a thread of global rank 0: that process is gone, or cannot be reached."""
        pid, host = self._of_hub
        how = how_it_ended(pid) if host == socket.gethostname() else ""
        self._learn(of_lost(0, self._place(0), "", how))
        self._hurry(0)
        while not self._left:
            if self._ends_at is not None and time.monotonic() > self._ends_at:
                self._end()
            time.sleep(0.1)

    def _where(self, *, with_stack: bool = False) -> Whereabouts:
        return look(frames_of(self._main), with_stack=with_stack)

    def _look(self) -> None:
        """Say once if the main thread stands still in a communication, and once if it goes on."""
        now, works = time.monotonic(), self._works()
        where = None if works else self._where()
        seen = () if where is None else (where.signature, self._progress())
        if where is None or seen != self._seen:
            self._seen, self._since = seen, now
            self._used = (time.process_time(), -1)
            if self._said:
                self._wire.send(kind="goes on")
            self._said = False
        elif now - self._since > (CLOSE_QUIET if self._closely else QUIET) and where.waits:
            moved = sent_and_received(without={sock.fileno() for sock in self.sockets()})
            idle = self._used[1] == moved and time.process_time() - self._used[0] < 0.02 * (now - self._since)
            if self._used[1] == -1:
                self._used = (self._used[0], moved)
            self._said = True
            self._wire.send(kind="waits", seconds=now - self._since, idle=idle, where=where.action)

    def _works(self) -> bool:
        """Whether the main thread has computed since the last call.

        Its frames are not looked at then: to walk those of a thread that runs was seen to crash CPython 3.11.7.
        """
        (used, then), self._computed = self._computed, (_processor_time(self._main), time.monotonic())
        return self._computed[0] - used > IDLE * (self._computed[1] - then)

    def sockets(self) -> list[socket.socket]:
        """Return the connections that belong to the watch alone."""
        return [self._wire.sock, *(self.hub.sockets if self.hub is not None else ())]

    def _report(self) -> None:
        where = self._where(with_stack=True)
        still = time.monotonic() - self._since if where.signature == next(iter(self._seen), None) else 0.0
        self._wire.send(
            kind="report",
            where=where.action,
            stack=where.stack,
            still=still,
            waits=where.waits,
        )

    def _end(self) -> None:
        """End this process: its main thread cannot."""
        failure = self.first or self.own
        assert failure is not None
        threading.Thread(target=_end_in, args=(5.0,), daemon=True).start()
        scribe = 0 if self.rank == 0 else failure.scribe
        for wish in self.last_wishes if self.rank in (scribe, failure.rank) else ():
            with contextlib.suppress(Exception):
                wish(failure)
        with contextlib.suppress(Exception):
            if self.rank in (scribe, failure.rank):
                self.say_once(failure)
            self.children()
            if self.hub is not None:
                self.hub.kill_silent()
            for worker in multiprocessing.active_children():
                worker.kill()
            sys.stdout.flush()
            sys.stderr.flush()
            self.last_rows()
        os._exit(1)

    _has_said = False

    def say_once(self, failure: Failure) -> None:
        """Write the first cause to stderr, unless its own rank does so by raising it."""
        if not self._has_said and not (failure.raised and failure.rank != self.rank):
            self._has_said = True
            sys.stderr.write(failure.report())
            sys.stderr.flush()


def start_watch(strategy: Any) -> Watch | None:
    """Have all ranks of a run watch over each other. A collective; ``None`` for one rank.

    Waiting has the strategy's ``timeout`` as its limit; a little less, so that the report comes before torch's errors.
    """
    from torch import distributed as dist

    if (number := dist.get_world_size()) == 1:
        return None
    rank, hub, address = dist.get_rank(), None, None
    place = functools.partial(_place_of, weakref.ref(strategy))  # threads end a moment after the run, its model sooner
    if rank == 0:
        timeout = strategy.settings.timeout
        seconds = None if timeout is None else timeout.total_seconds()
        limit = None if seconds is None else seconds - min(seconds / 2, 10)
        deadlock = DEADLOCK if strategy.root_device.type == "cpu" else None
        host = strategy.cluster_environment.main_address
        with _saying_why():
            everywhere = "127.0.0.1" if _is_loopback(host) else ""
            hub = Hub(everywhere, secrets.token_hex(16), num_ranks=number, place=place, limit=limit, deadlock=deadlock)
            hub.start()
            address = (host, hub.port, hub.secret, (os.getpid(), socket.gethostname()))
    address = strategy.broadcast(address)
    if address is None:
        return None
    watch = None
    with _saying_why():
        sock = socket.create_connection(tuple(address[:2]), timeout=10)
        keep_alive(sock)
        wire = Wire(sock)
        wire.send(secret=address[2], rank=rank, pid=os.getpid(), host=socket.gethostname(), kind="hello")
        trainer = strategy.lightning_module.trainer
        watch = Watch(
            wire,
            rank=rank,
            place=place,
            progress=lambda: _progress_of(trainer),
            hub=hub,
            of_hub=address[3],
        )
        watch.children = getattr(strategy.launcher, "kill_all", watch.children)
        watch.last_rows = functools.partial(write_last_rows, trainer)
    return watch


def suspect(error: BaseException | None) -> None:
    """See :meth:`Watch.suspect`; of the run of this process, where one is watched."""
    for watch in list(_open):
        watch.suspect(error)


@contextlib.contextmanager
def _saying_why() -> Any:
    try:
        yield
    except OSError as error:
        logger.warning(
            "This rank does not hear of failures of others (%s), and may wait for them until the strategy's timeout."
            " Global rank 0 must be reachable by all at MASTER_ADDR, on any port.",
            error,
        )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _place_of(strategy: weakref.ref[Any], rank: int) -> str:
    found = strategy()
    layout = None if found is None else found.choice.layout
    if layout is None:
        return "before the degrees are known"
    at = layout.coordinate(rank)
    return f"data {at.data}, tensor {at.tensor}, pipeline {at.pipeline}"


def _progress_of(trainer: Any) -> tuple[int, ...]:
    loops = (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop)
    return tuple(loop.batch_progress.total.ready for loop in (*loops, trainer.test_loop, trainer.predict_loop))


def add_note(error: BaseException, note: str) -> None:
    """Have a line printed below an error's traceback, once."""
    if hasattr(error, "add_note"):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    else:  # Python 3.10
        logger.error("%s: %s", type(error).__name__, note)


def _end_in(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(1)


def _close_in_child() -> None:
    """A forked process (a loader's worker) must not hold copies of the connections: others wait for their end."""
    for watch in list(_open):
        for sock in watch.sockets():
            with contextlib.suppress(OSError):
                os.close(sock.detach())
        watch._left = True
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _processor_time(thread: int) -> float:
    """Seconds that a thread of this process has computed; where the system does not say, it always has."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):  # not on macOS; or the thread has ended
        return time.monotonic()
