"""Links and devices as they were measured, and which of them are slow. Pure.

[Note: a curve]
What an exchange takes is kept as measured points, with straight lines between them: protocols change with the size, so
that two numbers (latency and rate) miss by up to a quarter. The two numbers are for people, and beyond the last point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

__all__ = ["OPS", "SLOW", "Collective", "Curve", "Device", "Measured", "Pair", "Slow", "find_slow", "odd_pairs"]

#: What is measured; ``send`` goes from each rank to its neighbour at the same time.
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
#: A link, or device, with less than this part of the median rate of its kind is slow.
SLOW = 0.5
#: Bytes at which links are compared: large enough that the rate counts, small enough that a long latency shows.
REFERENCE = 2**20
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curve:
    """Seconds of an exchange by its bytes, as measured.

    Raises:
        ValueError: if there is no point, or sizes do not ascend, or a number is not positive.
    """

    points: Points
    """(bytes, seconds); bytes are those of the whole tensor (all shares of a gather together)."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sorted(set(sizes)) != sizes or min(sizes) <= 0 or min(t for _, t in self.points) <= 0:
            raise ValueError(f"points {self.points!r} must be (bytes, seconds), positive, at ascending sizes")

    @cached_property
    def line(self) -> tuple[float, float]:
        """Latency in seconds and rate in bytes per second of ``latency + bytes / rate``.

        Least squares of the relative error, so that small messages count as much as large ones; neither is negative.
        """
        rows = [(1 / seconds, size / seconds) for size, seconds in self.points]
        a, b = sum(a for a, _ in rows), sum(b for _, b in rows)
        aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
        if len(rows) == 1 or (determinant := aa * bb - ab * ab) <= 1e-12 * aa * bb:
            return 0.0, self.points[-1][0] / self.points[-1][1]
        latency, slope = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
        if latency < 0:
            latency, slope = 0.0, b / bb
        if slope <= 0:  # larger messages were no slower: all that can be said is how fast the largest was
            return self.points[0][1], self.points[-1][0] / self.points[-1][1]
        return latency, 1 / slope

    def seconds(self, num_bytes: float) -> float:
        """Of an exchange of so many bytes."""
        size, time = self.points[0]
        if num_bytes <= size:
            return time
        for larger, slower in self.points[1:]:
            if num_bytes <= larger:
                return time + (slower - time) * (num_bytes - size) / (larger - size)
            size, time = larger, slower
        return time + (num_bytes - size) / self.line[1]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of exchange in all groups of ranks that are ``stride`` apart, at the same time."""

    op: str
    size: int
    stride: int
    points: Points
    """Of the slowest group."""
    axis: str | None = None
    """The mesh axis, where degrees were given."""

    @cached_property
    def curve(self) -> Curve:
        """Seconds by bytes."""
        return Curve(self.points)

    @property
    def bus_rate(self) -> float:
        """Bytes per second on each link with the largest message, for any number of ranks (``busbw`` of nccl-tests)."""
        size, seconds = self.points[-1]
        ring = (self.size - 1) / self.size
        return size / seconds * {"all_reduce": 2 * ring, "all_gather": ring, "reduce_scatter": ring}.get(self.op, 1.0)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A link between two ranks, both directions at once."""

    ranks: tuple[int, int]
    latency: float
    """Seconds."""
    rate: float
    """Bytes per second, each direction."""

    def seconds(self, num_bytes: float) -> float:
        """Of a message."""
        return self.latency + num_bytes / self.rate


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank stands on."""

    rank: int
    host: str
    name: str
    type: str
    """``"cpu"``, ``"cuda"``, ..."""
    memory: float
    """GiB; on a CPU the rank's share of the host's."""
    tflops: Mapping[str, float]
    """Rate of the best matrix product that was tried, by data type, all ranks at once."""
    bandwidth: float
    """GB/s of its memory (read and written)."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Something that is slower than its like."""

    what: str
    """``"ranks 2 and 3"``, ``"rank 5 on host b"``, ``"host b"``."""
    share: float
    """Its rate, of the median of its like."""
    text: str
    """One sentence with the numbers."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a probe found on one cluster.

    Raises:
        ValueError: if ranks or operations are unknown.
    """

    backend: str
    devices: tuple[Device, ...]
    collectives: tuple[Collective, ...] = ()
    pairs: tuple[Pair, ...] = ()
    slow: tuple[Slow, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    """Date, versions and how long it took."""

    def __post_init__(self) -> None:
        if unknown := {found.op for found in self.collectives} - set(OPS):
            raise ValueError(f"operations {', '.join(sorted(unknown))} are none of {', '.join(OPS)}")
        if self.devices and any(rank >= len(self.devices) for pair in self.pairs for rank in pair.ranks):
            raise ValueError(f"pairs name more ranks than the {len(self.devices)} devices")

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Measured:
        """Read what :meth:`to_document` wrote."""
        rest = dict(document)
        kinds = {"devices": Device, "collectives": Collective, "pairs": Pair, "slow": Slow}
        return cls(**{name: _read_all(kinds.get(name), value) for name, value in rest.items()})

    def to_document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @property
    def hosts(self) -> list[str]:
        """By rank."""
        return [device.host for device in self.devices]

    @cached_property
    def by_group(self) -> dict[tuple[str, int, int], Collective]:
        """Exchanges by operation, size and stride."""
        return {(found.op, found.size, found.stride): found for found in self.collectives}

    @cached_property
    def by_ranks(self) -> dict[tuple[int, int], Pair]:
        """Pairs, both ways round."""
        return {ranks: pair for pair in self.pairs for ranks in (pair.ranks, pair.ranks[::-1])}

    @cached_property
    def typical(self) -> dict[bool, Pair]:
        """The median link between hosts (``True``) and within one (``False``)."""
        return _typical(self.pairs, self.hosts)

    @cached_property
    def odd_pairs(self) -> list[Pair]:
        """Those that are slower than their like."""
        return odd_pairs(self.pairs, self.hosts)

    def slowdown(self, ranks: tuple[int, int], num_bytes: float) -> float:
        """How many times as long a message takes between two ranks as between others of the kind; 1 if unknown."""
        pair = self.by_ranks.get(ranks)
        if pair is None:
            return 1.0
        return _slowdown(pair, self.typical, self.hosts, num_bytes)


def _read_all(kind: Callable[..., Any] | None, value: Any) -> Any:
    return value if kind is None else tuple(kind(**_tuples(item)) for item in value)


def _tuples(item: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of JSON as the tuples that they were."""
    made = {name: tuple(value) if isinstance(value, list) else value for name, value in item.items()}
    if "points" in made:
        made["points"] = tuple((float(size), float(seconds)) for size, seconds in made["points"])
    return made


def odd_pairs(pairs: Sequence[Pair], hosts: Sequence[str]) -> list[Pair]:
    """The pairs that need twice as long (``1 / SLOW``) as the median of their kind for a message of 1 MiB."""
    typical = _typical(pairs, hosts)
    return [pair for pair in pairs if _slowdown(pair, typical, hosts, REFERENCE) > 1 / SLOW]


def _typical(pairs: Sequence[Pair], hosts: Sequence[str]) -> dict[bool, Pair]:
    found = {}
    for across in (False, True):
        if kind := [pair for pair in pairs if _joins(pair, hosts) == across]:
            latency, rate = median(pair.latency for pair in kind), median(pair.rate for pair in kind)
            found[across] = Pair(ranks=(0, 0), latency=latency, rate=rate)
    return found


def _slowdown(pair: Pair, typical: Mapping[bool, Pair], hosts: Sequence[str], num_bytes: float) -> float:
    return max(1.0, pair.seconds(num_bytes) / typical[_joins(pair, hosts)].seconds(num_bytes))


def find_slow(measured: Measured) -> tuple[Slow, ...]:
    """Links and devices below :data:`SLOW` of the median of their like.

    A rank, or host, most of whose links (two at least) are slow is named instead of each link.
    """
    found = [*_slow_devices(measured, "products"), *_slow_devices(measured, "memory")]
    odd, hosts = list(measured.odd_pairs), measured.hosts
    across = [pair for pair in odd if hosts[pair.ranks[0]] != hosts[pair.ranks[1]]]
    names = list(dict.fromkeys(hosts))
    if len(names) > 2:
        for host in names:
            mine = [pair for pair in across if host in (hosts[pair.ranks[0]], hosts[pair.ranks[1]])]
            if _most(mine, [p for p in measured.pairs if _joins(p, hosts) and host in [hosts[r] for r in p.ranks]]):
                found.append(_slow_links(measured, f"host {host}", "its links to other hosts", mine))
                odd = [pair for pair in odd if pair not in mine]
    for rank in range(len(hosts)):
        mine = [pair for pair in odd if rank in pair.ranks]
        if len(mine) > 1 and _most(mine, [pair for pair in measured.pairs if rank in pair.ranks]):
            found.append(_slow_links(measured, f"rank {rank} on host {hosts[rank]}", "its links", mine))
            odd = [pair for pair in odd if pair not in mine]
    for pair in odd:
        first, second = sorted(pair.ranks)
        place = f"on host {hosts[first]}"
        if hosts[first] != hosts[second]:
            place = f"between hosts {hosts[first]} and {hosts[second]}"
        found.append(_slow_links(measured, f"ranks {first} and {second}", f"the link {place}", [pair]))
    return tuple(found)


def _joins(pair: Pair, hosts: Sequence[str]) -> bool:
    return hosts[pair.ranks[0]] != hosts[pair.ranks[1]]


def _most(slow: Sequence[Pair], all_of_it: Sequence[Pair]) -> bool:
    return bool(slow) and 2 * len(slow) > len(all_of_it)


def _slow_links(measured: Measured, what: str, which: str, pairs: Sequence[Pair]) -> Slow:
    worst = max(pairs, key=lambda pair: measured.slowdown(pair.ranks, REFERENCE))
    usual = measured.typical[_joins(worst, measured.hosts)]
    share = 1 / measured.slowdown(worst.ranks, REFERENCE)
    numbers = f"{worst.rate / 1e9:.3g} GB/s and {worst.latency * 1e6:.0f} µs"
    others = f"{usual.rate / 1e9:.3g} GB/s and {usual.latency * 1e6:.0f} µs"
    text = f"{what}: {which} reached {numbers}, the median of such links {others}"
    return Slow(what=what, share=share, text=f"{text} ({1 / share:.1f} times as long for 1 MiB).")


def _slow_devices(measured: Measured, which: str) -> list[Slow]:
    """Devices, or on CPUs hosts (whose ranks share cores), that compute or move memory slowly."""
    groups: dict[str, list[Device]] = {}
    for device in measured.devices:
        shared = device.type == "cpu"
        groups.setdefault(f"host {device.host}" if shared else f"rank {device.rank} on host {device.host}", []).append(
            device
        )
    rate = _bandwidth if which == "memory" else _best
    rates = {what: median(map(rate, devices)) for what, devices in groups.items()}
    if len(rates) < 2:
        return []
    unit, name, usual = (
        *(("GB/s", "memory") if which == "memory" else ("TFLOP/s", "matrix products")),
        median(rates.values()),
    )
    return [
        Slow(
            what=what,
            share=reached / usual,
            text=f"{what} ({groups[what][0].name}): {name} reached {reached:.3g} {unit},"
            f" the median of all is {usual:.3g} {unit}.",
        )
        for what, reached in rates.items()
        if reached < SLOW * usual
    ]


def _bandwidth(device: Device) -> float:
    return device.bandwidth


def _best(device: Device) -> float:
    return max(device.tflops.values(), default=0.0)
