"""Which device each rank has, and what its groups then share. Pure.

Degrees say which *ranks* form groups (tensor ranks are neighbours, pipeline ranks are farthest apart). The placement
says which device each rank is: by default rank ``r`` is device ``r``, counted node by node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_hybrid.errors import ConfigurationError

__all__ = ["Group", "Placement"]


@dataclass(frozen=True)
class Group:
    """Ranks that are ``stride`` apart."""

    size: int
    stride: int

    def members_per_node(self, per_node: int) -> int:
        """Members that share a node, where rank ``r`` is device ``r``."""
        return max(1, min(self.size, per_node // self.stride))

    def position(self, rank: int) -> tuple[int, int]:
        """Which of the groups a rank is in (its first rank), and its place in it."""
        place = rank // self.stride % self.size
        return rank - place * self.stride, place


@dataclass(frozen=True)
class Placement:
    """Devices by rank; without any, rank ``r`` is device ``r``.

    Raises:
        ConfigurationError: if a device is given to two ranks.
    """

    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.order)) != len(self.order) or min(self.order, default=0) < 0:
            raise ConfigurationError(f"order={self.order} must name each device once, counted from 0.")

    @cached_property
    def ranks(self) -> dict[int, int]:
        """Ranks by device."""
        return {device: rank for rank, device in enumerate(self.order)}

    @property
    def usual(self) -> bool:
        """Whether each rank has the device of its number."""
        return self.order == tuple(range(len(self.order)))

    def spread(self, group: Group, per_node: int) -> tuple[int, int]:
        """Members of a group that share a node, and nodes: of the group that is spread most."""
        if self.usual:
            inside = group.members_per_node(per_node)
            return inside, -(-group.size // inside)
        return _spread(self, group, per_node)

    def share_group(self, first: int, second: int, group: Group, *, neighbours: bool = False) -> bool:
        """Whether two devices are in one group of this kind (next to each other in it: counted round)."""
        if self.order and not (first in self.ranks and second in self.ranks):
            return False  # one of them is idle
        one, other = (self.ranks.get(device, device) for device in (first, second))
        (base, place), (other_base, other_place) = group.position(one), group.position(other)
        if base != other_base:
            return False
        return not neighbours or (place - other_place) % group.size in (1, group.size - 1)

    def swapped(self, first: Sequence[int], second: Sequence[int]) -> Placement:
        """The same with devices ``first`` and ``second`` exchanged, one by one; those that no rank has come in."""
        other = dict(zip([*first, *second], [*second, *first], strict=True))
        return Placement(tuple(other.get(device, device) for device in self.order))


@lru_cache(maxsize=4096)
def _spread(placement: Placement, group: Group, per_node: int) -> tuple[int, int]:
    nodes: dict[int, set[int]] = {}
    for rank, device in enumerate(placement.order):
        nodes.setdefault(group.position(rank)[0], set()).add(device // per_node)
    most = max(len(found) for found in nodes.values())
    return max(1, group.size // most), most
