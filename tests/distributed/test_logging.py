"""What is logged, in every way of logging, is what ``ddp`` logs on as many data ranks (case LOG-1)."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.logger_connector import result
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric
from torchmetrics.utilities import dim_zero_cat

from lightning_hybrid import Hybrid3DStrategy, logged_values
from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.training import kept_values, log_rules
from tests.distributed.equality import QUIET
from tests.distributed.zoo import Lit, labelled_rows
from tests.ranks import run_ranks

ROWS = labelled_rows((12,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


PLAN = {"model.*.up": "colwise", "model.*.down": "rowwise"}


class Accuracy(Metric):
    """As torchmetrics' own: a state for each batch, joined at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", default=[], dist_reduce_fx="cat")

    hits: list[Tensor]

    def update(self, logits: Tensor, y: Tensor) -> None:
        self.hits.append((logits.argmax(-1) == y).float())

    def compute(self) -> Tensor:
        return dim_zero_cat(self.hits).mean()


class Logs(Lit):
    """In every way that ``self.log`` has."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Block(), Block(), nn.Linear(12, 5)))
        self.accuracy, self.val_accuracy = Accuracy(), Accuracy()
        self.seen, self.val_mean = SumMetric(), MeanMetric()
        self.outputs: list[Tensor] = []
        self.by_loader: dict[int, list[Tensor]] = defaultdict(list)
        self.total = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, y = self.model(batch["x"]), batch["y"]
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss)
        self.log("loss_both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("loss_synced", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(y))
        for how in ("sum", "min", "max"):
            self.log(f"loss_{how}", loss, on_step=False, on_epoch=True, reduce_fx=how, sync_dist=True)
        self.log("samples", float(len(y)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("largest", logits.abs().amax(), on_step=False, on_epoch=True, reduce_fx=torch.max, sync_dist=True)
        values = {"mean": logits.mean(), "count": (logits > 0).sum(), "top": logits.amax(), "n": float(len(y))}
        for name, value in values.items():  # what a value is made of is one thing, what is done with batches another
            for how in ("mean", "sum", "min", "max"):
                self.log(f"{name}_{how}", value, on_epoch=True, on_step=True, reduce_fx=how, sync_dist=True)
        if self.global_rank == 0:  # on the others it is there or not, which is said to be the user's own business
            self.log("of_rank_zero", loss, rank_zero_only=True)
        self.log_dict({"a": loss * 2, "b": logits.mean()}, on_epoch=True)
        if batch_idx % 2:
            self.log("now_and_then", loss, on_epoch=True, sync_dist=True)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.seen.update(float(len(y)))
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("in_hook", outputs["loss"] * 3, on_step=True, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("seen", self.seen.compute())
        self.seen.reset()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        logits, y = self.model(batch["x"]), batch["y"]
        loss = F.cross_entropy(logits, y)
        self.log("val_loss", loss, sync_dist=True)
        self.val_accuracy.update(logits, y)
        self.log("val_accuracy", self.val_accuracy)
        self.val_mean.update(loss)
        self.outputs.append(loss)
        self.by_loader[dataloader_idx].append(logits)
        self.total += float(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", self.val_mean.compute())
        self.val_mean.reset()
        self.log("val_of_list", torch.stack(self.outputs).mean(), sync_dist=True)
        self.log("val_total", self.total, sync_dist=True)
        for loader, logits in self.by_loader.items():
            self.log(f"val_largest_{loader}", torch.cat(logits).amax(), sync_dist=True)
        self.outputs.clear()
        self.by_loader.clear()
        self.total = 0.0


class Kept(Logger):
    """Keeps what a logger gets, on the rank that has one."""

    name = version = "kept"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def sharded(rows: Any, data: int, rank: int, batch_size: int) -> Any:
    sampler = DistributedSampler(rows, num_replicas=data, rank=rank, shuffle=False)
    return DataLoader(rows, batch_size=batch_size, sampler=sampler)


SABOTAGE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "": lambda patch: None,
    "lists": lambda patch: patch.setattr(kept_values.KeptValues, "apply", lambda *_: None),
    "metric": lambda patch: patch.setattr(logged_values.MetricMirror, "value_of_batch", lambda _, m: m._forward_cache),
    "rules": lambda patch: patch.setattr(log_rules.LogRules, "rule", lambda *_: None),
    "loss": lambda patch: patch.setattr(logged_values, "apply_rule", lambda rule, values, *_: values.max()),
}


def log(rank: int, strategy: Any, triple: tuple[int, int, int], sabotage: str = "") -> tuple[Any, ...]:
    SABOTAGE[sabotage](pytest.MonkeyPatch())
    L.seed_everything(0, verbose=False)
    if strategy == "hybrid3d":
        strategy = Hybrid3DStrategy(*triple, archive=None, schedule="1F1B", tp_plan=PLAN, num_microbatches=2)
    kept = Kept()
    options = {**QUIET, "logger": kept, "log_every_n_steps": 1, "max_epochs": 2, "use_distributed_sampler": False}
    trainer = L.Trainer(devices=math.prod(triple), strategy=strategy, **options)
    data = rank if isinstance(strategy, str) else strategy.coordinate.data
    loaders = [sharded(rows, triple[0], data, 4) for rows in (ROWS, ROWS[:8], ROWS[8:])]
    result.warning_cache.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(Logs(), loaders[0], loaders[1:])
    advised = any("It is recommended to use `self.log(" in str(warning.message) for warning in said)
    assert rank or advised == (triple[0] > 1 or isinstance(trainer.strategy, DDPStrategy))  # not where values are equal
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert rank or math.isfinite(numbers["of_rank_zero"])
    rows = [(step, {name: float(row[name]) for name in row if name != "of_rank_zero"}) for step, row in kept.rows]
    bar = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    return data, {name: numbers[name] for name in numbers if name != "of_rank_zero"}, bar, rows


@pytest.fixture(scope="module", params=[1, 2])
def expected(request: pytest.FixtureRequest) -> list[tuple[Any, ...]]:
    return run_ranks(request.param, log, "ddp", (request.param, 1, 1))


WAYS = {1: [(1, 1, 1), (1, 2, 1), (1, 1, 2)], 2: [(2, 1, 1), (2, 2, 2)]}


def compare(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    for data, numbers, bar, rows in found:
        _, right, right_bar, right_rows = expected[data]
        assert numbers == pytest.approx(right, rel=1e-5, abs=1e-6)
        assert bar == pytest.approx(right_bar, rel=1e-5)
        assert [step for step, _ in rows] == [step for step, _ in right_rows]
        for (_, row), (_, right_row) in zip(rows, right_rows, strict=True):
            assert row == pytest.approx(right_row, rel=1e-5, abs=1e-6)


def test_every_way_of_logging(expected: list[tuple[Any, ...]]) -> None:
    for triple in WAYS[len(expected)]:
        compare(run_ranks(math.prod(triple), log, "hybrid3d", triple), expected)


@pytest.mark.parametrize("sabotage", [name for name in SABOTAGE if name])
def test_wrong_variants_are_seen(sabotage: str) -> None:
    expected = run_ranks(1, log, "ddp", (1, 1, 1))
    with pytest.raises((AssertionError, RuntimeError)):  # an empty list cannot be stacked
        compare(run_ranks(2, log, "hybrid3d", (1, 1, 2), sabotage), expected)


class Odd(Lit):
    """Logs what micro-batches cannot tell of a batch: a metric that does not add up, or a spread."""

    def __init__(self, kind: str) -> None:
        super().__init__(nn.Sequential(Block(), Block(), nn.Linear(12, 5)))
        self.kind, self.largest = kind, MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        if self.kind == "compute":
            self.largest.update(loss)
            self.log("largest", self.largest.compute())
        elif self.kind == "metric":
            self.largest(loss)
            self.log("largest", self.largest)
        else:
            spread = logits.std()
            self.log("spread", spread if self.kind == "tensor" else float(spread))
        return loss


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("metric", r"metric largest with on_step=True.*on_step=False"),
        ("compute", r"largest\.compute\(\) in training_step.*on_train_batch_end"),
        ("tensor", r'self\.log\("spread", \.\.\.\) in training_step is .* no mean, no sum.*whole_batch_loss=True'),
        ("number", r'self\.log\("spread".* What is logged may be off'),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(kind: str, message: str) -> None:
    """Of a Python number, which may be anything, it is said."""

    def train(rank: int) -> str:
        strategy = Hybrid3DStrategy(1, 1, 2, archive=None, schedule="1F1B")
        trainer = L.Trainer(devices=2, strategy=strategy, max_steps=1, **QUIET)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                trainer.fit(Odd(kind), DataLoader(ROWS, batch_size=8))
            except UnsupportedError as error:
                return str(error)
        return " ".join(str(warning.message) for warning in said)

    found = run_ranks(2, train)
    assert re.search(message, found[0]), found[0]
    assert kind not in ("tensor", "compute") or found[1] == found[0]
