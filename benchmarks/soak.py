"""Does anything grow? ``python -m benchmarks.soak --steps 5000 --fits 50``.

Counts, in every rank: resident memory, open descriptors, threads, process groups and living tensors, over many steps of
one ``fit`` and over many calls of ``fit`` in one process, each with a new Trainer, strategy and module.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from examples.gpt.module import LitGPT
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import BubbleRatio, StepBreakdown

__all__ = ["Counts", "count", "many_fits", "many_steps"]

LAYOUTS = {"pp2": (1, 1, 2), "dp2": (2, 1, 1), "tp2": (1, 2, 1), "dp2xpp2": (2, 1, 2)}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What one process holds at a moment."""

    at: int
    """Steps, or calls of ``fit``, done."""
    megabytes: float
    descriptors: int
    threads: int
    groups: int
    tensors: int


def count(at: int) -> Counts:
    """Count what this process holds now."""
    gc.collect()
    return Counts(
        at=at,
        megabytes=int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        groups=len(dist.distributed_c10d._world.pg_map),
        tensors=sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()),
    )


class _Counter(L.Callback):
    def __init__(self, every: int) -> None:
        self.every, self.found = every, list[Counts]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every == 0:
            self.found.append(count(trainer.global_step))


def _fit(degrees: tuple[int, int, int], steps: int, callbacks: list[Any]) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=degrees[0] * degrees[1] * degrees[2],
        strategy=Hybrid3DStrategy(*degrees, archive=None, schedule="1F1B" if degrees[2] > 1 else "auto"),
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        default_root_dir=tempfile.gettempdir(),  # of pictures
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randint(0, 256, (64, 13), generator=torch.Generator().manual_seed(0))
    module = LitGPT(num_blocks=2, width=8, num_heads=2, context_length=12)
    trainer.fit(module, DataLoader(rows, batch_size=8))  # type: ignore[arg-type]


def many_steps(degrees: tuple[int, int, int], steps: int, every: int) -> list[Counts]:
    """Train one module for many steps, as one of the ranks."""
    gc.freeze()
    counter = _Counter(every)
    _fit(degrees, steps, [counter, StepBreakdown(), BubbleRatio()])
    return counter.found


def many_fits(degrees: tuple[int, int, int], fits: int, every: int) -> list[Counts]:
    """Call ``fit`` many times in this process, which is one of the ranks."""
    gc.freeze()
    found = []
    for number in range(1, fits + 1):
        _fit(degrees, 3, [StepBreakdown(), BubbleRatio()])
        if number % every == 0:
            _await_own_threads()
            found.append(count(number))
    return found


def _await_own_threads(seconds: float = 10.0) -> None:
    """The thread that hears of failures, on rank 0, ends when the last rank has left ``fit``: here it may be later."""
    end = time.monotonic() + seconds
    while any(t.name.startswith("lightning_hybrid") for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)


def main() -> None:
    """Run, and print what was counted."""
    from tests.ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--fits", type=int, default=50)
    parser.add_argument("--layout", choices=LAYOUTS, default="pp2")
    arguments = parser.parse_args()
    degrees = LAYOUTS[arguments.layout]
    number = degrees[0] * degrees[1] * degrees[2]
    assert threading.active_count() == 1
    for what, run, amount in (("fit", many_fits, arguments.fits), ("step", many_steps, arguments.steps)):
        every = max(1, amount // 10)
        for rank, found in enumerate(run_ranks(number, lambda rank: run(degrees, amount, every), timeout=7200)):  # noqa: B023
            for counts in found:
                print(f"rank {rank} {what} {counts}", flush=True)


if __name__ == "__main__":
    main()
