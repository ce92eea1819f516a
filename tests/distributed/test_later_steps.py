"""Steps that do something else later than the first one did: right, or refused when they do, never silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_hybrid.pipeline.stage
from lightning_hybrid.errors import PipelineError
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import Lit, labelled_rows
from tests.ranks import run_ranks

PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": "1F1B"}
ROWS = labelled_rows((12,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * scale


class Later(Lit):
    """From the second step on it uses what the first step did not."""

    def __init__(self, kind: str) -> None:
        super().__init__(nn.Identity())
        self.kind = kind
        self.stem, self.head = nn.Linear(12, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = self.stem(batch["x"])
        x, is_later = first, batch_idx > 0
        scale = torch.ones_like(x) * batch["x"][:, :1].expand(-1, 8).type_as(x)
        if is_later and self.kind == "argument":
            scale = scale + first.detach()
        for index, block in enumerate(self.blocks):
            x = block(x, scale)
            if index == 0:
                middle = x
        loss = F.cross_entropy(self.head(x), batch["y"])
        if is_later and self.kind == "embedding":
            loss = loss + 0.1 * first.square().mean()
        if is_later and self.kind == "block":
            loss = loss + 0.1 * middle.square().mean()
        if is_later and self.kind == "weight":
            loss = loss + 0.1 * self.stem.weight.square().sum()
        if is_later and self.kind == "in place":
            penalty = torch.zeros(())
            penalty.add_(first.detach().square().mean())
            loss = loss + penalty
        if is_later and self.kind == "logged":
            self.log("first", first.mean())
        return loss


def run(rank: int, kind: str, degrees: dict[str, Any], sabotage: Any = None) -> Trace:
    return trace(rank, lambda: Later(kind), ROWS, degrees, sabotage=sabotage)


def test_shapes_alone_are_no_reason() -> None:
    """The scale is made from a hole's shape and dtype, and from the batch."""
    expected = run_ranks(1, run, "nothing", ONE_PROCESS)[0]
    assert_equal(expected, run_ranks(2, run, "nothing", PP2))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("embedding", "The step's output"),
        ("block", "The step's output"),
        ("weight", "The step's output"),
        ("in place", "The step's output"),
        ("argument", "An argument of blocks.2"),
        ("logged", "A value given to self.log"),
    ],
)
def test_what_a_later_step_needs_of_another_stage_is_refused(kind: str, what: str) -> None:
    with pytest.raises(PipelineError, match=f"{what} is computed from weights or values of another stage"):
        run_ranks(2, run, kind, PP2)


def unmarked() -> None:
    lightning_hybrid.pipeline.stage.hollow = lambda values: values


@pytest.mark.parametrize("kind", ["embedding", "weight", "argument"])
def test_without_marks_it_would_be_wrong(kind: str) -> None:
    expected = run_ranks(1, run, kind, ONE_PROCESS)[0]
    with must_differ():
        assert_equal(expected, run_ranks(2, run, kind, PP2, unmarked))
