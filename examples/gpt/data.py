"""English text that comes with every Python: the manual's topics behind ``help()``, as bytes.

``pydoc_data.topics.topics`` is a dict of about 80 texts, 450 to 700 kB in all depending on the Python version, so the
example downloads nothing.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

HELD_OUT_SHARE = 0.1
"""The last tenth of the text is never trained on."""


def read_text() -> bytes:
    """All topics in alphabetical order, as UTF-8 bytes."""
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def split_text(text: bytes, held_out_share: float = HELD_OUT_SHARE) -> tuple[bytes, bytes]:
    """The training part and, after it, the held-out part."""
    cut = len(text) - int(len(text) * held_out_share)
    return text[:cut], text[cut:]


class ByteWindows(Dataset[Tensor]):
    """Windows of ``context_length + 1`` bytes, each starting ``context_length`` after the one before.

    An item is an int64 tensor of shape ``(context_length + 1,)``: the inputs are all but its last byte, the targets all
    but its first.
    """

    def __init__(self, text: bytes, context_length: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context_length = context_length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context_length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context_length
        return self.tokens[start : start + self.context_length + 1].long()


class PythonTopics(L.LightningDataModule):
    """The example's data: shuffled training windows, and held-out windows in order.

    Args:
        batch_size: windows per optimizer step, over all data ranks together; so the training is the same on one device
            and on many.
        context_length: bytes per window.
        num_held_out: how many held-out windows validation looks at (spread evenly over the held-out text).
    """

    def __init__(self, *, batch_size: int, context_length: int, num_held_out: int = 128) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.context_length = context_length
        self.num_held_out = num_held_out

    def setup(self, stage: str) -> None:
        train, held_out = split_text(read_text())
        self.train_windows = ByteWindows(train, self.context_length)
        windows = ByteWindows(held_out, self.context_length)
        stride = max(1, len(windows) // self.num_held_out)
        self.held_out_windows = Subset(windows, range(0, len(windows), stride)[: self.num_held_out])

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train_windows, batch_size=self.batch_size_per_data_rank, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.held_out_windows, batch_size=self.batch_size_per_data_rank)

    @property
    def batch_size_per_data_rank(self) -> int:
        """What a DataLoader takes: Lightning gives each data rank its own batches."""
        sampler = self.trainer.distributed_sampler_kwargs if self.trainer else None
        num_data_ranks: int = sampler["num_replicas"] if sampler else 1
        if self.batch_size % num_data_ranks:
            raise ValueError(f"batch_size={self.batch_size} cannot be divided among {num_data_ranks} data ranks")
        return self.batch_size // num_data_ranks
