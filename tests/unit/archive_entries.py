"""Entries for the archive's tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_hybrid.archive import Batch, Entry, Fingerprint, Hardware, Result, Settings, Training
from lightning_hybrid.layout import Layout

GPT = Fingerprint(model_class="GPT", num_parameters=1_000_000, hash="aaaa0000aaaa0000", dtype="float32", num_blocks=8)
H200 = Hardware(device="cuda", kind="NVIDIA H200", num_devices=8, num_nodes=1, memory_bytes=150_000_000_000)


def layout(data: int, tensor: int, pipeline: int, replicate: int = 1) -> Layout:
    return Layout(
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        replicate_size=replicate,
    )


def make_entry(
    name: str = "one",
    degrees: tuple[int, ...] = (2, 2, 2),
    *,
    rate: float | None = 10.0,
    status: Any = "ok",
    tokens: float | None = None,
    model: Fingerprint = GPT,
    kind: str = "NVIDIA H200",
    time: str = "2026-07-31T09:30:00Z",
    **changes: Any,
) -> Entry:
    """An entry with every kind of value in it."""
    chosen = layout(*degrees)
    entry = Entry(
        id=name,
        time=time,
        updated=time,
        model=model,
        hardware=dataclasses.replace(H200, kind=kind, num_devices=chosen.world_size, links={"tensor_parallel": 4e11}),
        degrees=chosen,
        software={"torch": "2.13.0"},
        settings=Settings(
            schedule="1F1B", num_microbatches=4, tp_plan={"*.up": "colwise"}, options={"a": True, "b": 1.5}
        ),
        batch=Batch(size_per_data_rank=16, accumulate_grad_batches=2, global_size=64, tokens_per_sample=128.0),
        training=Training(optimizer="AdamW", learning_rate=3e-4, seed=7),
        result=Result(
            status=status, samples_per_second=rate, tokens_per_second=tokens, breakdown={"compute": 0.5}, num_steps=3
        ),
    )
    return dataclasses.replace(entry, **changes)
