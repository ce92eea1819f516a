"""The self-check: silent where a run equals one process, a refusal on all ranks where it does not, and no trace."""

from __future__ import annotations

import math
import sys
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import Verify, check
from lightning_hybrid.cli import main
from lightning_hybrid.errors import VerificationError
from lightning_hybrid.pipeline import step
from tests.distributed.equality import QUIET
from tests.distributed.test_equality import ROWS, SGDGPT
from tests.ranks import run_ranks

TRIPLES = [(2, 1, 1), (1, 2, 2)]


def train(rank: int, triple: tuple[int, int, int], verify: bool, sabotage: bool = False) -> tuple[float, Any]:
    L.seed_everything(0, verbose=False)
    if sabotage:  # as if a sum over micro-batches were not divided
        reduce_ = step.PipelineRank._roots
        step.PipelineRank._roots = lambda self, flight: (  # type: ignore[method-assign]
            (lambda roots: (roots[0], [g * 1.5 for g in roots[1]]))(reduce_(self, flight))
        )
    callback = Verify(num_steps=2)
    as_argument = verify and triple == TRIPLES[0]
    module = SGDGPT(num_blocks=4, width=16, num_heads=4, context_length=16)
    trainer = L.Trainer(
        devices=math.prod(triple),
        strategy=Hybrid3DStrategy(*triple, archive=None, verify=2 if as_argument else False),
        max_steps=3,
        accumulate_grad_batches=2,
        callbacks=[callback] if verify and not as_argument else [],
        **QUIET,
    )
    trainer.fit(module, DataLoader(ROWS, batch_size=8 // triple[0], shuffle=True))
    if as_argument:
        (callback,) = (one for one in trainer.callbacks if isinstance(one, Verify))
    return float(trainer.callback_metrics["train_loss"]) + float(torch.rand(())), callback.compared


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_right_steps_are_let_through_without_a_trace(
    triple: tuple[int, int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    (first, compared), *_ = run_ranks(math.prod(triple), train, triple, True)
    assert len(compared) == 2
    for values in compared:
        for name in ("loss", "grad_norm"):
            assert values[name][0] == pytest.approx(values[name][1], rel=1e-5)
    assert capfd.readouterr().out.count("verified: the first 2 optimizer steps equal one process") == 1
    if triple == TRIPLES[0]:
        assert first == run_ranks(math.prod(triple), train, triple, False)[0][0]


def train_replicas(rank: int) -> Any:
    L.seed_everything(0, verbose=False)
    strategy = Hybrid3DStrategy(2, replicate_size=2, replica_sync=3, archive=None, verify=True)
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=2, **QUIET)
    trainer.fit(SGDGPT(num_blocks=2, width=16, num_heads=4, context_length=16), DataLoader(ROWS, batch_size=4))
    (callback,) = (one for one in trainer.callbacks if isinstance(one, Verify))
    return callback.compared


def test_of_replicas_that_differ_the_first_is_compared(capfd: pytest.CaptureFixture[str]) -> None:
    (values,) = run_ranks(2, train_replicas)[0]
    assert values["grad_norm"][0] == pytest.approx(values["grad_norm"][1], rel=1e-5)
    out = capfd.readouterr().out
    assert "the first optimizer step of replica 0 equals one process" in out
    assert "the other replicas were not compared" in out


def refused(rank: int, triple: tuple[int, int, int]) -> str:
    with pytest.raises(VerificationError) as caught:
        train(rank, triple, True, sabotage=True)
    return str(caught.value)


def test_wrong_variant_wrong_gradients_are_refused_on_all_ranks() -> None:
    first, second = run_ranks(2, refused, (1, 1, 2))
    assert first == second
    assert "Try pipeline_parallel_size=1 to see" in first
    assert "Optimizer step 1 differs from one process" in first and "grad_norm" in first and "loss" not in first[60:110]


class ByRank(SGDGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.global_rank)


def refused_by_rank(rank: int) -> str:
    module = ByRank(num_blocks=2, width=16, num_heads=4, context_length=16)
    trainer = L.Trainer(devices=2, strategy=Hybrid3DStrategy(2, archive=None, verify=True), max_steps=1, **QUIET)
    with pytest.raises(VerificationError) as caught:
        trainer.fit(module, DataLoader(ROWS, batch_size=4))
    return str(caught.value)


def test_a_step_that_depends_on_the_rank_is_named_as_such() -> None:
    assert "look for what depends on the rank" in run_ranks(2, refused_by_rank)[0]


class WithoutIndex(SGDGPT):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


def make_without_index() -> tuple[L.LightningModule, Any]:
    return WithoutIndex(num_blocks=2, width=16, num_heads=4, context_length=16), DataLoader(ROWS, batch_size=4)


def test_a_step_need_not_take_the_index() -> None:
    (values,) = check(make_without_index, 2, num_steps=1, pipeline_parallel_size=2)
    assert values["grad_norm"][0] == pytest.approx(values["grad_norm"][1], rel=1e-5)


def make() -> tuple[L.LightningModule, Any]:
    return SGDGPT(num_blocks=2, width=16, num_heads=4, context_length=16), DataLoader(ROWS, batch_size=4)


class Dropped(SGDGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + 0 * torch.rand(()))


def make_dropped() -> tuple[L.LightningModule, Any]:
    return Dropped(num_blocks=2, width=16, num_heads=4, context_length=16), DataLoader(ROWS, batch_size=4)


def test_the_command_and_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", f"{__name__}:make", "--devices", "2", "--pipeline_parallel_size", "2", "--schedule", "1F1B"]
    sys.modules.setdefault(__name__, sys.modules[make.__module__])
    assert main(command) == 0
    assert "equal to one process" in capsys.readouterr().out
    with pytest.raises(VerificationError, match="0 of 2 steps could be compared: the step draws random numbers"):
        check(make_dropped, 2, data_parallel_size=2)
    assert main(["check", "nowhere:make"]) == 1
    assert "nowhere:make cannot be imported" in capsys.readouterr().err


def test_the_command_takes_the_strategys_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    sys.modules.setdefault(__name__, sys.modules[make.__module__])
    replicas = ["--data_parallel_size", "2", "--replicate_size", "2", "--replica_sync", "{interval: 4}"]
    assert main(["check", f"{__name__}:make", "--steps", "1", *replicas]) == 0
    assert "equal to one process" in capfd.readouterr().out
    for wrong, told in (
        (["--tensor_parallel_size", "3"], "tensor_parallel_size=3 does not divide 2 devices"),
        (["--pipeline_parallel_size", "2", "--blocks", "nothing"], "blocks='nothing' is not a module"),  # on a rank
    ):
        assert main(["check", f"{__name__}:make", *wrong]) == 1
        error = capfd.readouterr().err
        assert told in error and "Traceback" not in error and "ProbeError" not in error
