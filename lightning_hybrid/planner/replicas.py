"""How often replicas should exchange, by the step's time and the link's. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, gcd, log2

from lightning_hybrid.planner.collectives import Group, ring
from lightning_hybrid.planner.constants import FITTED, Constants
from lightning_hybrid.planner.search import Planning
from lightning_hybrid.planner.step import estimate

__all__ = ["ReplicaProposal", "propose_for_plan", "propose_replica_sync"]

#: Share of a step's time that exchanges may take.
SHARE = 0.05
#: Steps beyond which DiLoCo has been found to learn less (Douillard et al. 2023, arXiv 2311.08105, figure 4).
MOST = 512
#: Steps beyond which replicas have gone so far apart that an outer optimizer is worth its memory.
APART = 32


@dataclass(frozen=True, kw_only=True)
class ReplicaProposal:
    """What to give as ``replica_sync``."""

    interval: int
    """Optimizer steps from one exchange to the next; a power of two."""
    method: str
    """``"average"`` or ``"diloco"``."""
    reason: str
    """One line with the numbers that it follows from."""


def propose_replica_sync(step_seconds: float, exchange_seconds: float) -> ReplicaProposal:
    """Return the shortest interval at which exchanges take at most 5 % of the time, at most 512 steps.

    Args:
        step_seconds: of an optimizer step without any exchange between replicas.
        exchange_seconds: of averaging all weights, which is what averaging all gradients takes too.
    """
    wanted = exchange_seconds / (SHARE * step_seconds)
    interval = min(MOST, 2 ** max(0, ceil(log2(wanted)))) if wanted > 0 else 1
    method = "average" if interval <= APART else "diloco"
    share = exchange_seconds / (interval * step_seconds)
    ratio = exchange_seconds / step_seconds
    reason = (
        f"a step takes {step_seconds:.3g} s and an exchange {exchange_seconds:.3g} s, which adds"
        f" {f'{ratio:.1%}' if ratio < 1 else f'{ratio:.3g} times as much'} if made at each step"
    )
    if interval == 1:
        reason += "; the link is fast, and replica_sync=1 averages gradients, as one process would"
    else:
        reason += f" and {share:.1%} with interval={interval}"
    if interval == MOST and share > SHARE:
        reason += f", the longest one that is known to learn well; {SHARE:.0%} would need {ceil(wanted)}"
    return ReplicaProposal(interval=interval, method=method, reason=reason)


def propose_for_plan(planning: Planning, constants: Constants = FITTED) -> tuple[int, ReplicaProposal] | None:
    """Return for the best plan how many replicas could be apart, no two in one node, and what their exchange should be.

    A replica's step is that of the same plan on its part of the devices.

    ``None`` if a pipeline stage has one node, or the data axis does not divide over its nodes.
    """
    best, cluster = planning.best, planning.cluster
    setup, layout = best.setup, best.setup.layout
    number = gcd(layout.data_parallel_size, max(1, cluster.num_nodes // layout.pipeline_parallel_size))
    if number == 1 or setup.num_devices != cluster.num_devices:
        return None
    data = layout.data_parallel_size // number
    alone = replace(layout, data_parallel_size=data, replicate_size=gcd(layout.replicate_size, data))
    own = estimate(
        planning.profile,
        cluster.with_devices(cluster.num_devices // number),
        replace(setup, layout=alone),
        constants=constants,
    )
    parts = layout.tensor_parallel_size * layout.pipeline_parallel_size * (data if setup.zero else 1)
    group = Group(number, setup.context * layout.tensor_parallel_size * data)
    exchange = ring(group, 4 * planning.profile.num_parameters / parts, cluster, constants, passes=2)
    return number, propose_replica_sync(own.seconds, exchange)
