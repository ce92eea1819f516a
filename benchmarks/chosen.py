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

from benchmarks.work import BATCH_SIZE, LENGTH, NUM_BLOCKS, LitGPT, rows
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.choosing.run_facts import cluster_here
from lightning_hybrid.layout import Layout, divisors
from lightning_hybrid.planner import ModelProfile, plan
from lightning_hybrid.planner.host import CLOSE_ON_HOST, HOST
from lightning_hybrid.planner.search import in_order
from lightning_hybrid.planner.setup import Setup, describe

#: Optimizer steps of a run, and of them those before the clock starts.
STEPS, WARMUP = 12, 4
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


def chosen(num_ranks: int) -> Layout:
    """The degrees that a run without any would have here, without an archive.

    A data rank's batch is the global batch over the data axis here, so degrees are asked for at that batch.
    """
    found = plan(
        ModelProfile.from_module(LitGPT(), seq_length=LENGTH),
        cluster_here(torch.device("cpu"), num_ranks, 1),
        global_batch=BATCH_SIZE,
        precision="fp32",
        allowed=_as_measured,
        idle=False,
        most=50,
        constants=HOST,
    )
    return in_order(found.plans, close=CLOSE_ON_HOST)[0].setup.layout


def _as_measured(setup: Setup) -> str | None:
    layout, samples = setup.layout, BATCH_SIZE // setup.layout.data_parallel_size
    ranks = layout.pipeline_parallel_size
    wanted = 1 if ranks == 1 else min(2 * ranks, samples)
    return None if setup.num_microbatches == wanted and setup.schedule == "1F1B" else "not what a run would have"


def compare(times: dict[Layout, list[tuple[float, float, str] | None]], ranks: list[int]) -> None:
    """Print, for each number of ranks, the fastest degrees and the chosen ones."""
    for num_ranks in ranks:
        median = {
            layout: tuple(statistics.median(run[which] for run in runs) for which in (0, 1))
            for layout, found in times.items()
            if layout.world_size == num_ranks and (runs := [run for run in found if run is not None])
        }
        made = chosen(num_ranks)
        if made not in median:
            print(f"{num_ranks} ranks: {describe(made)} chosen, which did not run")
            continue
        for which, what in enumerate(("wall time", "processor time of all ranks")):
            best = min(median, key=lambda layout: median[layout][which])
            ratio = median[made][which] / median[best][which]
            print(
                f"{num_ranks} ranks, {what}: chosen {describe(made)} {1e3 * median[made][which]:.0f} ms, fastest"
                f" {describe(best)} {1e3 * median[best][which]:.0f} ms: {ratio:.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file to which every measurement is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    times: dict[Layout, list[tuple[float, float, str] | None]] = {}
    for number in range(arguments.rounds):
        for layout in (found for ranks in arguments.ranks for found in all_layouts(ranks)):
            times.setdefault(layout, []).append(found := measure(layout))
            print(f"round {number + 1}: {layout.world_size} {describe(layout)} {found}", flush=True)
            if arguments.json:
                with open(arguments.json, "w", encoding="utf-8") as file:
                    json.dump({describe(layout): runs for layout, runs in times.items()}, file)
    compare(times, arguments.ranks)


if __name__ == "__main__":
    main()
