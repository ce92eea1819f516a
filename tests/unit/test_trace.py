"""The trace of a step: exact on a synthetic one, aligned across hosts, and bounded."""

from __future__ import annotations

import json
import os

import pytest

from lightning_hybrid.callbacks import StepBreakdown
from lightning_hybrid.callbacks.step_trace import shifted
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.metrics.breakdown import Span
from lightning_hybrid.metrics.collectives import Event
from lightning_hybrid.metrics.trace import RankTrace, build_trace, longest
from lightning_hybrid.pipeline.timeline import Mark

FIRST = RankTrace(
    rank=1, data=0, tensor=0, start=10.0, end=10.8,
    runs=[[Mark("F", 0, 0, 10.1, 10.2), Mark("WAIT_B", 0, 0, 10.2, 10.5), Mark("B", 0, 0, 10.5, 10.7),
           Mark("OPTIMIZER", -1, -1, 10.7, 10.8)]],
    data_waits=[(10.0, 10.05)],
    events=[Event("aten::mm", 10.11, 10.19, thread=77), Event("gemm", 10.12, 10.2, thread=7, on_device=True)],
)  # fmt: skip
LAST = RankTrace(
    rank=0, data=0, tensor=0, start=10.0, end=10.8,
    runs=[[Mark("F", 1, 0, 10.25, 10.35), Mark("B", 1, 0, 10.35, 10.45)]],
    exposed=[Span("communication_tensor", 10.3, 10.31)],
)  # fmt: skip


def test_what_stands_in_a_trace() -> None:
    document = json.loads(json.dumps(build_trace([LAST, FIRST])))
    events = document["traceEvents"]
    boxes = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"], e.get("args")) for e in events if e["ph"] == "X"]
    assert boxes == [
        (1, 0, "wait for data", 0.0, 50_000.0, None),
        (1, 0, "forward 0", 100_000.0, 100_000.0, {"stage": 0, "microbatch": 0}),
        (1, 0, "wait for backward", 200_000.0, 300_000.0, {"stage": 0, "microbatch": 0}),
        (1, 0, "backward 0", 500_000.0, 200_000.0, {"stage": 0, "microbatch": 0}),
        (1, 0, "optimizer", 700_000.0, 100_000.0, None),
        (1, 10, "aten::mm", 110_000.0, 80_000.0, None),
        (1, 11, "gemm", 120_000.0, 80_000.0, None),
        (0, 0, "forward 0", 250_000.0, 100_000.0, {"stage": 1, "microbatch": 0}),
        (0, 0, "backward 0", 350_000.0, 100_000.0, {"stage": 1, "microbatch": 0}),
        (0, 1, "communication_tensor", 300_000.0, 10_000.0, None),
    ]
    about = {(e["pid"], e.get("tid"), e["name"]): e["args"] for e in events if e["ph"] == "M"}
    assert about[1, None, "process_name"] == {"name": "stage 0, data 0, tensor 0"}
    assert about[1, None, "process_sort_index"] == {"sort_index": 0}  # stage 0 stands above stage 1
    assert about[0, None, "process_sort_index"] == {"sort_index": 1}
    assert about[1, 11, "thread_name"] == {"name": "stream 7"}
    arrows = [(e["id"], e["ph"], e["pid"], round(e["ts"])) for e in events if e["ph"] in "sf"]
    assert sorted(arrows, key=lambda arrow: arrow[3]) == [
        (arrows[2][0], "s", 1, 200_000), (arrows[2][0], "f", 0, 250_000),
        (arrows[0][0], "s", 0, 450_000), (arrows[0][0], "f", 1, 500_000),
    ]  # fmt: skip
    assert build_trace([])["traceEvents"] == []


def test_another_host_is_moved_and_the_longest_operators_stay() -> None:
    moved = build_trace([LAST, shifted(shifted(FIRST, 3.0), -3.0)])
    assert moved == build_trace([LAST, FIRST])
    assert build_trace([LAST, shifted(FIRST, 3.0)]) != moved  # else the test before could not fail
    events = [Event(str(i), 10 + i / 10, 10 + i / 10 + i / 100) for i in range(8)]
    assert [event.name for event in longest(events, 10.05, 10.75, 3)] == ["4", "5", "6"]  # "7" ends after the step


def test_a_trace_needs_a_profiled_step() -> None:
    with pytest.raises(ConfigurationError, match="give profile_every 1 or more"):
        StepBreakdown(trace=os.path.join("a", "trace.json"), profile_every=0)
