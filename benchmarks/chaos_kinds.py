"""The ways to fail that :mod:`benchmarks.chaos` tries."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["KINDS", "Kind", "fail"]

LIMIT = 30.0
WORDS = "chaos strikes"


def fail() -> None:
    raise ValueError(WORDS)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_connections() -> None:
    """As if the cable were pulled: every connection of this process is gone."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def crash() -> None:
    ctypes.string_at(0)


def sleep_for_ever() -> None:
    time.sleep(10_000)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def recurse() -> None:
    recurse()


def hang_in_c() -> None:
    """Holds the lock of the interpreter, so that no thread of this process runs any more."""
    ctypes.PyDLL(None).sleep(10_000)


def other_collective() -> None:
    dist.all_reduce(torch.zeros(3))


@dataclass(frozen=True)
class Kind:
    """One way to fail."""

    where: str
    """The hook in which it happens."""
    act: Callable[[], Any] = fail
    said: str = WORDS
    """What the cause must contain."""
    status: str = "error"
    """Of the archive's entry: what a user's own code raises is not put down to the degrees."""
    limit: float = LIMIT
    """Seconds until all must have ended."""
    timeout: float = 600.0
    """The strategy's."""
    ranks: str = "any"
    """``"first"``: only global rank 0 gets there."""
    same: bool = True
    """Whether the rank on which it happens must be the one that is named."""

    def with_timeout(self, seconds: float) -> Kind:
        """The same with another timeout of the strategy."""
        return replace(self, timeout=seconds)


def _memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (chaos)")


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


KINDS: dict[str, Kind] = {
    "exception in training_step": Kind("training_step"),
    "exception in a block's forward": Kind("forward"),
    "exception in a block's backward": Kind("backward"),
    # a pipeline that rehearses the step finds that it cannot cut it, and names other degrees as the remedy
    "exception in validation_step": Kind("validation_step", status="error or failed"),
    "exception in the dataset": Kind("dataset"),
    "exception in a loader's worker": Kind("worker"),
    "loader's worker killed": Kind("worker", be_killed, said="DataLoader worker"),
    "exception in setup": Kind("setup"),
    "exception in configure_model": Kind("configure_model"),
    "exception in configure_optimizers": Kind("configure_optimizers"),
    "exception in on_fit_start": Kind("on_fit_start"),
    "exception in on_train_batch_start": Kind("on_train_batch_start"),
    "exception in on_before_optimizer_step": Kind("on_before_optimizer_step"),
    "exception in on_train_batch_end": Kind("on_train_batch_end"),
    "exception in on_validation_epoch_end": Kind("on_validation_epoch_end"),
    "exception in on_save_checkpoint": Kind("on_save_checkpoint"),
    "exception in a logger": Kind("logger", ranks="first"),
    "exception in our code": Kind("send"),
    "out of memory": Kind("training_step", _memory, said="out of memory", status="oom"),
    "MemoryError": Kind("on_train_batch_end", _raise(MemoryError("chaos")), said="MemoryError", status="oom"),
    "KeyboardInterrupt": Kind(
        "training_step", _raise(KeyboardInterrupt()), said="KeyboardInterrupt", status="interrupted"
    ),
    "sys.exit": Kind("training_step", lambda: sys.exit(0), said="SystemExit"),
    "sys.exit with a text": Kind("training_step", lambda: sys.exit("enough of it"), said="enough of it"),
    "Ctrl-C while saving": Kind(
        "on_save_checkpoint", _raise(KeyboardInterrupt()), said="KeyboardInterrupt", status="interrupted"
    ),
    "StopIteration": Kind(
        "training_step", _raise(StopIteration(WORDS)), said="training_step raised StopIteration", status="failed"
    ),
    "StopIteration in the dataset": Kind("dataset", _raise(StopIteration(WORDS)), said="raised StopIteration for a"),
    "StopIteration in a hook": Kind(
        "on_train_batch_end", _raise(StopIteration(WORDS)), said="This rank has ended its epoch", limit=40
    ),
    "a connection of the user's own": Kind(
        "on_train_batch_end", _raise(ConnectionResetError("Connection reset by peer")), said="ConnectionResetError"
    ),
    "too deep recursion": Kind("training_step", recurse, said="RecursionError", status="failed"),
    "a message of megabytes": Kind("on_train_batch_end", _raise(ValueError(WORDS + "x" * 5_000_000))),
    "SIGKILL": Kind("training_step", be_killed, said="SIGKILL", status="interrupted"),
    "SIGKILL between steps": Kind("on_train_batch_end", be_killed, said="SIGKILL", status="interrupted"),
    "SIGKILL while saving": Kind("on_save_checkpoint", be_killed, said="SIGKILL", status="interrupted"),
    "SIGINT": Kind(
        "training_step",
        lambda: os.kill(os.getpid(), signal.SIGINT),
        said="KeyboardInterrupt",
        status="interrupted",
    ),
    "SIGTERM": Kind(
        "training_step",
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        said="SIGTERM",
        status="interrupted",
        same=False,
    ),
    "SIGSEGV": Kind("training_step", crash, said="SIGSEGV", status="failed"),
    "abort": Kind("on_train_batch_end", os.abort, said="SIGABRT", status="failed"),
    "os._exit(3)": Kind("training_step", lambda: os._exit(3), said="exit status 3", status="failed"),
    "os._exit(0)": Kind("on_train_batch_end", lambda: os._exit(0), said="exit status 0", status="failed"),
    "connections lost": Kind(
        "on_train_batch_end", lose_connections, said="", same=False, status="interrupted or failed"
    ),
    "a collective of its own": Kind(
        "on_train_batch_end", other_collective, said="", same=False, limit=40, status="failed"
    ),
    "no progress": Kind("on_train_batch_end", sleep_for_ever, said="no progress", timeout=12, status="failed"),
    "no progress, in a lock": Kind(
        "on_train_batch_end", wait_for_a_lock, said="no progress", timeout=12, status="failed"
    ),
    "SIGSTOP": Kind(
        "on_train_batch_end",
        lambda: os.kill(os.getpid(), signal.SIGSTOP),
        said="no progress",
        timeout=12,
        status="failed",
    ),
    "no progress, holding the interpreter": Kind(
        "on_train_batch_end", hang_in_c, said="no progress", timeout=12, status="failed"
    ),
}
