"""Buffers that each data rank updates by its own samples: what ddp has in them, in training and validation."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.data_parallel.buffers import SharedBuffers
from lightning_hybrid.mesh import broadcast_bits
from tests.distributed.equality import QUIET
from tests.distributed.zoo import Classifier, labelled_rows
from tests.ranks import run_ranks

ROWS = labelled_rows((12,))


class Normed(Classifier):
    """A batch norm, an average that a step writes to ``data``, a queue, a cache that grows otherwise on each rank."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5)))
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("queue", torch.arange(8.0))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mean.data.lerp_(batch["x"].mean(0), 0.1)
        self.queue.copy_(self.queue.roll(int(batch["x"][0, 0] > 0) + self.global_rank))
        if isinstance(self.trainer.strategy, Hybrid3DStrategy):  # ddp takes the sizes for equal
            self.cache = torch.zeros(1 + batch_idx * self.global_rank)
        self.note()
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note()
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def note(self) -> None:
        norm = self.model.get_submodule("0")
        assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
        self.seen += [float(norm.running_mean.sum()), float(self.mean.sum()), float(self.queue[0])]


def values(strategy: Any, accumulates: int) -> list[float]:
    L.seed_everything(3, verbose=False)
    module = Normed()
    trainer = L.Trainer(
        devices=2, strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulates, limit_val_batches=2, **QUIET
    )
    trainer.fit(module, DataLoader(ROWS, batch_size=2), DataLoader(ROWS, batch_size=2))
    return [*module.seen, float(trainer.callback_metrics["val_loss"])]


def compared(rank: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return what ddp and each way here have, by way."""
    sharded = {"data_parallel_size": 2, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "archive": None}

    def hybrid(**more: Any) -> Any:
        return Hybrid3DStrategy(**sharded, **more)

    wanted = {number: values(DDPStrategy(), number) for number in (1, 2)}
    found = {
        "shards": (wanted[1], values(hybrid(), 1)),
        "replicas": (wanted[2], values(hybrid(replicate_size=2), 2)),
    }
    SharedBuffers.before_step = lambda self, *, trains: None  # type: ignore[method-assign]
    return {**found, "wrong: each its own": (wanted[1], values(hybrid(), 1))}


def test_buffers_are_those_of_ddp() -> None:
    for by_way in run_ranks(2, compared):
        for way, (wanted, found) in by_way.items():
            if not way.startswith("wrong"):
                torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-5, msg=way)
    wanted, found = by_way["wrong: each its own"]  # on the last rank
    assert (torch.tensor(found) - torch.tensor(wanted)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.bool], ids=str)
def test_any_type_can_be_sent(dtype: torch.dtype) -> None:
    def run(rank: int) -> list[float]:
        dist.init_process_group("gloo")
        tensor = torch.full((2, 3), 1.0 - rank).to(dtype)
        broadcast_bits(tensor, 0)
        return tensor.to(torch.complex64).real.flatten().tolist()

    assert run_ranks(2, run) == [[1.0] * 6] * 2
