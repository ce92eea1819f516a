"""Who reads which samples: by data coordinate, alike within a group, augmentation included (cases DATA-1, DATA-2)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid import data as data_module
from lightning_hybrid.errors import ConfigurationError
from tests.distributed.equality import QUIET
from tests.distributed.test_hooks import PLAN, Block
from tests.distributed.zoo import Lit
from tests.ranks import run_ranks


class Items(Dataset[Any]):
    """Item ``i`` is ``i``, with noise of the worker's own."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((12,), index / 64), "index": torch.tensor(index), "noise": torch.rand(())}


class Pairs:
    """A batch sampler of the user's own, which Lightning makes anew around a sampler by data coordinate."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool = False) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        for start in range(0, len(indices), self.batch_size):
            yield indices[start : start + self.batch_size][::-1]

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)


class Reads(Lit):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(Block(), Block(), nn.Linear(12, 1)))
        self.indices: list[list[int]] = []
        self.noise: list[float] = []
        self.rates: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return self.model(batch["x"]).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.indices.append(batch["index"].tolist())
        self.noise += batch["noise"].tolist()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.num_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trainer_of(triple: tuple[int, int, int], **options: Any) -> L.Trainer:
    strategy = Hybrid3DStrategy(*triple, archive=None, schedule="1F1B", tp_plan=PLAN, num_microbatches=2)
    trainer = L.Trainer(devices=math.prod(triple), strategy=strategy, max_epochs=2, **{**QUIET, **options})
    kwargs = trainer.distributed_sampler_kwargs  # before anything has been launched
    assert kwargs == {"num_replicas": triple[0], "rank": trainer.strategy.coordinate.data}
    return trainer


@dataclass
class Seen:
    data: int
    indices: list[list[int]]
    noise: list[float]
    num_steps: int
    length: int
    rate: float

    def epoch(self, number: int) -> list[int]:
        half = self.num_steps // 2
        return [index for batch in self.indices[number * half : (number + 1) * half] for index in batch]


class Counts(Items):
    """A sampler that counts its epochs itself."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(self.num_items, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def test_what_was_looked_at_is_delivered_by_a_sampler_that_counts() -> None:
    loader = data_module.make_peekable(DataLoader(Items(8), batch_size=4, sampler=Counts(8)))
    assert data_module.peek_first_batch(loader)["index"].tolist() == next(iter(loader))["index"].tolist()
    assert loader.sampler.epoch == 1


def read(rank: int, triple: tuple[int, int, int], kind: str) -> Seen:
    torch.manual_seed(rank)
    if kind != "unseeded":
        L.seed_everything(2, workers=True, verbose=False)
    if kind == "sabotage":
        pytest.MonkeyPatch().setattr(data_module, "same_worker_seeds", lambda *_: None)
    items, trainer = Items(64), trainer_of(triple)
    loader = DataLoader(items, batch_size=4, shuffle=True, num_workers=1)
    if kind == "batch sampler":
        loader = DataLoader(items, batch_sampler=Pairs(torch.utils.data.RandomSampler(items), 4))
    trainer.fit(module := Reads(), loader)
    return Seen(
        data=trainer.strategy.coordinate.data,
        indices=module.indices,
        noise=module.noise,
        num_steps=module.num_steps,
        length=len(trainer.train_dataloader),
        rate=trainer.optimizers[0].param_groups[0]["lr"],
    )


def last_rate(num_steps: int) -> float:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=num_steps)
    for _ in range(num_steps):
        optimizer.step()
        schedule.step()
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("kind", "triple"),
    [
        ("seeded", (2, 2, 1)),
        ("seeded", (1, 2, 2)),
        ("unseeded", (2, 1, 2)),
        ("batch sampler", (2, 1, 2)),
        ("batch sampler", (1, 2, 2)),
    ],
)
def test_data_1_samples_by_data_coordinate(kind: str, triple: tuple[int, int, int]) -> None:
    by_data: dict[int, Seen] = {}
    for seen in run_ranks(4, read, triple, kind):
        first = by_data.setdefault(seen.data, seen)
        assert seen == first
        assert (seen.length, seen.num_steps, len(seen.indices)) == tuple(n // triple[0] for n in (16, 32, 32))
        assert seen.rate == pytest.approx(last_rate(32 // triple[0]))
    assert len(by_data) == triple[0]
    for number in (0, 1):
        assert sorted(index for seen in by_data.values() for index in seen.epoch(number)) == list(range(64))
    assert by_data[0].epoch(0) != by_data[0].epoch(1)
    if triple[0] == 2 and kind != "batch sampler":  # without workers data ranks draw alike, as with ddp and a seed
        assert by_data[0].noise != by_data[1].noise


def test_wrong_variant_workers_seeded_by_rank_are_seen() -> None:
    with pytest.raises(ConfigurationError, match="read different batches"):
        run_ranks(2, read, (1, 1, 2), "sabotage")


@pytest.mark.parametrize("triple", [(2, 1, 1), (2, 1, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(5, 1), (9, 3)], ids=str)
def test_data_2_uneven_tails(triple: tuple[int, int, int], sizes: tuple[int, int]) -> None:
    def train(rank: int) -> tuple[list[list[int]], int, dict[str, Tensor]]:
        L.seed_everything(0, verbose=False)
        train_loader, val_loader = DataLoader(Items(sizes[0]), batch_size=2), DataLoader(Items(sizes[1]), batch_size=4)
        trainer = trainer_of(triple, num_sanity_val_steps=2)
        trainer.fit(module := Reads(), train_loader, val_loader)
        return module.indices, trainer.global_step, trainer.callback_metrics

    found = run_ranks(math.prod(triple), train)
    assert {steps for _, steps, _ in found} == {2 * math.ceil(math.ceil(sizes[0] / triple[0]) / 2)}
    assert all(batch for indices, _, _ in found for batch in indices)
    assert {i for indices, _, _ in found for batch in indices for i in batch} == set(range(sizes[0]))
    assert len({float(metrics["val_loss"]) for _, _, metrics in found}) == 1
    assert math.isfinite(found[0][2]["val_loss"])
