"""Started as people start their scripts: Lightning's own processes, torchrun, fork; and what if a rank fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.multiprocessing import ProcessExitedException
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.checkpoint.directory import read_directory
from tests.distributed.equality import QUIET
from tests.distributed.test_equality import ROWS, SGDGPT
from tests.ranks import free_port, processes_of, run_ranks
from tests.wandb_file import read_run

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, "-m", "tests.distributed.launched_script"]


def launch(command: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its ranks are then known by their process group
    )


def end(process: subprocess.Popen[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def start(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return end(launch(command, **environment))


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


def slurm_task(node: int, port: int) -> dict[str, Any]:
    """What ``srun`` sets for one of two tasks on two nodes."""
    numbers = {"NTASKS": 2, "NTASKS_PER_NODE": 1, "NNODES": 2, "PROCID": node, "NODEID": node, "LOCALID": 0}
    task = {f"SLURM_{name}": str(value) for name, value in numbers.items()}
    task |= {"SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"command": [*SCRIPT, "popen"], **task}


def test_two_nodes_of_slurm(whole_norm: float) -> None:
    """Both on this machine; each would wait for the other until its timeout if ranks were counted wrongly.

    Two of torchrun's are in test_restart.py.
    """
    port = free_port()
    results = [end(process) for process in [launch(**slurm_task(node, port), NUM_NODES="2") for node in range(2)]]
    assert [result.returncode for result in results] == [0, 0], [result.stderr[-2000:] for result in results]
    norms = [held_norms(result.stdout) for result in results]
    assert [len(found) for found in norms] == [1, 1]
    assert sum(norms[0] + norms[1]) == pytest.approx(whole_norm, rel=1e-6)


class Large(L.Callback):
    """Of a state above the 64 KB of a pipe, as an average of the weights is."""

    values = torch.zeros(100_000)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values + 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict["values"]


def test_fork_hands_back_what_a_script_would_have(whole_norm: float, tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    best, large = ModelCheckpoint(monitor="train_loss", every_n_train_steps=1, save_last=True), Large()
    module = make_module_of_script()
    strategy = Hybrid3DStrategy(1, 1, 2, archive=None, start_method="fork")
    options = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=5, callbacks=[best, large], **options)
    trainer.fit(module, DataLoader(ROWS, batch_size=8, shuffle=False))
    assert float(sum(p.detach().double().norm() for p in module.parameters())) == pytest.approx(whole_norm, rel=1e-6)
    assert (trainer.global_step, trainer.current_epoch) == (5, 2)  # as in one process
    assert torch.equal(large.values, torch.ones(100_000))
    assert best.best_model_score is not None
    assert best.best_model_score <= trainer.callback_metrics["train_loss"]
    assert Path(best.best_model_path).is_file()
    assert Path(best.last_model_path).is_file()
    with pytest.warns(UserWarning, match="has no optimizer states"):
        trainer.save_checkpoint(tmp_path / "weights.ckpt")
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[key]) for key, value in module.state_dict().items())
    forget_environment()


class Leave(L.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        sys.exit(0)


def test_a_forked_rank_that_leaves_is_not_waited_for() -> None:
    strategy = Hybrid3DStrategy(1, 1, 2, archive=None, start_method="fork")
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=5, callbacks=[Leave()], **QUIET)
    with pytest.raises(ProcessExitedException, match="exit code 1"):
        trainer.fit(make_module_of_script(), DataLoader(ROWS, batch_size=8))
    forget_environment()


def forget_environment() -> None:
    for name in ("MASTER_PORT", "MASTER_ADDR", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


class Late(L.LightningModule):
    """Built in configure_model: the process that starts the others does not build it to train."""

    def __init__(self, *, needs_mesh: bool) -> None:
        super().__init__()
        self.layer, self.needs_mesh = None, needs_mesh

    def configure_model(self) -> None:
        if self.layer is None and (not self.needs_mesh or self.device_mesh.size()):
            self.layer: Any = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("needs_mesh", [False, True])
def test_fork_hands_back_what_configure_model_built(needs_mesh: bool, tmp_path: Path) -> None:
    strategy = Hybrid3DStrategy(2, 1, 1, archive=None, start_method="fork", save_distributed_checkpoint=True)
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=1, **QUIET)
    module = Late(needs_mesh=needs_mesh)
    with warnings.catch_warnings(record=True) as said:
        trainer.fit(module, DataLoader(torch.ones(8, 4), batch_size=2))
    forget_environment()
    assert any("has no layer.bias (and 1 others) here" in str(w.message) for w in said) is needs_mesh
    if not needs_mesh:
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        assert torch.equal(read_directory(tmp_path / "a.ckpt")["state_dict"]["layer.bias"].whole(), module.layer.bias)


def test_the_strategy_has_names(whole_norm: float) -> None:
    result = start([*SCRIPT, "string"])
    assert result.returncode == 0, result.stderr[-3000:]
    assert "data 2 x tensor 1 x pipeline 1" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("how", "rank", "by", "degrees"),
    [
        ("popen", "1", "exit", "1 1 2"),
        ("popen", "1", "raise", "2 1 1"),  # rank 0 waits in a collective, and cannot raise anything
        ("fork", "1", "raise", "1 1 2"),
        ("fork", "0", "exit", "1 1 2"),
    ],
)
def test_a_failing_rank_ends_all(how: str, rank: str, by: str, degrees: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    own = {name: str(tmp_path) for name in ("LOGS", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR")}
    process = launch([*SCRIPT, how], FAIL_ON_RANK=rank, FAIL_BY=by, DEGREES=degrees, **(own if rank == "1" else {}))
    result = end(process)
    assert result.returncode != 0
    assert time.monotonic() - begin < 110  # most of it is the import of torch, in each process
    if by == "raise":
        assert result.stderr.count("RuntimeError: the user's own mistake at step 2") == 1
        place = "(data 1, tensor 0, pipeline 0)" if degrees == "2 1 1" else f"(data 0, tensor 0, pipeline {rank})"
        assert f"On rank {rank} {place}: training batch" in result.stderr
    elif how == "popen":
        assert f"First cause: rank {rank} (data 0, tensor 0, pipeline {rank})" in result.stderr
    assert "peer" not in result.stderr  # what other ranks see of it is no cause
    assert "TOOK" not in result.stdout
    while processes_of([process.pid]) and time.monotonic() - begin < 115:
        time.sleep(0.1)
    assert not processes_of([process.pid]), "ranks are still running"
    if rank == "1":  # nothing that rank 0 had logged before is lost
        assert len(next(tmp_path.rglob("metrics.csv")).read_text().splitlines()) == 1 + 2
        assert len(read_run(next(tmp_path.rglob("*.wandb")))["history"]) == 2


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
