"""What practitioners advise, as rules with names and reasons; a measured run is never judged by them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.profile import ModelProfile
from lightning_hybrid.planner.setup import Setup
from lightning_hybrid.planner.step import Estimate

__all__ = [
    "ADVICE",
    "HEADROOM",
    "LIMITS",
    "MEMORY_SHARE",
    "Advice",
    "Headroom",
    "Limit",
    "advise",
    "first_problem",
    "preference",
]

#: Share of a device's memory that an estimate may reach; see :data:`HEADROOM`.
MEMORY_SHARE = 0.8
#: Communication's share of a step from which it is worth a remark.
LOUD = 0.3
#: Data parallelism, tensor parallelism and so on: what tells the parts of a step's communication apart.
_AXES = {
    "tensor": "tensor_parallel_size (or give each rank more samples)",
    "data": "the shards' spread: replicate_size > 1 keeps gathers within a node; larger micro-batches hide more",
    "pipeline": "pipeline_parallel_size",
    "bubble": "the bubble: more micro-batches, several stages a rank, or fewer pipeline ranks",
}


@dataclass(frozen=True)
class Limit:
    """What a setup must keep, known before anything is estimated."""

    name: str
    reason: str
    problem: Callable[[ModelProfile, Cluster, Setup], str | None]
    """The numbers that break it, or ``None``."""
    can_run: bool = False
    """Whether what breaks it runs all the same, only badly: what has been measured is not judged by it."""


@dataclass(frozen=True)
class Headroom:
    """How full an estimate may make a device; a layout that has run is not judged by it."""

    name: str
    reason: str

    def problem(self, needed: float, memory: float, share: float = MEMORY_SHARE) -> str | None:
        """The numbers that break it, or ``None``.

        Args:
            needed: Estimated need of the fullest device, in GiB.
            memory: Of a device, in GiB.
            share: Of it that may be used.
        """
        if needed <= share * memory:
            return None
        may = f"{share * memory:.1f} may be used"
        return f"at least {needed:.1f} GiB on a device, of which {may} ({self.name}: {self.reason})"


HEADROOM = Headroom("room in memory", "longer batches, libraries and fragments take what no estimate knows")


@dataclass(frozen=True)
class Advice:
    """What is better kept; among plans that are about as fast, those that keep more are preferred."""

    name: str
    reason: str
    remark: Callable[[ModelProfile, Cluster, Estimate], str | None]


def _heads(profile: ModelProfile, cluster: Cluster, setup: Setup) -> str | None:
    tensor = setup.layout.tensor_parallel_size
    heads = {f"{profile.num_heads} heads": profile.num_heads}
    heads[f"{profile.num_kv_heads} key and value heads"] = profile.num_kv_heads
    undivided = [words for words, number in heads.items() if number % tensor]
    return f"tensor {tensor} does not divide {' and '.join(undivided)}" if undivided else None


def _within_node(profile: ModelProfile, cluster: Cluster, setup: Setup) -> str | None:
    tensor = setup.layout.tensor_parallel_size
    if tensor > cluster.per_node or cluster.per_node % tensor:
        return f"tensor {tensor} does not stay within nodes of {cluster.per_node} devices"
    return None


def _stages(profile: ModelProfile, cluster: Cluster, setup: Setup) -> str | None:
    stages = setup.layout.pipeline_parallel_size * setup.stages_per_rank
    return f"{stages} stages need as many blocks, not {profile.num_layers}" if stages > profile.num_layers else None


def _filled(profile: ModelProfile, cluster: Cluster, setup: Setup) -> str | None:
    ranks, count = setup.layout.pipeline_parallel_size, setup.num_microbatches
    return f"{count} micro-batches leave some of {ranks} pipeline ranks idle" if ranks > 1 and count < ranks else None


def _rounds(profile: ModelProfile, cluster: Cluster, setup: Setup) -> str | None:
    ranks, count = setup.layout.pipeline_parallel_size, setup.num_microbatches
    if setup.schedule.startswith("Interleaved") and ranks > 1 and count % max(1, count // ranks):
        return f"{count} micro-batches cannot be dealt in equal rounds to {ranks} pipeline ranks"
    return None


LIMITS = (
    Limit("whole heads", "attention is split by heads", _heads),
    Limit("tensor within a node", "its exchanges cannot be hidden: only the fast links bear them", _within_node, True),
    Limit("a block for each stage", "a stage without blocks has nothing to do", _stages),
    Limit("a micro-batch for each rank", "ranks without one only wait", _filled, True),
    Limit("whole rounds", "interleaved schedules deal micro-batches in rounds", _rounds),
)


def _twice(profile: ModelProfile, cluster: Cluster, found: Estimate) -> str | None:
    ranks, count = found.setup.layout.pipeline_parallel_size, found.setup.num_microbatches
    return f"{count} micro-batches for {ranks} pipeline ranks" if ranks > 1 and count < 2 * ranks else None


def _powers(profile: ModelProfile, cluster: Cluster, found: Estimate) -> str | None:
    layout = found.setup.layout
    odd = [n for n in (layout.tensor_parallel_size, layout.pipeline_parallel_size) if n & (n - 1)]
    return f"degrees {', '.join(map(str, odd))}" if odd else None


def _quiet(profile: ModelProfile, cluster: Cluster, found: Estimate) -> str | None:
    parts = {name: found.parts[name] for name in _AXES}
    loudest = max(parts, key=lambda name: parts[name])
    share = sum(parts.values()) / found.seconds
    if share < LOUD:
        return None
    change = "change " + _AXES[loudest]
    if loudest == "data" and found.setup.shards == 1:
        change = "accumulate_grad_batches, or more samples a rank, make its exchanges rarer"
    return f"{share:.0%} of the step is communication and waiting, most of it {loudest}: {change}"


def _slow_links(profile: ModelProfile, cluster: Cluster, found: Estimate) -> str | None:
    setup = found.setup
    tensor, shards = setup.layout.tensor_parallel_size, setup.shards
    if cluster.gpu.wiring == "switch" and tensor * shards > 16 * cluster.per_node and setup.layout.replicate_size == 1:
        return f"every block is gathered over {shards} ranks of {-(-tensor * shards // cluster.per_node)} nodes"
    return None


ADVICE = (
    Advice("twice as many micro-batches as pipeline ranks", "the bubble is (p - 1) / m of the work", _twice),
    Advice("powers of two first", "kernels and networks are built for them", _powers),
    Advice("communication below a third", "beyond, another degree is usually better", _quiet),
    Advice(
        "gathers within few nodes", "rings over many nodes are slow and uneven; replicas meet once a step", _slow_links
    ),
)


def first_problem(profile: ModelProfile, cluster: Cluster, setup: Setup, *, has_run: bool = False) -> str | None:
    """The first limit that a setup breaks, with its numbers and its reason; ``None`` if it keeps all.

    Args:
        profile: The model.
        cluster: The devices.
        setup: Degrees and settings.
        has_run: Whether a run has shown that its degrees work.
    """
    for limit in LIMITS:
        if has_run and limit.can_run:
            continue
        if problem := limit.problem(profile, cluster, setup):
            return f"{problem} ({limit.name}: {limit.reason})"
    return None


def advise(profile: ModelProfile, cluster: Cluster, found: Estimate) -> list[str]:
    """What practitioners would remark on a plan."""
    remarks = ((advice, advice.remark(profile, cluster, found)) for advice in ADVICE)
    return [f"{remark} ({advice.name}: {advice.reason})" for advice, remark in remarks if remark]


def preference(found: Estimate, remarks: int) -> tuple[int, int, int]:
    """Order of plans that are about as fast: fewer remarks, fewer kinds of communication, fewer micro-batches."""
    layout = found.setup.layout
    sizes = (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.replicate_size, layout.shard_size)
    return remarks, sum(size > 1 for size in sizes), found.setup.num_microbatches
