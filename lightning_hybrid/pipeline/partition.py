"""Which blocks go to which stage: balanced by cost, in order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lightning_hybrid.errors import ConfigurationError

__all__ = ["partition_blocks"]


def partition_blocks(costs: Sequence[float], num_stages: int, *, before: float = 0.0, after: float = 0.0) -> list[range]:
    """Cut blocks into contiguous stages so that the most expensive stage is as cheap as possible.

    Args:
        costs: Cost of each block, in any unit.
        num_stages: Number of stages; each gets at least one block.
        before: Cost of what runs before the first block (embeddings), borne by the first stage.
        after: Cost of what runs after the last block (head, loss), borne by the last stage.

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

    # best[s][n]: smallest possible maximum when the first n blocks form s stages; the last cut is remembered
    best = [cost(0, n) for n in range(num_blocks + 1)]
    cuts: list[list[int]] = []
    for stage in range(2, num_stages + 1):
        row, cut = [float("inf")] * (num_blocks + 1), [0] * (num_blocks + 1)
        for n in range(stage, num_blocks + 1):
            # of equal maxima take the later cut, so that earlier stages (which hold more activations) are not starved
            row[n], cut[n] = min((max(best[k], cost(k, n)), -k) for k in range(stage - 1, n))
            cut[n] = -cut[n]
        best = row
        cuts.append(cut)
    ends = [num_blocks]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends.append(0)
    ends.reverse()
    return [range(first, last) for first, last in zip(ends, ends[1:], strict=False)]
