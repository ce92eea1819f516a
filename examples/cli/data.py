"""scikit-learn's handwritten digits, moved about by a pixel at random while training."""

from __future__ import annotations

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Images of ``(rows, columns)``, each moved by -1, 0 or 1 pixel in both directions whenever it is read."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int) -> None:
        self.images, self.labels = images, labels
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-1, 2, (2,), generator=self.generator).tolist()
        return self.images[index].roll((down, right), (0, 1)), self.labels[index]


class Digits(L.LightningDataModule):
    """1,797 images of 8 x 8 pixels, of which ``num_held_out`` are for validation.

    Args:
        batch_size: Samples of a step on each data rank.
        num_samples: How many images to take.
        num_held_out: How many of these to validate on.
        seed: Of the augmentation.
    """

    def __init__(self, batch_size: int = 32, num_samples: int = 1797, num_held_out: int = 357, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_samples, self.num_held_out, self.seed = batch_size, num_samples, num_held_out, seed

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images[: self.num_samples], dtype=torch.float32) / 16
        labels = torch.tensor(digits.target[: self.num_samples])
        held_out = self.num_held_out
        self.training = Shifted(images[held_out:], labels[held_out:], self.seed)
        self.validation = TensorDataset(images[:held_out], labels[:held_out])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, self.batch_size)
