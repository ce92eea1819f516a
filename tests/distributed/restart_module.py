"""What the script of docs/restart.md trains when the tests run it. Prints a line for each start and step."""

from __future__ import annotations

import os
from typing import Any

import lightning as L

from benchmarks.kills import LENGTH, Batches
from examples.gpt.module import LitGPT


class Printer(L.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        print(f"PID {os.getpid()} AT {trainer.global_step} WITH {trainer.strategy.layout}", flush=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(f"STEP {trainer.global_step} LOSS {float(outputs['loss']):.7f}", flush=True)


class RestartModule(LitGPT):
    """A tiny GPT; its batches are cut to the data ranks that there are."""

    def __init__(self) -> None:
        L.seed_everything(0, verbose=False)
        super().__init__(num_blocks=4, width=16, num_heads=4, context_length=LENGTH, learning_rate=3e-4)

    def train_dataloader(self) -> Any:
        strategy: Any = self.trainer.strategy
        return Batches(strategy.coordinate.data, strategy.layout.data_parallel_size)

    def configure_callbacks(self) -> Any:
        return [Printer()]
