"""``load_once=True``: one rank of a data coordinate reads, the others start nothing and see the same."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.batches import one_reader
from lightning_hybrid.errors import HybridError
from tests.distributed.equality import QUIET
from tests.distributed.test_hooks import PLAN, Block
from tests.distributed.zoo import Lit
from tests.ranks import run_ranks


class Rows(Dataset[Any]):
    """Counts how often this process reads it; noise comes from the process's generator."""

    def __init__(self, size: int = 12) -> None:
        self.size, self.num_reads = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_reads += 1
        return {
            "x": torch.full((12,), index / 64) + torch.rand(()) / 8,
            "mask": torch.tensor(index % 3 > 0),
            "i": index,
        }


class Stream(IterableDataset[Any]):
    """Of a length that nobody knows, given as rows of one large tensor."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.everything = torch.rand(20, 12)

    def __iter__(self) -> Iterator[Any]:
        for index, row in enumerate(self.everything):
            self.num_reads += 1
            yield {"x": row, "mask": torch.tensor(index % 3 > 0), "i": index}


class MaskedBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return torch.where(mask[:, None], super().forward(x), x)


class Reads(Lit):
    """Every block reads the batch; hooks do, and draw from the generator that reading draws from too."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList([*(MaskedBlock() for _ in range(3)), nn.Linear(12, 1)]))
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.model[:-1]:
            x = block(x, batch["mask"])
        out: Tensor = self.model[-1](x)
        return out.square().mean()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] * (1 + torch.rand(()))}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, batch["i"].tolist(), float(batch["x"].sum())))

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:  # reads by itself
            with torch.random.fork_rng():
                assert len(next(iter(self.trainer.train_dataloader))["x"]) == 4

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(("val", batch_idx, batch["i"].tolist(), float(batch["x"].sum())))


Triple = tuple[int, int, int]


def train(rank: int, triple: Triple, load_once: bool, kind: str = "rows") -> tuple[Any, ...]:
    if kind == "sabotage":
        pytest.MonkeyPatch().setattr(one_reader, "restore_random_state", lambda state: None)
    L.seed_everything(1, verbose=False)
    strategy = Hybrid3DStrategy(
        *triple, archive=None, schedule="1F1B", tp_plan=PLAN, num_microbatches=4, load_once=load_once
    )
    steps = {"max_steps": 5} if kind == "stream" else {"max_epochs": 2}
    trainer = L.Trainer(devices=math.prod(triple), strategy=strategy, **steps, **QUIET)  # type: ignore[arg-type]
    rows, val_rows = (Stream() if kind == "stream" else Rows()), Rows(6)
    loader: Any = DataLoader(rows, batch_size=4, shuffle=kind != "stream")
    trainer.fit(module := Reads(), loader, DataLoader(val_rows, batch_size=4))
    weights = float(sum(p.detach().double().norm() for p in module.parameters()))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return (rows.num_reads, val_rows.num_reads), module.seen, metrics, trainer.global_step, weights


@pytest.mark.parametrize(("triple", "kind"), [((1, 1, 3), "rows"), ((1, 2, 2), "rows"), ((1, 1, 2), "stream")], ids=str)
def test_others_read_nothing_and_see_the_same(triple: tuple[int, int, int], kind: str) -> None:
    everyone = run_ranks(math.prod(triple), train, triple, False, kind)
    once = run_ranks(math.prod(triple), train, triple, True, kind)
    for rank, ((reads, *right), (reads_once, *found)) in enumerate(zip(everyone, once, strict=True)):
        assert found == right
        is_reader = rank < triple[0] * triple[1] and rank % triple[1] == 0  # of the last stage, the first tensor rank
        assert min(reads) > 0
        assert (min(reads_once) > 0) if is_reader else reads_once == (0, 0)


def test_wrong_variant_random_numbers_that_only_the_reader_draws_are_seen() -> None:
    with pytest.raises(HybridError, match="different batches"):
        run_ranks(2, train, (1, 1, 2), True, "sabotage")


class Broken(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise OSError("the disk is full")
        return super().__getitem__(index)


def with_function(rows: list[Any]) -> Any:
    return {**default_collate(rows), "function": lambda: None}


@pytest.mark.parametrize(
    ("collate", "message"),
    [(None, "OSError: the disk is full"), (with_function, "cannot be sent to other ranks.*load_once=False")],
)
def test_what_fails_on_the_reader_is_told_on_all_ranks(collate: Any, message: str) -> None:
    def fit(rank: int) -> str:
        strategy = Hybrid3DStrategy(1, 1, 2, archive=None, schedule="1F1B", load_once=True)
        trainer = L.Trainer(devices=2, strategy=strategy, max_epochs=1, **QUIET)
        with pytest.raises((OSError, HybridError)) as caught:
            trainer.fit(Reads(), DataLoader(Broken(), batch_size=4, collate_fn=collate))
        return f"{caught.typename}: {caught.value}"

    for text in run_ranks(2, fit):
        assert re.search(message, text), text
