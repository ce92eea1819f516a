"""Case MEAS-1: 192 tokens/s, 24 for each device, efficiency 0.80; and what the usual mistakes would say."""

from __future__ import annotations

import pytest

from lightning_hybrid.layout import Layout
from lightning_hybrid.metrics import Reference, StepClock, Throughput, compare, count_once

LAYOUT = Layout(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)
TOKENS_PER_REPLICA = 96


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def train(accumulate: int, *, num_warmup: int = 1) -> Throughput:
    """Optimizer steps of 5, 1, 1, 1, 1 s for each accumulated batch, a 3 s validation and a 2 s save in between."""
    time = FakeClock()
    clock = StepClock(time)
    clock.lap()
    seconds, tokens, num_steps = 0.0, 0, 0
    for step, per_batch in enumerate([5.0, 1.0, 1.0, 1.0, 1.0]):
        for _ in range(accumulate):
            time.now += per_batch
        lap = clock.lap()
        assert lap is not None
        if step >= num_warmup:
            seconds += lap
            num_steps += 1
            tokens += count_once([TOKENS_PER_REPLICA * accumulate] * LAYOUT.world_size, LAYOUT)
        if step == 2:
            clock.pause("validation")
            time.now += 3.0
            clock.resume("validation")
            clock.pause("checkpoint")
            time.now += 2.0
            clock.resume("checkpoint")
    return Throughput(num_devices=8, seconds=seconds, num_steps=num_steps, samples=tokens // 12, tokens=tokens)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_exact_numbers(accumulate: int) -> None:
    got = train(accumulate)
    assert got.num_steps == 4
    assert got.seconds == pytest.approx(4.0 * accumulate)
    assert got.tokens_per_second == pytest.approx(192)
    assert got.tokens_per_second / got.num_devices == pytest.approx(24)
    assert got.samples_per_second == pytest.approx(16)
    assert got.batch_size == pytest.approx(16 * accumulate)


def test_usual_mistakes_give_other_numbers() -> None:
    everything = train(1, num_warmup=0)
    assert everything.tokens_per_second == pytest.approx(106.67, abs=0.01)  # the first step averaged in
    counts = [TOKENS_PER_REPLICA] * 8
    assert count_once(counts, LAYOUT) == 192
    assert sum(counts) == 768  # every rank counted
    assert sum(n for r, n in enumerate(counts) if LAYOUT.coordinate(r).pipeline == 0) == 384  # data x tensor counted


def test_uneven_batches_are_added_up_by_data_rank() -> None:
    layout = Layout(data_parallel_size=2, tensor_parallel_size=2)
    assert count_once([5, 5, 3, 3], layout) == 8
    with pytest.raises(ValueError, match="3 counts were given for 4 ranks"):
        count_once([1, 2, 3], layout)


def test_efficiency_against_one_device() -> None:
    got = train(1)
    run = Reference(num_devices=8, tokens_per_second=got.tokens_per_second, global_batch_size=16, model="gpt")
    baseline = Reference(num_devices=1, tokens_per_second=30.0, global_batch_size=16, model="gpt")
    scaling = compare(run, baseline)
    assert scaling.kind == "strong"
    assert scaling.efficiency == pytest.approx(0.80)
    assert scaling.speedup == pytest.approx(6.4)
    assert scaling.per_doubling == pytest.approx(6.4 ** (1 / 3))


def test_pauses_that_overlap_count_once() -> None:
    time = FakeClock()
    clock = StepClock(time)
    assert clock.lap() is None
    time.now += 1
    clock.pause("validation")
    clock.pause("validation")
    time.now += 1
    clock.pause("checkpoint")
    time.now += 1
    clock.resume("validation")
    time.now += 1
    clock.resume("checkpoint")
    clock.resume("never paused")
    time.now += 1
    assert clock.lap() == pytest.approx(2)


def test_a_pause_may_reach_over_the_end_of_a_step() -> None:
    time = FakeClock()
    clock = StepClock(time)
    clock.lap()
    time.now += 1
    clock.pause("checkpoint")
    time.now += 2
    assert clock.lap() == pytest.approx(1)
    time.now += 2
    clock.resume("checkpoint")
    time.now += 1
    assert clock.lap() == pytest.approx(1)


def test_a_step_may_be_closed_afterwards() -> None:
    """The end of the optimizer step is known from its mark, a moment after it."""
    time = FakeClock()
    clock = StepClock(time)
    clock.lap()
    time.now += 2
    ended = time.now
    clock.pause("checkpoint")
    time.now += 5
    clock.resume("checkpoint")
    assert clock.lap(ended) == pytest.approx(2)
    time.now += 1
    assert clock.lap() == pytest.approx(1)
    clock.reset()
    assert clock.lap() is None


def test_nothing_timed_is_zero_and_not_an_error() -> None:
    empty = Throughput(num_devices=8, seconds=0.0, num_steps=0, samples=0)
    assert (empty.samples_per_second, empty.step_seconds, empty.batch_size) == (0.0, 0.0, 0.0)
    assert empty.tokens_per_second is None
