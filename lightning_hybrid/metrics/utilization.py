"""Model FLOPs utilization: which share of the devices' peak a model's own arithmetic reaches. Pure."""

from __future__ import annotations

import re

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.planner.gpus import find_gpu

__all__ = ["model_flops_utilization", "peak_flops_of", "training_flops"]

#: Words in a device's name that stand for other rates than those of the data sheet with the same number.
_OTHER_RATES = frozenset(("nvl", "mig", "laptop", "max", "super", "ti"))


def model_flops_utilization(
    *, flops_per_sample: float, samples_per_second: float, num_devices: int, peak_flops: float
) -> float:
    """Return the MFU (Chowdhery et al. 2022, appendix B): operations that the model needs over those possible.

    What is computed twice (recomputed activations, layers that each tensor rank computes whole) does not count.

    Args:
        flops_per_sample: floating point operations that training on a sample needs, forward and backward.
        samples_per_second: of the whole job, each sample once.
        num_devices: of the job.
        peak_flops: floating point operations per second of one device, at the run's precision.

    Raises:
        ValueError: if there are no devices or there is no peak.
    """
    if num_devices < 1 or peak_flops <= 0:
        raise ValueError(f"{num_devices} devices of {peak_flops} FLOP/s have no utilization; both must be positive.")
    return flops_per_sample * samples_per_second / (num_devices * peak_flops)


def training_flops(forward: float) -> float:
    """Return the operations of forward and backward, where all weights are trained: the backward needs two products
    for each of the forward's (gradients of inputs and of weights)."""
    return 3.0 * forward


def peak_flops_of(device: str, precision: str, *, tf32: bool) -> float | None:
    """Return a device's dense peak in FLOP/s from its maker's data sheet; ``None`` where that is not certain.

    Args:
        device: its name, as the driver gives it.
        precision: as Lightning names it (``"bf16-mixed"``, ``"32-true"``, ...).
        tf32: whether fp32 matrix products may run as TF32, whose rate is another.
    """
    dtype = {"bf16": "bf16", "16": "fp16", "32": None if tf32 else "fp32"}.get(precision.partition("-")[0])
    words = set(re.findall(r"[a-z0-9]+", device.lower().replace("rtx ", "rtx")))
    if dtype is None or words & _OTHER_RATES:
        return None
    try:
        gpu = find_gpu(device)
    except ConfigurationError:
        return None
    if gpu.name.partition("-")[0].lower() not in words or dtype not in gpu.tflops:  # a relative of that device
        return None
    return gpu.peak(dtype)
