"""How long exchanges between ranks take: measured in a running job, on all of its ranks at once.

[Note: what is timed]
Collectives are those that training uses (on gloo, shards go straight to their place, see
:mod:`lightning_hybrid.data_parallel.gloo`), in all groups of a kind at the same time, as in a step. One exchange takes
as long as on
the rank where it takes longest; of several the lower quartile counts (what else the machine does is not the link's),
and no more than for more bytes. Pairs are timed in rounds of disjoint pairs, by their best time: what a link can
do does not depend on who else was computing. Slow pairs are timed again before they are believed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.data_parallel.gloo import all_gather, reduce_scatter
from lightning_hybrid.layout import divisors
from lightning_hybrid.planner.links import OPS, Collective, Pair, odd_pairs
from lightning_hybrid.planner.placement import Group

__all__ = [
    "FULL",
    "QUICK",
    "Effort",
    "Kind",
    "gather_objects",
    "kinds_of_groups",
    "measure_axes",
    "measure_groups",
    "measure_pairs",
]

#: How often slow pairs are timed again.
SECOND_LOOKS = 2
_WIDTH = 4  # bytes of an element
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How thoroughly to measure."""

    sizes: tuple[int, ...]
    """Bytes, on a CPU; eight times as many on GPUs."""
    repeats: int
    seconds: float
    """After which no further kind of group is begun."""


QUICK = Effort(sizes=(2**12, 2**20), repeats=3, seconds=1.0)
FULL = Effort(sizes=(2**12, 2**16, 2**18, 2**20, 2**22, 2**24), repeats=5, seconds=30.0)


@dataclass(frozen=True)
class Kind:
    """Groups of one size and stride; ``axis`` names the mesh axis if they are one."""

    group: Group
    axis: str | None = None


def kinds_of_groups(world_size: int, per_node: int) -> list[Kind]:
    """All groups that degrees can make of so many ranks, the likeliest first.

    Those are neighbours of a node, one rank of each node, all; then others, smaller products of size and stride first.
    """
    groups = [
        Group(size, stride)
        for stride in divisors(world_size)
        for size in divisors(world_size // stride)
        if size > 1 and not (1 < stride < per_node and stride * size > per_node and per_node % stride)
    ]
    first = (Group(per_node, 1), Group(world_size // per_node, per_node), Group(world_size, 1))

    def order(group: Group) -> tuple[int, int, int]:
        return (first.index(group) if group in first else len(first), group.size * group.stride, group.stride)

    return [Kind(group) for group in sorted(groups, key=order)]


def measure_groups(kinds: Iterable[Kind], device: torch.device, effort: Effort) -> tuple[list[Collective], list[str]]:
    """Time all operations in each kind of group; a collective over the world.

    Returns:
        What was measured, and in words what there was no time for.
    """
    end, found, left_out = time.monotonic() + effort.seconds, list[Collective](), list[str]()
    for kind in kinds:
        if not _same_on_all(time.monotonic() < end):
            left_out.append(f"{kind.group.size} ranks that are {kind.group.stride} apart")
            continue
        found += _measure_kind(kind, device, effort)
    return found, left_out


def _measure_kind(kind: Kind, device: torch.device, effort: Effort) -> list[Collective]:
    size, stride = kind.group.size, kind.group.stride
    world = dist.get_world_size()
    firsts = [rank for rank in range(world) if kind.group.position(rank)[1] == 0]
    members = [[first + place * stride for place in range(size)] for first in firsts]
    group, _ = dist.new_subgroups_by_enumeration(members)
    try:
        return _measure_in(group, kind, device, effort)
    finally:
        dist.destroy_process_group(group)


def measure_axes(
    axes: Sequence[tuple[Kind, dist.ProcessGroup]], device: torch.device, effort: Effort
) -> list[Collective]:
    """Time all operations in groups that exist, such as a mesh's; a collective over the world."""
    return [found for kind, group in axes for found in _measure_in(group, kind, device, effort)]


def _measure_in(group: dist.ProcessGroup, kind: Kind, device: torch.device, effort: Effort) -> list[Collective]:
    sizes = [size * (1 if device.type == "cpu" else 8) for size in effort.sizes]
    times = {op: [_times_of(op, size, group, device, effort) for size in sizes] for op in OPS}
    everyone = gather_objects(times)
    found = []
    for op in OPS:
        seconds = [
            _quartile([max(at) for at in zip(*(by[op][place] for by in everyone), strict=True)])
            for place in range(len(sizes))
        ]
        seconds = list(accumulate(reversed(seconds), min))[::-1]
        points = tuple(zip(map(float, sizes), seconds, strict=True))
        found.append(Collective(op=op, size=kind.group.size, stride=kind.group.stride, axis=kind.axis, points=points))
    return found


def _quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]


def _times_of(op: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device, effort: Effort) -> list[float]:
    """Seconds of each of several exchanges on this rank."""
    members = dist.get_world_size(group)
    share = torch.zeros(max(1, num_bytes // (_WIDTH * members)), device=device)
    whole = torch.zeros(share.numel() * members, device=device)
    run = _exchange(op, whole, share, group)
    inner = 1 if device.type == "cpu" else 5  # launching alone takes long beside a small message
    times = []
    for _ in range(effort.repeats + 1):
        _barrier(group, device)
        start = time.perf_counter()
        for _ in range(inner):
            run()
        _wait_for(device)
        times.append((time.perf_counter() - start) / inner)
    return times[1:]


def _exchange(op: str, whole: Tensor, share: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """What performs the operation once."""
    here, members = dist.get_rank(group), dist.get_world_size(group)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if op == "all_gather":
        return lambda: all_gather(whole, share, group)
    if op == "reduce_scatter":
        return lambda: reduce_scatter(share, whole, group)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, group=group, group_src=0)
    received, after, before = torch.empty_like(whole), (here + 1) % members, (here - 1) % members
    return lambda: swap(whole, received, after, before, group)


def swap(outgoing: Tensor, incoming: Tensor, to: int, source: int, group: dist.ProcessGroup) -> None:
    """Send to one member of a group and receive from one, at the same time."""
    operations = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def measure_pairs(hosts: Sequence[str], device: torch.device, effort: Effort) -> list[Pair]:
    """Time links between two ranks; a collective over the world.

    Those are all pairs of a host, and between two hosts the first ranks, the second ranks, and so on.
    """
    rounds = _rounds_of_pairs(hosts)
    best: dict[tuple[int, int], tuple[float, float]] = {}
    _time_rounds(rounds, device, effort, best)
    for _ in range(SECOND_LOOKS):
        odd = {pair.ranks for pair in odd_pairs(_pairs(best, device), hosts)}
        again = [pairs for pairs in rounds if odd & set(pairs)]
        if not again:
            break
        _time_rounds(again, device, effort, best)
    return list(_pairs(best, device))


def _time_rounds(
    rounds: Sequence[Sequence[tuple[int, int]]],
    device: torch.device,
    effort: Effort,
    best: dict[tuple[int, int], tuple[float, float]],
) -> None:
    """Time rounds of disjoint pairs and keep, for each pair, the best times of a small and a large message."""
    here, mine = dist.get_rank(), dict[tuple[int, int], tuple[float, float]]()
    small, large = _pair_sizes(device)
    for pairs in rounds:
        pair = next((pair for pair in pairs if here in pair), None)
        _barrier(dist.group.WORLD, device)
        if pair is not None:
            peer = pair[0] if pair[1] == here else pair[1]
            mine[pair] = (_best(peer, small, device, effort), _best(peer, large, device, effort))
    for found in gather_objects(mine):
        for pair, times in found.items():
            before = best.get(pair, (float("inf"),) * 2)
            best[pair] = (min(before[0], times[0]), min(before[1], times[1]))


def _best(peer: int, num_bytes: int, device: torch.device, effort: Effort) -> float:
    outgoing = torch.zeros(num_bytes // _WIDTH, device=device)
    incoming, times = torch.empty_like(outgoing), []
    group = dist.group.WORLD
    assert group is not None
    for _ in range(effort.repeats + 1):
        start = time.perf_counter()
        swap(outgoing, incoming, peer, peer, group)
        _wait_for(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _pair_sizes(device: torch.device) -> tuple[int, int]:
    return (2**12, 2**20) if device.type == "cpu" else (2**12, 2**25)


def _pairs(best: dict[tuple[int, int], tuple[float, float]], device: torch.device) -> tuple[Pair, ...]:
    small, large = _pair_sizes(device)
    found = []
    for ranks, (short, long) in sorted(best.items()):
        rate = (large - small) / (long - short) if long > 1.1 * short else large / long
        found.append(Pair(ranks=ranks, latency=max(0.0, short - small / rate), rate=rate))
    return tuple(found)


def _rounds_of_pairs(hosts: Sequence[str], most_hosts: int = 64) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs: within hosts first, then between hosts (beyond ``most_hosts``, next ones only)."""
    names = list(dict.fromkeys(hosts))
    ranks = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
    rounds = []
    for pairs in _tournament(max(map(len, ranks))):
        rounds.append([(own[a], own[b]) for own in ranks for a, b in pairs if max(a, b) < len(own)])
    hosts_rounds = _tournament(len(names))
    for pairs in hosts_rounds if len(names) <= most_hosts else hosts_rounds[:most_hosts]:
        rounds.append([pair for a, b in pairs for pair in zip(ranks[a], ranks[b], strict=False)])
    return [sorted(found) for found in rounds if found]


def _tournament(players: int) -> list[list[tuple[int, int]]]:
    """Rounds in which each of ``players`` meets each other one once (the circle method)."""
    seats = list(range(players + players % 2))
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        meetings = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in meetings if max(a, b) < players])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def gather_objects(value: T) -> list[T]:
    """The values of all ranks, on all ranks."""
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found  # type: ignore[return-value]


def _same_on_all(value: bool) -> bool:
    """Rank 0's value."""
    carrier = [value]
    dist.broadcast_object_list(carrier, src=0)
    return carrier[0]


def _barrier(group: dist.ProcessGroup | None, device: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    _wait_for(device)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
