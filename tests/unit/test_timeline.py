"""The ideal run of a schedule: exact answers for known action times, and tables that cannot run."""

from __future__ import annotations

import pytest

from lightning_hybrid.errors import PipelineError
from lightning_hybrid.metrics import idle_share
from lightning_hybrid.pipeline.schedule import Action, Kind, Table, find_schedule
from lightning_hybrid.pipeline.timeline import Mark, mean_durations, simulate, split_runs, table_of, window


def durations(num_stages: int, forward: float = 1.0, backward: float = 2.0) -> dict[tuple[str, int], float]:
    return {(k, s): t for k, t in (("F", forward), ("B", backward)) for s in range(num_stages)}


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 16)])
def test_textbook_bubble(name: str, ranks: int, microbatches: int) -> None:
    """Equal stages: makespan (m + p - 1)(f + b), bubble (p - 1) / (m + p - 1), whatever f and b are."""
    timeline = simulate(find_schedule(name).table(ranks, microbatches, 1), durations(ranks))
    assert window(timeline) == (0.0, 3.0 * (microbatches + ranks - 1))
    assert idle_share(timeline) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank() -> None:
    """Bubble time of interleaved 1F1B is (p - 1)(f + b) / v (https://arxiv.org/abs/2104.04473, section 2.2)."""
    ranks, stages_per_rank, microbatches = 2, 2, 4
    table = find_schedule("Interleaved1F1B").table(ranks, microbatches, stages_per_rank)
    end = window(simulate(table, durations(ranks * stages_per_rank, 0.5, 1.0)))[1]
    assert end == pytest.approx(3.0 * microbatches + 3.0 * (ranks - 1) / stages_per_rank)


def test_weight_halves_fill_the_bubble() -> None:
    """A hand-made zero-bubble order: the weight halves run where 1F1B would wait."""
    f, i, w = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    table: Table = {
        0: [Action(f, 0, 0), Action(f, 0, 1), Action(i, 0, 0), Action(w, 0, 0), Action(i, 0, 1), Action(w, 0, 1)],
        1: [Action(f, 1, 0), Action(i, 1, 0), Action(f, 1, 1), Action(i, 1, 1), Action(w, 1, 0), Action(w, 1, 1)],
    }
    timeline = simulate(table, {(k, s): 1.0 for k in "FIW" for s in (0, 1)})
    assert [(m.kind, m.microbatch, m.start) for m in timeline[0]] == [
        ("F", 0, 0), ("F", 1, 1), ("I", 0, 3), ("W", 0, 4), ("I", 1, 5), ("W", 1, 6),
    ]  # fmt: skip
    assert [(m.kind, m.microbatch, m.start) for m in timeline[1]] == [
        ("F", 0, 1), ("I", 0, 2), ("F", 1, 3), ("I", 1, 4), ("W", 0, 5), ("W", 1, 6),
    ]  # fmt: skip


def test_prologue_does_not_wait_and_transfer_does() -> None:
    table = {0: [Action(Kind.FORWARD, 0, 0)], 1: [Action(Kind.FORWARD, 1, 0)]}
    times = {("F", 0): 2.0, ("F", 1): 1.0, ("PROLOGUE", 1): 1.5}
    assert simulate(table, times, transfer=0.25)[1] == [Mark("PROLOGUE", 1, 0, 0.0, 1.5), Mark("F", 1, 0, 2.25, 3.25)]
    assert simulate(table, {**times, ("PROLOGUE", 1): 5.0})[1][-1] == Mark("F", 1, 0, 5.0, 6.0)


def test_no_transfer_between_stages_of_one_rank() -> None:
    table = {0: [Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 1, 0)]}
    assert window(simulate(table, {("F", 0): 1.0, ("F", 1): 1.0}, transfer=9.0)) == (0.0, 2.0)


def test_dependencies_hold_in_every_schedule() -> None:
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"):
        spec = find_schedule(name)
        stages = 4 * spec.stages_per_rank
        table = spec.table(4, 8, spec.stages_per_rank)
        timeline = simulate(table, {key: t * (1 + key[1] % 3) for key, t in durations(stages).items()})
        assert table_of(timeline) == table
        at = {(m.kind, m.stage, m.microbatch): m for marks in timeline.values() for m in marks}
        for (kind, stage, mb), mark in at.items():
            need = at.get((kind, stage + (1 if kind == "B" else -1), mb)) or at["F", stage, mb]
            assert need is mark or need.end <= mark.start, (name, mark)


def test_a_table_that_waits_for_itself_is_refused() -> None:
    f, b = Kind.FORWARD, Kind.BACKWARD
    table = {0: [Action(f, 0, 0), Action(b, 0, 0)], 1: [Action(b, 1, 0), Action(f, 1, 0)]}
    with pytest.raises(PipelineError, match=r"rank 0 at 0B0, rank 1 at 1B0"):
        simulate(table, durations(2))


def test_a_missing_duration_is_named() -> None:
    with pytest.raises(PipelineError, match='"B" of stage 1'):
        simulate(find_schedule("1F1B").table(2, 2, 1), {("F", 0): 1.0, ("B", 0): 1.0, ("F", 1): 1.0})


def test_mean_durations_ignores_waits() -> None:
    marks = [Mark("F", 0, 0, 0.0, 1.0), Mark("F", 0, 1, 1.0, 4.0), Mark("WAIT_B", 0, 0, 4.0, 9.0)]
    assert mean_durations(marks) == {("F", 0): 2.0}


def test_accumulated_batches_are_runs_of_their_own() -> None:
    first = [Mark("PROLOGUE", 1, 0, 0, 1), Mark("F", 1, 0, 1, 2), Mark("B", 1, 0, 2, 3), Mark("SEND", -1, -1, 3, 4)]
    second = [Mark(m.kind, m.stage, m.microbatch, m.start + 5, m.end + 5) for m in first]
    last = [Mark("OPTIMIZER", -1, -1, 10, 11)]
    assert split_runs(first + second + last) == [first, second + last]
    assert split_runs(first) == [first]
    assert split_runs([]) == [[]]
