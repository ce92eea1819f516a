"""The main promise: at all degrees, with accumulation and clipping, a run equals one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lightning_hybrid.parallelize
import lightning_hybrid.sharding
import lightning_hybrid.strategy
import lightning_hybrid.training.pipelined
import lightning_hybrid.training.torch_clipping
import tests.distributed.equality
from examples.gpt.module import LitGPT
from examples.gpt.train import TP_PLAN
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.ranks import run_ranks

LENGTH = 16
ROWS = torch.randint(0, 256, (24, LENGTH + 1), generator=torch.Generator().manual_seed(1))
VARIANTS = [{"accumulate_grad_batches": a, "gradient_clip_val": c} for a in (1, 3) for c in (None, 0.3)]
TRIPLES = [(d, t, p) for n in (2, 4, 8) for d in (1, 2, 4, 8) for t in (1, 2, 4) for p in (1, 2, 4) if d * t * p == n]
"""All degrees (data, tensor, pipeline) with product 2, 4 or 8 that the demo's 4 heads and 4 blocks allow."""


class SGDGPT(LitGPT):
    """The demo's model under SGD, which shows a wrong constant factor where Adam hides it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_module() -> SGDGPT:
    return SGDGPT(num_blocks=4, width=16, num_heads=4, context_length=LENGTH)


def degrees_of(data: int, tensor: int, pipeline: int, **more: Any) -> dict[str, Any]:
    return {
        "data_parallel_size": data,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "tp_plan": TP_PLAN if tensor > 1 else None,
        **more,
    }


def all_variants(
    rank: int,
    degrees: dict[str, Any],
    sabotage: Callable[[], Any] | None = None,
    chosen: tuple[int, ...] = (0, 1, 2, 3),
) -> list[Trace]:
    return [trace(rank, make_module, ROWS, degrees, sabotage=sabotage, **VARIANTS[i]) for i in chosen]


@pytest.fixture(scope="module")
def expected() -> list[Trace]:
    return run_ranks(1, all_variants, ONE_PROCESS)[0]


@pytest.mark.parametrize("triple", TRIPLES, ids=lambda triple: "x".join(map(str, triple)))
def test_equals_one_process(triple: tuple[int, int, int], expected: list[Trace]) -> None:
    num_ranks = triple[0] * triple[1] * triple[2]
    chosen = (0, 1, 2, 3) if num_ranks == 2 else (1, 2) if num_ranks == 4 else (3,)  # many ranks take their time
    found = run_ranks(num_ranks, all_variants, degrees_of(*triple), None, chosen, timeout=240)
    for index, traces in zip(chosen, zip(*found, strict=True), strict=True):
        assert_equal(expected[index], list(traces))


def test_replicas_equal_one_process(expected: list[Trace]) -> None:
    chosen = (1, 2)
    found = run_ranks(4, all_variants, degrees_of(4, 1, 1, replicate_size=2), None, chosen, timeout=120)
    for index, traces in zip(chosen, zip(*found, strict=True), strict=True):
        assert_equal(expected[index], list(traces))


# ---- the same tests must fail when something is wrong ------------------------------------------------------------


def all_data_ranks_read_the_same() -> None:
    right = tests.distributed.equality.DistributedSampler
    tests.distributed.equality.DistributedSampler = lambda rows, num_replicas, rank, shuffle: right(
        rows, num_replicas=num_replicas, rank=0, shuffle=shuffle
    )


def mean_taken_twice() -> None:
    right = lightning_hybrid.training.pipelined.reduce_gradients
    lightning_hybrid.training.pipelined.reduce_gradients = lambda module, root, scale: right(module, root, scale / 2)


def local_norm() -> None:
    def clip(parameters: Any, max_norm: float, **_: Any) -> Any:
        lightning_hybrid.training.torch_clipping._parts.clear()  # which would have refused it
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    lightning_hybrid.strategy.clip_grad_norm = clip


def partial_sums_not_added() -> None:
    import lightning_hybrid.tensor_parallel.collectives as collectives

    collectives._LeavePartial.forward = staticmethod(lambda ctx, x, group: x.clone())
    lightning_hybrid.parallelize.check_plan = lambda module, mesh, plan, calls, **_: plan  # which would have refused it


@pytest.mark.parametrize(
    ("sabotage", "triple", "variants"),
    [
        (mean_taken_twice, (1, 1, 2), [0, 2]),
        (local_norm, (1, 1, 2), [1, 3]),
        (all_data_ranks_read_the_same, (2, 1, 1), [0]),
        (partial_sums_not_added, (1, 2, 1), [0]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_run_is_noticed(
    sabotage: Callable[[], None], triple: tuple[int, int, int], variants: list[int], expected: list[Trace]
) -> None:
    found = run_ranks(2, all_variants, degrees_of(*triple), sabotage, timeout=120)
    for index in variants:
        with must_differ():
            assert_equal(expected[index], [traces[index] for traces in found])
