"""How long a group of ranks takes to exchange something. Pure.

[Note: rings]
A ring moves ``(n - 1) / n`` of the bytes over the slowest link of each rank (twice for an all-reduce). Within a node
that is the device's link. Between nodes all rings of a node share its adapters: a group with ``g`` members in each node
of ``k`` devices has ``g / k`` of them for itself, because the node's other members run the same exchange in groups of
their own.

[Note: measured links]
Where a probe measured the same kind of group, its curve counts; else that of the group most like it (within a node or
across, as many ranks as possible), rescaled as a ring; else what is nominal. A curve stands for the slowest of all
groups in the usual order. Another order is as much slower or faster as the slowest of the links in its groups.
"""

from __future__ import annotations

from math import log2

from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.constants import Constants
from lightning_hybrid.planner.links import Collective, Measured
from lightning_hybrid.planner.placement import Group, Placement

__all__ = ["Group", "nominal_rate", "ring", "send"]

#: What collectives reach of a bus: bytes pass the host's bridges twice.
_BUS = 0.75
#: Of a V100's six links, those that rings of so many of a node's eight devices reach (each pair has one or two links;
#: measured: 23, 45, 85, 37, 46, 87 and 135 GB/s; VIA-Research/vTrain).
_CUBE = {2: 1, 3: 2, 4: 4, 5: 2, 6: 2, 7: 4, 8: 6}
#: Operations that stand for one that was not measured, and how many times as long it takes.
_LIKE = {
    "all_reduce": (("all_reduce", 1.0), ("all_gather", 2.0), ("reduce_scatter", 2.0)),
    "all_gather": (("all_gather", 1.0), ("reduce_scatter", 1.0), ("all_reduce", 0.5)),
    "reduce_scatter": (("reduce_scatter", 1.0), ("all_gather", 1.0), ("all_reduce", 0.5)),
}


def ring(
    group: Group, num_bytes: float, cluster: Cluster, constants: Constants, *, passes: int = 1, op: str = "all_gather"
) -> float:
    """Seconds of an all-gather or reduce-scatter (``op``) of ``num_bytes`` (whole), or an all-reduce (``passes=2``)."""
    if group.size == 1 or num_bytes == 0:
        return 0.0
    if cluster.measured is not None:
        found = _measured_ring(group, num_bytes, cluster, cluster.measured, "all_reduce" if passes == 2 else op)
        if found is not None:
            return found
    rate = nominal_rate(group, cluster, constants)
    latency = constants.latency + constants.hop * (group.size - 1)
    return passes * (latency + (group.size - 1) / group.size * num_bytes / (rate * 1e9))


def nominal_rate(group: Group, cluster: Cluster, constants: Constants) -> float:
    """GB/s of each member in a ring, by what links should reach."""
    inside, nodes = cluster.placement.spread(group, cluster.per_node)
    rate = _link_rate(cluster, inside) * constants.link
    if nodes > 1:
        share = cluster.network * inside / cluster.per_node
        outside = constants.network * share / (1 + constants.crowd * log2(nodes))
        rate = min(rate, outside) if inside > 1 else outside
    return rate


def send(group: Group, num_bytes: float, cluster: Cluster, constants: Constants) -> float:
    """Seconds until a neighbour has ``num_bytes``."""
    if group.size == 1 or num_bytes == 0:
        return 0.0
    across = cluster.placement.spread(group, cluster.per_node)[1] > 1
    if cluster.measured is not None and (usual := cluster.measured.typical.get(across)) is not None:
        slower = _slowdown(group, num_bytes, cluster.measured, cluster.placement, neighbours=True)
        return constants.handover + usual.seconds(num_bytes) * slower
    shared = cluster.network / cluster.per_node * constants.network
    rate = shared if across else _link_rate(cluster, 2) * constants.link
    return constants.handover + num_bytes / (rate * 1e9)


def _link_rate(cluster: Cluster, members: int) -> float:
    """GB/s of one member within a node."""
    if cluster.gpu.wiring == "cube":
        return cluster.link * _CUBE.get(members, 6) / 6
    if cluster.gpu.wiring == "mesh" and 1 < members < cluster.per_node:
        return cluster.link * (members - 1) / (cluster.per_node - 1)
    return cluster.link * (_BUS if cluster.gpu.wiring == "bus" else 1.0)


def _measured_ring(group: Group, num_bytes: float, cluster: Cluster, measured: Measured, wanted: str) -> float | None:
    """Seconds by the curve of the group that is most like this one; ``None`` if none is."""
    usual = Placement()
    spread = cluster.placement.spread(group, cluster.per_node)
    for op, times in _LIKE[wanted]:
        exact = measured.by_group.get((op, group.size, group.stride))
        if exact is not None and usual.spread(group, cluster.per_node) == spread:
            here, there = (_slowdown(group, num_bytes, measured, place) for place in (cluster.placement, usual))
            return times * exact.curve.seconds(num_bytes) * here / there
        like = _most_like(group, spread, op, cluster, measured)
        if like is not None:
            seconds = _rescaled(like, group.size, num_bytes)
            its_own = _slowdown(Group(like.size, like.stride), num_bytes, measured, usual)
            return times * seconds * _slowdown(group, num_bytes, measured, cluster.placement) / its_own
    return None


def _most_like(
    group: Group, spread: tuple[int, int], op: str, cluster: Cluster, measured: Measured
) -> Collective | None:
    """The measured groups that cross nodes or not as this one does, with the nearest number of ranks."""

    def unlike(found: Collective) -> tuple[float, float]:
        inside, _ = Placement().spread(Group(found.size, found.stride), cluster.per_node)
        return abs(log2(inside / spread[0])), abs(log2(found.size / group.size))

    def crosses(found: Collective) -> bool:
        return Placement().spread(Group(found.size, found.stride), cluster.per_node)[1] > 1

    found = [known for known in measured.collectives if known.op == op and crosses(known) == (spread[1] > 1)]
    return min(found, key=unlike, default=None)


def _rescaled(known: Collective, size: int, num_bytes: float) -> float:
    """Seconds of a ring of another size on the same links."""
    latency = min(known.curve.line[0], known.curve.seconds(num_bytes))
    moved = known.curve.seconds(num_bytes) - latency
    hops = (size - 1) / (known.size - 1)
    return latency * hops + moved * hops * known.size / size


def _slowdown(
    group: Group, num_bytes: float, measured: Measured, placement: Placement, *, neighbours: bool = False
) -> float:
    """How many times as long as over usual links it takes over the slowest link in any of the groups."""
    odd = (pair for pair in measured.odd_pairs if placement.share_group(*pair.ranks, group, neighbours=neighbours))
    return max((measured.slowdown(pair.ranks, num_bytes) for pair in odd), default=1.0)
