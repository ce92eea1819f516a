"""``tune=N``: plans are tried in processes that leave nothing; what runs out of memory is passed over."""

from __future__ import annotations

import logging
import os
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from examples.gpt.module import LitGPT
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.choosing.plan import PlanChoice
from lightning_hybrid.choosing.run_facts import BatchFacts, batch_facts
from lightning_hybrid.choosing.tuning import Trial, _data_in_sight, fastest
from lightning_hybrid.layout import Layout


class Model(LitGPT):
    """The example's GPT, small. Plain replicas have too little memory for it, it says."""

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        if strategy.layout.replicate_size == 2:
            raise MemoryError("out of memory: 2 replicas")


def fit(**arguments: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    L.seed_everything(3, verbose=False)
    module = Model(num_blocks=4, width=16, num_heads=2, context_length=8)
    rows = torch.arange(64 * 9).reshape(64, 9) * 7 % 256
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=Hybrid3DStrategy(archive=None, start_method="fork", **arguments),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=8, shuffle=True))  # type: ignore[arg-type]
    for name in ("MASTER_PORT", "MASTER_ADDR", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # Lightning's launcher leaves them
    return trainer, module.state_dict()


@pytest.fixture
def chosen_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are as short as they can be."""
    monkeypatch.setattr("lightning_hybrid.choosing.tuning.STEPS", 4)
    monkeypatch.setattr("lightning_hybrid.choosing.tuning.WARMUP", 1)


def test_trials_leave_no_trace_and_what_fails_is_passed_over(
    chosen_here: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        trainer, weights = fit(tune=2)
    said = [record.getMessage() for record in caplog.records if "tried" in record.getMessage()]
    assert len(said) == 2, said
    assert "ran out of memory" in said[0]
    assert "s a step" in said[1]
    assert trainer.global_step == 2
    best = trainer.strategy.choice.tuned
    assert best.layout in (Layout(data_parallel_size=2), Layout(pipeline_parallel_size=2))
    given = {name: size for name, size in vars(best.layout).items() if size > 1}
    _, expected = fit(**given)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_the_fastest_is_that_of_samples_per_second() -> None:
    def trial(data: int, seconds: float | None) -> Trial:
        return Trial(PlanChoice(layout=Layout(data_parallel_size=data), lines=()), seconds)

    four, one, failed = trial(4, 1.0), trial(1, 0.5), trial(8, None)
    assert fastest([one, failed, four]) is four
    assert fastest([failed]) is None


def test_plans_to_try_are_for_the_loader_that_fit_was_given() -> None:
    """Before a run the Trainer has neither loader nor module; afterwards it has them no more."""
    module, trainer = LitGPT(num_blocks=2, width=32), L.Trainer(accelerator="cpu", logger=False)
    loader = DataLoader(torch.zeros(64, 17, dtype=torch.long), batch_size=6)  # type: ignore[arg-type]
    assert "batches of 8" in batch_facts(module, module._trainer).assumed
    with _data_in_sight(trainer, module, (module, loader, None, None, None)):
        assert batch_facts(module, module._trainer) == BatchFacts(samples=6, length=17)
    assert "batches of 8" in batch_facts(module, module._trainer).assumed
