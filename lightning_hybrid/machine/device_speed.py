"""How fast this rank's device computes and moves memory."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import torch

from lightning_hybrid.archive.surroundings import detect_hardware
from lightning_hybrid.planner.links import Device

__all__ = ["measure_device"]

_GIB = 2**30


def measure_device(rank: int, device: torch.device, *, seconds: float, ranks_on_host: int) -> Device:
    """Time matrix products and copies; all ranks do so at once, as in training.

    Args:
        rank: Of the job.
        device: Where to measure.
        seconds: Roughly how long each of the two or three measurements takes.
        ranks_on_host: Ranks that share the host's memory, on a CPU.
    """
    hardware = detect_hardware(device.type, num_devices=1)
    memory = (hardware.memory_bytes or 0) / (ranks_on_host if device.type == "cpu" else 1)
    types = {"fp32": torch.float32} if device.type == "cpu" else {"bf16": torch.bfloat16, "fp32": torch.float32}
    return Device(
        rank=rank,
        host=socket.gethostname(),
        name=hardware.kind,
        type=device.type,
        memory=memory / _GIB,
        tflops={name: _product_rate(dtype, device, seconds) for name, dtype in types.items()},
        bandwidth=_copy_rate(device, seconds),
    )


def _product_rate(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """TFLOP/s of the best of the matrix products that were tried in the given time."""
    sizes = (512, 1024) if device.type == "cpu" else (4096, 8192)
    best = 0.0
    for size in sizes:
        one, other = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        result = torch.empty_like(one)
        spent = _best_time(lambda a=one, b=other, out=result: torch.mm(a, b, out=out), device, seconds / len(sizes))  # type: ignore[misc]
        best = max(best, 2 * size**3 / spent / 1e12)
    return best


def _copy_rate(device: torch.device, seconds: float) -> float:
    """GB/s, read and written."""
    num_bytes = 2**25 if device.type == "cpu" else 2**29
    source = torch.zeros(num_bytes // 4, device=device)
    target = torch.ones_like(source)
    return 2 * num_bytes / _best_time(lambda: target.copy_(source), device, seconds) / 1e9


def _best_time(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest of at least three runs."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
