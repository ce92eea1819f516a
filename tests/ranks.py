"""Ranks forked from the warm pytest process: ``run_ranks(8, function)`` starts in a fifth of a second.

Importing torch and Lightning takes seconds per process; a fork inherits them. Each rank runs ``function(rank, *args)``
with the environment that ``torchrun`` users know (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so a
``Trainer(devices=num_ranks)`` in it takes part as that rank and launches nothing. What a rank prints is replayed on the
parent's stdout, where pytest shows it when the test fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import lightning  # noqa: F401  (warm: every rank inherits the import)
import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

__all__ = ["RankError", "RankTimeoutError", "processes_of", "run_ranks"]

#: Seconds in which other ranks may still report their own failure after the first one.
GRACE = 1.0
#: The same when only ranks have failed whose connection broke: the rank that caused it may still be tidying up.
PATIENCE = 10.0
BROKEN_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
BROKEN_CONNECTION += ("This rank ends because of",)


class RankError(Exception):
    """A rank failed; the text holds its traceback and what the other ranks were doing."""


class RankTimeoutError(RankError):
    """Ranks were still running at the timeout; the text holds their stacks."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank sends to the parent when its function ended."""

    time: float
    """When it ended, ``time.monotonic()``; one clock for all processes of a host."""
    result: Any = None
    error: BaseException | None = None
    """The exception, when it can be pickled; ``traceback`` is set for every failure."""
    traceback: str = ""
    summary: str = ""
    """The exception's type and message alone."""
    skipped: str = ""
    """The reason, when the rank called ``pytest.skip``."""


@dataclass(kw_only=True)
class Rank:
    """The parent's view of one rank."""

    rank: int
    pid: int
    pipe: Connection
    folder: Path
    report: Report | None = None
    status: int | None = None
    """Exit status from ``os.waitpid``; None while the process lives."""

    @property
    def failed(self) -> bool:
        return bool(self.report and self.report.traceback)

    @property
    def follows(self) -> bool:
        """True for a failure that another rank's failure explains."""
        return self.report is not None and any(text in self.report.summary for text in BROKEN_CONNECTION)

    @property
    def ended(self) -> float:
        return self.report.time if self.report else math.inf

    def poll(self) -> None:
        """Receive the report if there is one, or note that the process died without."""
        if self.report is None and self.pipe.poll():
            with contextlib.suppress(EOFError):
                self.report = pickle.loads(self.pipe.recv_bytes())
        if self.report is None and self.reap():
            cause = describe_status(self.status or 0)
            text = f"rank {self.rank} {cause} before its function ended.\n{self.read_output()[-30_000:]}"
            self.report = Report(time=time.monotonic(), traceback=text, summary=text)

    def reap(self) -> bool:
        """True when the process has ended; also ends what it had started."""
        if self.status is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.kill()
        return self.status is not None

    def dump_stacks(self) -> None:
        """Ask the process for the stacks of all its threads; works inside blocking C++ calls too."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def read_output(self) -> str:
        """What the process printed, the stacks of its threads last if a signal such as SIGSEGV ended it."""
        with contextlib.suppress(OSError):
            return (self.folder / "output").read_text(errors="replace")
        return ""

    def read_stacks(self) -> str:
        return (self.folder / "stacks").read_text(errors="replace").strip() or "(no stacks could be had)"

    def kill(self) -> None:
        """End the process and all that it started, and wait for it."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.status = os.waitpid(self.pid, 0)[1]


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run ``function(rank, *args)`` in ``num_ranks`` forked processes.

    ``function`` may be a closure; its results must be picklable. All ranks stay alive until the last one has ended, so
    none sees a closed connection because another was faster, or failed.

    Returns:
        The results in the order of ranks.

    Raises:
        Exception: the exception of the rank that failed first *in time* (a broken connection is never first), caused by
            a :class:`RankError` with its traceback. ``pytest.skip`` in a rank skips the test.
        RankError: if that rank died, or its exception cannot be pickled.
        RankTimeoutError: if ranks still run after ``timeout`` seconds; all are killed, the text shows where they stood.
    """
    __tracebackhide__ = True  # pytest shows the test and the rank, not what lies between
    port, end = free_port(), time.monotonic() + timeout
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        release, hold = os.pipe()  # ranks wait for its end of file, which comes when the parent closes `hold`
        try:
            for rank in range(num_ranks):
                environment = rank_environment(rank, num_ranks, port)
                ranks.append(fork_rank(rank, Path(folder), environment, (release, hold), function, args))
            wait_for(ranks, end)
            raise_first_failure(ranks, timeout)
            os.close(hold)
            hold = -1
            wait_for_exit(ranks)
            return [rank.report.result for rank in ranks if rank.report]
        finally:
            for rank_ in ranks:
                rank_.kill()
                rank_.pipe.close()
            for descriptor in (release, hold):
                if descriptor >= 0:
                    os.close(descriptor)
            replay_output(ranks)


def wait_for(ranks: list[Rank], end: float) -> None:
    """Return when all ranks have reported, or ``GRACE`` seconds after the first failure, or at ``end``."""
    while any(rank.report is None for rank in ranks) and time.monotonic() < end:
        multiprocessing.connection.wait([rank.pipe for rank in ranks if rank.report is None], timeout=0.02)
        for rank in ranks:
            rank.poll()
        if failed := [rank for rank in ranks if rank.failed]:
            grace = PATIENCE if all(rank.follows for rank in failed) else GRACE
            first = min(rank.ended for rank in failed if grace == PATIENCE or not rank.follows)
            end = min(end, first + grace)


def wait_for_exit(ranks: list[Rank], seconds: float = 5.0) -> None:
    """Give finished ranks a moment to leave by themselves; ``kill`` ends the rest."""
    end = time.monotonic() + seconds
    while not all(rank.reap() for rank in ranks) and time.monotonic() < end:
        time.sleep(0.005)


def raise_first_failure(ranks: list[Rank], timeout: float) -> None:
    """Raise what failed first in time, else a timeout, else nothing."""
    __tracebackhide__ = True
    running = [rank for rank in ranks if rank.report is None]
    for rank in running:
        rank.dump_stacks()
    if running:
        time.sleep(0.3)  # the signal handler writes all stacks in a few milliseconds
    stacks = "".join(f"\n--- rank {rank.rank} was still running ---\n{rank.read_stacks()}\n" for rank in running)
    failures = sorted((rank for rank in ranks if rank.failed), key=lambda rank: (rank.follows, rank.ended))
    if not failures:
        if running:
            names = ", ".join(str(rank.rank) for rank in running)
            raise RankTimeoutError(f"rank {names} of {len(ranks)} still running after {timeout:g} s.{stacks}")
        return
    first = failures[0].report
    assert first is not None
    others = "".join(
        f"\n--- rank {rank.rank} failed later ---\n{rank.report.summary}" for rank in failures[1:] if rank.report
    )
    error = RankError(f"rank {failures[0].rank} of {len(ranks)} failed first.\n{first.traceback}{others}{stacks}")
    if first.skipped:
        pytest.skip(first.skipped)
    if isinstance(first.error, Exception):
        raise first.error from error
    raise error


def replay_output(ranks: list[Rank]) -> None:
    for rank in ranks:
        if text := rank.read_output().rstrip():
            print(f"--- output of rank {rank.rank} ---\n{text}")


def describe_status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"left with exit status {os.waitstatus_to_exitcode(status)}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What a launcher such as ``torchrun`` sets, and the loopback interface for gloo (no name lookup, no firewall)."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
    }


def fork_rank(
    rank: int,
    folder: Path,
    environment: dict[str, str],
    gate: tuple[int, int],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Rank:
    """Fork one rank; only the parent returns."""
    folder = folder / str(rank)
    folder.mkdir()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(gate[1])
        run_child(rank, folder, environment, gate[0], sender, function, args)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # the child does so too; whoever is first, `kill` finds the group
    sender.close()
    return Rank(rank=rank, pid=pid, pipe=receiver, folder=folder)


def run_child(
    rank: int,
    folder: Path,
    environment: dict[str, str],
    release: int,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> NoReturn:
    """The whole life of a forked rank. Leaves by ``os._exit``: the parent's exit handlers are not ours to run."""
    try:
        become_rank(rank, folder, environment)
        report = call(function, rank, args)
        sys.stdout.flush()
        sys.stderr.flush()
        sender.send_bytes(report)
        os.read(release, 1)  # until the last rank has ended, or for ever after a failure: the parent kills
    finally:
        for process in multiprocessing.active_children():  # dataloader workers
            process.kill()
        os._exit(0)


def become_rank(rank: int, folder: Path, environment: dict[str, str]) -> None:
    gc.freeze()  # what the parent left as garbage may own threads that this process lacks
    os.setpgid(0, 0)  # so that the parent can kill dataloader workers together with their rank
    die_with_parent()
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (lives as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    redirect_logging()
    stacks = open(folder / "stacks", "w")  # noqa: SIM115
    faulthandler.disable()  # or the next line would not install its handlers anew, which others may have replaced
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # the parent's children are not this rank's
    os.environ.update(environment)
    rank_zero_only.rank = rank
    torch.set_num_threads(1)  # the parent's OpenMP threads do not survive a fork


def processes_of(groups: Collection[int]) -> list[str]:
    """Processes of some process groups that still run: id and name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            state, _, group = rest.split()[:3]
        except (OSError, ValueError):  # it has just ended
            continue
        if state != "Z" and int(group) in groups:
            found.append(f"{path.parent.name} {name}")
    return found


def die_with_parent() -> None:
    """A pytest that is killed must not leave hanging ranks behind (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def begin_peak_anew() -> None:
    """Before peak memory is measured: what this process, or its parent before the fork, once had must not hide it.

    What was freed goes back to the system (else allocations fit into it), and the peak is the present (Linux, glibc).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def redirect_logging() -> None:
    """Handlers made in the parent write to the parent's capture; let them write to this rank's output."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)


class Pickler(pickle.Pickler):
    """Plain tensors as arrays, six times as fast as torch's own way: results hold hundreds of small ones."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided
        if is_plain and not value.requires_grad and value.dtype in (torch.float32, torch.float64, torch.int64):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def call(function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> bytes:
    """Call the function and pickle what it returned or raised."""
    try:
        result = function(rank, *args)
        return dumps(Report(time=time.monotonic(), result=result))
    except pytest.skip.Exception as skip:
        return pickle.dumps(Report(time=time.monotonic(), traceback=traceback.format_exc(), skipped=str(skip)))
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(type(error), error))
        report = Report(time=time.monotonic(), traceback=traceback.format_exc(), summary=summary)
        try:
            pickle.loads(data := pickle.dumps(replace(report, error=error)))
            return data
        except Exception:  # exceptions with arguments of their own often cannot be rebuilt
            return pickle.dumps(report)
