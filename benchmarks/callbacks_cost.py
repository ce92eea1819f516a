"""What the callbacks cost: ``python -m benchmarks.callbacks_cost [--pairs 24]``.

One run on two pipeline ranks, and one on two data ranks, of the work of ``work.py``, in which stretches of steps with
all callbacks on and with none take turns, so that both see the same machine. Each stretch with callbacks holds one
measurement at its end, one in ten of them with a step that the profiler samples. Given are medians over the pairs of
stretches: what an ordinary step costs more, what a measurement costs (with and without a sampled step), and what
follows for a run that measures every 50 steps, Lightning's default; by the clock and by processor time of rank 0, which
other load on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from benchmarks.peers import machine
from benchmarks.work import BATCH_SIZE, NUM_MICROBATCHES, NUM_STEPS, LitGPT, rows
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import BubbleRatio, ConfigArchive, ScalingEfficiency, StepBreakdown
from lightning_hybrid.callbacks.measurement import Measurement
from lightning_hybrid.measuring.recorder import StepRecorder

ALLOWED = 0.01
#: Lightning's default of ``log_every_n_steps``.
EVERY = 50
HOOKS = ("on_train_batch_end", "on_validation_start", "on_validation_end")


class Switch(L.Callback):
    """Turns callbacks on and off every ``stretch`` steps, and times each step from hook to hook.

    Off, neither their hooks nor the recorder's listeners run. When they come on again the recorder starts anew, as at
    the start of a run, so the stretch is measured at its ``due`` step.
    """

    def __init__(self, callbacks: list[Measurement], stretch: int) -> None:
        self.callbacks, self.stretch = callbacks, stretch
        self.steps: list[tuple[bool, float, float]] = []
        self.is_on = True

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter(), time.process_time()
        if batch_idx:
            self.steps.append((self.is_on, now[0] - self._start[0], now[1] - self._start[1]))
        on = not (batch_idx // self.stretch) % 2
        if on != self.is_on:
            self._turn(trainer, pl_module, on)
            now = time.perf_counter(), time.process_time()
        self._start = now

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:  # here, since ranks are forked from the script's process
            print(json.dumps({"steps": self.steps}), flush=True)

    def _turn(self, trainer: L.Trainer, pl_module: L.LightningModule, on: bool) -> None:
        self.is_on = on
        if on:
            StepRecorder.of(trainer).begin(trainer)
        else:
            StepRecorder.of(trainer).finish()
        for callback in self.callbacks:
            for name in HOOKS:
                if on:
                    vars(callback).pop(name, None)
                else:
                    setattr(callback, name, lambda *args, **kwargs: None)


def measure(axis: str, stretch: int) -> None:
    """Run, and print all steps of rank 0 as a line of JSON."""
    L.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[Measurement] = [
            StepBreakdown(),
            BubbleRatio(),
            ScalingEfficiency({"samples_per_second": 10.0, "global_batch_size": BATCH_SIZE}),
            ConfigArchive(folder, every_n_steps=2 * stretch),
        ]
        switch = Switch(callbacks, stretch)
        sizes = {f"{name}_parallel_size": 2 if name == axis else 1 for name in ("data", "tensor", "pipeline")}
        strategy = Hybrid3DStrategy(
            archive=None,
            start_method="fork",
            num_microbatches=NUM_MICROBATCHES if axis == "pipeline" else "auto",
            schedule="1F1B",
            **sizes,
        )
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=NUM_STEPS,
            log_every_n_steps=stretch,
            callbacks=[switch, *callbacks],
            default_root_dir=folder,
            logger=L.pytorch.loggers.CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(LitGPT(), DataLoader(rows(), batch_size=BATCH_SIZE // sizes["data_parallel_size"]))  # type: ignore[arg-type]


def report(axis: str, steps: list[list[float]], stretch: int) -> float:
    """Print the costs; return what is added to a step, by processor time."""
    stretches = [steps[i : i + stretch] for i in range(0, len(steps) - stretch + 1, stretch)]
    pairs = list(zip(stretches[::2], stretches[1::2], strict=False))[1:]  # the first warms up, and measures twice
    total = 0.0
    for what, number in (("clock", 1), ("processor", 2)):
        step = statistics.median(_median(off, number) for _, off in pairs)
        each = [_median(on[:-1], number) / _median(off, number) - 1 for on, off in pairs]
        extra = [on[-1][number] - _median(on[:-1], number) for on, _ in pairs]
        is_sampled = [(place + 2) % StepBreakdown().profile_every == 0 for place in range(len(pairs))]
        plain = statistics.median(e for e, sampled in zip(extra, is_sampled, strict=True) if not sampled)
        sampled = statistics.median([e for e, sampled in zip(extra, is_sampled, strict=True) if sampled] or [plain])
        total = statistics.median(each) + (0.9 * plain + 0.1 * sampled) / (EVERY * step)
        print(
            f"{axis}, {what}: step {1e3 * step:.1f} ms; an ordinary step {statistics.median(each):+.2%} (quartiles"
            f" {_quartiles(each)}, {len(pairs)} pairs); a measurement {1e3 * plain:.1f} ms, a sampled one"
            f" {1e3 * sampled:.1f} ms; every {EVERY} steps, all in all {total:+.2%}",
            flush=True,
        )
    return total


def _median(steps: list[list[float]], number: int) -> float:
    return statistics.median(step[number] for step in steps)


def _quartiles(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:+.2%} to {high:+.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--stretch", type=int, default=10, help="steps with callbacks on, then as many without")
    parser.add_argument("--axes", nargs="*", default=["pipeline", "data"])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        measure(chosen.measure, chosen.stretch)
        return
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    num_steps = 2 * (chosen.pairs + 1) * chosen.stretch + 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ".", "WORK_STEPS": str(num_steps)}
    numbers = ["--pairs", str(chosen.pairs + 1), "--stretch", str(chosen.stretch)]
    worst = 0.0
    for axis in chosen.axes:
        command = [sys.executable, "-m", "benchmarks.callbacks_cost", "--measure", axis, *numbers]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"steps"')]
        if not lines:
            raise SystemExit(f"{axis} gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        worst = max(worst, report(axis, json.loads(lines[-1])["steps"], chosen.stretch))
    if worst > ALLOWED:
        raise SystemExit(f"The callbacks cost {worst:.2%} of a step; {ALLOWED:.0%} is allowed.")


if __name__ == "__main__":
    main()
