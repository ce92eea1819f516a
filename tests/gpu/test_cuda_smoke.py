"""A tiny model trains on the visible GPUs over NCCL, along each axis that the number of GPUs allows, and learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy

WIDTH = 32
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.mse_loss(self.head(x), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(rank: int, degrees: dict[str, int], num_devices: int, folder: str) -> list[float]:
    lightning.seed_everything(0)
    inputs = torch.randn(256, WIDTH)
    data = DataLoader(TensorDataset(inputs, inputs.mean(dim=1, keepdim=True)), batch_size=16)
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=num_devices,
        strategy=Hybrid3DStrategy(**degrees, tp_plan=TP_PLAN, archive=None),
        max_steps=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    model = Regression()
    trainer.fit(model, data)
    return model.losses


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_trains_over_nccl(run_ranks: Callable[..., list[Any]], tmp_path: Path, axis: str):
    num_devices = 2 if torch.cuda.device_count() >= 2 else 1
    degrees = {f"{name}_parallel_size": num_devices if name == axis else 1 for name in ("data", "tensor", "pipeline")}
    for losses in run_ranks(num_devices, train, degrees, num_devices, str(tmp_path), timeout=180):
        assert len(losses) == 20
        assert losses[-1] < 0.5 * losses[0]
