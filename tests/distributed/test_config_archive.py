"""ARCH-1: four ranks, one archive. One whole entry per run, whatever the ranks do; failures of any rank are kept."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from examples.gpt.module import LitGPT
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.archive import Archive, Entry, fingerprint_module
from lightning_hybrid.callbacks import BubbleRatio, ConfigArchive, ScalingEfficiency, StepBreakdown
from lightning_hybrid.layout import Layout
from lightning_hybrid.pipeline.schedule import SCHEDULES
from tests.ranks import run_ranks

NUM_RANKS, NUM_STEPS, CONTEXT_LENGTH, BATCH_SIZE = 4, 8, 8, 4
DEGREES = {"data_parallel_size": 2, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}
LAYOUT = Layout(data_parallel_size=2, pipeline_parallel_size=2)


class Model(LitGPT):
    """The example's GPT, small; ``at`` is the rank and the batch at which it fails."""

    def __init__(self, error: BaseException | None = None, at: tuple[int, int] = (0, 3)) -> None:
        super().__init__(num_blocks=4, width=16, num_heads=2, context_length=CONTEXT_LENGTH)
        self.error, self.at = error, at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.error is not None and (self.global_rank, batch_idx) == self.at:
            raise self.error

    def train_dataloader(self) -> Any:
        windows = torch.arange(64 * BATCH_SIZE * (CONTEXT_LENGTH + 1)).reshape(-1, CONTEXT_LENGTH + 1)
        return DataLoader(windows * 7 % 256, batch_size=BATCH_SIZE)


class EveryRankWrites(ConfigArchive):
    """The wrong variant: every rank takes itself for the one that writes, under an id of its own."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        assert self.entry is not None
        self.entry = dataclasses.replace(self.entry, id=f"rank-{trainer.global_rank}")

    def _write(self, trainer: L.Trainer, *, any_rank: bool = False) -> None:
        super()._write(trainer, any_rank=True)


def fit(rank: int, folder: Path, degrees: dict[str, int], **options: Any) -> tuple[Layout, str | None]:
    """Train a few steps; return the degrees and the entry started from."""
    time.sleep(options.get("delay", 0.0) * rank)
    L.seed_everything(5)
    archive = options.get("archive_class", ConfigArchive)(folder, every_n_steps=2)
    measured = {"every_n_steps": 3}
    others = [StepBreakdown(**measured), BubbleRatio(picture=False, **measured), ScalingEfficiency(**measured)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=Hybrid3DStrategy(**degrees, archive=str(folder)),
        max_steps=NUM_STEPS,
        callbacks=[archive, *(others if options.get("measure") else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(options.get("model") or Model())
    strategy: Any = trainer.strategy
    return strategy.layout, strategy.started_from


def start(num_ranks: int, folder: Path, degrees: dict[str, int], **options: Any) -> list[Any]:
    return run_ranks(num_ranks, lambda rank: fit(rank, folder, degrees, **options))


def entries_of(folder: Path) -> list[Entry]:
    """All entries; there is nothing else in the folder."""
    entries = Archive(folder).list()
    assert sorted(os.listdir(folder)) == sorted(f"{entry.id}.json" for entry in entries)
    return entries


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive after one run with given degrees. Not to be written to."""
    folder = tmp_path_factory.mktemp("archive") / "new"
    start(NUM_RANKS, folder, DEGREES, measure=True)
    return folder


@pytest.fixture
def archive(first_run: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(first_run, tmp_path / "archive"))


def test_one_whole_entry(first_run: Path) -> None:
    (entry,) = entries_of(first_run)
    assert entry.degrees == LAYOUT
    assert entry.hardware.num_devices == NUM_RANKS
    assert entry.model == fingerprint_module(Model())  # of the whole model, though each rank holds a part
    assert entry.settings.schedule.lower() in SCHEDULES  # "auto" chose it
    assert entry.settings.num_microbatches == 4
    assert (entry.batch.size_per_data_rank, entry.batch.global_size) == (BATCH_SIZE, 2 * BATCH_SIZE)
    assert (entry.training.seed, entry.training.optimizer, entry.software["torch"]) == (5, "AdamW", torch.__version__)
    result = entry.result
    assert (result.status, result.num_steps) == ("ok", NUM_STEPS)
    assert result.step_time is not None
    # Each sample once: two data ranks, not four devices. (Ranks time the same steps, but not to the microsecond.)
    assert result.samples_per_second == pytest.approx(2 * BATCH_SIZE / result.step_time, rel=0.2)
    assert result.samples_per_second_per_device == pytest.approx((result.samples_per_second or 0) / NUM_RANKS)
    assert result.first_loss is not None
    assert 4.5 < result.first_loss < 7  # ln 256 = 5.55
    assert {"step/time_s", "step/compute_s"} <= set(result.breakdown)
    assert {"bubble/measured", "bubble/ideal"} <= set(result.bubble)


def test_next_run_starts_from_it_and_a_smaller_one_rescales_it(archive: Path) -> None:
    (entry,) = entries_of(archive)
    assert start(NUM_RANKS, archive, {}) == [(LAYOUT, entry.id)] * NUM_RANKS
    first, second = entries_of(archive)
    assert first == entry
    assert (second.parent, second.degrees, second.result.status) == (entry.id, LAYOUT, "ok")
    smaller = Layout(data_parallel_size=1, pipeline_parallel_size=2)
    for layout, parent in start(2, archive, {}):
        assert layout == smaller
        assert parent in (first.id, second.id)


def test_delayed_ranks(tmp_path: Path) -> None:
    start(NUM_RANKS, tmp_path, DEGREES, delay=0.6)
    assert [entry.result.status for entry in entries_of(tmp_path)] == ["ok"]


def test_two_runs_at_once(tmp_path: Path) -> None:
    """Two launches share the folder; neither disturbs the other, and both are there in the end."""
    other = multiprocessing.get_context("fork").Process(target=start, args=(2, tmp_path, {"data_parallel_size": 2}))
    other.start()
    start(2, tmp_path, {"pipeline_parallel_size": 2})
    other.join(60)
    assert other.exitcode == 0
    entries = entries_of(tmp_path)
    assert [entry.result.status for entry in entries] == ["ok", "ok"]
    assert {str(entry.degrees) for entry in entries} == {
        "data 2 x tensor 1 x pipeline 1",
        "data 1 x tensor 1 x pipeline 2",
    }


def fit_by_cli(rank: int, folder: Path) -> None:
    """LightningCLI with a config file, which saves its own config into the same folder of runs."""
    archive = str(folder / "archive")
    strategy = {"class_path": "lightning_hybrid.Hybrid3DStrategy", "init_args": {**DEGREES, "archive": archive}}
    callback = {"class_path": "lightning_hybrid.callbacks.ConfigArchive", "init_args": {"url": archive}}
    trainer = {
        "accelerator": "cpu",
        "devices": NUM_RANKS,
        "strategy": strategy,
        "callbacks": [callback],
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder)}},
        "max_steps": 2,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    LightningCLI(Model, args=["fit", "--config", json.dumps({"trainer": trainer, "seed_everything": 5})])


def test_lightning_cli_with_its_own_config_saver(tmp_path: Path) -> None:
    run_ranks(NUM_RANKS, fit_by_cli, tmp_path)
    (entry,) = entries_of(tmp_path / "archive")
    assert (entry.degrees, entry.result.status) == (LAYOUT, "ok")
    assert len(list(tmp_path.rglob("config.yaml"))) == 1


def test_unwritable_folder_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, *others = run_ranks(NUM_RANKS, warnings_of, tmp_path / "file" / "archive")
    assert len([text for text in first if "training goes on" in text]) == 1
    assert others == [[]] * (NUM_RANKS - 1)


def warnings_of(rank: int, folder: Path) -> list[str]:
    """What a run warns of the archive."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_hybrid").addHandler(handler)
    fit(rank, folder, DEGREES)
    return [text for text in records if "archive" in text]


@pytest.mark.parametrize(
    ("rank", "error", "status"),
    [(0, ValueError("a bad batch"), "error"), (3, torch.OutOfMemoryError("CUDA out of memory"), "oom")],
)
def test_failure_on_any_rank_is_recorded(tmp_path: Path, rank: int, error: BaseException, status: str) -> None:
    with pytest.raises(type(error)):
        start(NUM_RANKS, tmp_path, DEGREES, model=Model(error, at=(rank, 3)))
    (entry,) = entries_of(tmp_path)
    assert (entry.degrees, entry.result.status) == (LAYOUT, status)
    assert entry.result.message is not None
    assert entry.result.message.startswith(f"rank {rank} (data {rank % 2}, tensor 0, pipeline {rank // 2}), training")
    assert entry.result.message.endswith(f": {type(error).__name__}: {error}")


def test_what_ran_out_of_memory_is_not_tried_again(archive: Path) -> None:
    with pytest.raises(MemoryError):
        start(NUM_RANKS, archive, {}, model=Model(MemoryError("too much"), at=(1, 2)))
    assert [(entry.degrees, entry.result.status) for entry in entries_of(archive)] == [(LAYOUT, "ok"), (LAYOUT, "oom")]
    for layout, parent in start(NUM_RANKS, archive, {}):
        assert parent is None
        assert layout != LAYOUT


def test_wrong_variant_every_rank_writes(tmp_path: Path) -> None:
    start(2, tmp_path, {"data_parallel_size": 2}, archive_class=EveryRankWrites)
    assert len(entries_of(tmp_path)) > 1
