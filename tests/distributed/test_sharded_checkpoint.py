"""Checkpoints as directories in real runs: from layout to layout in a ring, and what ends a save."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

import lightning_hybrid.checkpoint.host_copies as host_copies
import lightning_hybrid.checkpoint.shares as shares
from benchmarks.checkpoint_matrix import (
    LAYOUTS,
    PLAIN,
    STEPS,
    Saving,
    assert_same,
    assert_same_losses,
    read,
    train,
    world_size,
)
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.checkpoint.directory import read_directory
from lightning_hybrid.checkpoint.whole import why_not_whole
from lightning_hybrid.errors import CheckpointError
from tests.distributed.test_checkpoint import LAYOUTS as DEGREES
from tests.distributed.test_checkpoint import Editing, LitLM, build_trainer, loader
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


def copy_late(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """States of optimizers are copied when a step is over, or so late that it should be."""
    stepped, finish = threading.Event(), host_copies.HostCopies.finish
    monkeypatch.setattr(host_copies, "SMALL", 0)
    late = lambda self: [stepped.clear(), stepped.wait(seconds), finish(self)]  # noqa: E731
    monkeypatch.setattr(host_copies.HostCopies, "finish", late)
    monkeypatch.setattr(torch.optim.AdamW, "step", followed_by(stepped.set, torch.optim.AdamW.step))


def followed_by(end: Callable[[], None], step: Any) -> Any:
    """The step, and then ``end``; still torch's own by name."""
    return functools.wraps(step)(lambda *args, **kwargs: [step(*args, **kwargs), end()][0])


def test_states_are_copied_before_the_next_step(
    expected: tuple[list[float], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYOUTS, "dp2", {**LAYOUTS["1x1x1"], "data_parallel_size": 2})
    job = functools.partial(train, save_distributed_checkpoint="async")
    with monkeypatch.context() as patch:
        copy_late(patch, 0.3)
        run_ranks(2, job, "dp2", tmp_path, 0, 2, None, "waited", timeout=120)
    for epochs in (1, 2):
        assert_same(read(tmp_path / f"waited-{epochs}.ckpt"), read(expected[1] / f"{PLAIN}-{epochs}.ckpt"))
    copy_late(monkeypatch, 60)
    monkeypatch.setattr(host_copies.HostCopies, "_before_step", lambda *_: None)  # the wrong variant
    with pytest.raises(
        CheckpointError, match=r"wrong-1.ckpt could not be saved: rank .: optimizer_0.state.\S+, and \d+"
    ):
        run_ranks(2, job, "dp2", tmp_path, 0, 2, None, "wrong", timeout=120)
    assert not list(tmp_path.glob("wrong*"))


def keep_best(rank: int, name: str, folder: Path, form: Any) -> list[Any]:
    """Four epochs of one step; the two best by validation loss are kept. Then evaluate what was kept."""
    keep = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last="link")
    trainer = build_trainer(name, folder, form=form, max_epochs=4, callbacks=[keep], enable_checkpointing=True)
    batches = loader(1, rank, DEGREES[name]), loader(2, rank, DEGREES[name], seed=2)
    trainer.fit(LitLM(), *batches)
    found = [trainer.validate(LitLM(), batches[1], ckpt_path=path, verbose=False)[0] for path in ("best", "last")]
    return [sorted(os.listdir(folder)), Path(keep.best_model_path).name, *(row["val_loss"] for row in found)]


def test_model_checkpoint_keeps_the_best_directories(tmp_path: Path) -> None:
    ((names, best, *losses),) = run_ranks(1, keep_best, "plain", tmp_path / "plain", False)
    for found in run_ranks(2, keep_best, "dp2", tmp_path / "dp2", "async", timeout=120):
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
        trainer.state.status = TrainerStatus.RUNNING  # as within fit: saved in the background
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


def resume_damaged(rank: int, name: str, folder: Path, form: Any) -> int:
    """Case CKPT-1: six steps, a checkpoint at every second; the sixth's is cut off; then from "last" to the eighth."""
    degrees, seen = DEGREES[name], Seen()
    for last in (6, 8):
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
        options = {"max_steps": last, "limit_val_batches": 0, "callbacks": [keep, seen], "enable_checkpointing": True}
        trainer = build_trainer(name, folder, form=form, **options)
        trainer.fit(LitLM(), loader(2, rank, degrees), ckpt_path="last" if last == 8 else None)
        for damaged in ("step=6.ckpt", "last.ckpt") if rank == 0 and last == 6 and name != "plain" else ():
            file = folder / damaged / "__0_0.distcp"
            os.truncate(file, file.stat().st_size // 2)
        if name != "plain":
            trainer.strategy.barrier()
    return seen.first_step


class Seen(L.Callback):
    """Notes at which step the latest fit began."""

    first_step = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.first_step = trainer.global_step


def test_a_damaged_last_one_is_passed_over(tmp_path: Path) -> None:
    assert run_ranks(1, resume_damaged, "plain", tmp_path / "plain", False) == [6]
    assert run_ranks(4, resume_damaged, "dp2-pp2", tmp_path / "found", True, timeout=120) == [4] * 4
    expected = read(tmp_path / "plain" / "step=8.ckpt")
    for name in ("step=6-v1.ckpt", "step=8.ckpt", "last.ckpt"):
        assert why_not_whole(tmp_path / "found" / name) is None, "the sixth is there again by another name"
    assert_same(read(tmp_path / "found" / "last.ckpt"), expected)


class Half(LitLM):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {key: value.half() for key, value in checkpoint["state_dict"].items()}


class Unlike(LitLM):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            checkpoint["state_dict"]["other"] = checkpoint["state_dict"].pop("embedding.weight")


class OfMyOwn:
    """What weights_only=True does not read."""


class WithOwn(LitLM):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = OfMyOwn()
        checkpoint["average"] = {name: p.detach().clone() for name, p in self.named_parameters()}  # of this stage


class Grown(LitLM):
    """With a layer that no checkpoint knows, and without one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.register_buffer("more", torch.zeros(2))
        del self.scale
        self.scale = 1.5


def outcome(function: Callable[[], Any]) -> str:
    """What a call came to, for a comparison between ranks."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went well"


def edit(rank: int, folder: Path) -> dict[str, str]:
    batches = loader(1, rank, DEGREES["pp2"])

    def trainer_of(form: bool = True, **options: Any) -> L.Trainer:
        return build_trainer("pp2", folder, form=form, max_epochs=1, limit_val_batches=1, **options)

    def fit_and_save(module: LitLM, name: str) -> None:
        trainer = trainer_of()
        trainer.fit(module, batches)
        trainer.save_checkpoint(folder / name)

    def evaluate(module: LitLM, name: str, **options: Any) -> L.Trainer:
        trainer = trainer_of()
        trainer.validate(module, batches, ckpt_path=folder / name, verbose=False, **options)
        return trainer

    fit_and_save(Editing(), "edited")
    trainer = evaluate(Editing(), "edited")
    for _ in range(2):  # twice to one path, after an evaluation
        trainer.save_checkpoint(folder / "again", weights_only=True)
    for form, name in [(True, "averaged"), (False, "averaged-plain")]:
        average = EMAWeightAveraging(decay=0.5, update_starting_at_step=0)
        trainer_of(form, callbacks=[average, Saving(folder, name)]).fit(LitLM(), loader(2, rank, DEGREES["pp2"]))
    found = {kind.__name__: outcome(lambda kind=kind: fit_and_save(kind(), "refused")) for kind in (Half, Unlike)}
    fit_and_save(WithOwn(), "own")
    for only in (True, False):
        found[f"weights_only={only}"] = outcome(lambda only=only: evaluate(LitLM(), "own", weights_only=only))
    with warnings.catch_warnings(record=True) as warned:
        evaluate(Grown(), "own", weights_only=False)
    found["not strict"] = next((str(w.message) for w in warned if "strict" in str(w.message)), "")
    return found


def test_hooks_edit_directories(tmp_path: Path) -> None:
    found, other = run_ranks(2, edit, tmp_path, timeout=120)
    edited, again = (whole_state(tmp_path / name) for name in ("edited", "again"))
    assert list(edited) == [f"old.{key}" for key in LitLM().state_dict() if key != "scale"]
    assert list(again) == list(edited)
    assert torch.equal(again["old.head.weight"], 2 * edited["old.head.weight"])
    assert all(torch.equal(again[key], edited[key]) for key in edited if key != "old.head.weight")
    assert found["Half"] == other["Half"]
    assert "half was called on a tensor of the checkpoint" in found["Half"]
    assert found["Unlike"] == other["Unlike"]
    assert "Edit checkpoints alike on all ranks" in found["Unlike"]
    assert not (tmp_path / "refused").exists()
    for rank in (found, other):
        assert "UnpicklingError" in rank["weights_only=True"]
        assert rank["weights_only=False"] == "went well"
    own = read_directory(tmp_path / "own", weights_only=False)
    assert list(own["average"]) == [name for name, _ in LitLM().named_parameters()]
    assert all(torch.equal(value, own["state_dict"][name].whole()) for name, value in own["average"].items())
    assert "missing: ['more']" in found["not strict"]
    assert "unexpected: ['scale']" in found["not strict"]
    averaged, plain = (read(tmp_path / f"{name}-1.ckpt") for name in ("averaged", "averaged-plain"))
    for key in ("state_dict", "current_model_state", "averaging_state"):
        torch.testing.assert_close(dict(averaged[key]), dict(plain[key]), rtol=0, atol=0)
    name = "blocks.0.up.weight"
    assert not torch.equal(averaged["state_dict"][name], averaged["current_model_state"][name])
