"""SIGTERM in the middle of a step ends the run before the next batch, on all ranks, and callbacks may save then."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

import lightning_hybrid.strategy
from lightning_hybrid import Hybrid3DStrategy
from tests.distributed.equality import QUIET
from tests.distributed.test_hooks import PLAN, Loops
from tests.ranks import RankError, run_ranks


class Signalled(Loops):
    """The last stage gets the signal in its second step, while others are about to wait for it, or it for them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 1 and self.trainer.training and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss


def train(rank: int, triple: tuple[int, int, int], folder: Path, sabotage: bool = False) -> tuple[int, int]:
    if sabotage:
        lightning_hybrid.strategy.stop_together = lambda trainer: None
    strategy = Hybrid3DStrategy(*triple, archive=None, schedule="1F1B", tp_plan=PLAN)
    save = OnExceptionCheckpoint(folder, f"{triple}")
    options = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder, "max_epochs": 4}
    trainer = L.Trainer(devices=math.prod(triple), strategy=strategy, callbacks=[save], **options)
    with pytest.raises(SIGTERMException):
        trainer.fit(Signalled(triple[0]))
    return trainer.global_step, torch.load(folder / f"{triple}.ckpt", weights_only=True)["global_step"]


@pytest.mark.parametrize("triple", [(2, 1, 1), (1, 2, 2)], ids=str)
def test_a_signal_ends_all_ranks_at_a_boundary(triple: tuple[int, int, int], tmp_path: Path) -> None:
    assert run_ranks(math.prod(triple), train, triple, tmp_path) == [(2, 2)] * math.prod(triple)


def test_wrong_variant_lightnings_own_handler_leaves_ranks_behind(tmp_path: Path) -> None:
    """It has a collective to which other ranks do not come, and ends the signalled rank alone."""
    with pytest.raises((RankError, RuntimeError, AssertionError), match=r"still running|\[\(|closed by peer"):
        assert run_ranks(2, train, (1, 1, 2), tmp_path, True, timeout=8) == [(2, 2)] * 2


class Requeued(Loops):
    """SLURM tells one rank in its second step that the job's time is nearly over."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 1 and self.trainer.training and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


def requeue(rank: int, folder: Path) -> tuple[int, int]:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the tests' own shows stacks, and Lightning would leave it there
    os.environ |= {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "12345", "SLURM_PROCID": str(rank)}
    os.environ |= {"SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "2"}
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    options = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder, "max_epochs": 4}
    strategy = Hybrid3DStrategy(1, 1, 2, archive=None, schedule="1F1B")
    trainer = L.Trainer(devices=2, strategy=strategy, plugins=[SLURMEnvironment()], **options)
    trainer.fit(Requeued(1))
    return trainer.global_step, torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"]


def test_slurms_signal_saves_at_a_boundary_and_the_job_is_queued_again(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    (tmp_path / "scontrol").chmod(0o755)
    first, second = run_ranks(2, requeue, tmp_path)
    assert first == second
    assert first[1] == 2 < first[0]  # after the step in which it came; and training goes on until SLURM ends it
    assert (tmp_path / "told").read_text() == "requeue 12345\n"
