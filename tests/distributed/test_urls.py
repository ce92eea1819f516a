"""Checkpoints where people keep them: URLs of fsspec, and W&B's artifacts."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.checkpoint.convert import convert
from lightning_hybrid.checkpoint.whole import latest_checkpoint
from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.training import lightning_callbacks
from tests.distributed.test_checkpoint import LAYOUTS, LitLM, assert_same_training, build_trainer, loader
from tests.ranks import run_ranks
from tests.wandb_file import read_records


def trainer_of(name: str, root: str, epochs: int, *, directory: bool, **options: Any) -> L.Trainer:
    degrees = LAYOUTS[name]
    strategy = Hybrid3DStrategy(**vars(degrees), archive=None, save_distributed_checkpoint=directory)
    folder = f"{root}/checkpoints" if root.startswith("file:") else None  # Lightning makes a relative path of it
    keep = ModelCheckpoint(folder, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True)
    options = {"callbacks": [keep], "enable_checkpointing": True, "strategy": strategy, **options}
    return build_trainer("plain", root, devices=degrees.world_size, max_epochs=epochs, **options)


def fit(trainer: L.Trainer, rank: int, name: str, start: str | None = None) -> None:
    degrees = LAYOUTS[name]
    trainer.fit(LitLM(), loader(1, rank, degrees), loader(2, rank, degrees, seed=2), ckpt_path=start)


def keep_and_resume(rank: int, name: str, root: str, out: Path) -> None:
    """Two epochs, then two more from what is there; in both forms."""
    for directory in (False, True):
        place = f"{root}/{directory}"
        first = trainer_of(name, place, 2, directory=directory)
        fit(first, rank, name)
        fs, at = fsspec.url_to_fs(f"{place}/checkpoints")
        kept = sorted(os.path.basename(path) for path in fs.ls(at, detail=False))
        assert len(kept) == 3 and kept[-1] == "last.ckpt" and all(fs.isdir(f"{at}/{k}") is directory for k in kept)
        best = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        assert fs.exists(best) and os.path.basename(best) in kept
        first.validate(LitLM(), loader(2, rank, LAYOUTS[name], seed=2), ckpt_path="best")
        newest = latest_checkpoint(f"{place}/checkpoints")
        second = trainer_of(name, place, 4, directory=directory)
        fit(second, rank, name, "last" if root.startswith("file:") else newest)
        assert second.global_step == 4
        second.save_checkpoint(out / f"{directory}.ckpt")


@pytest.mark.parametrize(("name", "scheme"), [("alone", "memory"), ("pp2", "file")])
def test_urls(name: str, scheme: str, tmp_path: Path) -> None:
    root = f"file://{tmp_path}/kept" if scheme == "file" else "memory://kept"
    run_ranks(LAYOUTS[name].world_size, keep_and_resume, name, root, tmp_path, timeout=120)

    def uninterrupted(rank: int) -> None:
        trainer = trainer_of(name, str(tmp_path / "local"), 4, directory=False)
        fit(trainer, rank, name)
        trainer.save_checkpoint(tmp_path / "expected.ckpt")

    run_ranks(LAYOUTS[name].world_size, uninterrupted, timeout=120)
    expected = torch.load(tmp_path / "expected.ckpt", weights_only=True)
    assert_same_training(torch.load(tmp_path / "False.ckpt", weights_only=True), expected)
    convert(f"file://{tmp_path}/True.ckpt", tmp_path / "plain.ckpt")
    found = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    del found["lightning_hybrid"]
    assert_same_training(found, expected)


def artifacts(folder: Path) -> list[Any]:
    """What an offline run would upload."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in read_records(next((folder / "wandb").glob("offline-run-*/*.wandb"))):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "artifact":
            found.append(record.artifact)
    return found


@pytest.mark.parametrize(("log_model", "form", "at_least"), [(True, True, 1), ("all", "async", 2), (True, True, 0)])
def test_wandb_gets_whole_directories(
    log_model: Any, form: Any, at_least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_least:  # deliberately wrong: Lightning's own code
        monkeypatch.setattr(lightning_callbacks, "upload_directories", lambda trainer: None)

    def train(rank: int) -> None:
        os.environ |= {"WANDB_CACHE_DIR": str(tmp_path), "WANDB_DATA_DIR": str(tmp_path), "WANDB_SILENT": "true"}
        os.environ["WANDB_MODE"] = "offline"  # Lightning refuses WandbLogger(offline=True, log_model=True)
        logger = WandbLogger(project="test", save_dir=tmp_path, id="mine", log_model=log_model)
        trainer = trainer_of("pp2", str(tmp_path), 2, directory=form, logger=logger)
        with warnings.catch_warnings(record=True) as said:
            fit(trainer, rank, "pp2")
        assert not at_least or not any("not logged" in str(warning.message) for warning in said)
        if rank == 0:
            logger.experiment.finish()

    run_ranks(2, train, timeout=120)
    found = [artifact for artifact in artifacts(tmp_path) if artifact.type == "model"]
    assert len(found) >= at_least and bool(found) is bool(at_least)
    for artifact in found:
        assert artifact.name == "model-mine"
        names = {Path(entry.path).name for entry in artifact.manifest.contents}
        assert {".metadata", "__0_0.distcp", "__1_0.distcp", "complete.json", "meta.pt"} <= names


def test_other_loggers_that_upload_files_are_refused(tmp_path: Path) -> None:
    class Uploads(MLFlowLogger):
        def __init__(self) -> None:
            self._log_model, self._initialized = True, False

    def train(rank: int) -> None:
        trainer = trainer_of("pp2", str(tmp_path), 1, directory=True)
        trainer.loggers = [Uploads()]
        with pytest.raises(UnsupportedError, match=r"Uploads\(log_model=...\) uploads files"):
            fit(trainer, rank, "pp2")

    run_ranks(2, train, timeout=60)
