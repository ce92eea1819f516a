"""Sharding over the data axis: freed after the forward or kept, replicas of shards, shapes that do not divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid import sharding
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import Lit, generator
from tests.ranks import run_ranks

VOCABULARY, WIDTH, HIDDEN = 67, 13, 3
ROWS = torch.randint(0, VOCABULARY, (24, 8), generator=generator())
DEGREES: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel_size": 2},
    "dp4": {"data_parallel_size": 4},
    "hsdp": {"data_parallel_size": 4, "replicate_size": 2},
    "dp2-pp2": {"data_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "1F1B"},
}


class Block(nn.Module):
    """Of sizes that no degree divides; at 4 ranks one of them holds nothing of ``up``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.scale, self.gain = nn.Parameter(torch.ones(1)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class LitUneven(Lit):
    """``spare`` is in no step: its gradient is ``None``, and weight decay must leave it alone."""

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.spare, self.spare_scalar = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.0))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1) / self.temperature, batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)


def run(rank: int, degrees: dict[str, Any], sabotage: Any = None) -> list[Trace]:
    kinds = [{**degrees, "reshard_after_forward": free} for free in (True, False)] if degrees else [degrees]
    return [trace(rank, LitUneven, ROWS, kind, sabotage=sabotage) for kind in kinds]


@pytest.mark.parametrize("name", DEGREES)
def test_shards_equal_one_process(name: str) -> None:
    expected = run_ranks(1, run, ONE_PROCESS)[0][0]
    assert not any(key.startswith("spare") for key in expected.gradients[0])
    for traces in zip(*run_ranks(2 if name == "dp2" else 4, run, DEGREES[name]), strict=True):
        assert_equal(expected, list(traces))


def replicas_that_are_not_reduced() -> None:
    right = sharding.apply_sharding

    def wrong(*args: Any, **options: Any) -> Any:
        root = right(*args, **options)
        root.set_requires_all_reduce(False)  # type: ignore[operator]
        return root

    import lightning_hybrid.parallelize

    lightning_hybrid.parallelize.apply_sharding = wrong


def test_wrong_variant_replicas_that_go_their_own_way_are_seen() -> None:
    expected = run_ranks(1, run, ONE_PROCESS)[0][0]
    found = run_ranks(4, run, DEGREES["hsdp"], replicas_that_are_not_reduced)
    with must_differ():
        assert_equal(expected, [traces[0] for traces in found])
