"""What people do with checkpoints that would lose something: a fresh look at saving found each of these."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.tensor import DTensor

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.checkpoint.convert import convert
from lightning_hybrid.checkpoint.directory import read_directory
from lightning_hybrid.errors import CheckpointError
from tests.distributed.equality import QUIET
from tests.ranks import run_ranks


class Counts(BoringModel):  # type: ignore[misc]
    """Puts a counter into its checkpoints, and a shard if asked to."""

    leaks = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = Counter(a=3)
        if self.leaks:
            checkpoint["average"] = {"w": [p.detach().clone() for p in self.parameters()]}


def misuse(rank: int, folder: Path, form: Any) -> dict[str, Any]:
    strategy = Hybrid3DStrategy(2, 1, 1, archive=None, save_distributed_checkpoint=form)
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=1, limit_val_batches=0, **QUIET)
    module = Counts()
    os.chdir(folder)
    trainer.fit(module)
    said = {}
    trainer.save_checkpoint("final.ckpt")  # the last line of a script: nobody waits for what comes after it
    said["is there"] = Path("final.ckpt").exists()
    with pytest.raises(CheckpointError, match="folder which is no checkpoint"):
        trainer.save_checkpoint("results")
    module.leaks = True
    assert isinstance(next(module.parameters()), DTensor)
    with pytest.raises(CheckpointError, match=r"average\.w\.0 is a shard"):
        trainer.save_checkpoint("leaks.ckpt")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        strategy.load_checkpoint("nix.ckpt")
    return said


@pytest.mark.parametrize("form", [False, "async"])
def test_nothing_is_lost(form: Any, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.txt").write_text("years")
    backup = tmp_path / "final.ckpt.old"
    backup.write_text("a user's own")
    assert run_ranks(2, misuse, tmp_path, form, timeout=60) == [{"is there": True}] * 2
    assert (tmp_path / "results" / "thesis.txt").read_text() == "years"
    assert backup.read_text() == "a user's own"
    path = tmp_path / "final.ckpt"
    checkpoint = read_directory(path, False) if form else torch.load(path, weights_only=False)
    assert checkpoint["counts"] == Counter(a=3)
    convert(path, tmp_path / "other", "directory" if form is False else "file", trusted=True)
    other = tmp_path / "other"
    converted = torch.load(other, weights_only=False) if form else read_directory(other, False)
    assert converted["counts"] == Counter(a=3)
