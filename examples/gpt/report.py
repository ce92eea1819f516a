"""What the demo prints after training: the held-out loss, one table, and where things lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import WandbLogger
from rich.console import Console
from rich.table import Table

from lightning_hybrid.callbacks import BubbleRatio, ConfigArchive, ScalingEfficiency, StepBreakdown

COMMUNICATION = {
    "tensor": "step/communication_tensor_s",
    "data": "step/communication_data_shard_s",
    "replicas": "step/communication_data_replicate_s",
    "pipeline": "step/communication_pipeline_s",
}
"""Mesh axis -> the key under which ``StepBreakdown`` logs its exposed communication."""


class HeldOutLoss(L.Callback):
    """Remembers the held-out loss of every validation as (optimizer steps done, nats per byte).

    The Trainer's sanity check, run over all held-out batches (``num_sanity_val_steps=-1``), is the one before training.
    """

    def __init__(self) -> None:
        self.values: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.values.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    def describe(self) -> str:
        """One sentence: before, after, difference."""
        (_, before), *_, (steps, after) = self.values
        change = f"{before:.2f} nats per byte before, {after:.2f} after {steps} steps"
        return f"Held-out loss: {change} ({after - before:+.2f})."


def build_table(values: Mapping[str, float], *, num_devices: int, scaling: str) -> Table:
    """The demo's one table.

    Args:
        values: what the callbacks logged, by key.
        num_devices: processes (on CPU) or GPUs.
        scaling: kind of scaling ("weak" or "strong"), as ``ScalingEfficiency`` says.
    """
    step = values["step/time_s"]

    def seconds(key: str) -> tuple[str, str]:
        return f"{1000 * values[key]:.0f} ms", f"{values[key] / step:.0%} of the step"

    title = f"One optimizer step, mean of {num_devices} ranks and the latest measured steps"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_row("step time", f"{1000 * step:.0f} ms", "")
    table.add_row("compute", *seconds("step/compute_s"))
    for axis, key in COMMUNICATION.items():
        if values.get(key, 0.0) > 0:
            table.add_row(f"exposed communication: {axis}", *seconds(key))
    table.add_row("waiting for other stages", *seconds("step/bubble_s"))
    table.add_row("optimizer", *seconds("step/optimizer_s"))
    table.add_row("everything else", *_rest(values, step), end_section=True)
    table.add_row("bubble ratio", f"{values['bubble/measured']:.1%}", f"ideal: {values['bubble/ideal']:.1%}")
    table.add_row(
        "throughput",
        f"{values['throughput/samples_per_s']:.1f} samples/s",
        f"{values['throughput/tokens_per_s']:,.0f} bytes/s",
    )
    table.add_row("scaling efficiency", *_scaling(values, scaling))
    return table


def _rest(values: Mapping[str, float], step: float) -> tuple[str, str]:
    rest = values["step/other_s"] + values["step/data_wait_s"] + values["step/communication_unknown_s"]
    rest += values["step/communication_world_s"]
    return f"{1000 * rest:.0f} ms", f"{rest / step:.0%} of the step"


def _scaling(values: Mapping[str, float], kind: str) -> tuple[str, str]:
    if "scaling/efficiency" not in values:
        return "none", "no run on one device compares"
    speedup = values["scaling/speedup"]
    alone = values["throughput/samples_per_s"] / speedup  # the archive's figure, of that whole run
    return f"{values['scaling/efficiency']:.1%}", f"{kind}: {speedup:.2f} x one device's {alone:.1f} samples/s"


def shared_cores(trainer: L.Trainer) -> str:
    """A note for readers of the scaling efficiency, where processes share cores; else nothing."""
    cores, processes = os.cpu_count() or 1, trainer.world_size
    if trainer.strategy.root_device.type != "cpu" or cores >= processes:
        return ""
    return (
        f"{processes} processes share {cores} cores here, so about {cores / processes:.0%} is the best that scaling can"
        " reach."
    )


class Report(L.Callback):
    """Prints the report when all is over, on global rank 0. It comes last: after the progress bar and what it reads."""

    def __init__(
        self,
        held_out: HeldOutLoss,
        breakdown: StepBreakdown,
        bubble: BubbleRatio,
        scaling: ScalingEfficiency,
        archive: ConfigArchive,
    ) -> None:
        self.held_out = held_out
        self.breakdown, self.bubble, self.scaling, self.archive = breakdown, bubble, scaling, archive

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not trainer.is_global_zero:
            return
        values = {**self.breakdown.latest, **self.bubble.latest, **self.scaling.latest}
        console = Console()
        console.print()
        if trainer.world_size == 1:
            console.print(f"One device: {values['throughput/samples_per_s']:.1f} samples/s.", highlight=False)
            return
        console.print(self.held_out.describe(), style="bold", highlight=False)
        console.print()
        kind = "none" if self.scaling.scaling is None else self.scaling.scaling.kind
        console.print(build_table(values, num_devices=trainer.world_size, scaling=kind))
        console.print(shared_cores(trainer), style="dim", highlight=False)
        for what, where in self.places(trainer).items():
            console.print(f"[bold]{what:<16}[/bold]{where}", highlight=False, soft_wrap=True)

    def places(self, trainer: L.Trainer) -> dict[str, str]:
        """Where the reader finds the rest."""
        wandb = next(logger for logger in trainer.loggers if isinstance(logger, WandbLogger))
        return {
            "archive entry": shorten(self.archive.path),
            "timeline": shorten(self.bubble.picture_path),
            "W&B run": f"{shorten(Path(wandb.experiment.dir).parent)} (offline; `wandb sync` uploads it)",
        }


def shorten(path: str | Path | None) -> str:
    """A path as one would type it here: relative, if it lies below the current folder."""
    if path is None:
        return "none"
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)
