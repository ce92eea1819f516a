"""Real text for many steps: does a pipeline stay equal to one process, and does its memory stay the same?

``python -m benchmarks.long_run --steps 200`` trains the demo's GPT with 8 blocks on the manual's topics, cut into 4
stages (2 ranks, Interleaved1F1B). The sequence length changes at every step, the batch size now and then. One process
trains on the same batches. SGD with a small step: the rounding of fp32 sums, which differs between the two, then grows
slowly enough to be compared over all steps.
"""

from __future__ import annotations

import argparse
import gc
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from examples.gpt.data import read_text
from examples.gpt.module import LitGPT
from lightning_hybrid import Hybrid3DStrategy

__all__ = ["Record", "compare", "long_run"]

LONGEST = 48


class ChangingBatches(IterableDataset[Tensor]):
    """Batches of int64 windows ``(B, T + 1)``: T changes at every step, B at every seventh."""

    def __init__(self, num_steps: int) -> None:
        self._text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8)
        self._num_steps = num_steps

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for step in range(self._num_steps):
            size = (8, 6, 12)[step // 7 % 3]
            length = 8 + step * 11 % (LONGEST - 7)
            starts = torch.randint(len(self._text) - length - 1, (size,), generator=generator)
            yield torch.stack([self._text[start : start + length + 1] for start in starts.tolist()]).long()


class SGDGPT(LitGPT):
    """The demo's model under plain SGD."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


@dataclass(kw_only=True)
class Record:
    """What one rank saw, by step."""

    losses: list[float] = field(default_factory=list)
    num_tensors: list[int] = field(default_factory=list)
    """Tensors of this process that are alive after the step, every tenth step."""
    megabytes: list[float] = field(default_factory=list)
    """Resident memory of the process at the same moments."""


class _Recorder(L.Callback):
    def __init__(self, every: int) -> None:
        self.record, self._every = Record(), every

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record.losses.append(float(outputs["loss"]))
        if (batch_idx + 1) % self._every == 0:
            gc.collect()
            self.record.num_tensors.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
            self.record.megabytes.append(_resident() / 1e6)


def _resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def long_run(num_steps: int, num_ranks: int, *, every: int = 10) -> Record:
    """Train on this process (``num_ranks=1``) or as one of ``num_ranks``, and return what was seen."""
    gc.freeze()  # what was there before is not counted
    L.seed_everything(0, verbose=False)
    module = SGDGPT(num_blocks=8, width=32, num_heads=4, context_length=LONGEST)
    strategy: Any = "auto"
    if num_ranks > 1:
        strategy = Hybrid3DStrategy(
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=num_ranks,
            schedule="Interleaved1F1B",
            stages_per_rank=4 // num_ranks,
            archive=None,
        )
    recorder = _Recorder(every)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_epochs=1,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(ChangingBatches(num_steps), batch_size=None))
    return recorder.record


def compare(expected: list[float], found: list[float]) -> list[float]:
    """Return the relative difference of the losses, by step."""
    assert len(expected) == len(found), f"{len(found)} steps instead of {len(expected)}"
    return [abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True)]


def main() -> None:
    """Run both, and print what is compared."""
    from tests.ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    expected = run_ranks(1, lambda rank: long_run(steps, 1), timeout=3600)[0]
    records = run_ranks(2, lambda rank: long_run(steps, 2), timeout=3600)
    errors = compare(expected.losses, records[0].losses)
    print(f"loss: {expected.losses[0]:.3f} at first, {expected.losses[-1]:.3f} at last")
    for last in (10, 50, 100, steps):
        print(f"largest relative difference of the losses in steps 1 to {last}: {max(errors[:last]):.1e}")
    for name, record in [("one process", expected), *((f"rank {rank}", one) for rank, one in enumerate(records))]:
        print(f"{name}: tensors alive after every tenth step: {record.num_tensors}")
        print(f"{name}: megabytes: {' '.join(f'{found:.1f}' for found in record.megabytes)}")


if __name__ == "__main__":
    main()
