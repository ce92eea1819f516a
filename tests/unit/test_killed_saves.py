"""A process that is killed at every change of files that its saves make: what is resumed from has the latest step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

import lightning_hybrid.checkpoint.whole as whole
from lightning_hybrid.checkpoint.directory import as_shares, read_directory, write_directory
from lightning_hybrid.checkpoint.files import write_file
from lightning_hybrid.errors import CheckpointError
from tests.unit.test_checkpoint_directory import content
from tests.unit.test_restart import found

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def write(path: Path, form: str, checkpoint: dict[str, Any]) -> None:
    if form == "file":
        write_file(checkpoint, path, TorchCheckpointIO())
    else:
        write_directory(as_shares(checkpoint), path)


def save_as_model_checkpoint_does(folder: Path, form: str, step: int, best: str) -> None:
    """With ``save_top_k=1`` and ``save_last=True``: the new one, away with the one before it, the last one."""
    path = folder / f"step={step}.ckpt"
    checkpoint = {**content(step), "best": str(path)}
    write(path, form, checkpoint)
    if best and best != str(path):
        TorchCheckpointIO().remove_checkpoint(best)
    write(folder / "last.ckpt", form, checkpoint)


def killed_before(number: int, folder: Path, form: str, step: int, best: str) -> bool:
    """Save in a process that ends before its so-manieth change of the file system. Whether it was killed."""
    if (child := os.fork()) == 0:
        left = [number]

        def count(event: str, arguments: Any) -> None:
            if event in EVENTS and str(arguments[0]).startswith(str(folder)):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)

        try:
            sys.addaudithook(count)
            save_as_model_checkpoint_does(folder, form, step, best)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def resumed_from(folder: Path) -> dict[str, Any]:
    path = found(folder)
    assert path is not None, sorted(os.listdir(folder))
    path = whole.checkpoint_to_load(folder / path)
    return read_directory(path, True) if os.path.isdir(path) else torch.load(path, weights_only=True)


def kill_at_every_call(folder: Path) -> int:
    """Kills one after the other in one folder, so that each save meets what the kills before it have left."""
    kills = 0
    for form in ("file", "directory"):
        number, was_killed = 0, True
        while was_killed:
            before = resumed_from(folder)
            step = before["global_step"] + 1
            was_killed = killed_before(number, folder, form, step, before.get("best", ""))
            after = resumed_from(folder)["global_step"]
            assert after in (step - 1, step), f"{after} after {step}, {form} killed before call {number}"
            assert was_killed or after == step
            number, kills = number + 1, kills + was_killed
    return kills


def test_nothing_is_lost_wherever_a_save_is_killed(tmp_path: Path) -> None:
    save_as_model_checkpoint_does(tmp_path, "directory", 1, "")
    assert kill_at_every_call(tmp_path) > 30


def test_a_save_that_removes_first_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_as_model_checkpoint_does(tmp_path, "directory", 1, "")
    whole.remove(tmp_path / "step=1.ckpt")
    monkeypatch.setattr(sys.modules[__name__], "save_as_model_checkpoint_does", remove_first)
    with pytest.raises(CheckpointError, match="There is no whole one beside it"):
        kill_at_every_call(tmp_path)


def remove_first(folder: Path, form: str, step: int, best: str) -> None:
    whole.remove(folder / "last.ckpt")
    write(folder / "last.ckpt", form, content(step))
