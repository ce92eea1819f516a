"""Data ranks with different numbers of batches: nobody hangs, and nothing is lost or counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from lightning_hybrid.training import evaluation
from tests.distributed.equality import QUIET
from tests.ranks import RankError, run_ranks

DEGREES = [(2, 1, 1), (2, 1, 2), (2, 2, 2)]
IDS = ["dp2", "dp2xpp2", "2x2x2"]


def row(index: int) -> Tensor:
    return torch.arange(4.0) + index


class Rows(Dataset[Tensor]):
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Tensor:
        return row(index)


class Stream(IterableDataset[Tensor]):
    """Rows of one data rank, without a length."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return map(row, self.rows)


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
        self.batches: list[float] = []
        self.ended: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        self.batches.append(float(batch[0, 0]))
        return {"row": batch[:, 0], "output": self(batch)}

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.ended.append(batch_idx)

    def on_predict_epoch_end(self) -> None:
        everybody = self.all_gather(torch.ones(())).sum()  # a collective of the user's: all are here
        assert everybody == self.trainer.strategy.layout.data_parallel_size

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", batch[:, 0].mean(), batch_size=len(batch))
        self.batches.append(float(batch[0, 0]))
        self(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer_of(degrees: tuple[int, int, int], **options: Any) -> L.Trainer:
    data, tensor, pipeline = degrees
    plan = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"} if tensor > 1 else None
    strategy = Hybrid3DStrategy(
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        tp_plan=plan,
        archive=None,
        reshard_after_forward=True,
    )
    return L.Trainer(devices=data * tensor * pipeline, strategy=strategy, **{**QUIET, "max_epochs": 1, **options})


def size_of(degrees: tuple[int, int, int]) -> int:
    return degrees[0] * degrees[1] * degrees[2]


def build() -> Lit:
    L.seed_everything(0, verbose=False)
    return Lit()


def predict(rank: int, degrees: tuple[int, int, int], kind: str, without: str = "") -> tuple[int, Any, Any]:
    if without:
        setattr(evaluation.EvenSteps, without, lambda *_: None)
    module, trainer = build(), trainer_of(degrees)
    data = trainer.strategy.coordinate.data
    loaders: Any = {
        "sampler": lambda: DataLoader(Rows(5), batch_size=1),
        "two": lambda: [DataLoader(Rows(5), batch_size=2), DataLoader(Rows(3), batch_size=1)],
        "stream": lambda: DataLoader(Stream([0, 1, 2, 3] if data == 0 else [4]), batch_size=1),
    }[kind]()
    found = trainer.predict(module, loaders)
    return data, found, (module.batches, module.ended)


@pytest.mark.parametrize("kind", ["sampler", "stream"])
@pytest.mark.parametrize("degrees", DEGREES, ids=IDS)
def test_predictions_are_each_ranks_own_once_and_in_order(degrees: tuple[int, int, int], kind: str) -> None:
    expected = build()(torch.stack([row(i) for i in range(5)])).detach()
    rows = {"sampler": [[0, 2, 4], [1, 3]], "stream": [[0, 1, 2, 3], [4]]}[kind]
    for data, found, (batches, ended) in run_ranks(size_of(degrees), predict, degrees, kind):
        assert [int(one["row"]) for one in found] == rows[data]
        assert ended == list(range(len(rows[data])))
        assert batches == rows[data]
        for one in found:
            torch.testing.assert_close(one["output"], expected[int(one["row"])][None])


def test_several_loaders_are_predicted_one_after_another() -> None:
    for data, found, _ in run_ranks(2, predict, (2, 1, 1), "two"):
        assert [[one["row"].tolist() for one in loader] for loader in found] == (
            [[[0, 2], [4]], [[0], [2]]] if data == 0 else [[[1, 3]], [[1]]]
        )


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_wrong_variant_ranks_that_leave_early_are_seen(kind: str) -> None:
    """Without the idle steps, the rank with more batches waits, or reads what the others send for another purpose."""
    with pytest.raises((RankError, RuntimeError, AssertionError)):
        run_ranks(2, predict, (2, 1, 1), kind, "after_last", timeout=8)


def one_sample(rank: int, degrees: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"1 samples for data_parallel_size=2.*Use data_parallel_size=1"):
        trainer_of(degrees).predict(build(), DataLoader(Rows(1)))


def zero_length(rank: int) -> None:
    module = build()
    module.allow_zero_length_dataloader_with_multiple_devices = True
    with pytest.raises(UnsupportedError, match="allow_zero_length"):
        trainer_of((2, 1, 1)).predict(module, DataLoader(Rows(5)))


def nothing_for_one(rank: int) -> None:
    trainer = trainer_of((2, 1, 1))
    with pytest.raises(ConfigurationError, match="1 of 2 data ranks have no batch at all"):
        trainer.predict(build(), DataLoader(Stream([1, 2] if rank else [])))


def test_a_rank_without_any_batch_is_refused() -> None:
    run_ranks(2, zero_length)
    run_ranks(2, nothing_for_one)


@pytest.mark.parametrize("degrees", DEGREES, ids=IDS)
def test_fewer_samples_than_data_ranks_are_refused(degrees: tuple[int, int, int]) -> None:
    run_ranks(size_of(degrees), one_sample, degrees)


@pytest.mark.parametrize("degrees", DEGREES[:2], ids=IDS[:2])
def test_validation_on_uneven_streams_ends_and_counts_each_batch_once(degrees: tuple[int, int, int]) -> None:
    def validate(rank: int) -> tuple[int, list[float], float]:
        module, trainer = build(), trainer_of(degrees)
        data = trainer.strategy.coordinate.data
        loader = DataLoader(Stream([10, 20, 60] if data == 0 else [40]), batch_size=1)
        metrics = trainer.validate(module, loader, verbose=False)
        return data, module.batches, metrics[0]["mean"]

    for data, batches, mean in run_ranks(size_of(degrees), validate):
        assert mean == pytest.approx(30.0 if data == 0 else 40.0)  # as Lightning does without sync_dist
        assert batches == ([10, 20, 60] if data == 0 else [40])


@pytest.mark.parametrize("kind", ["stream", "sized"])
@pytest.mark.parametrize("degrees", DEGREES[:2], ids=IDS[:2])
def test_training_on_uneven_data_is_refused_on_all_ranks(degrees: tuple[int, int, int], kind: str) -> None:
    def train(rank: int) -> int:
        trainer = trainer_of(degrees, use_distributed_sampler=False)
        number = 7 if trainer.strategy.coordinate.data == 0 else 5
        data = Stream(list(range(number))) if kind == "stream" else Rows(number)
        message = {
            "stream": r"1 of 2 data ranks \(\[1\]\) have 5 training batches in this epoch",
            "sized": r"Data ranks have \[7, 5\] training batches",
        }[kind]
        with pytest.raises(ConfigurationError, match=message):
            trainer.fit(build(), DataLoader(data, batch_size=1))
        return trainer.global_step

    assert set(run_ranks(size_of(degrees), train)) == {4 if kind == "stream" else 0}
