"""What an archive entry says of a Lightning run: facts of a Trainer in, parts of an entry out."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer

from lightning_hybrid.archive import (
    Batch,
    Entry,
    Fingerprint,
    Settings,
    Training,
    detect_hardware,
    detect_software,
)
from lightning_hybrid.archive.record import write_history, write_timeline
from lightning_hybrid.archive.surroundings import redact
from lightning_hybrid.callbacks.measurement import Measurement
from lightning_hybrid.callbacks.scaling_efficiency import layout_of
from lightning_hybrid.failures.failure import Status, printable, said, status_of
from lightning_hybrid.metrics.throughput import Throughput
from lightning_hybrid.settings import Settings as RunSettings
from lightning_hybrid.settings import options_of

__all__ = ["build_batch", "build_entry", "estimated_memory", "judge", "latest_values", "rates"]


def build_entry(trainer: Trainer, fingerprint: Fingerprint, entry_id: str, time: str) -> Entry:
    """Return what is known of a run apart from its result."""
    strategy: Any = trainer.strategy
    layout = layout_of(trainer)
    return Entry(
        id=entry_id,
        time=time,
        updated=time,
        model=fingerprint,
        hardware=replace(
            detect_hardware(strategy.root_device.type, num_devices=layout.world_size, num_nodes=trainer.num_nodes),
            links=dict(getattr(strategy, "links", {})),
        ),
        software=detect_software(),
        degrees=layout,
        settings=build_settings(trainer),
        batch=build_batch(trainer, None),
        training=build_training(trainer),
        parent=getattr(strategy, "started_from", None),
        planned=getattr(getattr(strategy, "choice", None), "planned", None),
    )


def build_settings(trainer: Trainer) -> Settings:
    """Return the strategy's settings; of foreign strategies only the name and the precision are known."""
    strategy: Any = trainer.strategy
    plan = getattr(strategy, "tp_plan", None)
    described: dict[str, Any] = strategy.describe() if hasattr(strategy, "describe") else {}
    known = {*vars(layout_of(trainer)), "schedule", "num_microbatches", "forward_flops_per_sample"}
    scalars = {
        key: value
        for key, value in described.items()
        if key not in known and isinstance(value, bool | int | float | str)
    }
    settings = getattr(strategy, "settings", None)
    given = options_of(settings) if isinstance(settings, RunSettings) else {}
    return Settings(
        schedule=str(getattr(strategy, "schedule", "none")),
        num_microbatches=int(getattr(strategy, "num_microbatches", 1)),
        precision=str(trainer.precision),
        tp_plan={key: style if isinstance(style, str) else repr(style) for key, style in plan.items()}
        if plan
        else None,
        options={"strategy": type(strategy).__name__, **scalars, **given},
    )


def build_batch(trainer: Trainer, first_batch: tuple[int, int] | None) -> Batch:
    """Return the batch's sizes, from (samples, tokens) of this rank's first one."""
    accumulate = trainer.accumulate_grad_batches
    if first_batch is None:
        return Batch(accumulate_grad_batches=accumulate)
    samples, tokens = first_batch
    return Batch(
        size_per_data_rank=samples,
        accumulate_grad_batches=accumulate,
        global_size=samples * accumulate * layout_of(trainer).data_parallel_size,
        tokens_per_sample=tokens / samples if tokens else None,
    )


def build_training(trainer: Trainer) -> Training:
    """Return optimizer, base learning rate and seed, as far as they are known by now."""
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    group: dict[str, Any] = optimizer.param_groups[0] if optimizer is not None and optimizer.param_groups else {}
    rate = group.get("initial_lr", group.get("lr"))  # a scheduler keeps the base rate as initial_lr
    seed = os.environ.get("PL_GLOBAL_SEED", "")  # where seed_everything leaves it
    return Training(
        optimizer=None if optimizer is None else type(optimizer).__name__,
        learning_rate=None if rate is None else float(rate),
        seed=int(seed) if seed.isdigit() else None,
        max_steps=trainer.max_steps if trainer.max_steps and trainer.max_steps > 0 else None,
    )


def estimated_memory(trainer: Trainer) -> dict[str, float]:
    """Return the bytes that a step needs on this rank, by what they are for; nothing under other strategies."""
    strategy: Any = trainer.strategy
    parts = (strategy.describe()["memory"] if hasattr(strategy, "take_marks") else None) or {}
    return {name: float(value) for name, value in parts.items() if value and name != "host"}


def rates(throughput: Throughput) -> dict[str, Any]:
    """Return the fields of a Result that follow from the throughput; nothing where no step was timed."""
    if not throughput.num_steps:
        return {}
    samples, tokens, num_devices = throughput.samples_per_second, throughput.tokens_per_second, throughput.num_devices
    return {
        "step_time": throughput.step_seconds,
        "samples_per_second": samples,
        "tokens_per_second": tokens,
        "samples_per_second_per_device": samples / num_devices,
        "tokens_per_second_per_device": None if tokens is None else tokens / num_devices,
    }


def latest_values(trainer: Trainer) -> dict[str, Any]:
    """Return what the other callbacks measured last, by field of a Result."""
    values: dict[str, float] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        latest = getattr(callback, "latest", None)
        if isinstance(callback, Measurement) and isinstance(latest, dict):
            values |= latest
    prefixes = {"breakdown": "step", "bubble": "bubble/", "scaling": "scaling/"}
    found: dict[str, Any] = {
        field: {key: float(value) for key, value in values.items() if key.startswith(prefix)}
        for field, prefix in prefixes.items()
    }
    found |= course(trainer)
    return {field: kept for field, kept in found.items() if kept}


def course(trainer: Trainer) -> dict[str, dict[str, str]]:
    """Return what the other callbacks saw over the run, and their picture of a step, by field of a Result."""
    measurements = [callback for callback in trainer.callbacks if isinstance(callback, Measurement)]  # type: ignore[attr-defined]
    timelines = (getattr(measurement, "timeline", None) for measurement in measurements)
    return {
        "history": write_history(row for measurement in measurements for row in measurement.history.rows if row[1]),
        "timeline": write_timeline(next(filter(None, timelines), {})),
    }


def judge(exception: BaseException) -> tuple[Status, str]:
    """Return the status that an exception means, and its message without secrets."""
    text = printable(said(exception)).strip()
    message = redact(f"{type(exception).__name__}: {text}" if text else type(exception).__name__)
    return status_of(exception), message
