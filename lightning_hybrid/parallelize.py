"""THE recipe: how one LightningModule becomes this rank's part of a 3D-parallel one, in order.

synchronise -> plan the tensor split and check it -> cut into stages -> fill weights built on the meta device
-> split tensors -> move -> shard or replicate
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.fabric.utilities.init import _materialize_distributed_module
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_hybrid.batches.randomness import SHARES
from lightning_hybrid.building.alike import check_same_model
from lightning_hybrid.building.materialize import MetaWeights, check_same_meta, on_meta, to_meta, values_to_try_with
from lightning_hybrid.building.own_parallel import check_own, is_parallel, synchronise_own
from lightning_hybrid.building.per_block import apply_per_block
from lightning_hybrid.checkpoint.consolidate import StateKeys
from lightning_hybrid.checkpoint.pretrained import check_same_origins, load_origins, origins, refuse_unread, wait_on
from lightning_hybrid.data_parallel.buffers import SharedBuffers
from lightning_hybrid.data_parallel.replication import Replication, replicates_only
from lightning_hybrid.data_parallel.sharded_draws import draw_as_one_process
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import Layout
from lightning_hybrid.mesh import axis_group, broadcast_bits, data_mesh
from lightning_hybrid.pipeline.blocks import Blocks, find_block_lists, list_blocks
from lightning_hybrid.pipeline.partition import partition_blocks
from lightning_hybrid.pipeline.predict import chain_of
from lightning_hybrid.pipeline.probe import StepFacts
from lightning_hybrid.pipeline.stage import Cut
from lightning_hybrid.settings import Settings
from lightning_hybrid.sharding import ShardedRoot, apply_sharding
from lightning_hybrid.tensor_parallel.apply import apply_tensor_parallel
from lightning_hybrid.tensor_parallel.check import check_plan
from lightning_hybrid.tensor_parallel.huggingface import refuse_attention_weights
from lightning_hybrid.tensor_parallel.infer import check_not_empty, infer_plan
from lightning_hybrid.tensor_parallel.infer_sequence import infer_sequence
from lightning_hybrid.tensor_parallel.kinds import kind_of, told_apart
from lightning_hybrid.tensor_parallel.outside import check_outside
from lightning_hybrid.tensor_parallel.plan import TensorParallelPlan, build_tp_plan
from lightning_hybrid.tensor_parallel.sequence import intercept
from lightning_hybrid.tensor_parallel.styles import join_late

__all__ = ["Part", "StageMap", "parallelize"]


class FirstStep(Protocol):
    """The user's first step, run without a trace for what it shows."""

    def probe(self, cut: Cut) -> StepFacts:
        """Run it on holes."""

    def choose_stages(self) -> tuple[list[int], int]:
        """Return for each stage the schedule rank that runs it, and this rank's place in the schedule."""

    def record(self, blocks: list[str]) -> Mapping[str, Any]:
        """Run it for real up to the blocks; return the arguments of one block of each kind."""

    def run(self) -> Any:
        """Run it for real; return its output."""


@dataclass(frozen=True, kw_only=True)
class StageMap:
    """What each pipeline stage holds."""

    blocks: tuple[str, ...]
    """All blocks in the order of their calls."""
    ranges: tuple[range, ...]
    """For each stage the indices of its blocks."""
    costs: tuple[float, ...]
    """Share of each stage in what the cut balances; they add up to 1."""
    cut_by: str
    """What the cut balances: the forward's ``"floating point operations"``, or ``"parameters"`` if none are counted."""
    num_parameters: tuple[int, ...]
    """Elements of the parameters of each stage; a tied one counts on each of its stages."""
    stages_of_parameter: Mapping[str, tuple[int, ...]]
    """For each parameter the stages that hold it; more than one for a weight that is tied over stages."""

    def parameters_of(self, stages: list[int]) -> set[str]:
        """Return the names of the parameters that any of these stages holds."""
        return {name for name, owners in self.stages_of_parameter.items() if set(owners) & set(stages)}

    def owner_of(self, name: str) -> int:
        """Return the stage that answers for a parameter, buffer or extra state in checkpoints.

        A buffer outside of the blocks belongs to the stage of the parameters beside it; without any to the last stage,
        where the code around the blocks runs to its end.
        """
        if name in self.stages_of_parameter:
            return self.stages_of_parameter[name][0]
        for stage, blocks in enumerate(self.ranges):
            if any(name.startswith(f"{self.blocks[i]}.") for i in blocks):
                return stage
        beside = f"{name.rpartition('.')[0]}."
        neighbours = [owners[0] for other, owners in self.stages_of_parameter.items() if other.startswith(beside)]
        return min(neighbours, default=len(self.ranges) - 1)

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that live on more than one stage."""
        return {name: owners for name, owners in self.stages_of_parameter.items() if len(owners) > 1}


@dataclass(frozen=True, kw_only=True)
class Part:
    """This rank's part of the module."""

    plan: TensorParallelPlan
    cut: Cut | None
    facts: StepFacts | None
    stages: StageMap | None
    root: ShardedRoot | None
    keys: StateKeys
    replication: Replication | None = None
    buffers: SharedBuffers | None = None
    blocks: tuple[str, ...] = ()
    """Names of all blocks in order, those of other stages too; none if the model has none."""


def parallelize(
    module: nn.Module,
    *,
    layout: Layout,
    mesh: DeviceMesh,
    device: torch.device,
    settings: Settings,
    first_step: FirstStep,
    seed: int,
    given: Collection[str] = (),
) -> Part:
    """Turn ``module`` into this rank's part, in place.

    All ranks must call this with equal arguments. Weights on the meta device are drawn from ``seed``; ``given`` are
    keys that a checkpoint will overwrite afterwards. On the meta device the part has shapes and no values, and
    there are no collectives (:mod:`~lightning_hybrid.describing.estimate`).

    Raises:
        ConfigurationError: if degrees do not fit the model.
        PipelineError: if the step cannot be cut.
        UnsupportedError: if the module is already parallel and a degree asks for more, or if something on the meta
            device would get no values.
    """
    draw_as_one_process()
    if is_parallel(module):
        check_own(module, layout, mesh, settings)
        refuse_unread(module)
        _materialize_distributed_module(module, device)  # as ModelParallelStrategy does
        module.to(device)
        if device.type != "meta":
            synchronise_own(module, mesh)
        return Part(
            plan=build_tp_plan(nn.Module(), None, 1),
            cut=None,
            facts=None,
            stages=None,
            root=None,
            keys=StateKeys.of(module, lambda name: True),
            buffers=SharedBuffers(module, axis_group(mesh, "data_parallel"), device),
        )
    synchronise(module, device)
    weights, streamed = None, origins(module)
    if on_meta(module):
        if device.type != "meta":
            check_same_origins(streamed)
        weights = MetaWeights(module, seed, {*given, *streamed})
    plan = _plan_split(module, layout, mesh, settings, first_step)
    intercept([module.get_submodule(n) for n in plan.regions], plan.regions.values(), mesh["tensor_parallel"])
    cut, facts, stages, root = None, None, None, None
    mine = [0]
    if layout.pipeline_parallel_size > 1:
        cut = Cut(module, list_blocks(module, settings.blocks))
        facts = first_step.probe(cut)
        placement, here = first_step.choose_stages()
        mine = [stage for stage, rank in enumerate(placement) if rank == here]
        stages = map_stages(module, cut, facts, placement)
    keys = StateKeys.of(module, lambda name: stages is None or stages.owner_of(name) in mine)
    if cut is not None and stages is not None:
        cut.hold(stages.parameters_of(mine))
        cut.to(device)
    if device.type == "meta":
        to_meta(module)
    elif weights is not None:
        weights.fill(keys)
    apply_tensor_parallel(
        module,
        mesh["tensor_parallel"],
        plan,
        only=lambda name: any(True for _ in module.get_submodule(name).parameters()),
    )
    if layout.tensor_parallel_size > 1:
        refuse_attention_weights(module)
    if settings.loss_parallel and layout.tensor_parallel_size > 1:
        join_late(module)
    if not settings.cpu_offload:
        wait_on(module, device)
        module.to(device)
    names = tuple(stages.blocks if stages is not None else _units(module, settings.blocks))
    units = [module.get_submodule(name) for name in names]
    held = [unit for unit in units if any(True for _ in unit.parameters())]
    for unit in held if layout.tensor_parallel_size > 1 else ():
        unit.register_forward_hook(lambda *_: SHARES.close())  # where no row-wise layer did
    apply_per_block(held, **settings.per_block)
    axis = settings.step_axis
    replicates = axis == "data_parallel" and replicates_only(layout, module) and not settings.cpu_offload
    shard_mesh = None if replicates else data_mesh(mesh, of_one=settings.cpu_offload, axis=axis)
    if shard_mesh is not None:
        reshard = settings.reshard_after_forward
        reshard = layout.pipeline_parallel_size == 1 if reshard is None else reshard
        root = apply_sharding(
            module,
            units,
            shard_mesh,
            group=axis_group(mesh, axis),
            device=device,
            reshard=reshard,
            cpu_offload=settings.cpu_offload,
            is_pipelined=cut is not None,
        )
    replication, buffers = None, None
    if device.type != "meta":
        load_origins(module, streamed)
        group = axis_group(mesh, axis)
        replication = Replication(module, group) if replicates else None
        buffers = SharedBuffers(module, group, device)
    return Part(
        plan=plan,
        cut=cut,
        facts=facts,
        stages=stages,
        root=root,
        keys=keys,
        replication=replication,
        buffers=buffers,
        blocks=names,
    )


def _plan_split(
    module: nn.Module, layout: Layout, mesh: DeviceMesh, settings: Settings, first_step: FirstStep
) -> TensorParallelPlan:
    """Decide what tensor parallelism splits: by plans, checked, then by trying. A collective of the tensor axis."""
    plan = build_tp_plan(module, settings.tp_plan, layout.tensor_parallel_size)
    if layout.tensor_parallel_size == 1:
        return plan
    names, axis = _units(module, settings.blocks), mesh["tensor_parallel"]
    if layout.pipeline_parallel_size == 1 and not any(any(module.get_submodule(n).children()) for n in names):
        names = []  # single layers, in an nn.Sequential: what belongs together lies in several of them
    tried = names or [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    kinds = {name: kind_of(module.get_submodule(name)) for name in tried}
    with values_to_try_with(module):
        recorded, is_compiled = first_step.record(tried), settings.compile is not False
    alike, calls = told_apart(module, kinds, recorded, {name: plan.within(name).signature for name in tried})
    plan = check_plan(module, axis, plan, calls if names else {}, is_compiled=is_compiled)
    plan = infer_plan(module, axis, plan, calls, alike, is_compiled=is_compiled)
    check_not_empty(module, plan)
    if settings.loss_parallel and not any(entry.style == "colwise_gather_output" for entry in plan.entries):
        raise ConfigurationError(
            "loss_parallel=True keeps the logits of a head that is split over the vocabulary, but no layer is: give it"
            ' the style in tp_plan={"...head": "colwise_gather_output"}, or use loss_parallel=False.'
        )
    if tried and not recorded:  # nobody is there to try with: estimate.py
        return plan
    with values_to_try_with(module):
        check_outside(module, axis, plan, names, alike if names else {}, first_step.run)
    if settings.sequence_parallel:
        plan = infer_sequence(module, axis, plan, calls if names else {}, alike)
    return plan


def synchronise(module: nn.Module, device: torch.device) -> None:
    """Give all ranks the parameters and buffers of global rank 0, as DDP does; those on the meta device have none."""
    if dist.get_world_size() == 1 or device.type == "meta":
        return
    check_same_meta(module)
    check_same_model(module)
    with torch.no_grad():
        for tensor in [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta]:
            carrier = tensor.detach().to(device).contiguous()
            broadcast_bits(carrier, 0)
            tensor.copy_(carrier)


def map_stages(module: nn.Module, cut: Cut, facts: StepFacts, placement: list[int]) -> StageMap:
    """Decide which stage holds which blocks and parameters, given each stage's rank. Pure; the same on all ranks."""
    chain = chain_of(facts)
    costs, before, after = list(chain.blocks), chain.before, chain.after
    cut_by = "floating point operations" if any(costs) else "parameters"
    if not any(costs):  # nothing that is counted as arithmetic
        costs = [float(sum(p.numel() for p in module.get_submodule(name).parameters())) for name in facts.blocks]
    ranges = partition_blocks(costs, len(placement), before=before, after=after, placement=placement)
    stage_of_block = [stage for stage, blocks in enumerate(ranges) for _ in blocks]
    owners: dict[str, set[int]] = {name: set() for name in cut.parameter_names.values()}
    for index, name in enumerate(facts.blocks):
        for parameter in module.get_submodule(name).parameters():
            owners[cut.parameter_names[id(parameter)]].add(stage_of_block[index])
    for segment, names in enumerate(facts.uses):
        for name in names:  # the code after a block runs on that block's stage
            owners[name].add(stage_of_block[max(segment - 1, 0)])
    shapes = {cut.parameter_names[id(parameter)]: parameter.shape for parameter in module.parameters()}
    used = {name: tuple(sorted(found)) for name, found in owners.items() if found}
    stages_of_parameter = {name: used.get(name) or _stages_of_namesake(name, used, shapes) for name in owners}
    sizes = {cut.parameter_names[id(parameter)]: parameter.numel() for parameter in module.parameters()}
    total = sum(costs) + before + after or 1.0
    shares = [sum(costs[i] for i in blocks) for blocks in ranges]
    shares[0] += before
    shares[-1] += after
    return StageMap(
        blocks=facts.blocks,
        ranges=tuple(ranges),
        costs=tuple(share / total for share in shares),
        cut_by=cut_by,
        num_parameters=tuple(
            sum(sizes[name] for name, found in stages_of_parameter.items() if stage in found)
            for stage in range(len(placement))
        ),
        stages_of_parameter=stages_of_parameter,
    )


def _stages_of_namesake(
    name: str, used: Mapping[str, tuple[int, ...]], shapes: Mapping[str, torch.Size]
) -> tuple[int, ...]:
    """Where a parameter lives that no step uses: beside the one that it is a copy of (an average of the weights).

    That is the one of the same shape whose name ends with the most of the same words. Without any the first stage has
    it, so that checkpoints have it once.
    """
    words = name.split(".")

    def num_common(other: str) -> int:
        pairs = zip(reversed(words), reversed(other.split(".")), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(words), other.count(".") + 1))

    near = [other for other in used if shapes[other] == shapes[name] and num_common(other) > 1]
    return used[max(near, key=num_common)] if near else (0,)


def sync_tied_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum the gradients of parameters that are tied over the stages of ``group``, so that their copies stay equal.

    ``device`` is one that the group can send from, also when gradients are offloaded.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        local: Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        carrier = local.to(device)
        dist.all_reduce(carrier, group=group)
        if carrier is not local:
            local.copy_(carrier)


def _units(module: nn.Module, blocks: Blocks) -> list[str]:
    """Blocks to shard one by one where no pipeline was cut; none is fine too."""
    if blocks is None and not find_block_lists(module):
        return []
    return list_blocks(module, blocks)
