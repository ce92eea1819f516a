"""Losses that couple the samples of a batch: refused where micro-batches would compute another loss, or computed on
the whole batch and then equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_hybrid.pipeline.whole_batch
import lightning_hybrid.training.pipelined
from lightning_hybrid.errors import UnsupportedError
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import Lit, checkpointed, labelled_rows, text_rows
from tests.ranks import run_ranks

PP2, PP4 = {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 4}
WHOLE = {"whole_batch_loss": True}
ROWS: Any = labelled_rows((12,))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.linear(x).tanh(), self.linear.weight.norm()


class Pairs(Lit):
    """Blocks that return a tuple; the step uses the last one's argument again, and a statistic of the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__(nn.Identity())
        self.kind = kind
        self.stem, self.project = nn.Linear(12, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.BatchNorm1d(8) if kind == "batch_norm" else nn.LayerNorm(8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.stem(batch["x"])
        for block in self.blocks:
            out, size = block(h)
            h = h + 0.5 * out
        z = self.project(self.norm(h))
        if self.kind not in ("plain", "kept"):  # the spread of a batch, which micro-batches cannot tell
            self.log("variance", z.var(0).mean())
        return {"loss": self.of(z, batch) + 0.01 * size, "z": z.detach()}

    def of(self, z: Tensor, batch: Any) -> Tensor:
        if self.kind == "info_nce":
            a, b = F.normalize(z, dim=-1), F.normalize(batch["x"][:, :4], dim=-1)
            return F.cross_entropy(a @ b.T * 3, torch.arange(len(z)))
        if self.kind == "vicreg":
            off = torch.cov(z.T).fill_diagonal_(0)
            return F.relu(1 - z.std(0)).mean() + off.pow(2).sum() / 4 + F.mse_loss(z, batch["x"][:, :4])
        return F.cross_entropy(z, batch["y"].clamp(max=3))


KINDS = ["info_nce", "vicreg", "batch_norm"]


def runs(rank: int, make: Callable[[], Any], degrees: list[dict[str, Any]], **options: Any) -> list[Trace]:
    return [trace(rank, make, options.pop("rows", ROWS), each, **options) for each in degrees]


def run(num_ranks: int, make: Callable[[], Any], *degrees: dict[str, Any], **options: Any) -> list[list[Trace]]:
    found = run_ranks(num_ranks, lambda rank: runs(rank, make, list(degrees), **options), timeout=100)
    return [list(traces) for traces in zip(*found, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_the_whole_batch_equals_one_process(kind: str) -> None:
    (one,) = run(1, lambda: Pairs(kind), ONE_PROCESS, accumulate_grad_batches=2, batch_size=4)
    expected = one[0]
    looped = {**PP2, **WHOLE, "schedule": "LoopedBFS", "num_microbatches": 2}
    for traces in run(2, lambda: Pairs(kind), {**PP2, **WHOLE}, looped, accumulate_grad_batches=2, batch_size=4):
        assert_equal(expected, traces)
        assert abs(traces[0].metrics["variance"] - expected.metrics["variance"]) < 1e-5
    (four,) = run(4, lambda: Pairs(kind), {**PP4, **WHOLE}, accumulate_grad_batches=2, batch_size=4)
    assert_equal(expected, four)


class Noisy(Pairs):
    """Noise that is input and target, or (``"apart"``) drawn for the head alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.randn_like(batch["x"])
        target = noise[:, :4]
        h = self.stem(batch["x"] + noise)
        for block in self.blocks:
            h, _ = block(h)
        if self.kind == "apart":
            target = torch.randn(len(noise), 4)
        return F.mse_loss(self.project(h), target)


class Kept(Pairs):
    """The loss uses what the last block keeps in an attribute, which is there for one micro-batch at a time."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.blocks = nn.ModuleList(KeepingLayer() for _ in range(4))

    def of(self, z: Tensor, batch: Any) -> Tensor:
        kept: Tensor = self.blocks[-1].kept
        return F.mse_loss(z, batch["x"][:, :4]) + kept.mean()


class KeepingLayer(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.kept = x.tanh()
        return super().forward(x)


def test_attributes_of_the_last_block_are_refused_on_the_whole_batch() -> None:
    def train(rank: int, degrees: dict[str, Any]) -> str:
        try:
            trace(rank, lambda: Kept("kept"), ROWS, degrees)
        except UnsupportedError as error:
            return str(error)
        return "trained"

    assert run_ranks(2, train, PP2) == ["trained"] * 2
    assert all("blocks.3 keeps in an attribute" in message for message in run_ranks(2, train, {**PP2, **WHOLE}))


def test_noise_that_is_input_and_target_is_refused() -> None:
    def train(rank: int, kind: str) -> str:
        try:
            trace(rank, lambda: Noisy(kind), ROWS, {**PP2, **WHOLE})
        except UnsupportedError as error:
            return str(error)
        return "trained"

    assert run_ranks(2, train, "apart") == ["trained"] * 2
    assert all("random numbers before its last block" in message for message in run_ranks(2, train, "both"))


class Dealt(Pairs):
    """Of a batch of eight, couples the samples that one of two data ranks gets, as DDP does."""

    def of(self, z: Tensor, batch: Any) -> Tensor:
        halves = [super(Dealt, self).of(z[i::2], {n: value[i::2] for n, value in batch.items()}) for i in (0, 1)]
        return torch.stack(halves).mean()


def test_sharded_over_data_it_couples_each_rank_s_samples() -> None:
    (one,) = run(1, lambda: Dealt("info_nce"), ONE_PROCESS)
    degrees = {**PP2, **WHOLE, "data_parallel_size": 2, "num_microbatches": 2}
    (four,) = run(4, lambda: Pairs("info_nce"), degrees)
    assert_equal(one[0], four)


def test_activation_checkpointing_around_the_last_block() -> None:
    (one,) = run(1, checkpointed, ONE_PROCESS, rows=text_rows())
    (two,) = run(2, checkpointed, {**PP2, **WHOLE}, rows=text_rows())
    assert_equal(one[0], two)


def forgotten_rows() -> None:
    """The second micro-batch gets the gradient of the first."""
    right = lightning_hybrid.pipeline.whole_batch.WholeBatch.gradients_of
    lightning_hybrid.pipeline.whole_batch.WholeBatch.gradients_of = lambda self, i: right(self, 0)  # type: ignore


def test_wrong_gradients_of_the_joined_values_are_noticed() -> None:
    (one,) = run(1, lambda: Pairs("info_nce"), ONE_PROCESS)
    (two,) = run(2, lambda: Pairs("info_nce"), {**PP2, **WHOLE}, sabotage=forgotten_rows)
    with must_differ():
        assert_equal(one[0], two)


@pytest.mark.parametrize("kind", ["info_nce", "vicreg"])
def test_without_it_the_loss_is_refused_on_every_rank(kind: str) -> None:
    def refused(rank: int) -> str:
        with pytest.raises(UnsupportedError) as caught:
            trace(rank, lambda: Pairs(kind), ROWS, PP2)
        return str(caught.value)

    for message in run_ranks(2, refused):
        assert all(word in message for word in ("compares samples", "whole_batch_loss=True", "loss_weight")), message


class Mixing(Pairs):
    """Joins, re-orders or mixes rows before the blocks, and counts on it after them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, order = batch["x"], batch["x"][:, 0].argsort()
        x = {"joined": lambda: torch.cat([x, 2 * x]), "sorted": lambda: x[order], "centred": lambda: x - x.mean(0)}.get(
            self.kind, lambda: x
        )()
        x = x + x.flip(0) if self.kind == "flipped" else x
        h = self.stem(x)
        for block in self.blocks:
            h, _ = block(h)
        z = self.project(h)
        if self.kind == "odd_after" and len(x) == 16 and not self.training:
            raise ValueError("sixteen samples")
        if self.kind == "joined":
            a, b = z.chunk(2)
            return F.cross_entropy(a @ b.T, torch.arange(len(a)))
        target = batch["x"][:, :4]
        if self.kind == "sorted":
            z = z[order.argsort()]
        return F.mse_loss(z, target + target.flip(0) if self.kind == "flipped" else target)


@pytest.mark.parametrize(
    ("kind", "in_parts", "as_a_whole"),
    [
        ("joined", "whole_batch_loss=True", "torch.stack"),
        ("centred", "whole_batch_loss=True", "torch.stack"),
        ("flipped", "whole_batch_loss=True", "torch.stack"),
        ("sorted", "", "torch.stack"),
        ("odd_after", "", ""),
    ],
)
def test_rows_that_are_mixed_before_the_blocks(kind: str, in_parts: str, as_a_whole: str) -> None:
    """Refused with the remedy where it would be wrong; what cannot be checked (fails on other sizes) trains."""
    expected = run(1, lambda: Mixing(kind), ONE_PROCESS)[0][0]
    for degrees, remedy in ((PP2, in_parts), ({**PP2, **WHOLE}, as_a_whole)):
        refused = pytest.raises(UnsupportedError, match=remedy) if remedy else nullcontext()
        with refused:
            run(2, lambda: Mixing(kind), {**degrees, "num_microbatches": 2}, batch_size=16)
    if kind == "sorted":
        assert_equal(expected, run(2, lambda: Mixing(kind), PP2)[0])


def unrehearsed() -> None:
    lightning_hybrid.training.pipelined.Rehearsal.find = lambda self, read_loss: (None, True)  # type: ignore[method-assign]


@pytest.mark.parametrize("more", [{}, WHOLE], ids=["parts", "whole"])
def test_without_the_check_mixed_rows_would_be_wrong(more: dict[str, Any]) -> None:
    expected = run(1, lambda: Mixing("joined"), ONE_PROCESS)[0][0]
    (found,) = run(2, lambda: Mixing("joined"), {**PP2, **more}, sabotage=unrehearsed)
    with must_differ():
        assert_equal(expected, found)


class CountsMarks(L.Callback):
    found: list[int]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.found = []

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        marks = trainer.strategy.take_marks()
        self.found.append(sum(mark.kind == "F" for mark in marks))


def test_rehearsals_leave_the_marks_of_a_step_alone() -> None:
    """Four batches of two micro-batches in an optimizer step; before the first, second and third of them is one."""

    def count(rank: int) -> list[int]:
        counts = CountsMarks()
        degrees = {**PP2, "num_microbatches": 2, "schedule": "1F1B"}
        trace(rank, lambda: Pairs("plain"), ROWS, degrees, batch_size=4, accumulate_grad_batches=4, callbacks=[counts])
        return counts.found

    assert run_ranks(2, count) == [[8], [8]]
