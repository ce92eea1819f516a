"""Started as people start their scripts: Lightning's own processes, torchrun, fork; and what if a rank fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from tests.distributed.equality import QUIET
from tests.distributed.test_equality import ROWS, SGDGPT
from tests.ranks import free_port, run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, "-m", "tests.distributed.launched_script"]


def start(command: list[str], timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def whole_norm() -> float:
    """Sum of the norms of all weights after the same five steps in this one process."""
    L.seed_everything(0, verbose=False)
    module = make_module_of_script()
    L.Trainer(devices=1, max_steps=5, **QUIET).fit(module, DataLoader(ROWS, batch_size=8, shuffle=False))
    return float(sum(p.detach().double().norm() for p in module.parameters()))


def make_module_of_script() -> Any:
    return SGDGPT(num_blocks=4, width=16, num_heads=4, context_length=16)


def held_norms(output: str) -> list[float]:
    return [
        float(x) for x in re.findall(r"RANK \d Hybrid3DStrategy data 1 x tensor 1 x pipeline 2 (\d+\.\d{10})", output)
    ]


@pytest.mark.parametrize("how", ["popen", "torchrun", "spawn"])
def test_ranks_of_a_script_share_the_model(how: str, whole_norm: float) -> None:
    command = [*SCRIPT, "spawn" if how == "spawn" else "popen"]
    if how == "torchrun":
        run = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
        command = [sys.executable, *run, "-m", *SCRIPT[2:], "popen"]
    result = start(command)
    assert result.returncode == 0, result.stderr[-3000:]
    norms = held_norms(result.stdout)
    assert len(norms) == (1 if how == "spawn" else 2)  # with spawn the main process has the whole weights back
    assert sum(norms) == pytest.approx(whole_norm, rel=1e-6)
    assert "data 1 x tensor 1 x pipeline 2" in result.stdout + result.stderr


def test_fork_hands_the_whole_weights_back(whole_norm: float) -> None:
    L.seed_everything(0, verbose=False)
    module = make_module_of_script()
    strategy = Hybrid3DStrategy(1, 1, 2, archive=None, start_method="fork")
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=5, **QUIET)
    trainer.fit(module, DataLoader(ROWS, batch_size=8, shuffle=False))
    assert float(sum(p.detach().double().norm() for p in module.parameters())) == pytest.approx(whole_norm, rel=1e-6)
    assert trainer.global_step == 0 or trainer.global_step == 5  # Lightning's launcher does not hand loops back
    assert "train_loss" in trainer.callback_metrics
    for name in ("MASTER_PORT", "MASTER_ADDR", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def test_the_strategy_has_names(whole_norm: float) -> None:
    result = start([*SCRIPT, "string"])
    assert result.returncode == 0, result.stderr[-3000:]
    assert "data 2 x tensor 1 x pipeline 1" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("how", "rank", "by"),
    [("popen", "0", "raise"), ("popen", "1", "exit"), ("fork", "1", "raise"), ("fork", "0", "exit")],
)
def test_a_failing_rank_ends_all(how: str, rank: str, by: str) -> None:
    begin = time.monotonic()
    result = start([*SCRIPT, how], FAIL_ON_RANK=rank, FAIL_BY=by)
    assert result.returncode != 0
    assert time.monotonic() - begin < 60
    if by == "raise":
        assert "the user's own mistake at step 2" in result.stderr
        assert "while pipeline rank" in result.stderr  # where it happened
    assert "TOOK" not in result.stdout
    leftover = subprocess.run(["pgrep", "-f", "launched_script"], capture_output=True, text=True, check=False).stdout
    assert not leftover.split(), "ranks are still running"


def weights_of_one_device(rank: int, strategy: str) -> list[torch.Tensor]:
    """Train on one device in this process, which holds nothing afterwards that later tests would inherit by fork."""
    for name in ("MASTER_PORT", "MASTER_ADDR", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK"):
        os.environ.pop(name, None)
    L.seed_everything(0, verbose=False)
    module = make_module_of_script()
    trainer = L.Trainer(devices=1, strategy=strategy, max_steps=3, **QUIET)
    trainer.fit(module, DataLoader(ROWS, batch_size=8, shuffle=True))
    return [trainer.callback_metrics["train_loss"], *(p.detach() for p in module.parameters())]


def test_one_device_is_one_device() -> None:
    plain, hybrid = (run_ranks(1, weights_of_one_device, strategy)[0] for strategy in ("auto", "hybrid3d"))
    assert all(torch.equal(a, b) for a, b in zip(plain, hybrid, strict=True))
