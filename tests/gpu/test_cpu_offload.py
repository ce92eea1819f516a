"""Offloaded shards over NCCL: on the host, gradients too, computed on the GPU, equal to shards on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from tests.gpu.test_cuda_smoke import TP_PLAN, WIDTH, Regression
from tests.ranks import run_ranks


class Watched(Regression):
    """Notes where a step computes, and where gradients and states are."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.devices = {self.device.type, batch[0].device.type, self.head.weight.device.type}
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.held = {tensor.device.type for p in self.parameters() for tensor in (p, p.grad) if tensor is not None}


def train(rank: int, degrees: dict[str, Any], num_devices: int, folder: str) -> tuple[list[float], set[str], set[str]]:
    L.seed_everything(0)
    inputs = torch.randn(256, WIDTH)
    data = DataLoader(TensorDataset(inputs, inputs.mean(dim=1, keepdim=True)), batch_size=16)
    strategy = Hybrid3DStrategy(**degrees, tp_plan=TP_PLAN, archive=None)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=num_devices,
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    model = Watched()
    trainer.fit(model, data)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    assert strategy.describe()["memory"]["host"] > 0 or not degrees["cpu_offload"]
    return model.losses, model.devices, model.held


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_offloaded_shards_equal_those_on_the_gpu(tmp_path: Path, axis: str) -> None:
    num_devices = 2 if torch.cuda.device_count() >= 2 else 1
    degrees = {f"{name}_parallel_size": num_devices if name == axis else 1 for name in ("data", "tensor", "pipeline")}
    runs = {
        offload: run_ranks(
            num_devices, train, {**degrees, "cpu_offload": offload}, num_devices, str(tmp_path), timeout=180
        )
        for offload in (True, False)
    }
    for (losses, devices, held), (right, _, on_gpu) in zip(runs[True], runs[False], strict=True):
        assert losses == pytest.approx(right, rel=1e-4)
        assert devices == {"cuda"} and held == {"cpu"} and on_gpu == {"cuda"}
