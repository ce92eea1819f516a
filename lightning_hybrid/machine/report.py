"""What was measured beside what the devices should have, in words. Pure."""

from __future__ import annotations

from dataclasses import replace

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.collectives import nominal_rate
from lightning_hybrid.planner.constants import FITTED
from lightning_hybrid.planner.gpus import UNMEASURED_MATMUL, Gpu, find_gpu
from lightning_hybrid.planner.links import SLOW
from lightning_hybrid.planner.placement import Group

__all__ = ["compare_with_nominal", "group_in_words"]

_TYPICAL = "all_gather"


def compare_with_nominal(cluster: Cluster) -> list[str]:
    """One sentence for each axis, or device property, below half of what a known device should reach."""
    measured = cluster.measured
    known = _known(cluster)
    if measured is None or known is None:
        return []
    found = []
    nominal = replace(cluster, gpu=known, measured=None)
    for exchange in measured.collectives:
        group = Group(exchange.size, exchange.stride)
        expected, reached = nominal_rate(group, nominal, FITTED), exchange.bus_rate / 1e9
        if exchange.op == _TYPICAL and reached < SLOW * expected:
            what = exchange.axis or group_in_words(exchange.size, exchange.stride, cluster)
            across = group.members_per_node(cluster.per_node) < group.size
            where = f"{cluster.network * 8:.0f} Gbit/s between nodes" if across else f"links of {known.link:.0f} GB/s"
            found.append(
                f"{what}: {_TYPICAL} reached {reached:.3g} GB/s, about {expected:.3g} are expected of {where};"
                " lightning-hybrid doctor looks for the reason."
            )
    return found + _devices(cluster, known)


def _devices(cluster: Cluster, known: Gpu) -> list[str]:
    assert cluster.measured is not None
    found = []
    for device in cluster.measured.devices:
        expected = known.peak("bf16") / 1e12 * (known.matmul or UNMEASURED_MATMUL)
        rates = {
            "matrix products (bf16)": (device.tflops.get("bf16", expected), expected, "TFLOP/s"),
            "memory": (device.bandwidth, known.bandwidth, "GB/s"),
        }
        found += [
            f"rank {device.rank} on host {device.host}: {name} reached {reached:.3g} {unit}, a {known.name} should"
            f" reach about {usual:.3g}; look at its clocks, its temperature, and at who else uses it."
            for name, (reached, usual, unit) in rates.items()
            if reached < SLOW * usual
        ]
    return found


def _known(cluster: Cluster) -> Gpu | None:
    """What the data sheet says; ``None`` for CPUs and unknown devices."""
    try:
        return find_gpu(cluster.gpu.name)
    except ConfigurationError:
        return None


def group_in_words(size: int, stride: int, cluster: Cluster) -> str:
    """Such as ``"8 neighbours of a node"``."""
    inside = Group(size, stride).members_per_node(cluster.per_node)
    where = "of a node" if inside == size else f"on {-(-size // inside)} nodes"
    if stride == 1:
        return f"{size} neighbours {where}"
    return f"{size} ranks, {stride} apart, {where}"
