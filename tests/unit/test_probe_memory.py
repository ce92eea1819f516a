"""Looking at a step must not take the memory of all of its values: models that need a pipeline have no room for it."""

from __future__ import annotations

import ctypes
import resource
import sys

import torch
from torch import Tensor, nn

from lightning_hybrid.pipeline.stage import Cut
from tests.ranks import run_ranks

WIDTH, LENGTH, NUM_BLOCKS = 512, 4096, 48
ACTIVATION = LENGTH * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 10)

    def step(self, ids: Tensor, keep: list[Tensor]) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
            if keep is not None:
                keep.append(x)
        return self.head(x).mean()


def growth(rank: int, keeps: bool) -> int:
    """Bytes by which the process grew at most while the step was probed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed leaves, and leaves no holes
    model = Model()
    cut = Cut(model, [f"blocks.{i}" for i in range(NUM_BLOCKS)])
    ids, kept = torch.zeros(1, LENGTH, dtype=torch.long), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = cut.probe(lambda: model.step(ids, kept if keeps else None))
    assert len(facts.blocks) == NUM_BLOCKS
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_values_of_a_probed_step_are_freed() -> None:
    assert run_ranks(1, growth, False)[0] < 12 * ACTIVATION
    assert run_ranks(1, growth, True)[0] > 0.8 * NUM_BLOCKS * ACTIVATION  # a step that keeps them shows in the measure
