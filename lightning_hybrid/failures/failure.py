"""What ended a run: on which rank, where it stood, doing what, and why. Data and words; no processes, no sockets."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hybrid.errors import CheckpointError, NonFiniteError, PipelineError

__all__ = ["Failure", "PeerFailedError", "Status", "causes", "is_consequence", "printable", "said", "status_of"]

Status = Literal["failed", "oom", "error", "interrupted"]

#: A longer text says no more, and travels to every rank.
_MOST_CHARACTERS = 20_000
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
#: Where torch or we raise what a data set, its worker, or a script that differs between ranks is to blame for.
_NO_DEGREES: tuple[str, ...] = ("torch._utils", "torch.utils.data")
_NO_DEGREES += ("lightning_hybrid.failures.early_end", "lightning_hybrid.building.alike")
#: What gloo, NCCL and torch's store say on the ranks that follow a failed one.
_BROKEN_CONNECTION = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|Connection refused|Socket closed|remote process exited"
    r"|Read error \[|Write error|[Tt]imed out waiting|Timed out after|Watchdog caught collective|Rank \d+ successfully"
    r" reached monitoredBarrier|NCCL communicator was aborted|failed to recv, got 0 bytes",
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first cause."""

    rank: int
    place: str
    """Its coordinate, such as ``"data 0, tensor 1, pipeline 0"``."""
    action: str
    """What it was doing, such as ``"training batch 3, stage 2 forward of micro-batch 3"``."""
    cause: str
    """The error's type and message, or how the process ended."""
    details: str = ""
    """The traceback, or what all ranks were doing."""
    status: Status = "failed"
    raised: bool = False
    """Whether it is an exception, which its own rank prints as it ends."""

    @classmethod
    def of(cls, error: BaseException, *, rank: int, place: str, action: str) -> Failure:
        """Return what an exception on a rank means."""
        notes = len(getattr(error, "__notes__", ()))  # they stand in the traceback
        lines = traceback.format_exception_only(type(error), error)
        cause = "".join(lines[: len(lines) - notes] if notes else lines).strip()
        details = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(
            rank=rank,
            place=place,
            action=action,
            cause=printable(cause[:_MOST_CHARACTERS]),
            details=printable(details[-_MOST_CHARACTERS:]),
            status=status_of(error),
            raised=True,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Failure:
        """Return what :meth:`to_dict` made, sent by another rank."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @property
    def headline(self) -> str:
        """Rank, coordinate, action, and the cause without its notes."""
        place = f" ({self.place})" if self.place else ""
        doing = f", {self.action}" if self.action else ""
        return f"rank {self.rank}{place}{doing}: {self.cause or 'unknown'}"

    @property
    def scribe(self) -> int:
        """The global rank that writes down what happened to a rank which cannot: the first one that is still there."""
        return 1 if self.rank == 0 else 0

    def report(self) -> str:
        """Everything, for the launcher's stderr."""
        details = f"\n{self.details.rstrip()}" if self.details else ""
        return f"The run has failed. First cause: {self.headline}{details}\n"


class PeerFailedError(PipelineError):
    """Another rank has failed, and this one cannot go on. ``failure`` says what happened there."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"This rank ends because of {failure.headline}")
        self.failure = failure

    def __reduce__(self) -> tuple[type[PeerFailedError], tuple[Failure]]:
        return PeerFailedError, (self.failure,)


def printable(text: str) -> str:
    """Without what no terminal, file or archive takes (half of a surrogate pair), or what would steer a terminal."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def is_consequence(error: BaseException) -> bool:
    """Whether an error is what a rank sees when another one has gone: a broken connection, or a wait in vain.

    A connection of the user's own, as to a database, breaks with the same words; those are a cause.
    """
    return isinstance(error, PeerFailedError) or any(
        isinstance(cause, (RuntimeError, OSError))
        and _BROKEN_CONNECTION.search(said(cause))
        and (isinstance(cause, torch.distributed.DistError) or _is_of_ranks(cause))
        for cause in causes(error)
    )


def _is_of_ranks(error: BaseException) -> bool:
    """Whether an error is gloo's or NCCL's, or was raised by code that talks to other ranks."""
    if any(name in said(error).lower() for name in ("gloo", "nccl", "monitoredbarrier")):
        return True
    return _raised_in(error).startswith(("torch.", "lightning_hybrid."))


def _raised_in(error: BaseException) -> str:
    """The module in which an error was raised; empty if it was not."""
    inner = error.__traceback__
    while inner is not None and inner.tb_next is not None:
        inner = inner.tb_next
    return "" if inner is None else str(inner.tb_frame.f_globals.get("__name__", ""))


def said(error: BaseException) -> str:
    """An error's text; empty where it cannot even say that."""
    try:
        return str(error)
    except Exception:
        return ""


def status_of(error: BaseException) -> Status:
    """Return what an exception means for the archive.

    ``"failed"`` and ``"oom"`` are put down to the degrees, and ``"error"`` is not: what the user's own code, a data set
    or a disk raises would end the run at other degrees too. A ``RuntimeError`` may come from a tensor that is split.
    """
    if isinstance(error, PeerFailedError):
        return error.failure.status
    if isinstance(error, KeyboardInterrupt | SIGTERMException):
        return "interrupted"
    for cause in causes(error):
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            return "oom"
        if isinstance(cause, RuntimeError) and any(words in said(cause) for words in _OUT_OF_MEMORY):
            return "oom"
    if isinstance(error, (NonFiniteError, CheckpointError)):
        return "error"
    is_torchs = isinstance(error, RuntimeError) or _raised_in(error).startswith(("torch.", "lightning_hybrid."))
    return "failed" if is_torchs and not _raised_in(error).startswith(_NO_DEGREES) else "error"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from, or while handling."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
