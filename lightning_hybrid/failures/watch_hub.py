"""The one place where a run's ranks hear of each other when something goes wrong: a thread of global rank 0.

Every rank holds one connection to it (:mod:`lightning_hybrid.failures.watch`). In ordinary training nothing is said on
it. The
hub decides what came first: a failure that a rank reports, a connection that ends without a goodbye, or ranks that wait
for each other. It tells all ranks, once. Messages are lines of JSON; the first one carries a secret that the ranks
share, and a line that is longer than :data:`MOST_BYTES` or no JSON ends its connection.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_hybrid.failures.failure import Failure, Status
from lightning_hybrid.failures.meeting import Meetings

__all__ = ["LOST", "MOST_BYTES", "Hub", "Wire", "exit_status", "how_it_ended", "keep_alive", "of_lost"]

MOST_BYTES = 1 << 20
LOST = "the connection to it was lost: its process has ended, or its machine cannot be reached"
#: Seconds for which a broken connection may be the consequence of something that is not known yet.
PATIENCE = 3.0
#: Seconds of waiting after which a failure that was to be told later is told now.
SUSPICION = 6.0
#: The same where all ranks wait, so none of them can come to what it would tell.
STUCK = 1.0
#: Seconds in which all ranks may send what they are doing.
REPORTING = 2.0


class Wire:
    """Lines of JSON over one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send a message; to somebody who is gone, nothing happens."""
        with contextlib.suppress(OSError), self._lock:
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come; ``None`` if there will be no more. Waits if nothing has come."""
        try:
            data = self.sock.recv(1 << 16)
        except OSError:
            return None
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        if not data or len(self._buffer) > MOST_BYTES or not all(isinstance(m, dict) for m in messages):
            return messages or None
        return messages

    def close(self) -> None:
        """End the connection, also where a forked process holds a copy of it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel find out within 17 s if the other machine cannot be reached any more (Linux)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 17_000, "TCP_NODELAY": 1}
    for name, value in options.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass
class _Member:
    wire: Wire
    rank: int = -1
    pid: int = 0
    host: str = ""
    state: str = "new"
    """``"new"``, ``"here"``, ``"failed"`` (it has said so) or ``"left"``."""
    where: str = ""
    stack: str = ""
    idle_since: float | None = None
    """Since when it has waited for others without a byte or a computation."""
    waits_since: float | None = None
    spoke: float = field(default=0.0)
    still: float = 0.0
    """For how many seconds it has not moved, when it spoke."""
    waits: bool = True
    """Whether it waited for others then."""


class Hub(threading.Thread):
    """Listens, decides, tells."""

    def __init__(
        self,
        host: str,
        secret: str,
        *,
        num_ranks: int,
        place: Callable[[int], str],
        limit: float | None,
        deadlock: float | None,
    ) -> None:
        """``place`` says where a rank stands.

        ``limit``: seconds that a rank may wait for others; ``deadlock``: that all may wait for each other.
        """
        super().__init__(name="lightning_hybrid.hub", daemon=True)
        self._listener = socket.create_server((host, 0), backlog=max(num_ranks, 16))
        self.port: int = self._listener.getsockname()[1]
        self.secret, self._num_ranks, self._place = secret, num_ranks, place
        self._limit, self._deadlock = limit, deadlock
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._members: list[_Member] = []
        self._is_over = False
        self._first: Failure | None = None
        self._consequence: tuple[float, Failure] | None = None
        self._suspects: dict[int, Failure] = {}
        self._hints: dict[int, Failure] = {}
        self._stall: tuple[float, str] | None = None
        self._warned = False
        self._meetings = Meetings(num_ranks, self._tell)
        self.sockets: list[socket.socket] = [self._listener]

    def run(self) -> None:
        """Until every rank has left or is gone."""
        try:
            while self._members or not self._is_over:
                for key, _ in self._selector.select(timeout=0.1 if self._suspects else 0.5):
                    if key.data is None:
                        self._accept()
                    else:
                        self._hear(key.data)
                self._consider(time.monotonic())
        finally:
            for member in list(self._members):
                self._drop(member)
            self._selector.close()
            self._listener.close()

    def kill_silent(self) -> None:
        """End ranks on this machine that did not say what they were doing: no thread of theirs runs any more."""
        asked = None if self._stall is None else self._stall[0]
        for member in self._members:
            if (
                asked is not None
                and member.state == "here"
                and member.spoke < asked
                and member.host == socket.gethostname()
            ):
                with contextlib.suppress(OSError):
                    os.kill(member.pid, signal.SIGKILL)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            keep_alive(sock)
            sock.settimeout(5.0)
            member = _Member(Wire(sock))
            self.sockets.append(sock)
            self._members.append(member)
            self._selector.register(sock, selectors.EVENT_READ, member)

    def _drop(self, member: _Member) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(member.wire.sock)
        self._members = [other for other in self._members if other is not member]
        self.sockets = [sock for sock in self.sockets if sock is not member.wire.sock]
        member.wire.close()

    def _hear(self, member: _Member) -> None:
        messages = member.wire.receive()
        for message in messages or ():
            if member.state == "new" and not self._welcome(member, message):
                messages = None
                break
            self._take(member, message)
        if messages is None:
            self._lose(member)

    def _welcome(self, member: _Member, message: dict[str, Any]) -> bool:
        secret, rank = message.get("secret"), message.get("rank")
        if not isinstance(secret, str) or not hmac.compare_digest(secret, self.secret) or not isinstance(rank, int):
            return False
        member.rank, member.pid, member.host = rank, int(message.get("pid", 0)), str(message.get("host", ""))
        member.state = "here"
        return True

    def _take(self, member: _Member, message: dict[str, Any]) -> None:
        member.where = str(message.get("where", member.where))
        member.stack = str(message.get("stack", member.stack))
        kind = message.get("kind")
        if kind == "fail":
            member.state = "failed"
            failure = Failure.read(message["failure"])
            if not message.get("consequence"):
                self._decide(failure)
            elif self._consequence is None:
                self._consequence = (time.monotonic(), failure)
        elif kind == "suspect":
            self._suspects[member.rank] = Failure.read(message["failure"])
            self._tell(kind="closely", closely=True)
        elif kind == "withdraw":
            self._suspects.pop(member.rank, None)
            self._tell(kind="closely", closely=bool(self._suspects))
        elif kind == "hint":
            self._hints[member.rank] = Failure.read(message["failure"])
        elif kind == "no hint":
            self._hints.pop(member.rank, None)
        elif kind == "left":
            member.state = "left"
            self._is_over |= member.rank == 0
            self._tell_gone(member)
        elif kind == "waits":
            now = time.monotonic()
            member.waits_since = member.waits_since or now - float(message["seconds"])
            member.idle_since = (member.idle_since or now - float(message["seconds"])) if message["idle"] else None
        elif kind == "goes on":
            member.waits_since = member.idle_since = None
        elif kind == "report":
            member.spoke = time.monotonic()
            member.still, member.waits = float(message["still"]), bool(message["waits"])
        elif kind == "meet?":
            self._meetings.ask(sum(other.state == "here" for other in self._members))
        elif kind == "begun":
            self._meetings.note(member.rank, int(message["batch"]))

    def _lose(self, member: _Member) -> None:
        """A connection has ended."""
        self._drop(member)
        if member.state == "here":
            how = how_it_ended(member.pid) if member.host == socket.gethostname() else ""
            self._decide(of_lost(member.rank, self._place(member.rank), member.where, how))
        if member.state != "new":
            self._is_over |= member.rank == 0
            self._tell_gone(member)

    def _tell(self, **message: Any) -> None:
        for member in self._members:
            member.wire.send(**message)

    def _tell_gone(self, member: _Member) -> None:
        self._tell(kind="gone", rank=member.rank)
        self._meetings.cancel()

    def _decide(self, failure: Failure) -> None:
        """Tell every rank of the first cause."""
        if self._first is None:
            self._first = failure
            self._tell(kind="first", failure=failure.to_dict())

    def _consider(self, now: float) -> None:
        if self._first is not None:
            return
        if self._consequence is not None and now - self._consequence[0] > PATIENCE:
            self._decide(self._consequence[1])
        elif self._stall is None:
            self._look_for_stalls(now)
        elif now - self._stall[0] > REPORTING or all(m.spoke >= self._stall[0] for m in self._members):
            self._end_stall()

    def _look_for_stalls(self, now: float) -> None:
        here = [member for member in self._members if member.state == "here"]
        waiting = [member for member in here if member.waits_since is not None]
        if not waiting or len(here) < self._num_ranks:
            return
        waits = [now - member.waits_since for member in waiting if member.waits_since is not None]
        longest, all_wait = max(waits), len(waits) == len(here)
        idle = [now - member.idle_since for member in here if member.idle_since is not None]
        if self._suspects and (longest > SUSPICION or (all_wait and min(waits) > STUCK)):
            self._decide(next(iter(self._suspects.values())))
        elif self._limit is not None and longest > self._limit:
            self._ask(now, f"some ranks have waited for others for {longest:.0f} s")
        elif self._deadlock is not None and len(idle) == len(here) and min(idle) > self._deadlock:
            why = f"all ranks wait for each other, and nothing has been sent or computed for {min(idle):.0f} s"
            self._ask(now, why)

    def _ask(self, now: float, why: str) -> None:
        self._stall = (now, why)
        self._tell(kind="report?")

    def _end_stall(self) -> None:
        assert self._stall is not None
        asked, why = self._stall
        # who does not wait keeps the others waiting; else whoever began to wait first waits for something impossible
        suspect = min(self._members, key=lambda m: (m.spoke >= asked and m.waits, m.spoke >= asked, -m.still, m.rank))
        silent = "does not answer (stopped, or busy in C)", ""
        lines = []
        for m in sorted(self._members, key=lambda m: m.rank):
            where, stack = (m.where, m.stack) if m.spoke >= asked else silent
            lines.append(f"  rank {m.rank} ({self._place(m.rank)}): {where}\n{stack}")
        cause = f"no progress: {why}. Ranks must make the same collectives in the same order"
        details = "What each rank was doing:\n" + "".join(lines)
        for hint in self._hints.values() if len(self._hints) < self._num_ranks else ():
            self._decide(replace(hint, details=f"Since then {why}. {details}", raised=False))
        place = self._place(suspect.rank)
        self._decide(Failure(rank=suspect.rank, place=place, action=suspect.where, cause=cause, details=details))


def of_lost(rank: int, place: str, action: str, how: str) -> Failure:
    """Return what the end of a process means: one that is killed, or lost with its machine, has done nothing wrong."""
    is_killed = not how or any(name in how for name in ("SIGKILL", "SIGTERM", "SIGINT", "still there"))
    status: Status = "interrupted" if is_killed else "failed"
    return Failure(rank=rank, place=place, action=action, cause=how or LOST, status=status)


def how_it_ended(pid: int, seconds: float = 1.0) -> str:
    """Return how a process of this machine ended, as far as can be seen; empty if it cannot."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        status = exit_status(pid)
        if status is None and not os.path.exists(f"/proc/{pid}"):
            return "its process ended in the middle of the run"
        if status is not None:
            return _describe(status)
        time.sleep(0.02)
    return f"its connections broke, but its process {pid} is still there"


def exit_status(pid: int) -> int | None:
    """The wait status of a process that has ended and is not waited for yet; it is left so."""
    with contextlib.suppress(AttributeError, OSError):  # no such call on some systems; no child of this process
        if (found := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            return found.si_status if found.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else found.si_status << 8
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat") as file:
            state, *rest = file.read().rpartition(")")[2].split()
        return int(rest[-1]) if state == "Z" else None
    return None


def _describe(status: int) -> str:
    if number := status & 0x7F:
        name = signal.Signals(number).name if number in signal.Signals._value2member_map_ else f"signal {number}"
        hint = " (if nobody sent it: the system's out-of-memory killer, see dmesg)" if number == signal.SIGKILL else ""
        return f"its process was ended by {name}{hint}"
    return f"its process left with exit status {status >> 8} in the middle of the run"
