"""Writes the profiled step of all ranks as one trace."""

from __future__ import annotations

import gzip
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_hybrid.measuring.recorder import RecordedStep
from lightning_hybrid.metrics.breakdown import Span
from lightning_hybrid.metrics.collectives import Event
from lightning_hybrid.metrics.trace import RankTrace, build_trace, longest
from lightning_hybrid.pipeline.timeline import Mark

__all__ = ["write_trace"]

_log = logging.getLogger(__name__)

#: Operators and kernels of a rank, the longest of its step.
MAX_EVENTS = 4000


def write_trace(
    path: str | os.PathLike[str], strategy: Any, step: RecordedStep, exposed: Sequence[Span], events: Sequence[Event]
) -> None:
    """Gather a step and write it from global rank 0. A collective over the world.

    Clocks of one host are one clock; those of different hosts are aligned by their time of day. Operators are those of
    the first data rank's tensor and pipeline ranks.
    """
    at = strategy.layout.coordinate(strategy.global_rank)
    own = RankTrace(
        rank=strategy.global_rank,
        data=at.data,
        tensor=at.tensor,
        start=step.start,
        end=step.end,
        runs=step.runs,
        data_waits=step.data_waits,
        exposed=exposed,
        events=longest(events, step.start, step.end, MAX_EVENTS) if at.data == 0 else (),
    )
    host, to_wall = socket.gethostname(), time.time() - time.perf_counter()
    everyone: list[tuple[RankTrace, str, float]] = strategy.all_gather_object((own, host, to_wall))
    if strategy.global_rank != 0:
        return
    ranks = [rank if their == host else shifted(rank, wall - to_wall) for rank, their, wall in everyone]
    data = json.dumps(build_trace(ranks), separators=(",", ":")).encode()
    try:
        os.makedirs(os.path.dirname(os.fspath(path)) or ".", exist_ok=True)
        with open(path, "wb") as file:
            file.write(gzip.compress(data) if os.fspath(path).endswith(".gz") else data)
    except OSError as error:
        _log.warning("The trace cannot be written, and training goes on: %s", error)


def shifted(rank: RankTrace, seconds: float) -> RankTrace:
    """Move all times of a rank."""
    return replace(
        rank,
        start=rank.start + seconds,
        end=rank.end + seconds,
        runs=[
            [Mark(m.kind, m.stage, m.microbatch, m.start + seconds, m.end + seconds) for m in run] for run in rank.runs
        ],
        data_waits=[(start + seconds, end + seconds) for start, end in rank.data_waits],
        exposed=[Span(part, start + seconds, end + seconds) for part, start, end in rank.exposed],
        events=[event._replace(start=event.start + seconds, end=event.end + seconds) for event in rank.events],
    )
