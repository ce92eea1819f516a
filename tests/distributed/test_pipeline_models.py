"""Any model that people bring, unmodified, at 2 and 4 stages: losses, gradients and updates equal one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, trace
from tests.distributed.zoo import ZOO
from tests.ranks import run_ranks


def run(rank: int, name: str, degrees: dict[str, Any], batch_size: int = 8) -> Trace:
    torch.manual_seed(0)
    entry = ZOO[name]
    return trace(rank, entry.make, entry.rows(), degrees, batch_size=batch_size)


def runs(rank: int, name: str, degrees: list[dict[str, Any]]) -> list[Trace]:
    return [run(rank, name, each) for each in degrees]


@pytest.mark.parametrize("name", sorted(ZOO))
def test_equals_one_process(name: str) -> None:
    expected = run_ranks(1, run, name, ONE_PROCESS)[0]
    schedules = ["1F1B", "InterleavedZeroBubble", "DualPipeV"]
    found = run_ranks(2, runs, name, [{"pipeline_parallel_size": 2, "schedule": each} for each in schedules])
    for traces in zip(*found, strict=True):
        assert_equal(expected, list(traces))
    assert_equal(expected, run_ranks(4, run, name, {"pipeline_parallel_size": 4}))
