"""``ckpt_path="last"`` where ``last.ckpt`` is not there, or not whole: what Lightning's search for it finds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hybrid.failures.restart import prepare_for_restarts
from tests.unit.test_checkpoint_directory import save


def found(folder: Path, *, prepared: bool = True, fn: TrainerFn | None = None) -> str | None:
    """What a trainer that is started with ``ckpt_path="last"`` resumes from."""
    trainer = L.Trainer(accelerator="cpu", callbacks=[ModelCheckpoint(folder, save_last=True)], logger=False)
    trainer.state.fn = fn
    if prepared:
        prepare_for_restarts(trainer)
    connector: Any = trainer._checkpoint_connector
    path = connector._parse_ckpt_path(TrainerFn.FITTING, "last", model_provided=True, model_connected=True)
    return None if path is None else os.path.relpath(path, folder)


def make_link(folder: Path) -> None:
    (folder / "last.ckpt").symlink_to("step=9.ckpt")  # which was removed


def stop_between_renames(folder: Path) -> None:
    save(folder / "last-v1.ckpt", 1)
    os.utime(folder / "last-v1.ckpt", (0, 0))
    save(folder / "last.ckpt", 4).rename(folder / "last.ckpt.replaced")


LEFT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the first one half written": (lambda folder: (folder / "last.ckpt.incomplete").mkdir(), "step=2.ckpt"),
    "between two renames": (
        lambda folder: save(folder / "last.ckpt", 4).rename(folder / "last.ckpt.replaced"),
        "last.ckpt.replaced",
    ),
    "between two renames, beside one of long ago": (stop_between_renames, "last.ckpt.replaced"),
    "a link taken away": (lambda folder: None, "step=2.ckpt"),
    "a link to nothing": (make_link, "step=2.ckpt"),
    "a whole one": (lambda folder: save(folder / "last.ckpt", 4), "last.ckpt"),
}


@pytest.mark.parametrize("left", LEFT)
def test_what_is_left_is_resumed_from(left: str, tmp_path: Path) -> None:
    do, expected = LEFT[left]
    save(tmp_path / "step=2.ckpt", 2)
    do(tmp_path)
    assert found(tmp_path) == expected
    assert (left == "a whole one") is (found(tmp_path, prepared=False) == expected), "Lightning would take another"


def test_what_was_interrupted_is_named(tmp_path: Path) -> None:
    save(tmp_path / "last.ckpt", 2)
    (tmp_path / "step=4.ckpt.incomplete").mkdir()
    with pytest.warns(UserWarning, match=r"interrupted.*passed over: step=4\.ckpt\.incomplete"):
        assert found(tmp_path, fn=TrainerFn.VALIDATING) == "last.ckpt"
    assert (tmp_path / "step=4.ckpt.incomplete").exists(), "a job that trains may be saving it"
    with pytest.warns(UserWarning, match=r"interrupted.*removed: step=4\.ckpt\.incomplete"):
        assert found(tmp_path, fn=TrainerFn.FITTING) == "last.ckpt"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_without_any_checkpoint_training_starts_anew(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    assert found(tmp_path / "nowhere") is None


def test_an_old_one_is_not_removed_before_there_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "last.ckpt", 2).rename(tmp_path / "last.ckpt.replaced")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "last.ckpt", 4)
    assert found(tmp_path) == "last.ckpt.replaced"
