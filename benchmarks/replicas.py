"""Replicas that exchange now and then: what it does to the loss, and to the step on a slow link.

    python -m benchmarks.replicas loss --out curves.json     # the demo's GPT on real text, 4 replicas, H = 1, 8, 32
    python -m benchmarks.replicas plot curves.json docs/replicas_loss.svg
    python -m benchmarks.replicas link                       # step time over H with a slowed axis, beside HSDP

``link`` slows the replicate axis: a collective over it is done no earlier than a latency plus its bytes at a bandwidth
after it began. HSDP's sums wait for that at once, as they do on gloo (NCCL would hide some of it behind the backward).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from examples.gpt.data import PythonTopics, read_text, split_text
from examples.gpt.module import LitGPT
from lightning_hybrid import Hybrid3DStrategy
from tests.ranks import run_ranks

NUM_REPLICAS, BATCH_SIZE, CONTEXT_LENGTH = 4, 32, 64
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
OPEN = {"close_before": ["end"]}
CURVES: dict[str, Any] = {
    "H = 1 (gradients averaged)": 1,
    "H = 8, average": {"interval": 8, **OPEN},
    "H = 32, average": {"interval": 32, **OPEN},
    "H = 8, DiLoCo": {"interval": 8, "method": "diloco", **OPEN},
    "H = 32, DiLoCo": {"interval": 32, "method": "diloco", **OPEN},
    "H = 32, DiLoCo, momentum 0.5": {"interval": 32, "method": "diloco", "outer_momentum": 0.5, **OPEN},
}


class HeldOut(L.Callback):
    """The held-out loss by step."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking or trainer.global_step == 0:
            self.points.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def learn(rank: int, sync: Any, num_steps: int, width: int) -> list[tuple[int, float]]:
    """Train, looking at the held-out text every 32 steps, when all windows have just been closed, and at the end."""
    L.seed_everything(0, verbose=False)
    sizes = {"data_parallel_size": NUM_REPLICAS, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    held_out = HeldOut()
    trainer = L.Trainer(
        devices=NUM_REPLICAS,
        strategy=Hybrid3DStrategy(**sizes, replicate_size=NUM_REPLICAS, replica_sync=sync, archive=None),
        max_steps=num_steps,
        val_check_interval=32,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
        callbacks=[held_out],
        **QUIET,
    )
    module = LitGPT(context_length=CONTEXT_LENGTH, width=width)
    data = PythonTopics(batch_size=BATCH_SIZE, context_length=CONTEXT_LENGTH)
    trainer.fit(module, data)
    if held_out.points[-1][0] != num_steps:
        [found] = trainer.validate(module, data, verbose=False)
        held_out.points[-1] = num_steps, float(found["val_loss"])  # its callback took the step before the end's closing
    return held_out.points


def loss(out: Path, num_steps: int, width: int) -> None:
    """Train and write each curve that the file lacks."""
    found: dict[str, Any] = json.loads(out.read_text())["curves"] if out.exists() else {}
    for name, sync in CURVES.items():
        if name in found:
            continue
        start = time.monotonic()
        found[name] = run_ranks(NUM_REPLICAS, learn, sync, num_steps, width, timeout=6000)[0]
        out.write_text(json.dumps({"width": width, "curves": found}))
        print(f"{name}: {found[name][-1]} ({time.monotonic() - start:.0f} s)", flush=True)


def plot(curves: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a third of the file
    from matplotlib import pyplot

    document = json.loads(curves.read_text())
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name, points in document["curves"].items():
        style = ":" if "momentum" in name else "--" if "DiLoCo" in name else "-"
        color = {"1": "black", "8": "tab:blue", "32": "tab:orange"}[name.split("=")[1].split()[0].strip(",")]
        label = f"{name}: {points[-1][1]:.3f} at the end"
        axes.plot(*zip(*points, strict=True), style, color=color, label=label)
    axes.set(xlabel="optimizer step", ylabel="held-out loss, nats per byte")
    axes.set_title(f"{NUM_REPLICAS} replicas, exchange every H steps", loc="left")
    axes.set_ylim(top=3.5)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(out)


# ---- a slow link ----------------------------------------------------------------------------------------------------


class SlowWork:
    """A collective that is not done before its time."""

    def __init__(self, work: Any, due: float, counts: dict[str, float]) -> None:
        self.work, self.due, self.counts = work, due, counts

    def wait(self) -> None:
        self.work.wait()
        missing = max(0.0, self.due - time.perf_counter())
        self.counts["waited"] += missing
        time.sleep(missing)


def slow_down(ranks: list[int], latency: float, bandwidth: float, counts: dict[str, float]) -> None:
    """Delay all-reduces whose group is ``ranks``; ``bandwidth`` in bytes per second. Count bytes and seconds waited."""
    right = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        if group is None or dist.get_process_group_ranks(group) != ranks:
            return right(tensor, *args, group=group, async_op=async_op, **kwargs)
        counts["bytes"] += tensor.nbytes
        due = time.perf_counter() + latency + tensor.nbytes / bandwidth
        work = SlowWork(right(tensor, *args, group=group, async_op=True, **kwargs), due, counts)
        if async_op:
            return work
        work.wait()
        return None

    dist.all_reduce = all_reduce  # type: ignore[assignment]


class StepTimes(L.Callback):
    """Time, and what was waited and sent until then, at the end of each step; the closing at the end comes later."""

    def __init__(self, counts: dict[str, float]) -> None:
        self.counts = counts
        self.ends: list[tuple[float, float, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append((time.perf_counter(), self.counts["waited"], self.counts["bytes"]))


def step_times(rank: int, sync: Any, num_steps: int, latency: float, bandwidth: float) -> tuple[float, float, float]:
    """Per step, after 8: seconds, those of them spent waiting for the slow axis, and bytes. 2 replicas of 2 shards."""
    L.seed_everything(0, verbose=False)
    sizes = {"data_parallel_size": 4, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "replicate_size": 2}
    counts = {"bytes": 0.0, "waited": 0.0}
    times = StepTimes(counts)
    trainer = L.Trainer(
        devices=4,
        strategy=Hybrid3DStrategy(**sizes, replica_sync=sync, archive=None),
        max_steps=8 + num_steps,
        limit_val_batches=0,
        callbacks=[times, SlowFrom(8, latency, bandwidth, counts)],
        **QUIET,
    )
    windows = torch.randint(0, 256, (4096, CONTEXT_LENGTH + 1))
    trainer.fit(LitGPT(context_length=CONTEXT_LENGTH), DataLoader(windows, batch_size=2))  # type: ignore[arg-type]
    seconds, waited, sent = ((b - a) / num_steps for a, b in zip(times.ends[7], times.ends[-1], strict=True))
    return seconds, waited, sent


class SlowFrom(L.Callback):
    """Slows the axis down after so many steps, when every kind of step has been seen."""

    def __init__(self, step: int, latency: float, bandwidth: float, counts: dict[str, float]) -> None:
        self.step, self.rest = step, (latency, bandwidth, counts)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            group = trainer.strategy.device_mesh["data_parallel_replicate"].get_group()
            slow_down(dist.get_process_group_ranks(group), *self.rest)


WAYS: dict[str, Any] = {
    "HSDP": 1,
    "H = 2": {"interval": 2, **OPEN},
    "H = 4": {"interval": 4, **OPEN},
    "H = 8": {"interval": 8, **OPEN},
    "H = 32": {"interval": 32, **OPEN},
    "H = 8, bf16": {"interval": 8, "dtype": "bfloat16", **OPEN},
    "H = 8, 4 fragments, delay 1": {
        "interval": 8,
        "num_fragments": 4,
        "delay": 1,
        "mixing": 0.5,
        "close_before": ["checkpoint", "end"],
    },
}


def link(rounds: int, num_steps: int, latency: float, bandwidth: float, ways: list[str]) -> None:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways or WAYS}
    for _ in range(rounds):
        for name in found:
            ranks = run_ranks(4, step_times, WAYS[name], num_steps, latency, bandwidth, timeout=600)
            seconds, waited = (statistics.fmean(rank[i] for rank in ranks) for i in (0, 1))
            found[name].append((seconds, waited, ranks[0][2]))
            print(name, f"{1e3 * seconds:.0f} ms, {1e3 * waited:.0f} of them waiting", flush=True)
    print(f"\n| | ms a step (median of {rounds}) | of them waiting for the link | bytes a step and rank | of HSDP's |")
    print("|---|---|---|---|---|")
    for name, runs in found.items():
        seconds, waited, num_bytes = (statistics.median(run[i] for run in runs) for i in range(3))
        share = num_bytes / found["HSDP"][0][2] if "HSDP" in found else 0.0
        print(f"| {name} | {1e3 * seconds:.0f} | {1e3 * waited:.0f} | {num_bytes:,.0f} | {share:.4f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    learning = commands.add_parser("loss")
    learning.add_argument("--out", type=Path, default=Path("curves.json"))
    learning.add_argument("--steps", type=int, default=500)
    learning.add_argument("--width", type=int, default=96, help="of the GPT; the demo's is 96")
    drawing = commands.add_parser("plot")
    drawing.add_argument("curves", type=Path)
    drawing.add_argument("out", type=Path)
    slow = commands.add_parser("link")
    slow.add_argument("--rounds", type=int, default=3)
    slow.add_argument("--steps", type=int, default=32, help="a multiple of 32")
    slow.add_argument("--ways", nargs="*", default=[], help=f"some of {list(WAYS)}; by default all")
    slow.add_argument("--latency", type=float, default=0.05, help="seconds")
    slow.add_argument("--bandwidth", type=float, default=2e6, help="bytes per second")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    assert split_text(read_text())  # read once, before processes are forked
    if arguments.command == "loss":
        loss(arguments.out, arguments.steps, arguments.width)
    elif arguments.command == "plot":
        plot(arguments.curves, arguments.out)
    else:
        link(arguments.rounds, arguments.steps, arguments.latency, arguments.bandwidth, arguments.ways)


if __name__ == "__main__":
    main()
