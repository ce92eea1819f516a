"""Which degrees and settings train a model fastest on a cluster. Pure.

[Note: the search]
All degrees whose product is the number of devices are tried, with every micro-batch that divides a data rank's samples,
the schedules that the pipeline can run, and three ways to shard: over all data ranks, in replicas of a node each, or
not at all. Of settings that only save memory (blocks gathered again, blocks computed again) no more are used than it
takes to fit: each costs time. Memory is counted before time, so that most candidates cost microseconds. Fewer devices
than there are are tried where no plan uses all; on small clusters always, and on others the power of two below, which
divides batches and heads that 48 or 1000 devices do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import Layout
from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.constants import FITTED, Constants
from lightning_hybrid.planner.gpus import PRECISIONS
from lightning_hybrid.planner.profile import ModelProfile
from lightning_hybrid.planner.rules import HEADROOM, MEMORY_SHARE, advise, first_problem, preference
from lightning_hybrid.planner.setup import Setup, describe
from lightning_hybrid.planner.stage_memory import memory_of_stages
from lightning_hybrid.planner.step import PARTS, Estimate, estimate, head_in_blocks
from lightning_hybrid.planner.topology import Placed, can_gain, place

__all__ = ["CLOSE", "Plan", "Planning", "Rejection", "in_order", "plan", "rank_estimates"]

#: Plans that are slower by less than this are as good: estimates are not better.
CLOSE = 0.03
#: Clusters on which plans that leave devices idle are always tried.
_SMALL = 32
#: Plans beyond those that are returned that may become better when their ranks are placed.
_MORE = 10
_GIB = 2**30
#: How the reason begins that says what memory degrees would need, in GiB.
_LACKS = "at least "


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A setup that fits, what it would take, and what speaks against it."""

    estimate: Estimate
    seconds: float
    """Of a step: measured where a run was, else estimated."""
    measured: bool = False
    remarks: tuple[str, ...] = ()
    behind: str = ""
    """Why it is not the first one."""
    placed: Placed | None = None
    """Which device each rank should have, where that matters."""

    @property
    def setup(self) -> Setup:
        """Degrees and settings."""
        return self.estimate.setup

    def arguments(self) -> dict[str, object]:
        """What to give :class:`~lightning_hybrid.Hybrid3DStrategy`.

        Without a pipeline micro-batches are the Trainer's: ``accumulate_grad_batches``.
        """
        setup, layout = self.setup, self.setup.layout
        found: dict[str, object] = {
            "data_parallel_size": layout.data_parallel_size,
            "tensor_parallel_size": layout.tensor_parallel_size,
            "pipeline_parallel_size": layout.pipeline_parallel_size,
            "replicate_size": layout.replicate_size,
            "activation_checkpointing": setup.recompute,
        }
        if layout.tensor_parallel_size > 1:
            found["sequence_parallel"] = setup.sequence_parallel
        if layout.pipeline_parallel_size > 1:
            found |= {"schedule": setup.schedule, "num_microbatches": setup.num_microbatches}
            found |= {"stages_per_rank": setup.stages_per_rank}
        if layout.shard_size > 1:
            found["reshard_after_forward"] = setup.reshard
        return found


@dataclass(frozen=True)
class Rejection:
    """Degrees of which no settings can be used, and why."""

    what: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The outcome of a search."""

    profile: ModelProfile
    cluster: Cluster
    global_batch: int
    plans: tuple[Plan, ...]
    """The best first; those that are about as fast in the order of practitioners."""
    rejected: tuple[Rejection, ...]
    num_tried: int

    @property
    def best(self) -> Plan:
        """The first plan.

        Raises:
            ConfigurationError: if none fits; the message says what the nearest would need.
        """
        if not self.plans:
            reasons = "; ".join(f"{found.what}: {found.reason}" for found in _nearest(self.rejected)[:3])
            raise ConfigurationError(
                f"No plan for {self.profile.name} at a batch of {self.global_batch} on {self.cluster} fits ({reasons})."
                " Use more devices, another global batch, or shorter sequences."
            )
        return self.plans[0]

    @property
    def idle(self) -> int:
        """Devices that the best plan leaves without work."""
        return self.cluster.num_devices - self.best.setup.num_devices


@dataclass
class _Found:
    """What a search has gathered so far."""

    fitting: list[Estimate] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    tried: int = 0


def plan(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    global_batch: int,
    precision: str = "bf16",
    sequence_parallel: bool | None = None,
    compile: bool = False,
    memory_share: float = MEMORY_SHARE,
    measured: Mapping[Layout, float | None] | None = None,
    allowed: Callable[[Setup], str | None] = lambda setup: None,
    idle: bool = True,
    most: int = 10,
    constants: Constants = FITTED,
) -> Planning:
    """Return the fastest setups that fit, with the reasons for and against each.

    Args:
        profile: The model.
        cluster: The devices.
        global_batch: Samples of one optimizer step, over all devices.
        precision: Data type of the matrix products: ``bf16``, ``fp16``, ``fp8`` or ``fp32``.
        sequence_parallel: Whether tensor ranks divide the sequence between matrix products; by default where blocks are
            not compiled, since it saves memory at no cost.
        compile: Whether blocks are compiled.
        memory_share: Share of a device's memory that an estimate may reach.
        measured: Step seconds of layouts that have run (``None``: ran out of memory). They count instead of estimates,
            and no rule speaks against them.
        allowed: Says why a setup cannot be used, beside what the planner knows itself; ``None`` if it can.
        idle: Whether plans may leave devices without work.
        most: Plans to return.
        constants: What was fitted to measurements.

    Raises:
        ConfigurationError: if the batch or ``most`` is not positive, or the precision is unknown.
    """
    if most < 1:
        raise ConfigurationError(f"most={most} plans to return must be at least 1.")
    if global_batch < 1:
        raise ConfigurationError(f"global_batch={global_batch} must be at least 1.")
    if precision not in PRECISIONS:
        raise ConfigurationError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}.")
    known = measured or {}
    parallel = not compile if sequence_parallel is None else sequence_parallel
    options = {"precision": precision, "sequence_parallel": parallel, "fused": compile}
    found = _Found()
    for devices, always in _counts(cluster) if idle else ((cluster.num_devices, True),):
        if found.fitting and not always:
            break
        for layout in _layouts(profile, cluster, devices, global_batch, known, found):
            if layout in known and known[layout] is None:
                found.rejected[describe(layout)] = "it ran out of memory in a run"
                continue
            for setup in _setups(profile, layout, global_batch, options):
                usable = [each for each in setup if _is_allowed(each, allowed, found)]
                _try(profile, cluster, usable, memory_share, layout in known, constants, found)
    ranked = rank_estimates(profile, cluster, found.fitting, known)
    if can_gain(cluster):
        ranked = _place_all(profile, cluster, ranked[: most + _MORE], constants)
    ranked = ranked[:most]
    plans = tuple(_explained(ranked[0], other) for other in ranked)
    used = {describe(estimate.setup.layout) for estimate in found.fitting}
    rejected = [Rejection(what, why) for what, why in found.rejected.items() if what not in used]
    return Planning(
        profile=profile,
        cluster=cluster,
        global_batch=global_batch,
        plans=plans,
        rejected=tuple(rejected),
        num_tried=found.tried,
    )


def rank_estimates(
    profile: ModelProfile, cluster: Cluster, found: Sequence[Estimate], measured: Mapping[Layout, float | None]
) -> list[Plan]:
    """The fastest first; of those within :data:`CLOSE` of the fastest, in the order of practitioners.

    One setup of each layout is kept for each number of micro-batches.
    """
    fastest: dict[tuple[Layout, int], Plan] = {}
    for candidate in found:
        setup = candidate.setup
        seconds = measured.get(setup.layout)
        remarks = () if seconds is not None else tuple(advise(profile, cluster, candidate))
        made = Plan(
            estimate=candidate,
            seconds=candidate.seconds if seconds is None else seconds,
            measured=seconds is not None,
            remarks=remarks,
        )
        before = fastest.get((setup.layout, setup.num_microbatches))
        if before is None or candidate.seconds < before.estimate.seconds:
            fastest[setup.layout, setup.num_microbatches] = made
    return in_order(fastest.values())


def in_order(plans: Iterable[Plan], *, by_sample: bool = False, close: float = CLOSE) -> list[Plan]:
    """The fastest first; of those within ``close`` of the fastest, in the order of practitioners.

    Args:
        plans: In any order.
        by_sample: Whether a sample's seconds are compared, for plans of different batches.
        close: Share by which slower plans are as good.
    """

    def seconds(made: Plan) -> float:
        return made.seconds / (made.setup.global_batch if by_sample else 1)

    ranked = sorted(plans, key=seconds)
    limit = seconds(ranked[0]) * (1 + close) if ranked else 0.0
    near = [made for made in ranked if seconds(made) <= limit]
    near.sort(key=lambda made: preference(made.estimate, len(made.remarks)))
    return near + ranked[len(near) :]


def _place_all(profile: ModelProfile, cluster: Cluster, plans: Sequence[Plan], constants: Constants) -> list[Plan]:
    """The plans with their ranks placed, those that stay within :data:`CLOSE` of the fastest in their order."""
    made = []
    for plan in plans:
        placed = place(profile, cluster, plan.setup, constants=constants)
        seconds = plan.seconds if plan.measured else placed.estimate.seconds
        made.append(replace(plan, estimate=placed.estimate, seconds=seconds, placed=placed))
    limit = min((plan.seconds for plan in made), default=0.0) * (1 + CLOSE)
    close = [plan for plan in made if plan.seconds <= limit]
    return close + sorted((plan for plan in made if plan.seconds > limit), key=lambda plan: plan.seconds)


def _counts(cluster: Cluster) -> Iterator[tuple[int, bool]]:
    """How many devices to use, and whether that is tried in any case, or only if no plan with more of them fits."""
    count = cluster.num_devices
    is_small, power = count <= _SMALL, 1 << (count.bit_length() - 1)
    yield count, True
    if not is_small and power < count:
        yield power, True
    if is_small:
        yield from ((fewer, fewer > count // 2) for fewer in range(count - 1, 0, -1))
        return
    yield from ((fewer, False) for fewer in range(count - cluster.per_node, count // 2, -cluster.per_node)[:16])
    while count > 1:
        count //= 2
        yield count, False


def _nearest(rejected: Iterable[Rejection]) -> list[Rejection]:
    """What lacks least memory first; of what is refused for one reason with other numbers, the first."""
    by_kind: dict[str, Rejection] = {}
    for found in sorted(
        rejected, key=lambda found: float(found.reason.split()[2]) if _lacks_memory(found.reason) else inf
    ):
        by_kind.setdefault("".join(char for char in found.reason if not char.isdigit() and char != "."), found)
    return list(by_kind.values())


def _lacks_memory(reason: str) -> bool:
    return reason.startswith(_LACKS)


def _layouts(
    profile: ModelProfile,
    cluster: Cluster,
    devices: int,
    global_batch: int,
    known: Mapping[Layout, float | None],
    found: _Found,
) -> Iterator[Layout]:
    """Degrees whose product is ``devices``; those that cannot be are noted with the reason."""
    for tensor in divisors_up_to(devices, profile.num_heads):
        for pipeline in divisors_up_to(devices // tensor, profile.num_layers):
            data = devices // tensor // pipeline
            layout = Layout(data_parallel_size=data, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
            samples = global_batch // data
            one = Setup(layout=layout, micro_batch=1, num_microbatches=samples or 1)
            has_run = any(replace(ran, replicate_size=1) == layout for ran, took in known.items() if took is not None)
            problem = first_problem(profile, cluster, one, has_run=has_run)
            if global_batch % data:
                problem = f"a batch of {global_batch} cannot be divided among {data} data ranks"
            if problem:
                found.rejected.setdefault(describe(layout), problem)
                continue
            for replicas in _replicas(cluster, layout):
                yield Layout(
                    data_parallel_size=data,
                    tensor_parallel_size=tensor,
                    pipeline_parallel_size=pipeline,
                    replicate_size=replicas,
                )


def _replicas(cluster: Cluster, layout: Layout) -> list[int]:
    """Numbers of replicas: none (all sharded), one for each node, one for each rank."""
    data, within = layout.data_parallel_size, max(1, cluster.per_node // layout.tensor_parallel_size)
    found = {1, data}
    if data % within == 0:
        found.add(data // within)
    return sorted(found)


def _setups(
    profile: ModelProfile, layout: Layout, global_batch: int, options: Mapping[str, object]
) -> Iterator[list[Setup]]:
    """Setups of a layout: in each list those that differ only in what saves memory, the fastest first."""
    samples, ranks = global_batch // layout.data_parallel_size, layout.pipeline_parallel_size
    for micro_batch in divisors_up_to(samples, 64):
        count = samples // micro_batch
        for schedule, virtual in _schedules(profile, ranks, splits=not options["fused"]):
            made = []
            for recompute in ("none",) if schedule.startswith("ZBV") else ("none", "full"):
                for reshard in (False, True) if layout.shard_size > 1 else (False,):
                    made.append(
                        Setup(
                            layout=layout,
                            micro_batch=micro_batch,
                            num_microbatches=count,
                            schedule=schedule,
                            stages_per_rank=virtual,
                            recompute=recompute,
                            reshard=reshard,
                            **options,  # type: ignore[arg-type]
                        )
                    )
            yield made


def _schedules(profile: ModelProfile, ranks: int, *, splits: bool) -> list[tuple[str, int]]:
    """Schedules and stages of each rank; those that split backwards only where blocks allow it (not compiled)."""
    if ranks == 1:
        return [("1F1B", 1)]
    found = [("1F1B", 1)]
    found += [("Interleaved1F1B", virtual) for virtual in (2, 4, 8) if virtual * ranks <= profile.num_layers]
    if splits and 2 * ranks <= profile.num_layers:
        found.append(("ZBVZeroBubble", 2))
    return found


def _is_allowed(setup: Setup, allowed: Callable[[Setup], str | None], found: _Found) -> bool:
    problem = allowed(setup)
    if problem is not None:
        found.rejected.setdefault(describe(setup.layout), problem)
    return problem is None


def _try(
    profile: ModelProfile,
    cluster: Cluster,
    setups: Sequence[Setup],
    memory_share: float,
    has_run: bool,
    constants: Constants,
    found: _Found,
) -> None:
    """Keep the setups that fit, without those that save more memory than needed at the cost of time."""
    limit = memory_share * cluster.gpu.memory * _GIB
    least, kept = float("inf"), list[Setup]()
    for setup in setups:
        found.tried += 1
        if problem := first_problem(profile, cluster, setup, has_run=has_run):
            found.rejected.setdefault(describe(setup.layout), problem)
            return
        if any(other.recompute == setup.recompute or other.reshard <= setup.reshard for other in kept):
            continue
        layers = setup.layers_of_stages(profile.num_layers, head_in_blocks(profile))
        needed = max(stage.total for stage in memory_of_stages(profile, setup, layers, host=cluster.gpu.host))
        if needed <= limit or has_run:
            kept.append(setup)
            found.fitting.append(estimate(profile, cluster, setup, constants=constants))
        least = min(least, needed)
    if setups and not kept:
        _note_memory(setups[-1].layout, least / _GIB, cluster.gpu.memory, memory_share, found)


def _note_memory(layout: Layout, needed: float, memory: float, share: float, found: _Found) -> None:
    """Remember the least (GiB) that any setup of these degrees would need."""
    key = describe(layout)
    before = found.rejected.get(key, "")
    problem = HEADROOM.problem(needed, memory, share)
    if problem and (not _lacks_memory(before) or needed < float(before.split()[2])):
        found.rejected[key] = problem


def _explained(best: Plan, other: Plan) -> Plan:
    """A plan with the reason why it is not the first."""
    if other is best:
        return other
    more = other.seconds / best.seconds - 1
    if more < 0:
        text = (
            f"{-more:.1%} faster by estimate, which is less than the error; it has more remarks or kinds of exchanges"
        )
    else:
        loss = {name: other.estimate.parts[name] - best.estimate.parts[name] for name in PARTS}
        worst = max(loss, key=lambda name: loss[name])
        text = f"{more:.1%} slower; most by {worst} (+{loss[worst]:.3g} s)"
    return replace(other, behind=text)


def divisors_up_to(number: int, limit: int) -> list[int]:
    """Divisors that are not larger than ``limit``, in ascending order."""
    return [found for found in range(1, min(number, limit) + 1) if number % found == 0]
