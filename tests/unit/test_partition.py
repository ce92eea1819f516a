"""Which blocks go to which stage."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.pipeline.partition import partition_blocks
from lightning_hybrid.pipeline.schedule import find_schedule


def sizes(ranges: list[range]) -> list[int]:
    assert [i for stage in ranges for i in stage] == list(range(ranges[-1].stop))
    return [len(stage) for stage in ranges]


def test_stages_are_balanced_by_cost() -> None:
    assert sizes(partition_blocks([1.0] * 8, 4)) == [2, 2, 2, 2]
    assert sizes(partition_blocks([1.0] * 7, 3)) == [2, 2, 3]
    assert sizes(partition_blocks([1.0] * 8, 2, after=2.0)) == [5, 3]
    assert sizes(partition_blocks([1.0] * 8, 2, before=2.0)) == [3, 5]
    assert sizes(partition_blocks([4.0, 1.0, 1.0, 1.0, 1.0], 2)) == [1, 4]


def test_no_cut_has_a_cheaper_dearest_stage() -> None:
    costs, before, after = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0], 2.0, 6.0
    found = partition_blocks(costs, 3, before=before, after=after)
    cuts = [(0, *middle, len(costs)) for middle in combinations(range(1, len(costs)), 2)]
    assert dearest([(r.start, r.stop) for r in found], costs, before, after) == min(
        dearest(list(pairwise(ends)), costs, before, after) for ends in cuts
    )


def dearest(stages: list[tuple[int, int]], costs: list[float], before: float, after: float) -> float:
    last = len(costs)
    return max(sum(costs[a:b]) + before * (a == 0) + after * (b == last) for a, b in stages)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("ZBVZeroBubble", 2), ("Interleaved1F1B", 4), ("DualPipeV", 4)])
def test_virtual_stages_are_balanced_by_rank(schedule: str, num_ranks: int) -> None:
    """No single boundary can be moved so that the most loaded rank gets cheaper; and it is cheaper than before."""
    costs, after = [1.0] * 16, 2.6
    placement = find_schedule(schedule).ranks_of_stages(num_ranks, 2)

    def most(ranges: list[range]) -> float:
        loads = [0.0] * num_ranks
        for stage, blocks in enumerate(ranges):
            loads[placement[stage]] += sum(costs[i] for i in blocks) + after * (stage == len(ranges) - 1)
        return max(loads)

    by_stage = partition_blocks(costs, len(placement), after=after)
    by_rank = partition_blocks(costs, len(placement), after=after, placement=placement)
    assert most(by_rank) <= most(by_stage)
    ends = [0, *(blocks.stop for blocks in by_rank)]
    for i in range(1, len(placement)):
        for step in (-1, 1):
            moved = [*ends[:i], ends[i] + step, *ends[i + 1 :]]
            if all(a < b for a, b in pairwise(moved)):
                assert most([range(a, b) for a, b in pairwise(moved)]) >= most(by_rank)


def test_one_stage_for_each_rank_needs_no_placement() -> None:
    costs = [1.0, 2.0, 3.0, 4.0]
    assert partition_blocks(costs, 2, placement=[0, 1]) == partition_blocks(costs, 2)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"5 pipeline stages.*has 4"):
        partition_blocks([1.0] * 4, 5)
