"""An ordinary script, started by the tests in the ways that people start theirs. Prints one line per rank."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch.utils.data import DataLoader

import lightning_hybrid  # noqa: F401 - registers the strategies
from lightning_hybrid import Hybrid3DStrategy
from tests.distributed.equality import QUIET
from tests.distributed.test_equality import ROWS, SGDGPT

FAIL = os.environ.get("FAIL_ON_RANK")


class Failing(SGDGPT):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        optimizer_steps = self.trainer.global_step
        if str(self.global_rank) == FAIL and optimizer_steps == 2:
            if os.environ.get("FAIL_BY") == "exit":
                os._exit(3)
            raise RuntimeError("the user's own mistake at step 2")
        return super().training_step(batch, batch_idx)


def own_loggers() -> dict[str, Any]:
    """Two loggers that write later than they are told, where the test asks for them."""
    if (folder := os.environ.get("LOGS")) is None:
        return {}
    return {
        "logger": [CSVLogger(folder, name="csv"), WandbLogger(project="test", save_dir=folder, offline=True)],
        "log_every_n_steps": 1,
    }


def main(strategy: str) -> None:
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    module = Failing(num_blocks=4, width=16, num_heads=4, context_length=16)
    degrees = map(int, os.environ.get("DEGREES", "1 1 2").split())
    own = Hybrid3DStrategy(*degrees, archive=None, start_method="popen" if strategy == "string" else strategy)
    chosen = "HYBRID3D_fork" if strategy == "string" else own
    num_nodes = int(os.environ.get("NUM_NODES", "1"))
    logging = {**QUIET, **own_loggers()}
    trainer = L.Trainer(devices=2 // num_nodes, num_nodes=num_nodes, strategy=chosen, max_steps=5, **logging)
    start = time.monotonic()
    trainer.fit(module, DataLoader(ROWS, batch_size=8, shuffle=False))
    norm = float(sum(p.detach().double().norm() for p in module.parameters()))
    print(
        f"RANK {trainer.global_rank} {type(trainer.strategy).__name__} {trainer.strategy.layout} {norm:.10f}",
        flush=True,
    )
    print(f"TOOK {time.monotonic() - start:.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
