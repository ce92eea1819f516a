"""The measured bubble beside its schedule's own; what stages, messages and the schedule each cost."""

from __future__ import annotations

import pytest

from lightning_hybrid.metrics import idle_share, measure_bubble
from lightning_hybrid.pipeline.schedule import find_schedule
from lightning_hybrid.pipeline.timeline import Mark, simulate

RANKS, MICROBATCHES = 4, 8
TABLE = find_schedule("1F1B").table(RANKS, MICROBATCHES, 1)
TEXTBOOK = (RANKS - 1) / (MICROBATCHES + RANKS - 1)


def run(slow_stage: int | None = None, slowdown: float = 2.0, transfer: float = 0.0) -> dict[int, list[Mark]]:
    factor = [slowdown if stage == slow_stage else 1.0 for stage in range(RANKS)]
    times = {(kind, s): t * factor[s] for kind, t in (("F", 1.0), ("B", 2.0)) for s in range(RANKS)}
    return simulate(TABLE, times, transfer=transfer)


def test_a_perfect_run_has_the_schedules_bubble_and_nothing_else() -> None:
    bubble = measure_bubble(run(), TABLE)
    assert bubble.measured == pytest.approx(TEXTBOOK)
    assert (bubble.imbalance, bubble.overhead, bubble.slowdown) == pytest.approx((0, 0, 1))


def test_messages_are_overhead_and_not_imbalance() -> None:
    bubble = measure_bubble(run(transfer=0.5), TABLE)
    assert bubble.ideal == pytest.approx(TEXTBOOK)
    assert bubble.imbalance == pytest.approx(0)
    assert bubble.overhead == pytest.approx(idle_share(run(transfer=0.5)) - TEXTBOOK)
    assert bubble.overhead > 0.02


def test_a_slow_stage_is_imbalance_and_is_named() -> None:
    bubble = measure_bubble(run(slow_stage=2), TABLE)
    assert bubble.schedule == pytest.approx(TEXTBOOK)
    assert bubble.overhead == pytest.approx(0)
    assert bubble.imbalance == pytest.approx(2 / 11)  # 66 s instead of the balanced 41.25 s
    assert (bubble.slowest_stage, bubble.slowdown) == (2, pytest.approx(1.6))  # 6 s against a mean of 3.75 s


def test_shares_add_up() -> None:
    bubble = measure_bubble(run(slow_stage=0, transfer=0.3), TABLE)
    assert bubble.measured == pytest.approx(bubble.schedule + bubble.imbalance + bubble.overhead, abs=1e-12)


def test_idle_share_by_hand() -> None:
    """2 ranks in a window of 4 s, busy 3 s and 1 s: half is idle. Waits and the optimizer are no work of the window."""
    timeline = {
        0: [Mark("F", 0, 0, 1, 2), Mark("WAIT_B", 0, 0, 2, 3), Mark("B", 0, 0, 3, 5), Mark("OPTIMIZER", 0, -1, 5, 9)],
        1: [Mark("WAIT_F", 1, 0, 0, 2), Mark("F", 1, 0, 2, 2.5), Mark("B", 1, 0, 2.5, 3)],
    }
    assert idle_share(timeline) == pytest.approx(0.5)
    wrong = 1 - sum(m.duration for marks in timeline.values() for m in marks) / (2 * 4)  # counts waits as work
    assert wrong != pytest.approx(0.5)


def test_nothing_ran() -> None:
    assert idle_share({0: [], 1: []}) == 0.0
    assert idle_share({}) == 0.0
    one = {0: [Mark("F", 0, 0, 0, 1), Mark("B", 0, 0, 1, 3)]}
    assert measure_bubble(one, find_schedule("1F1B").table(1, 1, 1)).measured == pytest.approx(0)


@pytest.mark.parametrize(
    ("schedule", "idle"),
    [
        ("GPipe", 3 / 11), ("1F1B", 3 / 11), ("Interleaved1F1B", 3 / 19), ("LoopedBFS", 3 / 19),
        ("InterleavedZeroBubble", 3 / 51), ("ZBVZeroBubble", 3 / 51), ("DualPipeV", 3 / 51),
    ],
)  # fmt: skip
def test_textbook_bubbles(schedule: str, idle: float) -> None:
    """4 ranks, 8 micro-batches, F = I = W = 1: (p - 1) / (v m + p - 1), and (p - 1) F beside 3 v m for zero bubble."""
    spec = find_schedule(schedule)
    table = spec.table(RANKS, MICROBATCHES, spec.stages_per_rank)
    stages = range(RANKS * spec.stages_per_rank)
    times = {(kind, s): t for kind, t in (("F", 1.0), ("B", 2.0), ("I", 1.0), ("W", 1.0)) for s in stages}
    bubble = measure_bubble(simulate(table, times), table)
    assert bubble.measured == pytest.approx(idle)
    assert (bubble.imbalance, bubble.overhead) == pytest.approx((0, 0))
