"""Which blocks go to which stage: balanced by cost, in order. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from lightning_hybrid.errors import ConfigurationError

__all__ = ["partition_blocks"]


def partition_blocks(
    costs: Sequence[float],
    num_stages: int,
    *,
    before: float = 0.0,
    after: float = 0.0,
    placement: Sequence[int] | None = None,
) -> list[range]:
    """Cut blocks into contiguous stages so that the most expensive stage is as cheap as possible.

    With virtual stages it is the most loaded *rank* that counts: from that cut on, boundaries are moved by one block
    for as long as this helps.

    Args:
        costs: Cost of each block, in any unit.
        num_stages: Number of stages; each gets at least one block.
        before: Cost of what runs before the first block (embeddings), borne by the first stage.
        after: Cost of what runs after the last block (head, loss), borne by the last stage.
        placement: For each stage the rank that runs it; by default each has one of its own.

    Returns:
        One range of block indices for each stage; together they hold each block exactly once, in order.

    Raises:
        ConfigurationError: if there are more stages than blocks.
    """
    num_blocks = len(costs)
    if num_stages > num_blocks:
        raise ConfigurationError(
            f"{num_stages} pipeline stages need at least as many blocks, but the model has {num_blocks};"
            f" use at most {num_blocks} stages (pipeline_parallel_size x stages per rank)."
        )
    sums = [0.0, *accumulate(costs)]

    def cost(first: int, last: int) -> float:
        return sums[last] - sums[first] + before * (first == 0) + after * (last == num_blocks)

    # best[n]: smallest (maximum, sum of squares) when the first n blocks form the stages so far; cuts remember where.
    # The squares choose among equal maxima the evenest cut (3, 2, 2 rather than 3, 3, 1).
    best = [(cost(0, n), cost(0, n) ** 2) for n in range(num_blocks + 1)]
    cuts: list[list[int]] = []
    for stage in range(2, num_stages + 1):
        row, cut = [(float("inf"), float("inf"))] * (num_blocks + 1), [0] * (num_blocks + 1)
        for n in range(stage, num_blocks + 1):
            options = ((max(best[k][0], cost(k, n)), best[k][1] + cost(k, n) ** 2, k) for k in range(stage - 1, n))
            *row_n, cut[n] = min(options)
            row[n] = (row_n[0], row_n[1])
        best = row
        cuts.append(cut)
    ends = [num_blocks]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends.append(0)
    ends.reverse()
    if placement is not None and len(set(placement)) < num_stages:
        ends = _balance_ranks(ends, placement, cost)
    return [range(first, last) for first, last in pairwise(ends)]


def _balance_ranks(ends: list[int], placement: Sequence[int], cost: Callable[[int, int], float]) -> list[int]:
    """Move boundaries by one block for as long as the most loaded rank, then the evenness of all stages, gains."""

    def badness(ends: list[int]) -> tuple[float, float]:
        stages = [cost(first, last) for first, last in pairwise(ends)]
        loads = dict.fromkeys(placement, 0.0)
        for rank, load in zip(placement, stages, strict=True):
            loads[rank] += load
        return max(loads.values()), sum(load**2 for load in stages)

    while True:
        moved = [
            [*ends[:i], ends[i] + step, *ends[i + 1 :]]
            for i in range(1, len(ends) - 1)
            for step in (-1, 1)
            if ends[i - 1] < ends[i] + step < ends[i + 1]
        ]
        best = min(moved, key=badness, default=ends)
        if badness(best) >= badness(ends):
            return ends
        ends = best
