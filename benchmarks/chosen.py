"""Are the degrees that choose themselves the fastest? ``python -m benchmarks.chosen [--ranks 2 4 8] [--rounds 3]``.

The work of :mod:`benchmarks.work` with all degrees, in turn (A B C A B C ...), each in processes of its own; then what
the planner names on this machine, without an archive, beside the fastest. Medians over the rounds count. Processor
time (of all ranks, by the cores) is shown beside wall time: other load on the machine changes it less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.work import BATCH_SIZE, NUM_BLOCKS, LitGPT, rows
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.layout import Layout, divisors

#: Optimizer steps of a run, and of them those before the clock starts.
STEPS, WARMUP = 5, 2
#: A run that takes longer counts as failed.
TIMEOUT = 240.0


class Times(L.Callback):
    """Wall seconds of each step on rank 0, and processor seconds of all ranks over the timed steps."""

    def __init__(self, sender: Connection) -> None:
        self.seconds: list[float] = []
        self.worked = 0.0
        self.sender = sender

    def on_train_batch_start(self, *_: Any) -> None:
        if len(self.seconds) == WARMUP:
            self.worked = time.process_time()
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        own = (time.process_time() - self.worked) / (len(self.seconds) - WARMUP)
        everywhere = sum(trainer.strategy.all_gather_object(own))
        if trainer.is_global_zero:
            median = statistics.median(self.seconds[WARMUP:])
            self.sender.send((median, everywhere, str(trainer.strategy.schedule)))


def all_layouts(num_ranks: int) -> list[Layout]:
    """Every way to use so many ranks that the work allows: 8 heads, 8 blocks, batches of 16."""
    found = []
    for tensor in divisors(num_ranks):
        for pipeline in divisors(num_ranks // tensor):
            data = num_ranks // tensor // pipeline
            for replicas in divisors(data):
                if NUM_BLOCKS % tensor == 0 and pipeline <= NUM_BLOCKS and BATCH_SIZE % data == 0:
                    found.append(
                        Layout(
                            data_parallel_size=data,
                            tensor_parallel_size=tensor,
                            pipeline_parallel_size=pipeline,
                            replicate_size=replicas,
                        )
                    )
    return found


def _fit(degrees: dict[str, Any], num_ranks: int, data: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    strategy = Hybrid3DStrategy(archive=None, start_method="fork", **degrees)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[Times(sender)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitGPT(), DataLoader(rows()[: BATCH_SIZE * STEPS], batch_size=BATCH_SIZE // data))  # type: ignore[arg-type]


def measure(layout: Layout) -> tuple[float, float, str] | None:
    """Seconds of a step, processor seconds of all ranks for it, and the schedule; ``None`` if the run failed."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    degrees = {**vars(layout)}
    process = multiprocessing.get_context("fork").Process(
        target=_fit, args=(degrees, layout.world_size, layout.data_parallel_size, sender)
    )
    process.start()
    sender.close()
    found: tuple[float, float, str] | None = None
    try:
        if receiver.poll(TIMEOUT):
            found = receiver.recv()
    except EOFError:
        pass
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file to which every measurement is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    times: dict[str, list[tuple[float, float, str] | None]] = {}
    for number in range(arguments.rounds):
        for layout in (found for ranks in arguments.ranks for found in all_layouts(ranks)):
            name = f"{layout} / {layout.replicate_size}"
            times.setdefault(name, []).append(found := measure(layout))
            print(f"round {number + 1}: {layout.world_size} {name} {found}", flush=True)
            if arguments.json:
                with open(arguments.json, "w", encoding="utf-8") as file:
                    json.dump(times, file)


if __name__ == "__main__":
    main()
