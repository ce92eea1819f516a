"""Case MEAS-1 in a real Trainer whose time is made up: what counts as a step, and what its rates are."""

from __future__ import annotations

import logging
from collections import UserDict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.callbacks import ScalingEfficiency, StepBreakdown
from lightning_hybrid.callbacks.scaling_efficiency import as_reference, count_samples, count_tokens
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.measuring.recorder import StepRecorder

BATCH_SIZE, NUM_TOKENS = 8, 12


class Time:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Slow(L.LightningModule):
    """The first batch takes 5 s, the others 1 s each, a validation 3 s."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self.time, self.weight, self.num_batches = time, torch.nn.Parameter(torch.ones(())), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.time.now += 1.0 if self.num_batches else 5.0
        self.num_batches += 1
        return self.weight * batch[0].float().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.time.now += 3.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SlowCheckpoint(ModelCheckpoint):
    """Every save takes 2 s."""

    def __init__(self, time: Time, **options: Any) -> None:
        super().__init__(**options)
        self.time = time

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.time.now += 2.0


class SlowData(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    def __init__(self, time: Time, seconds: float) -> None:
        self.time, self.seconds = time, seconds

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.time.now += self.seconds
        return (torch.ones(NUM_TOKENS, dtype=torch.int64),)


def fit(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *callbacks: L.Callback,
    accumulate: int = 1,
    data_seconds: float = 0.0,
) -> StepRecorder:
    time = Time()
    recorder = StepRecorder(time)
    monkeypatch.setattr(StepRecorder, "of", lambda trainer: recorder)
    save = SlowCheckpoint(time, dirpath=folder, every_n_train_steps=3, save_top_k=-1, save_on_train_epoch_end=False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=8,
        accumulate_grad_batches=accumulate,
        val_check_interval=4 * accumulate,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, save],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start, stop = trainer.profiler.start, trainer.profiler.stop
    held_out = DataLoader(TensorDataset(torch.ones(BATCH_SIZE, NUM_TOKENS, dtype=torch.int64)), batch_size=BATCH_SIZE)
    trainer.fit(Slow(time), DataLoader(SlowData(time, data_seconds), batch_size=BATCH_SIZE), held_out)
    assert trainer.global_step == 8
    assert len(list(folder.glob("*.ckpt"))) == 2
    assert (trainer.profiler.start, trainer.profiler.stop) == (start, stop)  # nobody listens any more
    return recorder


@pytest.mark.parametrize("accumulate", [1, 2])
def test_exact_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accumulate: int) -> None:
    """96 tokens a second, whether or not gradients are accumulated; neither start, validation nor saving count."""
    callback = ScalingEfficiency(
        {"tokens_per_second": 120.0, "global_batch_size": BATCH_SIZE * accumulate},
        every_n_steps=100,
        num_warmup_steps=1,
    )
    fit(monkeypatch, tmp_path, callback, accumulate=accumulate)
    assert callback.throughput is not None
    assert callback.throughput.num_steps == 6  # of 8: less the first, and the one after the measurement at step 3
    assert callback.throughput.seconds == pytest.approx(6.0 * accumulate)
    assert callback.latest["throughput/step_s"] == pytest.approx(accumulate)
    assert callback.latest["throughput/batch_size"] == BATCH_SIZE * accumulate
    assert callback.latest["throughput/samples_per_s"] == pytest.approx(8)
    assert callback.latest["throughput/tokens_per_s"] == pytest.approx(96)
    assert callback.latest["scaling/efficiency"] == pytest.approx(0.8)
    assert callback.scaling is not None
    assert callback.scaling.kind == "same size"


def test_where_every_step_is_measured_these_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    callback = ScalingEfficiency({"tokens_per_second": 120.0}, every_n_steps=1)
    fit(monkeypatch, tmp_path, callback)
    assert callback.latest["throughput/tokens_per_s"] == pytest.approx(96)
    assert [step for step, _ in callback.history.rows] == [4, 5, 6, 7, 8]
    with pytest.raises(ConfigurationError, match="the same keys"):
        fit(monkeypatch, tmp_path, callback, ScalingEfficiency())


def test_without_warm_up_the_first_step_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rates of the test before are no accident: what it leaves out is there."""
    recorder = fit(monkeypatch, tmp_path, ScalingEfficiency(every_n_steps=0))
    assert [step.seconds for step in recorder.steps] == pytest.approx([1.0] * 7)
    assert [step.end - step.start for step in recorder.steps] == pytest.approx(
        [1, 1, 3, 4, 1, 3, 1]
    )  # saves, validation


def test_waiting_for_data_is_part_of_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = fit(monkeypatch, tmp_path, ScalingEfficiency(every_n_steps=0), data_seconds=0.25)
    steps = list(recorder.steps)[1:-1]
    assert [step.seconds for step in steps] == pytest.approx([3.0] * len(steps))
    assert [sum(end - start for start, end in step.data_waits) for step in steps] == pytest.approx([2.0] * len(steps))


@pytest.mark.parametrize(
    ("baseline", "reason"),
    [
        ({"tokens_per_second": 120.0, "global_batch_size": 3}, "use 3 a device"),
        ({"tokens_per_second": 120.0, "model": "another"}, "model: another there"),
    ],
)
def test_a_baseline_that_does_not_compare_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, baseline: Any, reason: str
) -> None:
    callback = ScalingEfficiency(baseline, every_n_steps=100)
    with caplog.at_level(logging.WARNING):
        fit(monkeypatch, tmp_path, callback)
    assert "throughput/tokens_per_s" in callback.latest
    assert not [key for key in callback.latest if key.startswith("scaling/")]
    assert reason in caplog.text


def test_an_archive_without_a_baseline_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = ScalingEfficiency(str(tmp_path / "archive"), every_n_steps=100)
    fit(monkeypatch, tmp_path, callback)
    assert "has no run of this model on one device" in caplog.text
    assert caplog.text.count("has no run") == 1


def test_measured_steps_are_the_same_on_all_ranks() -> None:
    """They follow from the global step alone, also after a resume at step 100."""
    callback, trainer = StepBreakdown(every_n_steps=10), L.Trainer(logger=False, enable_checkpointing=False)
    assert [step for step in range(31) if callback.is_due(trainer, step)] == [4, 10, 20, 30]
    callback._first_step = 100
    assert [step for step in range(131) if callback.is_due(trainer, step)] == [104, 110, 120, 130]
    callback.every_n_steps = 0
    assert not any(callback.is_due(trainer, step) for step in range(300))
    callback.every_n_steps = None
    assert callback.is_due(trainer, 150)  # log_every_n_steps is 50
    with pytest.raises(ConfigurationError, match="every_n_steps=-1"):
        StepBreakdown(every_n_steps=-1)


def test_tokens() -> None:
    words, mask, image = (
        torch.zeros(4, 5, dtype=torch.int64),
        torch.ones(4, 5, dtype=torch.bool),
        torch.zeros(4, 3, 8, 8),
    )
    assert count_tokens({"mask": mask, "input_ids": words}, 4, "auto") == 20
    assert count_tokens([image, torch.zeros(4, dtype=torch.int64)], 4, "auto") == 0
    assert count_tokens(image, 4, 64) == 256
    assert count_tokens({"lengths": torch.tensor([3, 4])}, 2, lambda batch: batch["lengths"].sum()) == 7
    with pytest.raises(ConfigurationError, match="tokens='words'"):
        ScalingEfficiency(tokens="words")


def test_samples() -> None:
    words = torch.zeros(4, 5, dtype=torch.int64)
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    assert count_samples(UserDict(input_ids=words)) == 4  # what Hugging Face's tokenizers make
    assert count_samples([packed, torch.zeros(2)]) == count_samples({"text": ["a", "b"]}) == 2
    assert count_samples([torch.zeros(3, 5), torch.zeros(3, 4), torch.zeros(2, 4)]) == 3  # of different sizes
    assert count_samples(None) == 0
    with pytest.warns(UserWarning, match="a batch \\(object\\) has no tensor"):
        assert count_samples(object()) == 1


def test_baselines() -> None:
    assert as_reference(12.0).samples_per_second == 12.0
    assert as_reference({"num_devices": 2, "tokens_per_second": 5.0}).num_devices == 2
    with pytest.raises(ConfigurationError, match="its fields are num_devices"):
        as_reference({"tokens_per_sec": 5.0})
