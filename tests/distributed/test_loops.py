"""Lightning's loops: how they evaluate, and one after another on one Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loops import utilities as of_loops
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid import strategy as strategy_module
from lightning_hybrid.errors import ConfigurationError
from tests.distributed.equality import QUIET
from tests.distributed.test_hooks import PLAN, ROWS, Loops
from tests.ranks import run_ranks


def trainer_of(triple: tuple[int, int, int], **options: Any) -> L.Trainer:
    strategy = Hybrid3DStrategy(*triple, archive=None, schedule="1F1B", tp_plan=PLAN)
    return L.Trainer(devices=math.prod(triple), strategy=strategy, **{**QUIET, "max_epochs": 1, **options})


class Modes(Loops):
    """Notes whether evaluation runs in inference mode."""

    modes: set[bool]

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.modes = {torch.is_inference_mode_enabled()}
        return super().predict_step(batch, batch_idx)


def evaluate_then_train(rank: int, triple: tuple[int, int, int], sabotage: bool = False) -> set[bool]:
    patch = pytest.MonkeyPatch()
    patch.setattr(of_loops, "_distributed_is_initialized", lambda: False)  # chosen as on NCCL, not by gloo's name
    if sabotage:
        patch.setattr(strategy_module, "evaluate_by_no_grad", lambda *_: None)
    module, trainer = Modes(triple[0]), trainer_of(triple)
    trainer.validate(module, verbose=False)
    trainer.fit(module)
    trainer.predict(module)
    return module.modes


@pytest.mark.parametrize("triple", [(2, 1, 1), (2, 1, 2)], ids=str)
def test_sharded_weights_are_never_gathered_in_inference_mode(triple: tuple[int, int, int]) -> None:
    assert run_ranks(math.prod(triple), evaluate_then_train, triple) == [{False}] * math.prod(triple)


def test_without_shards_inference_mode_stays() -> None:
    assert run_ranks(2, evaluate_then_train, (1, 1, 2)) == [{True}] * 2


def test_wrong_variant_training_after_inference_mode_fails() -> None:
    with pytest.raises(RuntimeError, match="inference tensor"):
        run_ranks(2, evaluate_then_train, (2, 1, 1), True)


class Shuffles(Loops):
    """Notes the order of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def train_dataloader(self) -> Any:
        return DataLoader(ROWS, batch_size=8, shuffle=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += batch["x"][:, 0].tolist()


def fit_twice(rank: int, triple: tuple[int, int, int]) -> list[float]:
    L.seed_everything(3, verbose=False)
    module = Shuffles()
    strategy = {} if math.prod(triple) > 1 else {"strategy": "auto"}
    trainer = trainer_of(triple, **strategy) if not strategy else L.Trainer(max_epochs=1, **QUIET)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    return module.seen


def test_a_second_fit_shuffles_on() -> None:
    (alone,) = run_ranks(1, fit_twice, (1, 1, 1))
    orders = [alone[start : start + len(ROWS)] for start in range(0, 3 * len(ROWS), len(ROWS))]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    for triple in [(1, 1, 2), (1, 2, 1)]:
        assert run_ranks(2, fit_twice, triple) == [alone] * 2


class Few(Loops):
    def predict_dataloader(self) -> Any:
        return DataLoader(ROWS[:1], batch_size=1)


def test_too_few_samples_of_the_modules_own_loader_are_refused() -> None:
    def predict(rank: int) -> None:
        with pytest.raises(ConfigurationError, match=r"1 samples for data_parallel_size=2.*Use data_parallel_size=1"):
            trainer_of((2, 1, 1)).predict(Few())

    run_ranks(2, predict)


class AsLong(Loops):
    """Batches with as many rows as features."""

    def train_dataloader(self) -> Any:
        return DataLoader(ROWS[:12], batch_size=12)

    val_dataloader = train_dataloader


def test_validating_first_with_as_many_rows_as_features() -> None:
    def run(rank: int, triple: tuple[int, int, int]) -> tuple[int, float]:
        L.seed_everything(0, verbose=False)
        trainer = trainer_of(triple) if math.prod(triple) > 1 else L.Trainer(max_epochs=1, **QUIET)
        (found,) = trainer.validate(module := AsLong(), verbose=False)
        trainer.fit(module)
        return trainer.global_step, found["val_loss"]

    (expected,) = run_ranks(1, run, (1, 1, 1))
    assert run_ranks(2, run, (1, 1, 2)) == [pytest.approx(expected, rel=1e-5)] * 2


class Stateful:
    """A loader that goes on where its saved state says, as torchdata's do."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(ROWS) // 4:
            self.position += 1
            yield default_collate(ROWS[4 * self.position - 4 : 4 * self.position])
        self.position = 0

    def __len__(self) -> int:
        return len(ROWS) // 4

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Goes(Loops):
    example_input_array = torch.zeros(2, 12)  # for the summary, which runs the model with it

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch["x"][0, 0]))


def resume(rank: int, triple: tuple[int, int, int], folder: Path) -> tuple[list[float], list[float]]:
    path, seen = folder / f"{triple}.ckpt", []
    for max_steps, ckpt_path in [(2, None), (4, path)]:
        options = {
            **QUIET,
            "max_epochs": 2,
            "max_steps": max_steps,
            "limit_val_batches": 0,
            "enable_model_summary": True,
        }
        trainer = trainer_of(triple, **options) if math.prod(triple) > 1 else L.Trainer(**options)
        trainer.fit(module := Goes(), Stateful(), ckpt_path=ckpt_path)
        if ckpt_path is None:
            trainer.save_checkpoint(path)
        seen.append(module.seen)
    return seen[0], seen[1]


def test_a_stateful_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    (expected,) = run_ranks(1, resume, (1, 1, 1), tmp_path)
    assert [*expected[0], *expected[1]] == [float(row["x"][0]) for row in ROWS[::4]]  # on from the saved position
    for triple in [(1, 1, 2), (1, 2, 1)]:
        assert run_ranks(2, resume, triple, tmp_path) == [expected] * 2
