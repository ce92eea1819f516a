"""The first steps of ``benchmarks/long_run.py``: lengths and batch sizes that change, virtual stages, no growth."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import benchmarks.long_run
from benchmarks.long_run import SGDGPT, Record, compare, long_run
from tests.ranks import run_ranks

NUM_STEPS = 15


def run(rank: int, num_ranks: int, sabotage: Callable[[], Any] | None = None) -> Record:
    if sabotage is not None:
        sabotage()
    return long_run(NUM_STEPS, num_ranks, every=5)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    losses: list[float] = run_ranks(1, run, 1)[0].losses
    return losses


def check_growth(records: list[Record]) -> None:
    """A tensor that stays with each step would be 5 more from one count to the next."""
    for record in records:
        assert record.num_tensors[-1] - record.num_tensors[-2] < 5, record.num_tensors
        assert record.megabytes[-1] - record.megabytes[-2] < 20, record.megabytes


def test_equals_one_process_at_every_step_without_growth(expected: list[float]) -> None:
    records = run_ranks(2, run, 2, timeout=120)
    for record in records:
        assert max(compare(expected, record.losses)) < 1e-5
    check_growth(records)


def other_step_size_and_hoard() -> None:
    step, hoard = SGDGPT.training_step, []

    def wrong(self: SGDGPT, batch: Any, batch_idx: int) -> Any:
        hoard.append(step(self, batch, batch_idx))
        return hoard[-1] * 1.01

    SGDGPT.training_step = wrong  # type: ignore[method-assign]


def test_wrong_variant_is_seen(expected: list[float]) -> None:
    records = run_ranks(2, run, 2, other_step_size_and_hoard, timeout=120)
    assert max(compare(expected, records[0].losses)) > 1e-5
    with pytest.raises(AssertionError):
        check_growth(records)


def test_lengths_change_at_every_step_and_sizes_now_and_then() -> None:
    shapes = [tuple(batch.shape) for batch in benchmarks.long_run.ChangingBatches(200)]
    assert all(a[1] != b[1] for a, b in itertools.pairwise(shapes))
    assert {size for size, _ in shapes} == {6, 8, 12}
    assert len({length for _, length in shapes}) > 30
