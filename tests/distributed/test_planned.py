"""What the planner names can be run: its arguments, on as many ranks, equal to one process."""

from __future__ import annotations

from typing import Any

import torch

from lightning_hybrid.planner import Cluster, ModelProfile, Plan, plan
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, trace
from tests.distributed.zoo import LENGTH, ZOO, even_rows
from tests.ranks import run_ranks

BATCH = 30


def plans_for_six() -> list[Plan]:
    """The best plan that uses six devices, and the best of those with a pipeline."""
    profile = ModelProfile.from_module(ZOO["llama"].make(), seq_length=LENGTH)
    found = plan(profile, Cluster.named("V100-16GB", 6), global_batch=BATCH, precision="fp32", most=100).plans
    whole = [made for made in found if made.setup.num_devices == 6]
    flat = [made for made in whole if made.setup.num_microbatches == 1]  # else the Trainer accumulates
    pipelined = [made for made in whole if made.setup.layout.pipeline_parallel_size > 1]
    return [flat[0], pipelined[0]]


def test_plans_for_six_devices_run_and_equal_one_process() -> None:
    torch.manual_seed(0)
    chosen = [made.arguments() for made in plans_for_six()]
    assert chosen[1]["pipeline_parallel_size"] > 1  # type: ignore[operator]

    def run(rank: int, settings: list[dict[str, Any]]) -> list[Trace]:
        rows = even_rows(2 * BATCH)
        return [trace(rank, ZOO["llama"].make, rows, degrees, batch_size=BATCH) for degrees in settings]

    expected = run_ranks(1, run, [ONE_PROCESS])[0][0]
    for found in zip(*run_ranks(6, run, chosen), strict=True):
        assert_equal(expected, list(found))
