"""Case WB-1: one W&B run per training, whoever touches it first and however ranks are started; and when resumed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import StepBreakdown
from tests.distributed.equality import QUIET
from tests.distributed.zoo import Classifier, labelled_rows, mlp
from tests.ranks import rank_environment, run_ranks
from tests.wandb_file import read_run

ROWS = labelled_rows((12,))  # 16


class Touches(Classifier):
    """Writes to the run by itself, as users do: the config where there is one, a value on all ranks."""

    def setup(self, stage: str) -> None:
        if self.trainer.is_global_zero:
            self.logger.experiment.config["in_setup"] = 2

    def on_train_batch_end(self, *_: Any) -> None:
        self.logger.experiment.log({"own": float(self.global_step), "trainer/global_step": self.global_step})


def train(rank: int, folder: Path, start_method: str, runs: int, own_run: bool) -> None:
    """``runs`` trainings of 6 steps; the later ones resume the run and the checkpoint.

    ``own_run``: the script begins and ends the W&B run; else a rank begins it, and nobody but its process ends it.
    """
    os.environ |= {"WANDB_CACHE_DIR": str(folder), "WANDB_DATA_DIR": str(folder), "WANDB_SILENT": "true"}
    if start_method != "external":  # nothing in the parent says which rank it is
        for name in rank_environment(0, 1, 0).keys() - {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"}:
            del os.environ[name]
    for number in range(runs):
        logger = WandbLogger(project="test", save_dir=folder, offline=True, id="mine", resume="allow")
        if rank == 0 and own_run:
            logger.experiment.config.update({"at_the_top": 1}, allow_val_change=True)
        strategy = Hybrid3DStrategy(
            1, 1, 2, archive=None, start_method="popen" if start_method == "external" else start_method
        )
        options = {"logger": logger, "log_every_n_steps": 1, "enable_checkpointing": True}
        callbacks = [StepBreakdown(every_n_steps=1), ModelCheckpoint(folder / "kept", save_last=True)]
        trainer = L.Trainer(
            devices=2, strategy=strategy, max_epochs=3 * (number + 1), callbacks=callbacks, **{**QUIET, **options}
        )
        path = folder / "kept" / "last.ckpt" if number else None
        trainer.fit(Touches(mlp()), DataLoader(ROWS, batch_size=8), ckpt_path=path)
        if trainer.is_global_zero and own_run:
            logger.experiment.finish()


@pytest.mark.parametrize(
    ("start_method", "num_ranks", "runs", "own_run"),
    [("external", 2, 2, True), ("fork", 1, 1, True), ("fork", 1, 1, False)],
)
def test_one_run(start_method: str, num_ranks: int, runs: int, own_run: bool, tmp_path: Path) -> None:
    run_ranks(num_ranks, train, tmp_path, start_method, runs, own_run, timeout=120)
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == runs  # offline, each resumption has a file of its own ...
    assert {path.name.rpartition("-")[2] for path in folders} == {"mine"}  # ... of the same run
    start = 0
    for path in folders:
        run = read_run(next(path.glob("*.wandb")))
        assert ({"at_the_top": 1} if own_run else {}).items() | {"in_setup": 2}.items() <= run["config"].items()
        steps: dict[str, list[int]] = {}
        for row in run["history"]:
            for key in row:
                steps.setdefault(key, []).append(row["trainer/global_step"])
        assert steps["train_loss"] == list(range(start, start + 6))
        assert steps["own"] == list(range(start + 1, start + 7))
        assert set(steps["step/time_s"]) <= set(range(start, start + 7)) and len(steps["step/time_s"]) >= 2
        start += 6
