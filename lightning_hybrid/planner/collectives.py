"""How long a group of ranks takes to exchange something. Pure.

[Note: rings]
A ring moves ``(n - 1) / n`` of the bytes over the slowest link of each rank (twice for an all-reduce). Within a node
that is the device's link. Between nodes all rings of a node share its adapters: a group with ``g`` members in each node
of ``k`` devices has ``g / k`` of them for itself, because the node's other members run the same exchange in groups of
their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.constants import Constants

__all__ = ["Group", "ring", "send"]

#: What collectives reach of a bus: bytes pass the host's bridges twice.
_BUS = 0.75


@dataclass(frozen=True)
class Group:
    """Ranks that are ``stride`` apart."""

    size: int
    stride: int

    def members_per_node(self, per_node: int) -> int:
        """Members that share a node."""
        return max(1, min(self.size, per_node // self.stride))


def ring(group: Group, num_bytes: float, cluster: Cluster, constants: Constants, *, passes: int = 1) -> float:
    """Seconds of an all-gather or reduce-scatter of ``num_bytes`` (whole), or of an all-reduce (``passes=2``)."""
    if group.size == 1 or num_bytes == 0:
        return 0.0
    inside = group.members_per_node(cluster.per_node)
    nodes = -(-group.size // inside)
    rate = _link_rate(cluster, inside) * constants.link
    if nodes > 1:
        share = cluster.network * inside / cluster.per_node
        outside = constants.network * share / (1 + constants.crowd * log2(nodes))
        rate = min(rate, outside) if inside > 1 else outside
    latency = constants.latency + constants.hop * (group.size - 1)
    return passes * (latency + (group.size - 1) / group.size * num_bytes / (rate * 1e9))


def send(group: Group, num_bytes: float, cluster: Cluster, constants: Constants) -> float:
    """Seconds until a neighbour has ``num_bytes``."""
    if group.size == 1 or num_bytes == 0:
        return 0.0
    if group.stride * group.size <= cluster.per_node:
        rate = _link_rate(cluster, 2) * constants.link
    else:
        rate = cluster.network / cluster.per_node * constants.network
    return constants.handover + num_bytes / (rate * 1e9)


def _link_rate(cluster: Cluster, members: int) -> float:
    """GB/s of one member within a node."""
    if cluster.gpu.wiring == "mesh" and 1 < members < cluster.per_node:
        return cluster.link * (members - 1) / (cluster.per_node - 1)
    return cluster.link * (_BUS if cluster.gpu.wiring == "bus" else 1.0)
