"""A classifier of handwritten digits: the rows of an image are the tokens of a small transformer."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

SIZE, NUM_CLASSES = 8, 10


class DigitClassifier(L.LightningModule):
    """Knows nothing of devices.

    Args:
        width: Features of a token.
        num_blocks: Transformer blocks.
        learning_rate: The highest one, of a cycle over all steps.
    """

    def __init__(self, width: int = 32, num_blocks: int = 2, learning_rate: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.embedding = nn.Linear(SIZE, width)
        self.position = nn.Parameter(0.1 * torch.randn(SIZE, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(num_blocks)
        )
        self.head = nn.Linear(SIZE * width, NUM_CLASSES)
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.embedding(images) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.flatten(1))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        total_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
