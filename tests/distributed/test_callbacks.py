"""The measuring callbacks in real runs: what they log, where it ends up, and what does not count."""

from __future__ import annotations

import csv
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import BubbleRatio, ScalingEfficiency, StepBreakdown
from lightning_hybrid.measuring.recorder import gather_timelines
from lightning_hybrid.metrics import PARTS, Span, break_down, spans_of_marks
from tests.wandb_file import read_run

TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
Ranks = Callable[..., list[Any]]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


class SleepingBlock(nn.Module):
    """Takes a known time and next to no processor: forward ``seconds``, and each half of the backward (the inputs' and
    the weights') as long again."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.scale, self.seconds = nn.Parameter(torch.ones(width)), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleeping.apply(x, self.seconds, self.seconds) * Sleeping.apply(self.scale, 0.0, self.seconds)


class Words(L.LightningModule):
    def __init__(self, blocks: list[nn.Module], width: int = 16) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(32, width), nn.ModuleList(blocks), nn.Linear(width, 32)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.embed(batch["input_ids"])
        for block in self.blocks:
            hidden = block(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch["input_ids"].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(num_batches: int, batch_size: int = 8, num_tokens: int = 12) -> DataLoader[Any]:
    def collate(rows: list[tuple[Tensor]]) -> dict[str, Tensor]:
        return {"input_ids": torch.stack([row[0] for row in rows])}

    words = torch.randint(0, 32, (num_batches * batch_size, num_tokens))
    return DataLoader(TensorDataset(words), batch_size=batch_size, collate_fn=collate)


def build_trainer(
    degrees: tuple[int, int, int], folder: Path, callbacks: list[L.Callback], **options: Any
) -> L.Trainer:
    strategy_options = {name: options.pop(name) for name in ("schedule", "num_microbatches") if name in options}
    plan = TP_PLAN if degrees[1] > 1 else None
    strategy = Hybrid3DStrategy(*degrees, tp_plan=plan, archive=None, **strategy_options)
    defaults: dict[str, Any] = {"max_steps": 12, "logger": False, "enable_checkpointing": False}
    return L.Trainer(
        accelerator="cpu",
        devices=math.prod(degrees),
        strategy=strategy,
        callbacks=callbacks,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )


def check_breakdown(values: dict[str, float]) -> None:
    """The parts are all there, add up to the step, and are shares of it."""
    parts = [values[f"step/{part}_s"] for part in PARTS]
    assert sum(parts) == pytest.approx(values["step/time_s"], rel=1e-6)
    assert all(part >= 0 for part in parts)
    assert sum(values[f"step_share/{part}"] for part in PARTS) == pytest.approx(1)
    assert values["step/compute_s"] > 0
    assert values["step/optimizer_s"] > 0
    assert values["step_worst/compute_s"] >= values["step/compute_s"] * (1 - 1e-9)


# ---- everything that is logged, in every logger ---------------------------------------------------------------------


def log_everywhere(rank: int, folder: Path) -> list[dict[str, float]]:
    os.environ["WANDB_CACHE_DIR"] = os.environ["WANDB_DATA_DIR"] = str(folder / "wandb-own")
    callbacks = [
        StepBreakdown(every_n_steps=5),
        BubbleRatio(every_n_steps=5),
        ScalingEfficiency({"samples_per_second": 100.0, "global_batch_size": 16}, peak_flops=1e9, every_n_steps=5),
    ]
    loggers = [
        CSVLogger(folder, name="csv", version=0, flush_logs_every_n_steps=1),
        WandbLogger(project="test", save_dir=folder, offline=True),
    ]
    trainer = build_trainer(
        (2, 1, 2), folder, list(callbacks), logger=loggers, log_every_n_steps=1, gradient_clip_val=1.0
    )
    trainer.fit(Words([Block(16) for _ in range(4)]), loader(40))
    if rank == 0:
        loggers[1].experiment.finish()
    return [callback.latest for callback in callbacks]


def test_csv_and_one_wandb_run_hold_the_values(run_ranks: Ranks, tmp_path: Path) -> None:
    """Case WB-1: four ranks, a WandbLogger in each of them, one run directory with everything in it."""
    results = run_ranks(4, log_everywhere, tmp_path, timeout=120)
    breakdown, bubble, scaling = results[0]
    assert results[1][0] == breakdown  # every rank knows the values of the whole job
    check_breakdown(breakdown)
    assert breakdown["step/communication_data_shard_s"] > 0
    assert breakdown["step/communication_tensor_s"] == 0
    assert breakdown["step/communication_unknown_s"] == 0
    assert 0 < bubble["bubble/measured"] < 1
    assert bubble["bubble/schedule"] == pytest.approx(0.2, abs=0.02)  # (p - 1) / (m + p - 1) with p = 2, m = 4
    assert scaling["throughput/batch_size"] == 16
    assert scaling["throughput/tokens_per_s"] == pytest.approx(12 * scaling["throughput/samples_per_s"])
    assert scaling["scaling/efficiency"] == pytest.approx(scaling["throughput/samples_per_s"] / 100 / 4)

    flops = 3 * 12 * (4 * 2 + 1) * 2 * 16 * 32  # forward and backward, 12 tokens, two layers of each block and the head
    assert scaling["throughput/mfu"] == pytest.approx(flops * scaling["throughput/samples_per_s"] / 4e9)

    keys = {*breakdown, *bubble, *scaling, "train_loss"}
    with open(tmp_path / "csv" / "version_0" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert keys <= {key for row in rows for key, value in row.items() if value}
    assert breakdown["step/time_s"] in [float(row["step/time_s"]) for row in rows if row["step/time_s"]]

    runs = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(runs) == 1
    run = read_run(next(runs[0].glob("*.wandb")))
    logged = {key: value for row in run["history"] for key, value in row.items()}
    assert keys <= set(logged)
    for key, value in {**breakdown, **bubble, **scaling}.items():
        assert value in [row[key] for row in run["history"] if key in row], key
    steps = {row["trainer/global_step"] for row in run["history"] if "step/time_s" in row}
    assert steps == {4, 5, 10}  # the second step after two of warm-up, then every fifth
    for key, start in (("bubble/timeline", "idle (bubble)"), ("step/breakdown", "communication, data (shards)")):
        assert logged[f"{key}._type"] == "images/separated"
        assert logged[f"{key}_chart._type"] == "html-file"
        page = runs[0] / "files" / logged[f"{key}_chart.path"]
        assert start in page.read_text()
    assert (tmp_path / "csv" / "version_0" / "timeline.png").stat().st_size > 10_000
    for key in keys - {"train_loss"}:  # each key of ours has the Trainer's step as its axis ...
        assert run["metrics"][key].step_metric == "trainer/global_step", key
    for key, best in (("step/time_s", min), ("throughput/samples_per_s", max)):  # ... and a summary
        values = [row[key] for row in run["history"] if key in row]
        expected = {best.__name__: best(values), "mean": statistics.mean(values), "last": values[-1]}
        assert run["summary"][key] == pytest.approx(expected), key
    assert run["summary"]["throughput/batch_size"] == 16


# ---- all axes at once -----------------------------------------------------------------------------------------------


class EveryStep(StepBreakdown):
    """Breaks each recorded step down by itself, beside a clock of its own from one optimizer step's end to the next."""

    def __init__(self, trace: Path) -> None:
        super().__init__(every_n_steps=100, trace=trace)  # only the first measurement, at step 4
        self.ends: list[float] = []
        self.found: list[tuple[float, float, float]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        strategy: Any = trainer.strategy
        step = strategy.optimizer_step

        def timed(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.ends.append(time.perf_counter())
            return result

        strategy.optimizer_step = timed

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        steps = list(self.recorder(trainer).steps)
        for step, runs in zip(steps, gather_timelines(strategy, steps), strict=True):
            spans = [Span("data_wait", *wait) for wait in step.data_waits]
            for timeline in runs:
                spans += spans_of_marks(timeline[strategy.schedule_rank], pipeline=timeline.values())
            parts = break_down(spans, start=step.start, end=step.end, exclude=step.excluded).seconds
            clock = self.ends[step.index - 1] - self.ends[step.index - 2]
            self.found.append((sum(parts.values()), sum(parts.values()) - parts["other"], clock))
        super().on_train_end(trainer, pl_module)


def run_in_3d(rank: int, folder: Path) -> tuple[dict[str, float], list[tuple[float, float, float]]]:
    callback = EveryStep(folder / "new" / "trace.json")
    trainer = build_trainer((2, 2, 2), folder, [callback], max_steps=7)
    trainer.fit(Words([Block(16) for _ in range(4)]), loader(28))
    return callback.latest, callback.found


def test_every_axis_has_its_communication_and_the_parts_add_up(run_ranks: Ranks, tmp_path: Path) -> None:
    results = run_ranks(8, run_in_3d, tmp_path, timeout=120)
    values = results[0][0]
    check_breakdown(values)
    for axis in ("tensor", "data_shard", "pipeline"):
        assert values[f"step/communication_{axis}_s"] > 0
    assert values["step/communication_data_replicate_s"] == 0
    assert values["step/communication_unknown_s"] == 0
    assert values["step/bubble_s"] > 0
    for _, steps in results:
        assert len(steps) == 4  # of 7: less the first, the profiled one, and the one after it
        assert all(known < clock for _, known, clock in steps)
        assert all(together == pytest.approx(clock, rel=0.01, abs=0.05) for together, _, clock in steps)
        near = [together == pytest.approx(clock, rel=0.01, abs=0.002) for together, _, clock in steps]
        assert sum(near) >= 2  # the clock is read by itself, and a process of a busy machine is stopped in between
    known_shares = [known / clock for _, steps in results for _, known, clock in steps]
    assert max(known_shares) > 0.5  # it is not "other" that makes them add up

    events = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {  # rank 0 has the last stage
        rank: f"stage {1 - rank // 4}, data {rank // 2 % 2}, tensor {rank % 2}" for rank in range(8)
    }
    boxes = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in boxes)
    for rank in range(8):  # four micro-batches, each on clocks that agree: no message arrives before it was sent
        assert sum(event["pid"] == rank and event["name"].startswith("forward ") for event in boxes) == 4
        assert any(event["pid"] == rank and event["tid"] == 1 for event in boxes)  # exposed communication
        assert any(event["pid"] == rank and event["tid"] >= 10 for event in boxes) == (rank // 2 % 2 == 0)  # operators
    sent = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    received = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert sent.keys() == received.keys() and len(sent) == 4 * 4 * 2
    assert all(received[number] > sent[number] for number in sent)


# ---- a pipeline that only sleeps ------------------------------------------------------------------------------------

FORWARD = 0.05  # of a rank's blocks together; long beside the delays of a machine that is not idle
#: Idle share with 2 ranks, 4 micro-batches and F = I = W. GPipe and 1F1B: (p - 1) / (m + p - 1); v stages on each rank:
#: (p - 1) / (v m + p - 1); zero bubble: (p - 1) (F + I - W) beside v m (F + I + W) (Qi et al. 2023, of v stages).
#: What is measured has the delays of a machine that wakes up for each message besides: `benchmarks/bubbles.py` has the
#: two points that are asked for, with longer times.
DELAYS = {"measured": 0.05, "ideal": 0.02}
ANALYTIC = {"GPipe": 1 / 5, "1F1B": 1 / 5, "Interleaved1F1B": 1 / 9, "ZBVZeroBubble": 1 / 25}
SLOW = (
    1 / 3
)  # 1F1B, one of two ranks twice as slow: 4 x 300 + 150 ms in all, of 2 x 1350 ms there is work in 600 + 1200


class Quiet(BubbleRatio):
    """Measures each step and ends training with the first one that nobody disturbed: delays only add to a bubble."""

    def __init__(self, expected: float) -> None:
        super().__init__(every_n_steps=1, num_warmup_steps=0, picture=False)
        self.expected = expected

    def publish(self, trainer: L.Trainer, values: Mapping[str, float]) -> None:
        super().publish(trainer, values)
        near = all(abs(values[f"bubble/{name}"] - self.expected) < most for name, most in DELAYS.items())
        trainer.should_stop = trainer.global_step >= 3 and near


def sleep_through(rank: int, folder: Path, schedule: str, slow: float) -> tuple[dict[str, float], Any]:
    bubble = Quiet(ANALYTIC[schedule] if slow == 1 else SLOW)
    breakdown = StepBreakdown(every_n_steps=1, num_warmup_steps=0, profile_every=0)
    trainer = build_trainer((1, 1, 2), folder, [bubble, breakdown], max_steps=30, schedule=schedule, num_microbatches=4)
    blocks = 2 if schedule in ("GPipe", "1F1B") else 4
    seconds = [FORWARD * 2 / blocks] * blocks
    seconds[1] *= slow
    trainer.fit(Words([SleepingBlock(16, s) for s in seconds]), loader(30))
    return bubble.latest, (breakdown.latest, breakdown.adviser.said)


@pytest.mark.parametrize("schedule", ANALYTIC)
def test_bubble_of_known_times(run_ranks: Ranks, tmp_path: Path, schedule: str) -> None:
    """Two ranks of 50 ms forward and 100 ms backward, four micro-batches."""
    bubble, (breakdown, _) = run_ranks(2, sleep_through, tmp_path, schedule, 1.0, timeout=120)[0]
    assert bubble["bubble/measured"] == pytest.approx(ANALYTIC[schedule], abs=DELAYS["measured"])
    assert bubble["bubble/schedule"] == pytest.approx(ANALYTIC[schedule], abs=0.02)
    assert abs(bubble["bubble/imbalance"]) < 0.04
    assert breakdown["step/compute_s"] >= 4 * 3 * FORWARD
    check_breakdown(breakdown)


def test_a_stage_that_is_twice_as_slow_is_imbalance(run_ranks: Ranks, tmp_path: Path) -> None:
    bubble, (breakdown, said) = run_ranks(2, sleep_through, tmp_path, "1F1B", 2.0, timeout=120)[0]
    assert bubble["bubble/measured"] == pytest.approx(SLOW, abs=0.02)
    assert bubble["bubble/schedule"] == pytest.approx(0.2, abs=0.001)
    assert bubble["bubble/imbalance"] == pytest.approx(SLOW - 0.2, abs=0.04)
    assert (bubble["bubble/slowest_stage"], bubble["bubble/slowdown"]) == (1, pytest.approx(4 / 3, rel=0.1))
    assert bubble["bubble/slowest_rank"] == breakdown["step_worst/compute_rank"] == 0  # it holds the last stage
    assert [text for text in said if "Pipeline coordinate 0 (rank 0) computes 1." in text]


# ---- one device, and other strategies -------------------------------------------------------------------------------


def test_one_device_has_no_bubble_and_no_communication(tmp_path: Path, run_ranks: Ranks) -> None:
    breakdown, bubble, scaling = run_ranks(1, run_on_one, tmp_path)[0]
    check_breakdown(breakdown)
    assert breakdown["step/communication_s"] == 0
    assert breakdown["step/bubble_s"] == 0
    assert bubble == {"bubble/measured": 0.0, "bubble/ideal": 0.0}
    assert scaling["scaling/efficiency"] == pytest.approx(scaling["throughput/samples_per_s"] / 50)
    flops = 3 * 12 * (2 + 1) * 2 * 16 * 32
    assert scaling["throughput/mfu"] == pytest.approx(flops * scaling["throughput/samples_per_s"] / 1e9)


def run_on_one(rank: int, folder: Path) -> list[dict[str, float]]:
    callbacks = [
        StepBreakdown(every_n_steps=5),
        BubbleRatio(every_n_steps=5, prog_bar=True),
        ScalingEfficiency(50.0, every_n_steps=5, peak_flops=1e9, prog_bar=True),
    ]
    trainer = build_trainer((1, 1, 1), folder, list(callbacks))
    trainer.fit(Words([Block(16)]), loader(12))
    shown = trainer.progress_bar_metrics
    assert shown.keys() == {"bubble/measured", "throughput/tokens_per_s"}  # what was asked for
    rates = [values["throughput/tokens_per_s"] for _, values in callbacks[2].history.rows]
    assert shown["throughput/tokens_per_s"] == pytest.approx(rates[-2])  # the last one comes when all is over
    return [callback.latest for callback in callbacks]


def test_other_strategies_have_throughput_and_are_told_about_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = [StepBreakdown(every_n_steps=5), BubbleRatio(every_n_steps=5), ScalingEfficiency(every_n_steps=5)]
    trainer = L.Trainer(
        accelerator="cpu", max_steps=6, logger=False, enable_checkpointing=False, callbacks=list(callbacks),
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Words([Block(16)]), loader(12))
    assert [bool(callback.latest) for callback in callbacks] == [False, False, True]
    assert caplog.text.count("logs nothing: it reads the marks") == 2
