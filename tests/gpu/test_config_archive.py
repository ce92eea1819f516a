"""ConfigArchive on a real device: its name and memory, and a real failure for lack of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hybrid.archive import Archive, Entry
from lightning_hybrid.callbacks import ConfigArchive
from tests.ranks import run_ranks

BATCH_SIZE, WIDTH = 8, 256


class Model(L.LightningModule):
    """One layer; asks for ``extra_bytes`` at the fifth batch."""

    def __init__(self, extra_bytes: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.extra_bytes = extra_bytes

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 4 and self.extra_bytes:
            torch.empty(self.extra_bytes, dtype=torch.uint8, device=self.device)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(20 * BATCH_SIZE, WIDTH), batch_size=BATCH_SIZE)


def fit(folder: Path, model: Model) -> None:
    trainer = L.Trainer(
        accelerator="cuda",
        devices=1,
        max_steps=10,
        callbacks=[ConfigArchive(folder, every_n_steps=2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)


def only_entry(folder: Path) -> Entry:
    (entry,) = Archive(folder).list()
    return entry


def test_device_and_memory_are_recorded(tmp_path: Path) -> None:
    run_ranks(1, check_device_and_memory, tmp_path)  # CUDA must not start in the pytest process, which forks


def check_device_and_memory(rank: int, tmp_path: Path) -> None:
    fit(tmp_path, Model())
    entry = only_entry(tmp_path)
    properties = torch.cuda.get_device_properties(0)
    assert (entry.hardware.device, entry.hardware.kind) == ("cuda", properties.name)
    assert entry.hardware.memory_bytes == properties.total_memory
    assert entry.software["cuda"] == torch.version.cuda
    assert entry.result.is_good
    held = 3 * 4 * (WIDTH * WIDTH + WIDTH)  # fp32 weights and AdamW's two moments
    assert held < (entry.result.peak_memory_bytes or 0) < properties.total_memory


def test_out_of_memory_is_recorded(tmp_path: Path) -> None:
    run_ranks(1, check_out_of_memory, tmp_path)


def check_out_of_memory(rank: int, tmp_path: Path) -> None:
    more_than_there_is = 2 * torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, Model(more_than_there_is))
    result = only_entry(tmp_path).result
    assert (result.status, result.num_steps) == ("oom", 4)
    assert "out of memory" in (result.message or "")
