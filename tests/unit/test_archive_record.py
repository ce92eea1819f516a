"""What an entry keeps of a run's course: bounded lines that come back as they were; foreign ones are refused."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from lightning_hybrid.archive import Entry
from lightning_hybrid.archive.record import MAX_BOXES, read_history, read_timeline, write_history, write_timeline
from lightning_hybrid.errors import ArchiveError
from lightning_hybrid.metrics.bubble import measure_bubble
from lightning_hybrid.metrics.history import History
from lightning_hybrid.pipeline.boxes import boxes_of
from lightning_hybrid.pipeline.schedule import find_schedule
from lightning_hybrid.pipeline.timeline import COMPUTE, Mark, Timeline, simulate, table_of
from tests.unit.archive_entries import make_entry


def run(name: str = "1F1B", ranks: int = 2, microbatches: int = 4, stages_per_rank: int = 1) -> Timeline:
    table = find_schedule(name).table(ranks, microbatches, stages_per_rank)
    times = {(k, s): t for k, t in (("F", 0.01), ("B", 0.02)) for s in range(ranks * stages_per_rank)}
    return simulate(table, times | {("PROLOGUE", 1): 0.001}, transfer=0.005)


def shifted(timeline: Timeline, seconds: float) -> Timeline:
    return {
        rank: [dataclasses.replace(mark, start=mark.start + seconds, end=mark.end + seconds) for mark in marks]
        for rank, marks in timeline.items()
    }


def test_a_timeline_comes_back_with_its_bubble() -> None:
    measured = shifted(run(), 7.0)
    measured[1] += [Mark("REDUCE", -1, -1, 7.2, 7.21), Mark("OPTIMIZER", -1, -1, 7.21, 7.22)]
    lines = write_timeline(measured)
    assert lines["1"].startswith("1PROLOGUE0 0 1; 1F0 15 25; ")
    assert lines["1"].endswith("communication_data_shard 200 210; optimizer 210 220")
    back = read_timeline(lines)
    for rank, boxes in boxes_of(measured).items():
        assert [(box.kind, box.stage, box.microbatch) for box in back[rank]] == [
            (box.kind, box.stage, box.microbatch) for box in boxes
        ]
        assert [box.start for box in back[rank]] == pytest.approx([box.start - 7.0 for box in boxes], abs=1e-6)
    there, here = measure_bubble(back, table_of(back)), measure_bubble(measured, table_of(measured))
    assert vars(there) == pytest.approx(vars(here), abs=1e-4)
    assert write_timeline(back) == lines


def test_a_timeline_is_bounded() -> None:
    """16 stages with 64 micro-batches keep all actions; what is no action goes first, the shortest of it."""
    lines = write_timeline(run("1F1B", 16, 64))
    assert sum(box.kind in ("F", "B") for boxes in read_timeline(lines).values() for box in boxes) == 2048
    assert sum(map(len, lines.values())) < 64_000
    assert write_timeline(run("1F1B", 16, 65)) == {}
    crowded = run()
    crowded[0] += [Mark("REDUCE", -1, -1, 1 + i / 100, 1 + i / 100 + 1e-5 * i) for i in range(MAX_BOXES)]
    kept = [box for boxes in read_timeline(write_timeline(crowded)).values() for box in boxes]
    assert len(kept) <= MAX_BOXES
    assert sum(box.kind in COMPUTE for box in kept) == 2 * 2 * 4 + 4
    assert write_timeline({}) == write_timeline({0: []}) == {}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"one": ""}, "no rank"),
        ({"0": "0F0 1"}, "'0F0 1', which is not 'name start end'"),
        ({"0": "0F0 0 nan"}, "ends before it starts"),
        ({"0": "0F0 2 1"}, "ends before it starts"),
        ({"0": "<script> 0 1"}, "neither an action nor a part"),
        ({"0": "0F0 0 2; 0F1 1 3"}, "overlap at 1 ms"),
        ({"0": "; ".join(f"0F{i} {i} {i + 1}" for i in range(MAX_BOXES + 1))}, "more than 2048 boxes"),
    ],
)
def test_foreign_timelines_are_refused(lines: dict[str, str], message: str) -> None:
    with pytest.raises(ArchiveError, match=message):
        read_timeline(lines)


def test_a_history_comes_back() -> None:
    rows = [(4, {"step/time_s": 0.123456}), (10, {"step/time_s": 0.2}), (4, {"bubble/measured": 0.25}), (12, {})]
    lines = write_history(rows)
    assert lines == {"steps": "4 10 12", "step/time_s": "0.1235 0.2 -", "bubble/measured": "0.25 - -"}
    assert read_history(lines) == [
        (4, {"step/time_s": 0.1235, "bubble/measured": 0.25}),
        (10, {"step/time_s": 0.2}),
        (12, {}),
    ]
    assert write_history([]) == {}
    assert read_history({}) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"a": "1"}, "ascending"),
        ({"steps": "2 1", "a": "1 2"}, "ascending"),
        ({"steps": "1 2", "a": "1"}, "has 1 numbers for 2 steps"),
        ({"steps": "1", "a": "one"}, "cannot be read"),
    ],
)
def test_foreign_histories_are_refused(lines: dict[str, str], message: str) -> None:
    with pytest.raises(ArchiveError, match=message):
        read_history(lines)


@pytest.mark.parametrize("num_steps", [1, 64, 65, 66, 1000, 12_345])
def test_memory_of_a_run_is_bounded_and_even(num_steps: int) -> None:
    history = History(64)
    for step in range(1, num_steps + 1):
        history.add(step, {"value": step / 2})
    steps = [step for step, _ in history.rows]
    assert all(values == {"value": step / 2} for step, values in history.rows)
    assert (steps[0], steps[-1]) == (1, num_steps)
    assert min(num_steps, 33) <= len(steps) <= 65
    gaps = {later - earlier for earlier, later in itertools.pairwise(steps[:-1])}
    assert len(gaps) <= 1  # the newest alone may come sooner


def test_entries_with_and_without_a_course_are_read() -> None:
    entry = make_entry()
    result = dataclasses.replace(
        entry.result, timeline=write_timeline(run()), history={"steps": "1"}, memory={"a": 1.0}
    )
    full = dataclasses.replace(entry, result=result)
    assert Entry.from_json(full.to_json()) == full
    document = json.loads(entry.to_json())
    for name in ("history", "timeline", "memory"):  # as the releases before wrote it
        del document["result"][name]
    assert Entry.from_json(json.dumps(document | {"revision": 0})).result == entry.result
