"""Collectives of the user's own in a pipelined step go over the data axis, or are refused by name; none hangs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import all_reduce
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.training import step_world
from tests.distributed.equality import ONE_PROCESS, QUIET, Trace, assert_equal, trace
from tests.distributed.zoo import Lit, labelled_rows, mlp
from tests.ranks import RankError, run_ranks

ROWS = labelled_rows((12,))


class Talks(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = batch["x"].sum()
        dist.all_reduce(before)
        loss = self.loss(batch)
        for value in (before, loss.detach().clone()):
            mine = batch["x"].sum() if value is before else value.clone()
            if value is not before:
                dist.all_reduce(value)
            here = self.all_gather(mine).reshape(-1)
            assert len(here) == dist.get_world_size() == 2 and torch.allclose(here.sum(), value)
            assert torch.equal(here[dist.get_rank()], mine)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = [torch.zeros(()), torch.zeros(())]
        dist.all_gather(found, loss := self.loss(batch))
        dist.broadcast(loss, src=1)
        self.log("gap", (loss - found[1]).abs(), reduce_fx="max")

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch["x"]), batch["y"])


class ByName(Talks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        all_reduce(batch["x"].sum())
        return self.loss(batch)


class Uneven(IterableDataset[Any]):
    """Batches of 4 samples on one data rank, of 1, which is not cut, on the other."""

    def __iter__(self) -> Any:
        size = 1 if dist.get_rank() % 2 else 4  # the data coordinate at 2 x 1 x 2
        yield from (default_collate(ROWS[start : start + size]) for start in (0, 4))


def fit(kind: type[Lit], loader: Any) -> Any:
    strategy = Hybrid3DStrategy(2, 1, 2, num_microbatches=2, archive=None, schedule="1F1B")
    trainer = L.Trainer(devices=4, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(kind(mlp()), loader, DataLoader(ROWS[:8], batch_size=2))
    return trainer


def talk(rank: int, sabotage: bool = False) -> None:
    if sabotage:
        pytest.MonkeyPatch().setattr(step_world.StepWorld, "entered", lambda self: nullcontext())
    loader = DataLoader(ROWS, batch_size=4)
    trainer = fit(Talks, loader)
    assert trainer.global_step == 2 and float(trainer.callback_metrics["gap"]) == 0
    with pytest.raises(UnsupportedError, match=r"all_reduce inside of a step.*torch\.distributed\.all_reduce\(x\)"):
        fit(ByName, loader)
    with pytest.raises(UnsupportedError, match=r"\[1, 2\] micro-batches, but training_step has collectives of its own"):
        fit(Talks, DataLoader(Uneven(), batch_size=None))


def test_collectives_in_a_step_go_over_the_data_axis() -> None:
    run_ranks(4, talk, timeout=60)


def test_wrong_variant_the_world_of_all_stages_is_seen() -> None:
    with pytest.raises((RankError, RuntimeError, AssertionError)):
        run_ranks(4, talk, True, timeout=6)


class Contrastive(Lit):
    """SimCLR's way: the batches of all data ranks are compared, with gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        here = F.normalize(self.model(batch["x"]), dim=-1)
        is_alone = not dist.is_initialized()
        everyone = here if is_alone else torch.cat(torch.distributed.nn.all_gather(here))
        first = 0 if is_alone else dist.get_rank() * len(here)
        return F.cross_entropy(here @ everyone.T * 2, torch.arange(first, first + len(here)))


def contrast(rank: int, degrees: dict[str, Any]) -> Trace:
    return trace(rank, lambda: Contrastive(mlp()), ROWS, degrees)


@pytest.mark.filterwarnings("ignore:torch.distributed.nn")
def test_a_gather_with_gradients() -> None:
    expected = run_ranks(1, contrast, ONE_PROCESS)[0]
    degrees = {"data_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2, "whole_batch_loss": True}
    assert_equal(expected, run_ranks(4, contrast, degrees))
