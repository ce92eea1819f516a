"""Checkpoints as directories in real runs: from layout to layout in a ring, and what ends a save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import lightning_hybrid.checkpoint.shares as shares
from benchmarks.checkpoint_matrix import LAYOUTS, PLAIN, STEPS, assert_same, assert_same_losses, read, train, world_size
from lightning_hybrid import Hybrid3DStrategy
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
