"""Which device each rank should have: slow links get the axis that sends least. Pure.

[Note: what is tried]
First all orders of the axes (which ranks are neighbours), then exchanges of single devices at the ends of slow links,
of whole nodes, and with devices that would be idle. Each is judged by the step time that the planner estimates with it;
the usual order stays unless another one is faster by more than estimates can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.constants import Constants
from lightning_hybrid.planner.links import Pair
from lightning_hybrid.planner.placement import Group, Placement
from lightning_hybrid.planner.profile import ModelProfile
from lightning_hybrid.planner.setup import Setup
from lightning_hybrid.planner.step import Estimate, estimate

__all__ = ["Placed", "can_gain", "launch_lines", "place"]

#: A placement that gains less is not worth the trouble: estimates are not better.
GAIN = 0.03
_MOST_DEVICES = 512
_MOST_PAIRS = 4
_ROUNDS = 8


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A setup with its ranks on devices."""

    estimate: Estimate
    placement: Placement
    usual_seconds: float
    """Of a step in the usual order."""
    reasons: tuple[str, ...] = ()
    """What each slow link carries; for another than the usual order what it gains."""


def can_gain(cluster: Cluster) -> bool:
    """Whether devices are reached at different speeds, and few enough to try orders."""
    odd = cluster.measured is not None and bool(cluster.measured.odd_pairs)
    return (odd or cluster.num_nodes > 1) and cluster.num_devices <= _MOST_DEVICES


def place(profile: ModelProfile, cluster: Cluster, setup: Setup, *, constants: Constants) -> Placed:
    """Return the fastest order of ranks that was found.

    Args:
        profile: The model.
        cluster: The devices; links count as measured, where they were.
        setup: Degrees and settings.
        constants: What was fitted to measurements.
    """

    def judge(placement: Placement) -> Estimate:
        return estimate(profile, replace(cluster, placement=placement), setup, constants=constants)

    usual = Placement(tuple(range(setup.num_devices)))
    start = judge(usual)
    best, best_estimate = usual, start
    for order in _axis_orders(setup):
        found = judge(order)
        if found.seconds < best_estimate.seconds:
            best, best_estimate = order, found
    for _ in range(_ROUNDS):
        swaps = [(judge(swap), swap) for swap in _swaps(best, setup, cluster)]
        found, swap = min(swaps, key=lambda item: item[0].seconds, default=(best_estimate, best))
        if found.seconds >= best_estimate.seconds * (1 - 1e-9):
            break
        best, best_estimate = swap, found
    if best_estimate.seconds > start.seconds * (1 - GAIN):
        best, best_estimate = usual, start
    reasons = _reasons(setup, cluster, best, best_estimate.seconds, start.seconds)
    return Placed(estimate=best_estimate, placement=best, usual_seconds=start.seconds, reasons=tuple(reasons))


def _axes(setup: Setup) -> dict[str, Group]:
    """From the outermost to the innermost."""
    return {
        "pipeline": setup.pipeline_group,
        "replicate": setup.replica_group,
        "shard": setup.shard_group,
        "tensor": setup.tensor_group,
    }


def _axis_orders(setup: Setup) -> Iterator[Placement]:
    """Orders of ranks in which other axes are the innermost (context ranks stay with the shards)."""
    sizes = [group.size for group in _axes(setup).values()]
    real = [axis for axis, size in enumerate(sizes) if size > 1]
    for order in permutations(real):
        strides, stride = [0] * len(sizes), 1
        for axis in reversed(order):
            strides[axis], stride = stride, stride * sizes[axis]
        devices = [sum(map(int.__mul__, at, strides)) for at in product(*map(range, sizes))]
        if order != tuple(real):
            yield Placement(tuple(devices))


def _swaps(placement: Placement, setup: Setup, cluster: Cluster) -> Iterator[Placement]:
    """The same with two devices, or two nodes, exchanged: those at the ends of slow links with others."""
    measured = cluster.measured
    if measured is None:
        return
    worst = sorted(measured.odd_pairs, key=lambda pair: pair.seconds(2**20))[-_MOST_PAIRS:]
    per_node, devices = cluster.per_node, range(cluster.num_devices)
    for one in dict.fromkeys(device for pair in worst for device in pair.ranks):
        node = range(one // per_node * per_node, min((one // per_node + 1) * per_node, len(devices)))
        idle = [device for device in devices if device not in placement.ranks]
        for other in dict.fromkeys([*node, *idle]):
            if other != one and (one in placement.ranks or other in placement.ranks):
                yield placement.swapped([one], [other])
        for first in range(0, setup.num_devices - per_node + 1, per_node):
            if len(node) == per_node and node[0] != first:
                yield placement.swapped(list(node), list(range(first, first + per_node)))


def _reasons(
    setup: Setup, cluster: Cluster, placement: Placement, seconds: float, usual_seconds: float
) -> Iterator[str]:
    if not placement.usual:
        gain = f"{seconds:.3g} s a step instead of {usual_seconds:.3g} s"
        yield f"ranks in another order than that of the devices: {gain}"
    if cluster.measured is None:
        return
    usual = Placement(tuple(range(setup.num_devices)))
    for pair in cluster.measured.odd_pairs[:_MOST_PAIRS]:
        slower = cluster.measured.slowdown(pair.ranks, 2**20)
        now, before = _carried(pair, setup, placement), _carried(pair, setup, usual)
        text = f"the slow link between devices {pair.ranks[0]} and {pair.ranks[1]} ({slower:.1f} times as long) carries"
        yield f"{text} {now}" + (f", not {before}" if now != before else "")


def _carried(pair: Pair, setup: Setup, placement: Placement) -> str:
    """Axes whose exchanges cross a link."""
    names = {
        name: placement.share_group(*pair.ranks, group, neighbours=name == "pipeline")
        for name, group in _axes(setup).items()
        if group.size > 1
    }
    return " and ".join(f"the {name} axis" for name, crosses in names.items() if crosses) or "nothing"


def launch_lines(placement: Placement, cluster: Cluster) -> list[str]:
    """How to start ranks in this order, in words."""
    order, per_node = placement.order, cluster.per_node
    hosts = list(dict.fromkeys(cluster.measured.hosts)) if cluster.measured else []
    nodes = [order[first : first + per_node] for first in range(0, len(order), per_node)]

    def host(device: int) -> str:
        node = device // per_node
        return hosts[node] if node < len(hosts) else f"node {node}"

    if any(len({device // per_node for device in node}) > 1 for node in nodes):
        slots = ", ".join(f"{host(device)}:{device % per_node}" for device in order)
        return [f"ranks 0, 1, ... on host:device {slots} (a rankfile of mpirun, or SLURM's --distribution=arbitrary)"]
    lines = []
    if (names := [host(node[0]) for node in nodes]) != [host(first * per_node) for first in range(len(nodes))]:
        lines.append(f"hosts in the order {', '.join(names)} (hostfile, or torchrun's --node_rank 0, 1, ...)")
    for node in nodes:
        within = [device % per_node for device in node]
        if within != list(range(len(within))):
            lines.append(f"CUDA_VISIBLE_DEVICES={_joined(within)} on {host(node[0])}")
    return lines


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
