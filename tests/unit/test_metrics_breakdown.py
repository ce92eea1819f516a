"""Exact answers on synthetic steps; wrong ways of counting give other numbers."""

from __future__ import annotations

import random

import pytest

from lightning_hybrid.metrics import COMMUNICATION, PARTS, Span, break_down, spans_of_marks
from lightning_hybrid.metrics.breakdown import cut, mean, overlap, split_wait
from lightning_hybrid.pipeline.timeline import Mark


def nonzero(seconds: dict[str, float]) -> dict[str, float]:
    return {part: pytest.approx(value) for part, value in seconds.items() if value}


def first_part(spans: list[Span], second: int) -> str:
    return min((span.part for span in spans if span.start <= second < span.end), key=PARTS.index, default="other")


def test_overlap_counts_once_as_compute() -> None:
    """A 4 s all-reduce, 3 s of it behind computation: 1 s is exposed."""
    spans = [Span("compute", 0, 6), Span("communication_tensor", 3, 7), Span("communication_tensor", 5, 7)]
    got = break_down(spans, start=0, end=10)
    assert nonzero(dict(got.seconds)) == {"compute": 6, "communication_tensor": 1, "other": 3}
    wrong = sum(span.end - span.start for span in spans)
    assert wrong == 12 > got.step  # what adding up durations would say


def test_two_axes_at_once_count_once() -> None:
    got = break_down([Span("communication_data_shard", 0, 4), Span("communication_tensor", 2, 6)], start=0, end=6)
    assert nonzero(dict(got.seconds)) == {"communication_data_shard": 2, "communication_tensor": 4}
    assert got.communication == 6


def test_no_communication_is_zero_and_not_nan() -> None:
    got = break_down([Span("compute", 0, 1)], start=0, end=1)
    assert got.communication == 0
    assert all(got.shares[part] == 0 for part in COMMUNICATION)
    empty = break_down([], start=2, end=2)
    assert empty.step == 0
    assert set(empty.shares.values()) == {0.0}
    assert tuple(empty.seconds) == PARTS


def test_spans_are_clipped_to_the_step() -> None:
    got = break_down([Span("compute", -5, 1), Span("optimizer", 9, 20), Span("data_wait", 30, 40)], start=0, end=10)
    assert nonzero(dict(got.seconds)) == {"compute": 1, "optimizer": 1, "other": 8}


def test_unknown_collectives_are_reported_and_unknown_parts_refused() -> None:
    got = break_down([Span("communication_unknown", 0, 1)], start=0, end=2)
    assert got.shares["communication_unknown"] == 0.5
    with pytest.raises(ValueError, match="communication_tensr"):
        break_down([Span("communication_tensr", 0, 1)], start=0, end=2)
    with pytest.raises(ValueError, match="before its start"):
        break_down([], start=1, end=0)


def test_parts_always_add_up_and_each_instant_has_the_first_part() -> None:
    """Random overlapping spans against an instant-by-instant count on a grid of integers."""
    rng = random.Random(0)
    for _ in range(50):
        spans = [Span(rng.choice(PARTS), a, a + rng.randint(0, 8)) for a in (rng.randint(-5, 30) for _ in range(25))]
        got = break_down(spans, start=0, end=25)
        assert got.step == pytest.approx(25, abs=1e-12)
        for part in PARTS:
            assert got.seconds[part] == sum(part == first_part(spans, second) for second in range(25))


def test_move_keeps_the_sum() -> None:
    got = break_down([Span("compute", 0, 8)], start=0, end=10).move("compute", {"communication_tensor": 0.25})
    assert nonzero(dict(got.seconds)) == {"compute": 6, "communication_tensor": 2, "other": 2}


def test_cut() -> None:
    spans = [Span("compute", 0, 10), Span("compute", 20, 30)]
    assert cut(spans, [(2, 3), (2.5, 4), (8, 22), (29, 40)]) == [
        Span("compute", 0, 2), Span("compute", 4, 8), Span("compute", 22, 29),
    ]  # fmt: skip
    assert cut(spans, []) == spans
    assert cut(spans, [(-1, 50)]) == []


def test_wait_is_bubble_until_the_peer_had_computed() -> None:
    wait = Mark("WAIT_F", 1, 0, 2.0, 6.0)
    assert split_wait(wait, 5.0) == [Span("bubble", 2, 5), Span("communication_pipeline", 5, 6)]
    assert split_wait(wait, 1.0) == [Span("communication_pipeline", 2, 6)]
    assert split_wait(wait, 7.0) == [Span("bubble", 2, 6)]
    assert split_wait(wait, None) == [Span("bubble", 2, 6)]


# Two stages, two micro-batches, GPipe: F = 1 s, B = 2 s, a message takes 0.5 s.
FIRST = [
    Mark("F", 0, 0, 0, 1), Mark("F", 0, 1, 1, 2), Mark("WAIT_B", 0, 1, 2, 6), Mark("B", 0, 1, 6, 8),
    Mark("WAIT_B", 0, 0, 8, 8.1), Mark("B", 0, 0, 8.1, 10.1), Mark("REDUCE", 0, -1, 10.1, 10.4),
    Mark("OPTIMIZER", 0, -1, 10.4, 11),
]  # fmt: skip
LAST = [
    Mark("PROLOGUE", 1, 0, 0, 0.25), Mark("WAIT_F", 1, 0, 0.25, 1.5),
    Mark("F", 1, 0, 1.5, 2.5), Mark("F", 1, 1, 2.5, 3.5),
    Mark("B", 1, 1, 3.5, 5.5), Mark("B", 1, 0, 5.5, 7.5), Mark("SEND", 1, 0, 7.5, 8.1), Mark("REDUCE", 1, -1, 8.1, 8.4),
    Mark("SYNC", 1, -1, 8.4, 10.3), Mark("OPTIMIZER", 1, -1, 10.3, 11),
]  # fmt: skip


def test_marks_of_a_pipeline_step() -> None:
    first = break_down(spans_of_marks(FIRST, pipeline=[FIRST, LAST]), start=0, end=11.5)
    assert nonzero(dict(first.seconds)) == {
        "compute": 6.0, "bubble": 3.5, "communication_pipeline": 0.6, "communication_data_shard": 0.3,
        "optimizer": 0.6, "other": 0.5,
    }  # fmt: skip
    spans = spans_of_marks(LAST, pipeline=[FIRST, LAST], reduce_part="communication_data_replicate")
    last = break_down(spans, start=0, end=11.5)
    assert nonzero(dict(last.seconds)) == {
        "compute": 6.25,
        "bubble": 0.75 + 0.5 + 1.7,  # WAIT_F until stage 0 had computed; SEND while stage 0 computed; SYNC until 10.1
        "communication_pipeline": 0.5 + 0.1,
        "communication_world": 0.2,
        "communication_data_replicate": 0.3,
        "optimizer": 0.7,
        "other": 0.5,
    }
    assert first.step == last.step == pytest.approx(11.5)


def test_sync_inside_of_the_optimizer_is_not_optimizer() -> None:
    """The global norm waits for the first stage's last backward, at 4 s, and then takes half a second."""
    marks = [Mark("B", 1, 0, 0, 1), Mark("SYNC", -1, -1, 1.5, 4.5), Mark("OPTIMIZER", -1, -1, 1, 5)]
    got = break_down(spans_of_marks(marks, pipeline=[marks, [Mark("B", 0, 0, 1, 4)]]), start=0, end=5)
    assert nonzero(dict(got.seconds)) == {
        "compute": 1, "bubble": 2.5, "communication_world": 0.5, "optimizer": 1,
    }  # fmt: skip


def test_an_exchange_of_replicas_inside_of_the_optimizer_is_theirs() -> None:
    marks = [Mark("B", 0, 0, 0, 1), Mark("REPLICAS", -1, -1, 2, 4.5), Mark("OPTIMIZER", -1, -1, 1, 5)]
    got = break_down(spans_of_marks(marks), start=0, end=5)
    assert nonzero(dict(got.seconds)) == {"compute": 1, "communication_data_replicate": 2.5, "optimizer": 1.5}


def test_idle_tail_of_a_stage_is_bubble_but_waiting_for_data_is_not() -> None:
    early = [Mark("B", 1, 0, 0, 1)]
    late = [Mark("B", 0, 0, 1, 4)]
    spans = [*spans_of_marks(early, pipeline=[late, early]), Span("data_wait", 3, 6)]
    assert nonzero(dict(break_down(spans, start=0, end=6).seconds)) == {"compute": 1, "bubble": 2, "data_wait": 3}


def test_excluded_stretches_do_not_count() -> None:
    """A validation of 3 s inside of a step of 10 s, half of it under a wait that the marks also saw."""
    spans = [Span("compute", 0, 4), Span("bubble", 3, 6), Span("optimizer", 9, 10)]
    got = break_down(spans, start=0, end=10, exclude=[(5, 8), (5, 6)])
    assert nonzero(dict(got.seconds)) == {"compute": 4, "bubble": 1, "optimizer": 1, "other": 1}
    assert got.step == pytest.approx(7)
    assert break_down(spans, start=0, end=10).step == 10  # what forgetting the validation would say


def test_overlap_and_mean() -> None:
    windows = [Span("compute", 0, 2), Span("compute", 5, 9)]
    spans = [Span("communication_tensor", 1, 6), Span("communication_data_shard", 8, 20)]
    assert overlap(spans, windows) == {"communication_tensor": 2, "communication_data_shard": 1}
    assert overlap([], windows) == {}
    nested = [Span("compute", 0, 9), Span("compute", 1, 2), Span("compute", 3, 4)]
    assert overlap([Span("communication_tensor", 5, 7)], nested) == {"communication_tensor": 2}


def test_optimizers_inside_of_a_manual_training_step_are_optimizer() -> None:
    marks = [Mark("F", 0, 0, 0, 10), Mark("B", 0, 0, 2, 3), Mark("OPTIMIZER", -1, -1, 3, 5), Mark("SYNC", -1, -1, 4, 5)]
    got = break_down(spans_of_marks(marks), start=0, end=10)
    assert nonzero(dict(got.seconds)) == {"compute": 8, "optimizer": 1, "communication_world": 1}
    both = mean([break_down([Span("compute", 0, 1)], start=0, end=2), break_down([], start=0, end=4)])
    assert nonzero(dict(both.seconds)) == {"compute": 0.5, "other": 2.5}


def test_a_send_without_a_stage_is_judged_by_the_neighbours_of_its_rank() -> None:
    marks = [Mark("B", 1, 0, 0, 1), Mark("SEND", -1, -1, 1, 5)]
    near, far = [Mark("B", 0, 0, 1, 3)], [Mark("B", 3, 0, 0, 4.5)]
    got = break_down(spans_of_marks(marks, pipeline=[near, marks, far]), start=0, end=5)
    assert nonzero(dict(got.seconds)) == {"compute": 1, "bubble": 2, "communication_pipeline": 2}
