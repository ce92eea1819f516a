"""How long a step takes, part by part, and what it needs of memory. Pure.

[Note: what is added to what]
The slowest pipeline rank works ``m`` micro-batches; the others' work before its first and after its last one is the
bubble. A rank's micro-batch is its blocks' compute (or the host's time, if that is longer), tensor ranks' exchanges
(which nothing hides), sends to neighbours, and what shows of gathering and reducing shards. After the last micro-batch
come what shows of the reduction of gradients over data ranks, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_hybrid.planner.calibration import correct
from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.collectives import ring, send
from lightning_hybrid.planner.compute import Work, block_time, head_time, host_work
from lightning_hybrid.planner.constants import FITTED, Constants
from lightning_hybrid.planner.placement import Placement
from lightning_hybrid.planner.profile import ModelProfile
from lightning_hybrid.planner.setup import Setup
from lightning_hybrid.planner.stage_memory import StageMemory, memory_of_stages, stage_parameters

__all__ = ["PARTS", "Estimate", "estimate", "head_in_blocks", "step_parts"]

#: The parts of a step's time; they add up to it.
PARTS = ("compute", "recompute", "tensor", "context", "data", "pipeline", "bubble", "optimizer", "host")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run would take."""

    setup: Setup
    parts: Mapping[str, float]
    """Seconds of a step by part; see :data:`PARTS`."""
    memory: tuple[StageMemory, ...]
    """Of each pipeline rank."""
    layers: tuple[int, ...]
    """Blocks of each pipeline rank."""
    mfu: float
    """Share of the devices' peak that does what the model needs."""
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.parts.values())

    @property
    def peak_memory(self) -> float:
        """Bytes of the fullest device."""
        return max(stage.total for stage in self.memory)


@dataclass(frozen=True)
class _Pass:
    """Seconds of one micro-batch on one pipeline rank."""

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    tensor: float
    context: float
    data: float
    pipeline: float

    @property
    def seconds(self) -> float:
        return (
            self.forward
            + self.backward_input
            + self.backward_weight
            + self.recompute
            + self.tensor
            + self.context
            + self.data
            + self.pipeline
        )


def estimate(profile: ModelProfile, cluster: Cluster, setup: Setup, *, constants: Constants = FITTED) -> Estimate:
    """Return a run's step time by part and memory by pipeline rank.

    Args:
        profile: The model.
        cluster: The devices; the run may use fewer of them.
        setup: Degrees and settings.
        constants: What was fitted to measurements.
    """
    layers = setup.layers_of_stages(profile.num_layers, head_in_blocks(profile))
    if cluster.measured is not None and not cluster.placement.order:  # others may be slow, but have no part in it
        cluster = replace(cluster, placement=Placement(tuple(range(setup.num_devices))))
    parts = shared_parts(cluster, setup, step_parts(profile, cluster, setup, layers, constants))
    parts = correct(parts, cluster.factors)
    seconds = sum(parts.values())
    peak = cluster.gpu.peak("bf16") * setup.num_devices
    return Estimate(
        setup=setup,
        parts=parts,
        memory=tuple(memory_of_stages(profile, setup, layers, host=cluster.gpu.host)),
        layers=tuple(layers),
        mfu=setup.global_batch * profile.flops_per_sample / (seconds * peak),
        tokens_per_second=setup.global_batch * profile.seq_length / seconds,
    )


def head_in_blocks(profile: ModelProfile) -> float:
    """What head and loss cost, in blocks."""
    return profile.head_flops / profile.layer_flops


def step_parts(
    profile: ModelProfile, cluster: Cluster, setup: Setup, layers: list[int], constants: Constants
) -> dict[str, float]:
    """Seconds of a step by part."""
    passes: dict[tuple[int, bool, bool], _Pass] = {}
    last = len(layers) - 1
    keys = [(count, stage == 0, stage == last) for stage, count in enumerate(layers)]
    for key in keys:
        if key not in passes:
            passes[key] = _one_pass(profile, cluster, setup, *key, constants)
    stages = [passes[key] for key in keys]
    slowest = max(range(len(stages)), key=lambda stage: stages[stage].seconds)
    worst, count = stages[slowest], setup.num_microbatches
    reduction, optimizer = _after(profile, cluster, setup, keys, worst, constants)
    return {
        "compute": count * (worst.forward + worst.backward_input + worst.backward_weight),
        "recompute": count * worst.recompute,
        "tensor": count * worst.tensor,
        "context": count * worst.context,
        "data": count * worst.data + reduction,
        "pipeline": count * worst.pipeline,
        "bubble": _bubble(setup, stages, slowest),
        "optimizer": optimizer,
        "host": constants.step + count * constants.microbatch,
    }


def shared_parts(cluster: Cluster, setup: Setup, parts: dict[str, float]) -> dict[str, float]:
    """The parts of a step where ranks share their host's cores.

    Whatever a rank does, exchanges too, is then work of a core, and what one rank waits another one works. A step is as
    long as the path of a rank that has a core to itself, or as all ranks' work takes on all cores.
    """
    ranks = min(setup.num_devices, cluster.per_node)
    if cluster.seats is None or cluster.seats >= ranks:
        return parts
    alone, turns = sum(parts.values()), ranks / cluster.seats
    found = {name: seconds * turns for name, seconds in parts.items()}
    found["bubble"] = max(0.0, alone - (sum(found.values()) - found["bubble"]))
    return found


def _one_pass(
    profile: ModelProfile,
    cluster: Cluster,
    setup: Setup,
    count: int,
    first: bool,
    last: bool,
    constants: Constants,
) -> _Pass:
    work = Work(
        tensor=setup.layout.tensor_parallel_size,
        context=setup.context,
        micro_batch=setup.micro_batch,
        sequence_parallel=setup.sequence_parallel,
        precision=setup.precision,
        attention=setup.attention,
        fused=setup.fused,
    )
    block = block_time(profile, cluster.gpu, work, constants)
    exchange = _tensor_exchange(profile, cluster, setup, constants)
    if setup.overlap_tensor:
        exchange = _longer(block.products, exchange, constants.sharpness) - block.products
    again = {
        "none": 0.0,
        "selective": block.attention,
        "ops": block.forward - block.attention - block.products / 2,
        "full": block.forward,
    }[setup.recompute]
    host = constants.launch * host_work(work)
    # the device waits for the host where kernels are too short: what the host needs more is shown as compute
    forward = _longer(block.forward + exchange, host, 4.0) - exchange
    whole = block.backward + again + exchange
    stretch = _longer(whole, host * (2.0 if setup.recompute == "full" else 1.0), 4.0) / whole
    times = exchange * (3 if setup.recompute == "full" else 2)
    head, trained = head_time(profile, cluster.gpu, work, constants) if last else None, not setup.adapters
    passed = _Pass(
        forward=count * forward + (head.forward if head else 0.0),
        backward_input=count * block.backward_input * stretch + (head.backward_input if head else 0.0),
        backward_weight=trained * (count * block.backward_weight * stretch + (head.backward_weight if head else 0.0)),
        recompute=count * again * stretch,
        tensor=count * times,
        context=count * _context_exchange(profile, cluster, setup, block.attention, constants),
        data=0.0,
        pipeline=0.0,
    )
    if setup.zero < 3 and setup.num_microbatches > 1 and trained:
        passed = replace(
            passed,
            backward_weight=passed.backward_weight
            + _accumulate(profile, cluster, setup, count, first, last, constants),
        )
    passed = replace(passed, pipeline=_pipeline_exchange(profile, cluster, setup, passed.seconds, constants))
    if setup.zero < 3 or setup.shards * setup.layout.replicate_size == 1:
        return passed
    return replace(passed, data=_shards_exposed(profile, cluster, setup, count, first, last, passed, constants))


def _accumulate(
    profile: ModelProfile, cluster: Cluster, setup: Setup, count: int, first: bool, last: bool, constants: Constants
) -> float:
    """Seconds of adding a micro-batch's gradients to those before."""
    parameters = stage_parameters(profile, setup, count, first=first, last=last)
    return 2 * setup.gradient_bytes * parameters / (cluster.gpu.bandwidth * 1e9 * constants.memory)


def _longer(one: float, other: float, sharpness: float) -> float:
    """The longer of two times that run side by side, a little more where they are alike."""
    high, low = max(one, other), min(one, other)
    return high * float((1 + (low / high) ** sharpness) ** (1 / sharpness)) if high > 0 else 0.0


def _tensor_exchange(profile: ModelProfile, cluster: Cluster, setup: Setup, constants: Constants) -> float:
    """Seconds of a block's forward (or backward): two all-reduces, or as many gathers and scatters."""
    tokens = setup.micro_batch * profile.seq_length / setup.context
    return 2 * ring(setup.tensor_group, setup.width * tokens * profile.hidden_size, cluster, constants, passes=2)


def _context_exchange(
    profile: ModelProfile, cluster: Cluster, setup: Setup, attention: float, constants: Constants
) -> float:
    """Seconds that show of keys and values going round, forward and backward, behind attention."""
    if setup.context == 1:
        return 0.0
    width = 2 * profile.num_kv_heads * profile.head_dim / setup.layout.tensor_parallel_size
    moved = ring(setup.context_group, 2 * setup.micro_batch * profile.seq_length * width, cluster, constants)
    return _longer(attention, moved, constants.sharpness) * 3 - 3 * attention


def _pipeline_exchange(
    profile: ModelProfile, cluster: Cluster, setup: Setup, seconds: float, constants: Constants
) -> float:
    """Seconds of a micro-batch's messages forward and backward that show.

    With several stages a rank they travel while another stage computes; with one, neighbours wait for each other.
    """
    tokens = setup.micro_batch * profile.seq_length / setup.context
    num_bytes = setup.width * tokens * profile.hidden_size
    if setup.sequence_parallel:
        num_bytes /= setup.layout.tensor_parallel_size
    sent = send(setup.pipeline_group, num_bytes, cluster, constants)
    if setup.stages_per_rank == 1:
        return 2 * sent
    one = seconds / (2 * setup.stages_per_rank)
    return 2 * setup.stages_per_rank * (_longer(one, sent, constants.sharpness) - one)


def _shards_exposed(
    profile: ModelProfile,
    cluster: Cluster,
    setup: Setup,
    count: int,
    first: bool,
    last: bool,
    passed: _Pass,
    constants: Constants,
) -> float:
    """Seconds of a micro-batch that show of gathering shards and reducing gradients behind compute."""
    if constants.replicas_as_shards and setup.layout.pipeline_parallel_size > 1:
        setup = replace(setup, layout=replace(setup.layout, replicate_size=1))
    tensor = setup.layout.tensor_parallel_size
    units = [profile.layer_parameters / tensor] * count
    tables = stage_parameters(profile, setup, 0, first=first, last=last)

    def gather(width: float, op: str = "all_gather") -> float:
        block = ring(setup.shard_group, width * units[0], cluster, constants, op=op) if units else 0.0
        return len(units) * block + ring(setup.shard_group, width * tables, cluster, constants, op=op)

    whole = sum(units) + tables
    replicas = ring(setup.replica_group, setup.gradient_bytes * whole / setup.shards, cluster, constants, passes=2)
    if setup.reshard:
        replicas /= setup.num_microbatches  # they meet once a step
    reduce = gather(setup.gradient_bytes, "reduce_scatter") + replicas
    forward = passed.forward + passed.tensor / (3 if setup.recompute == "full" else 2)
    backward = passed.seconds - passed.pipeline - forward
    if not setup.reshard:  # gathered once, reduced once: shared by the micro-batches of a step
        hidden = _longer(forward, gather(setup.width), constants.sharpness) + _longer(
            backward, reduce, constants.sharpness
        )
        return (hidden - forward - backward) / setup.num_microbatches
    hidden = _longer(forward, gather(setup.width), constants.sharpness)
    hidden += _longer(backward, gather(setup.width) + reduce, constants.sharpness)
    return hidden - forward - backward


def _bubble(setup: Setup, stages: list[_Pass], slowest: int) -> float:
    """Seconds that the slowest rank waits for the others at the beginning and end of a step."""
    others = [stage for index, stage in enumerate(stages) if index != slowest]
    name = setup.schedule
    if name in ("GPipe", "1F1B", "Interleaved1F1B"):
        return sum(stage.seconds for stage in others) / setup.stages_per_rank
    saved = 1 if name in ("ZB-H1", "InterleavedZeroBubble") else 2  # weights' halves that fill the gaps
    waits = (max(0.0, s.seconds - s.backward_weight - saved * s.backward_weight) for s in others)
    return sum(waits) / (setup.stages_per_rank if name == "InterleavedZeroBubble" else 1)


def _after(
    profile: ModelProfile,
    cluster: Cluster,
    setup: Setup,
    keys: list[tuple[int, bool, bool]],
    worst: _Pass,
    constants: Constants,
) -> tuple[float, float]:
    """Seconds after the last micro-batch: what shows of reducing gradients over data ranks, and the optimizer."""
    parameters = max(
        stage_parameters(profile, setup, count, first=first, last=last) for count, first, last in set(keys)
    )
    own = parameters / (setup.shards if setup.zero else 1)
    optimizer = 30 * own / (cluster.gpu.bandwidth * 1e9 * constants.memory)
    if setup.adapters:
        return 0.0, 0.0
    if setup.zero == 3:
        return 0.0, optimizer
    reduced = ring(setup.shard_group, setup.gradient_bytes * parameters, cluster, constants, op="reduce_scatter")
    gathered = 0.0
    if setup.zero:  # each rank updates its share, which the others then need
        gathered = ring(setup.shard_group, 2 * parameters, cluster, constants)
    else:
        reduced *= 2
    reduced += ring(setup.replica_group, setup.gradient_bytes * parameters / setup.shards, cluster, constants, passes=2)
    behind = constants.overlap * (worst.backward_input + worst.backward_weight), constants.overlap * worst.forward
    shown = [
        _longer(hiding, moved, constants.sharpness) - hiding
        for hiding, moved in zip(behind, (reduced, gathered), strict=True)
    ]
    return sum(shown), optimizer
