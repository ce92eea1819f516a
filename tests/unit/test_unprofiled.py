"""Collectives that outlive a step leave no event in its profile; others do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lightning_hybrid.measuring.unprofiled import unprofiled
from tests.ranks import run_ranks


def test_no_profiler_is_told() -> None:
    def events(rank: int) -> list[str]:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
        assert group is not None
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            dist.all_reduce(torch.ones(2), group=group)
            with unprofiled(group):
                dist.broadcast(torch.ones(2), 0, group=group)
            torch.ones(2) + 1
        dist.destroy_process_group()
        return [event.name for event in seen.events()]

    (names,) = run_ranks(1, events)
    assert any("all_reduce" in name for name in names) and "aten::add" in names
    assert not any("broadcast" in name for name in names)
