"""Around the whole of a run on one rank: a failure is told to the others, and theirs is told here."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException

from lightning_hybrid.choosing.logged import remark_on_failure
from lightning_hybrid.failures.failure import PeerFailedError
from lightning_hybrid.failures.watch import add_note
from lightning_hybrid.failures.watch_hub import exit_status

__all__ = ["exit_codes", "failing_together", "kill_all", "run_together", "watch_children"]

#: Seconds between the end of the rank that failed first and of those that follow: launchers report who ends first.
AFTERWARDS = 0.5
#: Seconds that the watch, or the script's own end, may take before this process is ended for a child that has failed.
CHILD_PATIENCE = 28.0


def run_together(trainer: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a Trainer's function on this rank; Lightning calls ``on_exception`` around it."""
    with _explained(trainer.strategy, trainer):
        return function(*args, **kwargs)


@contextmanager
def failing_together(strategy: Any, trainer: Any) -> Iterator[None]:
    """Around what a forked or spawned rank does: there Lightning calls no ``on_exception``, so it is called here."""
    try:
        with _explained(strategy, trainer):
            yield
    except _TunerExitException:
        raise
    except BaseException as error:
        if trainer is not None:
            _interrupt(trainer, error)
            trainer._teardown()
        raise


@contextmanager
def _explained(strategy: Any, trainer: Any) -> Iterator[None]:
    """Raise what came first, wherever that was, and tell the other ranks of it."""
    try:
        yield
    except _TunerExitException:
        _leave(strategy)
        raise
    except BaseException as error:
        stops = isinstance(error, SIGTERMException) and trainer is not None and trainer.received_sigterm
        if strategy.watch is None or stops:
            raise
        explained = strategy.watch.explain(error)
        if explained is error:
            if (remark := remark_on_failure(strategy, trainer, error)) is not None:
                add_note(error, remark)
            raise
        _print_once(strategy.watch.rank)
        time.sleep(AFTERWARDS)
        raise explained from None
    else:
        _leave(strategy)


def _leave(strategy: Any) -> None:
    if strategy.watch is not None:
        strategy.watch.leave()


def _print_once(rank: int) -> None:
    """What another rank has failed of is printed there, with its traceback, and not again here."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, traceback: Any) -> None:
        if isinstance(error, PeerFailedError):
            sys.stderr.write(f"Rank {rank} ends too.\n")
        else:
            before(kind, error, traceback)

    sys.excepthook = hook


def watch_children(processes: list[subprocess.Popen[Any]], trainer: Any) -> None:
    """Look after the ranks that this process has started, until all have ended well. Returns at once."""
    threading.Thread(target=_watch, args=(processes, trainer), name="lightning_hybrid.children", daemon=True).start()


def _watch(processes: list[subprocess.Popen[Any]], trainer: Any) -> None:
    while True:
        time.sleep(0.2)
        codes = exit_codes(processes)
        if failed := [(rank, code) for rank, code in enumerate(codes, start=1) if code]:
            break
        if all(code == 0 for code in codes):
            return
    watch = getattr(trainer.strategy, "watch", None) if trainer is not None else None
    is_watched = watch is not None and not watch.has_left
    time.sleep(CHILD_PATIENCE if is_watched else 1.0)  # else it may just have been the first of us to fail
    rank, code = failed[0]
    how = f"was ended by signal {-code}" if code < 0 else f"left with exit status {code}"
    if not is_watched:
        sys.stderr.write(f"The process of local rank {rank} {how} outside of a run. All processes are ended.\n")
        sys.stderr.flush()
    kill_all(processes)
    os._exit(1)


def exit_codes(processes: list[subprocess.Popen[Any]]) -> list[int | None]:
    """Return exit codes (``None``: still running), and leave them to be seen by the hub, which names the signal."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return [process.poll() for process in processes]
    statuses = [exit_status(process.pid) if process.returncode is None else None for process in processes]
    return [
        process.returncode if status is None else os.waitstatus_to_exitcode(status)
        for process, status in zip(processes, statuses, strict=True)
    ]


def kill_all(processes: list[subprocess.Popen[Any]]) -> None:
    """End processes at once."""
    for process in processes:
        with contextlib.suppress(OSError):
            process.kill()
