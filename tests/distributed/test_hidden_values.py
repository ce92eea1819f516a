"""Values that autograd does not see still come from weights: they travel to the stage that needs them, or are refused.

On a later stage whatever was computed before its first block is made of zeros, so none of these may go unnoticed.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import PipelineError, UnsupportedError
from lightning_hybrid.pipeline.probe import StepFacts
from tests.distributed.equality import ONE_PROCESS, QUIET, Trace, assert_equal, trace
from tests.distributed.zoo import Lit, labelled_rows
from tests.ranks import run_ranks

ROWS: Any = labelled_rows((12,))
PP2: dict[str, Any] = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, condition: Tensor | None = None, index: Tensor | None = None) -> Tensor:
        x = self.linear(x).tanh()
        if condition is not None:
            x = x * condition
        return x if index is None else x + index[:, None]


class Nearest(nn.Module):
    """Integers that depend on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        codes: Tensor = self.codes(x)
        return codes.argmax(-1)


class Base(Lit):
    """A stem, four blocks and a head; subclasses hide something from autograd."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.stem, self.head = nn.Linear(12, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Layer() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        return self.compute(batch["x"], batch["y"])

    def through(self, h: Tensor, *more: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h, *more)
        out: Tensor = self.head(h)
        return out

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


class Teacher(Base):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(12, 5)

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            targets = torch.softmax(self.teacher(x), -1)
        return F.cross_entropy(self.through(self.stem(x)), targets)


class Tokenizer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = Nearest()

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        targets = self.tokenizer(x)
        return F.cross_entropy(self.through(self.stem(x)), targets)


class Between(Base):
    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        h, seen = self.stem(x), []
        for block in self.blocks:
            h = block(h)
            seen.append(h.mean().detach())
        return F.cross_entropy(self.head(h), y) + torch.stack(seen).sum()


class Written(Base):
    """In place, through a view."""

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        kept = torch.zeros(2)
        kept[0] = h.detach().mean()
        return F.cross_entropy(self.through(h), y) + kept.sum()


class OldView(Base):
    """A view made before the blocks does not follow what travels."""

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        first = h[:, :5].detach()
        return F.cross_entropy(self.through(h) + first, y)


class Logged(Base):
    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        self.log("stem_norm", h.norm())
        return F.cross_entropy(self.through(h), y)


class Number(Base):
    """A number that only the stage of the stem could read."""

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        return F.cross_entropy(self.through(h), y) * (1 + h.norm().item())


class Branch(Base):
    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        factor = 2.0 if (h > 0).any() else 1.0
        return F.cross_entropy(self.through(h), y) * factor


class Listed(Base):
    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        return F.cross_entropy(self.through(h), y) * sum(h[0].detach().tolist())


class Keeping(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = torch.zeros(())

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        x = super().forward(x, *more)
        self.auxiliary = x.pow(2).mean()
        return x


class Auxiliary(Base):
    """A part of the loss that blocks keep in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping() for _ in range(4))

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.through(self.stem(x)), y)
        return loss + sum(block.auxiliary for block in self.blocks)


class Reentrant(Base):
    def through(self, h: Tensor, *more: Tensor) -> Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        out: Tensor = self.head(h)
        return out

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.through(self.stem(x)), y)


class Scripted(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.jit.script(nn.Linear(8, 8)) for _ in range(4))

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.through(self.stem(x)), y)


class LayerDrop(Base):
    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                h = block(h)
        return F.cross_entropy(self.head(h), y)


class LateDrop(Base):
    """Leaves a block out that begins a stage, in the second batch."""

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        for i, block in enumerate(self.blocks):
            h = h if i == 2 and self.global_step else block(h)
        return F.cross_entropy(self.head(h), y)


class OneMore(Base):
    """The block's second argument appears in the second batch."""

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        return F.cross_entropy(self.through(h, *([x[:, :8]] if self.global_step else [])), y)


def refused(rank: int, kind: type[Base]) -> str:
    L.seed_everything(0, verbose=False)
    strategy = Hybrid3DStrategy(archive=None, **PP2)
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=2, **QUIET)
    with pytest.raises((PipelineError, UnsupportedError)) as caught:
        trainer.fit(kind(), DataLoader(ROWS, batch_size=8))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Teacher, ["a value of teacher", "the step's output"]),
        (Tokenizer, ["a value of tokenizer", "the step's output"]),
        (Between, ["a value of blocks.", "the step's output"]),
        (Written, ["a value of stem", "the step's output"]),
        (OldView, ["a value of stem", "the step's output"]),
        (Logged, ["a value of stem", 'self.log("stem_norm")']),
        (Number, ["a value of stem", "out of its tensor"]),
        (Branch, ["a value of stem", "out of its tensor"]),
        (Listed, ["a value of stem", "out of its tensor"]),
        (Auxiliary, ["a value of blocks.", "kept in an attribute"]),
        (Reentrant, ["blocks.0", "use_reentrant=False"]),
        (Scripted, ["is a ScriptModule"]),
        (LayerDrop, ["calls the blocks", "layerdrop"]),
        (LateDrop, ["blocks.2", "layerdrop"]),
        (OneMore, ["blocks.", "than in the first batch", "2 values", "instead of 1"]),
    ],
)
def test_is_refused_by_name_on_every_rank(kind: type[Base], words: list[str]) -> None:
    for message in run_ranks(2, refused, kind):
        assert all(word in message for word in [*words, "pipeline_parallel_size=1"]), message


class Detached(Base):
    """A detached condition and integers for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.condition, self.tokenizer = nn.Linear(12, 8), Nearest()

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.through(self.stem(x), self.condition(x).detach(), self.tokenizer(x)), y)


class Residual(Base):
    """A residual and a view of it after the blocks' calls, a frozen parameter used directly, a logged hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8), requires_grad=False)

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x) * self.scale
        for block in self.blocks:
            out = block(h)
            h = h + out + h[:, :1] * self.scale.detach()
        self.log("last_norm", h.detach().mean())
        return F.cross_entropy(self.head(h), y)


def runs(rank: int, kind: type[Base], degrees: list[dict[str, Any]]) -> list[Trace]:
    return [trace(rank, kind, ROWS, each) for each in degrees]


class ReadParameter(Base):
    """A number read from a parameter, used in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.7), requires_grad=False)

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        scale = float(self.scale)
        return F.cross_entropy(self.through(self.stem(x) * self.scale) * scale, y)


class Sometimes(Base):
    """A condition that only some batches have, made from a parameter that the last stage does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8))

    def compute(self, x: Tensor, y: Tensor, more: Tensor | None = None) -> Tensor:
        h = self.stem(x)
        out = self.through(h) if more is None else self.through(h, self.shift * 1)
        return F.cross_entropy(out, y)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if torch.equal(batch["x"][0], ROWS[0]["x"]) else {**batch, "more": batch["x"]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.compute(**batch)


@pytest.mark.parametrize("kind", [Detached, Residual, ReadParameter, Sometimes])
def test_what_can_travel_equals_one_process(kind: type[Base]) -> None:
    (expected,) = run_ranks(1, runs, kind, [ONE_PROCESS])[0]
    schedules = ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"]
    found = run_ranks(2, runs, kind, [{**PP2, "schedule": each} for each in schedules], timeout=100)
    for traces in zip(*found, strict=True):
        assert_equal(expected, list(traces))


def test_an_argument_that_was_none_in_the_first_batch() -> None:
    facts = StepFacts(
        blocks=("a",),
        arguments=((0,),),
        differentiable=((True,),),
        num_values=(2,),
        uses=(frozenset(), frozenset()),
        reuses=(False,),
        flops=(1.0,),
        flops_outside=(0.0, 0.0),
    )
    h = torch.ones(1, requires_grad=True)
    facts.check_structure(0, [h, None])
    facts.check_structure(0, [h, torch.ones(1)])  # a mask: every stage has its own
    for leaves in ([h, h * 2], [None, h], [h], [h, None, None]):
        with pytest.raises(PipelineError, match="The block a got other arguments than in the first batch"):
            facts.check_structure(0, leaves)
