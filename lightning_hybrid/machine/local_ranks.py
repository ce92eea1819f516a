"""Ranks on this machine for the time of one function: all end when the first one fails, or when the time is over."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from lightning_hybrid.errors import HybridError, ProbeError

__all__ = ["run_here"]

#: Seconds in which other ranks may still report what failed first, after a rank whose connection broke.
_GRACE = 1.0
_FOLLOWS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")


@dataclass(frozen=True)
class _Failure:
    rank: int
    time: float
    text: str
    summary: str
    error: HybridError | None = None
    """The error itself, if it is one of ours."""

    @property
    def follows(self) -> bool:
        """Whether another rank's failure explains this one."""
        return any(words in self.text for words in _FOLLOWS)


def run_here(num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
    """Run ``function(store, rank, num_ranks, *args)`` in ``num_ranks`` processes and return rank 0's result.

    ``store`` is an ``init_method`` for :func:`torch.distributed.init_process_group`. Processes are forked, unless this
    one uses CUDA already.

    Raises:
        ProbeError: has the traceback of the rank that failed first, or says that the time is over. An error of this
            library is its ``__cause__``.
    """
    context = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    with tempfile.TemporaryDirectory(prefix="lightning-hybrid-") as folder:
        ranks: list[BaseProcess] = [
            context.Process(target=_run_rank, args=(folder, rank, num_ranks, function, args), daemon=True)  # type: ignore[attr-defined]
            for rank in range(num_ranks)
        ]
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for process in ranks:
                process.start()
            _wait(ranks, Path(folder), time.monotonic() + timeout, timeout)
            return pickle.loads((Path(folder) / "result").read_bytes())
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def _wait(ranks: list[BaseProcess], folder: Path, end: float, timeout: float) -> None:
    """Return when all ranks have ended well."""
    failed_at: float | None = None
    while any(process.is_alive() for process in ranks):
        multiprocessing.connection.wait([process.sentinel for process in ranks if process.is_alive()], timeout=0.1)
        if failed_at is None and any(process.exitcode for process in ranks):
            failed_at = time.monotonic()
        if failed_at is not None:
            failures = _failures(ranks, folder)
            if time.monotonic() > failed_at + _GRACE or not all(failure.follows for failure in failures):
                break
        if time.monotonic() > end:
            raise ProbeError(
                f"{len(ranks)} ranks were not done after {timeout:g} s. Allow them more, or probe fewer devices."
            )
    if failures := _failures(ranks, folder):
        first = min(failures, key=lambda failure: (failure.follows, failure.time))
        text = f"Rank {first.rank} of {len(ranks)} failed: {first.summary}\n{first.text}".rstrip()
        raise ProbeError(text) from first.error


def _failures(ranks: list[BaseProcess], folder: Path) -> list[_Failure]:
    found = []
    for rank, process in enumerate(ranks):
        if process.exitcode:
            path = folder / f"failure-{rank}"
            if path.exists():
                found.append(pickle.loads(path.read_bytes()))
            else:
                found.append(_Failure(rank, time.monotonic(), "", f"it ended with exit code {process.exitcode}"))
    return found


def _run_rank(folder: str, rank: int, num_ranks: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    gc.freeze()  # garbage of the parent, such as process groups, may own threads that this process lacks
    torch.multiprocessing._prctl_pr_set_pdeathsig(9)  # type: ignore[attr-defined]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)  # the parent's threads did not survive a fork; the function may set its own number
    try:
        result = function(f"file://{folder}/store", rank, num_ranks, *args)
        if rank == 0:
            (Path(folder) / "part").write_bytes(pickle.dumps(result))
            os.replace(Path(folder) / "part", Path(folder) / "result")
        code = 0
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        own = type(error)(str(error)) if isinstance(error, HybridError) else None  # pickles, whatever hangs on it
        failure = _Failure(rank, time.monotonic(), traceback.format_exc(), summary, own)
        (Path(folder) / f"failing-{rank}").write_bytes(pickle.dumps(failure))
        os.replace(Path(folder) / f"failing-{rank}", Path(folder) / f"failure-{rank}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a failed rank's process group would wait for the others; exit handlers are the parent's
