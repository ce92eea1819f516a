"""The few constants that no data sheet says. Pure.

[Note: where the numbers come from]
Fitted by ``python -m benchmarks.planner_published --fit FILE...`` to published step times, those of
``published_more.json`` among them, the same for all sources, models and devices; each stands for something that a
kernel or a network does. ``--leave-out`` fits them once without each source and shows the error on that one.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FITTED", "Constants"]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Shares are of what the data sheet (or the best matrix product) says; times are seconds."""

    matmul: float = 0.93
    """Rate of large matrix products in a step, of the best one alone (clocks fall under load)."""
    throttle: float = 0.25
    """How much the clock falls on devices that may draw less power for each operation than an A100: the exponent."""
    wave: float = 0.5
    """Part of a last wave of tiles that idles."""
    operands: float = 1.0
    """Time of reading and writing operands once that stays visible."""
    narrow_attention: float = 0.35
    """Rate of attention's batched products without flash attention, of the best matrix product."""
    flash: float = 0.85
    """Rate of flash attention 2, relative to what the device's table says."""
    first_flash: float = 0.55
    """Rate of flash attention's first version, of the second's."""
    elementwise: float = 1.0
    """Traffic of norms, activations, dropout and residuals, relative to one read and write for each kernel."""
    scores: float = 1.0
    """Traffic of attention's scores without flash attention, relative to kernels that fuse scale, mask and softmax."""
    memory: float = 0.85
    """Rate of device memory."""
    launch: float = 6.0e-4
    """The host's time for one block forward with flash attention; its backward takes as long."""
    link: float = 0.78
    """Rate of collectives within a node."""
    network: float = 0.8
    """Rate of collectives between nodes."""
    crowd: float = 0.05
    """How much slower the network gets with each doubling of nodes."""
    latency: float = 3.0e-5
    """Of one collective within a node."""
    handover: float = 5.0e-4
    """Of one message between pipeline ranks: the waits for each other that come with it."""
    hop: float = 3.0e-6
    """More for each rank of a ring."""
    overlap: float = 0.7
    """Part of a backward behind which reduced gradients hide, and of a forward behind which weights return."""
    sharpness: float = 3.0
    """How well communication of shards hides behind compute: 1 adds both, infinity shows only the longer."""
    replicas_as_shards: bool = False
    """Whether replicas within a pipeline take as long as as many shards would."""
    microbatch: float = 2.0e-3
    """The host's time for one micro-batch on one stage."""
    step: float = 1.0e-2
    """Of one step, whatever it does."""


FITTED = Constants(
    matmul=0.929,
    throttle=0.221,
    wave=0.302,
    operands=0.697,
    narrow_attention=0.432,
    flash=0.669,
    first_flash=0.791,
    elementwise=1.26,
    scores=0.862,
    launch=0.00062,
    link=0.6,
    network=0.636,
    crowd=0.0511,
    latency=2.78e-05,
    handover=0.000398,
    hop=3.05e-06,
    overlap=0.721,
    sharpness=3.8,
    microbatch=0.00148,
    step=0.00959,
)
