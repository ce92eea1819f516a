"""Checkpoints as directories in real runs: from layout to layout in a ring, and what ends a save."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_hybrid.checkpoint.shares as shares
from benchmarks.checkpoint_matrix import LAYOUTS, PLAIN, STEPS, assert_same, assert_same_losses, read, train, world_size
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.checkpoint.whole import why_not_whole
from lightning_hybrid.errors import CheckpointError
from tests.distributed.test_checkpoint import LAYOUTS as DEGREES
from tests.distributed.test_checkpoint import LitLM, build_trainer, loader
from tests.ranks import run_ranks

RING = tuple(LAYOUTS)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """The uninterrupted run's losses, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("plain")
    return run_ranks(1, train, PLAIN, folder, 0, len(RING), None, PLAIN)[0], folder


def test_every_layout_goes_on_from_another(expected: tuple[list[float], Path], tmp_path: Path) -> None:
    losses, folder = expected
    start = None
    for epoch, name in enumerate(RING):
        ranks = run_ranks(world_size(name), train, name, tmp_path, epoch, epoch + 1, start, name, timeout=120)
        assert_same_losses(ranks, losses[STEPS * epoch : STEPS * (epoch + 1)])
        start = tmp_path / f"{name}-{epoch + 1}.ckpt"
        assert start.is_dir()
        assert_same(read(start), read(folder / f"{PLAIN}-{epoch + 1}.ckpt"))


def forget_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hybrid3DStrategy, "load_optimizer_state_dict", lambda *_: None)


def forget_order_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = shares._pieces
    monkeypatch.setattr(shares, "_pieces", lambda local, bounds, rows: pieces(local, bounds, None))


@pytest.mark.parametrize("sabotage", [forget_moments, forget_order_of_rows])
def test_what_is_forgotten_is_noticed(
    sabotage: Callable[[pytest.MonkeyPatch], None],
    expected: tuple[list[float], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LAYOUTS, "tp2", {**LAYOUTS["1x1x1"], "tensor_parallel_size": 2})
    sabotage(monkeypatch)
    run_ranks(2, train, "tp2", tmp_path, 0, 1, None, "a", timeout=120)
    ranks = run_ranks(1, train, "1x1x1", tmp_path, 1, 2, tmp_path / "a-1.ckpt", "b", timeout=120)
    with pytest.raises(AssertionError, match="loss of step"):
        assert_same_losses(ranks, expected[0][STEPS : 2 * STEPS])


def keep_best(rank: int, name: str, folder: Path, form: Any) -> list[Any]:
    """Four epochs of one step; the two best by validation loss are kept. Then evaluate what was kept."""
    keep = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last="link")
    trainer = build_trainer(name, folder, form=form, max_epochs=4, callbacks=[keep], enable_checkpointing=True)
    batches = loader(1, rank, DEGREES[name]), loader(2, rank, DEGREES[name], seed=2)
    trainer.fit(LitLM(), *batches)
    found = [trainer.validate(LitLM(), batches[1], ckpt_path=path, verbose=False)[0] for path in ("best", "last")]
    return [sorted(os.listdir(folder)), Path(keep.best_model_path).name, *(row["val_loss"] for row in found)]


@pytest.mark.parametrize("form", [True, "async"])
def test_model_checkpoint_keeps_the_best_directories(form: Any, tmp_path: Path) -> None:
    ((names, best, *losses),) = run_ranks(1, keep_best, "plain", tmp_path / "plain", False)
    for found in run_ranks(2, keep_best, "dp2", tmp_path / "dp2", form, timeout=120):
        assert found[:2] == [names, best]
        assert found[2:] == pytest.approx(losses, rel=1e-6)
    for name in names:
        assert (tmp_path / "dp2" / name).is_dir()
        assert why_not_whole(tmp_path / "dp2" / name) is None


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def fill_disk(rank: int, folder: Path, form: Any) -> str:
    """The second save fails on one rank."""
    trainer = build_trainer("pp2", folder, form=form, max_epochs=1, limit_val_batches=0)
    trainer.fit(LitLM(), loader(1, rank, DEGREES["pp2"]))
    trainer.save_checkpoint(folder / "last.ckpt", weights_only=True)
    trainer.strategy.teardown()  # what an asynchronous save waits for
    before = whole_state(folder / "last.ckpt")
    if rank == (0 if form is False else 1):
        where = "lightning_hybrid.checkpoint.files" if form is False else "torch.distributed.checkpoint.filesystem"
        pytest.MonkeyPatch().setattr(f"{where}.torch.save", full_disk)
    if form == "async":
        trainer.save_checkpoint(folder / "last.ckpt", weights_only=True)  # it shows at the next one
    with pytest.raises(CheckpointError) as refused:
        trainer.save_checkpoint(folder / "last.ckpt", weights_only=True)
    trainer.strategy.barrier()
    torch.testing.assert_close(whole_state(folder / "last.ckpt"), before)
    assert os.listdir(folder) == ["last.ckpt"]
    return str(refused.value)


def whole_state(path: Path) -> dict[str, Tensor]:
    return dict(read(path)["state_dict"])


@pytest.mark.parametrize("form", [True, "async", False])
def test_a_full_disk_of_one_rank_ends_all_and_leaves_the_old_one(form: Any, tmp_path: Path) -> None:
    texts = run_ranks(2, fill_disk, tmp_path, form, timeout=60)
    assert len(set(texts)) == 1
    assert "last.ckpt could not be saved" in texts[0]
    assert ("rank 1: " in texts[0]) is (form is not False)
    assert "No space left on device" in texts[0]
