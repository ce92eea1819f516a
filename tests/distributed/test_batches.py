"""Batches and values between blocks of any structure: nested, with strings, numbers, ``None``, dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from tests.distributed.equality import ONE_PROCESS, QUIET, Recorder, Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import VOCABULARY, Lit, text_rows
from tests.ranks import run_ranks


class Block(nn.Module):
    """Takes and returns ``(x, bool mask, float tensor, step)``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, state: tuple[Tensor, Tensor, Tensor, int]) -> tuple[Tensor, Tensor, Tensor, int]:
        x, mask, extra, step = state
        kept = torch.where(mask[..., None], self.linear(x).tanh(), 0.0)
        return x + kept / (1 + step), mask & (x.mean(-1) < 1), extra + self.mix(x).mean(1), step + 1


@dataclass
class Output:
    logits: Tensor
    extra: Tensor
    loss: Tensor | None = None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, ids: Tensor, mask: Tensor, scale: float) -> Output:
        state = self.embed(ids) * scale, mask, torch.zeros(len(ids), 8), 0
        for block in self.blocks:
            state = block(state)
        return Output(logits=self.head(state[0]), extra=state[2])


class Everything(Lit):
    """PPM-4 of the cases that other pipelines lost."""

    def __init__(self) -> None:
        super().__init__(Model())
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, more, scale, nothing = batch
        assert nothing is None and len(more["names"]) == len(ids)
        out = self.model(ids, more["mask"], scale)
        loss = F.cross_entropy(out.logits.flatten(0, 1), ids.flatten()) + out.extra.pow(2).mean() * 0
        weights = torch.tensor([float(len(name)) for name in more["names"]])
        return {"loss": loss + 0.1 * (out.extra.mean(1) * weights).mean(), "preds": out.extra[:, 0].detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["preds"])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        ids, more, scale, _ = batch
        out = self.model(ids, more["mask"], scale)
        self.log("val", out.extra.mean())
        return {"val": out.extra.mean().detach(), "names": more["names"]}


def collate(rows: list[Any]) -> list[Any]:
    mask = torch.stack([row["attention_mask"] for row in rows]).bool()
    ids = torch.stack([row["input_ids"] for row in rows])
    return [ids, {"mask": mask, "names": ["x" * (1 + int(i[0]) % 3) for i in ids]}, 3.0, None]


def train(rank: int, degrees: dict[str, Any]) -> tuple[Trace, list[Any]]:
    L.seed_everything(0, verbose=False)
    recorder, module = Recorder(), Everything()
    strategy: Any = "auto"
    if degrees:
        strategy = Hybrid3DStrategy(archive=None, data_parallel_size=1, tensor_parallel_size=1, **degrees)
    devices = degrees.get("pipeline_parallel_size", 1)
    trainer = L.Trainer(
        devices=devices, strategy=strategy, callbacks=[recorder], use_distributed_sampler=False, max_epochs=1, **QUIET
    )
    rows: Any = text_rows()
    loader = DataLoader(rows, batch_size=8, collate_fn=collate)
    trainer.fit(module, loader, loader)
    return recorder.trace, module.seen


def test_ppm_4_any_structure() -> None:
    ((expected, predictions),) = run_ranks(1, train, ONE_PROCESS)
    assert [len(each) for each in predictions] == [8, 8]
    for degrees in ({"pipeline_parallel_size": 2, "num_microbatches": 2}, {"pipeline_parallel_size": 3}):
        found = run_ranks(degrees["pipeline_parallel_size"], train, degrees)
        assert_equal(expected, [trace for trace, _ in found])
        assert abs(found[0][0].metrics["val"] - expected.metrics["val"]) < 1e-5
        for rows, right in zip(found[0][1], predictions, strict=True):  # global rank 0 has the last stage
            torch.testing.assert_close(rows, right)
            with must_differ():
                torch.testing.assert_close(rows.flip(0), right)
        assert found[-1][1] == [None, None]


@dataclass
class Texts:
    """A sequence of another length for each sample."""

    ids: list[Tensor]
    scores: Any


class Ragged(Lit):
    def __init__(self) -> None:
        super().__init__(Model())

    def loss(self, batch: Any) -> Tensor:
        ids = nn.utils.rnn.pad_sequence(batch.ids, batch_first=True)
        counts = torch.tensor([len(each) for each in batch.ids])[:, None]
        out = self.model(ids, ids > 0, 1.0)
        values = (out.logits[..., 0] * (ids > 0)).sum(1, keepdim=True) / counts
        return F.mse_loss(values[:, 0] + 0 * out.extra.mean(1), torch.as_tensor(batch.scores))


def ragged_collate(rows: list[Any]) -> Texts:
    lengths = [3 + (5 * int(row["input_ids"][0])) % 9 for row in rows]
    ids = [row["input_ids"][:n] for row, n in zip(rows, lengths, strict=True)]
    return Texts(ids=ids, scores=numpy.array(lengths, dtype=numpy.float32) / 10)


def test_lists_of_samples_in_a_dataclass() -> None:
    def run(rank: int, degrees: dict[str, Any]) -> Trace:
        return trace(rank, Ragged, text_rows(), degrees, collate=ragged_collate)

    (expected,) = run_ranks(1, run, ONE_PROCESS)
    assert_equal(expected, run_ranks(2, run, {"pipeline_parallel_size": 2}))
