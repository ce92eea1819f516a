"""What more devices bring, against a baseline that compares. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Reference", "Scaling", "compare"]

#: Batches count as equal up to this relative difference (a last, smaller batch of an epoch).
_BATCH_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Throughput of one run, and what must be equal for another run to compare with it. ``None``: not known."""

    num_devices: int
    """Devices that it used."""
    samples_per_second: float | None = None
    """Samples per second of the whole job."""
    tokens_per_second: float | None = None
    """Tokens per second of the whole job."""
    global_batch_size: float | None = None
    """Samples in one optimizer step of the whole job."""
    num_data_ranks: int | None = None
    """Ranks that read different samples; for one device it is 1."""
    model: str | None = None
    """Fingerprint of the model."""
    precision: str | None = None
    """Numerical precision, as Lightning names it."""
    hardware: str | None = None
    """Kind of device."""

    @property
    def batch_per_device(self) -> float | None:
        """Samples of one optimizer step by device."""
        return None if self.global_batch_size is None else self.global_batch_size / self.num_devices


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A run beside its baseline."""

    kind: str
    """"strong" (same global batch), "weak" (same batch on each device), "weak per data rank" (same batch on each group
    of devices that holds the model), "same size" (same number of devices), "unchecked" (the baseline does not say its
    batch), or "none" (they do not compare)."""
    speedup: float | None
    """Throughput over the baseline's; ``None`` if they do not compare."""
    efficiency: float | None
    """Speedup over the growth in devices: 1 is ideal, for weak and strong scaling alike."""
    per_doubling: float | None
    """Geometric mean of the gain of each doubling of devices: 2 is ideal. ``None`` at the same number of devices."""
    reasons: tuple[str, ...] = ()
    """Why they do not compare, or what could not be checked."""


def compare(run: Reference, baseline: Reference) -> Scaling:
    """Compare a run with a baseline, or say why that would mean nothing.

    Tokens are compared if both have them, else samples. With different models, precisions or hardware, or batches
    that are equal neither by device nor in all, there is no efficiency, only reasons.
    """
    reasons = [
        f"{name}: {theirs} there, {ours} here"
        for name in ("model", "precision", "hardware")
        if (ours := getattr(run, name)) is not None
        and (theirs := getattr(baseline, name)) is not None
        and ours != theirs
    ]
    kind = _kind(run, baseline)
    if kind == "none":
        reasons.append(
            f"batch: {baseline.global_batch_size:g} samples a step on {baseline.num_devices} device(s) there,"
            f" {run.global_batch_size:g} on {run.num_devices} here; use {baseline.batch_per_device:g} a device or"
            f" a data rank (weak) or {baseline.global_batch_size:g} in all (strong)"
        )
    speedup = _ratio(run.tokens_per_second, baseline.tokens_per_second)
    if speedup is None:
        speedup = _ratio(run.samples_per_second, baseline.samples_per_second)
    if speedup is None:
        reasons.append("throughput: the two runs count neither tokens nor samples in common")
    if reasons or speedup is None:
        return Scaling(kind="none", speedup=None, efficiency=None, per_doubling=None, reasons=tuple(reasons))
    growth = run.num_devices / baseline.num_devices
    return Scaling(
        kind=kind,
        speedup=speedup,
        efficiency=speedup / growth,
        per_doubling=None if growth == 1 else speedup ** (1 / math.log2(growth)),
        reasons=("batch: the baseline does not say its global batch size",) if kind == "unchecked" else (),
    )


def _kind(run: Reference, baseline: Reference) -> str:
    ours, theirs = run.global_batch_size, baseline.global_batch_size
    if ours is None or theirs is None:
        return "unchecked"
    if _close(ours, theirs):
        return "same size" if run.num_devices == baseline.num_devices else "strong"
    if run.num_devices == baseline.num_devices:
        return "none"
    if _close(ours / run.num_devices, theirs / baseline.num_devices):
        return "weak"
    data_ranks = 1 if baseline.num_devices == 1 else baseline.num_data_ranks
    if run.num_data_ranks and data_ranks and _close(ours / run.num_data_ranks, theirs / data_ranks):
        return "weak per data rank"
    return "none"


def _close(ours: float, theirs: float) -> bool:
    return math.isclose(ours, theirs, rel_tol=_BATCH_TOLERANCE)


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs
