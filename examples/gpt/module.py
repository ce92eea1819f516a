"""The GPT as an ordinary LightningModule. It runs on one device or on many, and nothing in it says which."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from .model import GPT


class LitGPT(L.LightningModule):
    """Trains ``GPT`` to predict the next byte.

    Args:
        num_blocks, width, num_heads, context_length: the model's shape.
        learning_rate: AdamW's, at its highest, after the warm-up.
        num_warmup_steps: optimizer steps over which the learning rate rises linearly.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 4,
        width: int = 96,
        num_heads: int = 4,
        context_length: int = 64,
        learning_rate: float = 2e-3,
        num_warmup_steps: int = 10,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(num_blocks=num_blocks, width=width, num_heads=num_heads, context_length=context_length)
        self.learning_rate = learning_rate
        self.num_warmup_steps = num_warmup_steps

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of ``(B, T + 1)`` windows; knowing nothing costs ln 256 = 5.55."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=self.num_warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
