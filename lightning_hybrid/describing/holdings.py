"""Counts what a rank holds, in bytes, for :mod:`lightning_hybrid.describing.memory`.

Tensors are counted as they are; the optimizer's state is what the real class makes of one small parameter; activations
are what autograd kept of one micro-batch when the step was probed (:mod:`lightning_hybrid.pipeline.holes`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_hybrid.describing.memory import Memory, most_in_flight
from lightning_hybrid.pipeline.probe import StepFacts
from lightning_hybrid.training.optimizer_scope import step_alone

__all__ = ["device_memory", "holdings", "state_bytes"]


def holdings(strategy: Any, part: Any, pipeline: Any, optimizers: list[Optimizer]) -> Memory:
    """Count what this rank will hold in training steps; without optimizers their state is unknown."""
    module = strategy.lightning_module
    parameters = list(module.parameters())
    gathered, unreduced = (0, 0) if part.root is None else _of_units(part.root, is_pipelined=pipeline is not None)
    states = [state_bytes(optimizer) for optimizer in optimizers] or [None]
    shares = sum(_local(p).nbytes for p in parameters)
    gradients = sum(_local(p).nbytes for p in parameters if p.requires_grad)
    optimizer = None if None in states else sum(state or 0 for state in states)
    offloads = strategy.settings.cpu_offload  # then fully_shard holds all parameters
    outer = 0 if strategy.replicas is None else strategy.replicas.outer_bytes
    outer_on_host = outer if offloads or strategy.settings.replica_sync.offload else 0
    held = 0 if offloads and optimizer is not None else optimizer
    return Memory(
        parameters=(0 if offloads else shares) + sum(_local(buffer).nbytes for buffer in module.buffers()),
        gradients=0 if offloads else gradients,
        optimizer=None if held is None else held + outer - outer_on_host,
        gathered=gathered,
        unreduced=unreduced,
        activations=None if pipeline is None else _activations(strategy, part),
        messages=0 if pipeline is None else _messages(strategy, part),
        host=outer_on_host + (shares + gradients + (optimizer or 0) if offloads else 0),
    )


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of a device's memory; ``None`` for a CPU, whose memory ranks share."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def state_bytes(optimizer: Optimizer) -> int | None:
    """Return the bytes of state that an optimizer will keep; ``None`` if it is not proportional to parameters.

    The optimizer's own class makes a step of zero on one small parameter for each group and dtype.
    """
    total = 0
    for group in optimizer.param_groups:
        for dtype in {p.dtype for p in group["params"] if p.requires_grad}:  # frozen ones may be integers
            states = _states_of_one(optimizer, group, dtype)
            if states is None:
                return None
            alike, scalars = states
            trained = [p for p in group["params"] if p.requires_grad and p.dtype == dtype]
            total += sum(alike * _local(p).numel() + scalars for p in trained)
    return total


def _states_of_one(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> tuple[int, int] | None:
    """Bytes of state for each element, and for each parameter."""
    parameter = nn.Parameter(torch.zeros(3, 5, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    try:
        states = step_alone(optimizer, group, [parameter])
    except Exception:
        return None
    values = [value for value in states[parameter].values() if isinstance(value, Tensor)]
    if any(value.numel() > 1 and value.shape != parameter.shape for value in values):
        return None
    whole = [value for value in values if value.numel() > 1]
    return sum(value.element_size() for value in whole), sum(v.nbytes for v in values) - sum(v.nbytes for v in whole)


def _of_units(root: nn.Module, *, is_pipelined: bool) -> tuple[int, int]:
    """Most bytes of gathered parameters and of gradients that wait for their reduction.

    A pipelined step reduces once, at its end. Without one a unit's gradients are reduced as soon as they are there, and
    units that are freed after their forward stand gathered in pairs: one in use, one fetched ahead.
    """
    gathered, unreduced, freed, waiting = 0, 0, [0, 0], [0, 0]
    for unit in root.modules():
        if not isinstance(unit, FSDPModule):
            continue
        state: Any = unit._get_fsdp_state()
        for group in state._fsdp_param_groups:
            parameters = [p.sharded_param for p in group.fsdp_params]
            size = sum(_unsharded(p) * p.element_size() for p in parameters)
            gradients = sum(_unsharded(p) * max(p.element_size(), 4) for p in parameters if p.requires_grad)
            is_freed = group.post_forward_mesh_info is not None
            gathered, freed = (gathered, [*freed, size]) if is_freed else (gathered + size, freed)
            unreduced, waiting = unreduced + gradients, [*waiting, gradients]
    return gathered + sum(sorted(freed)[-2:]), unreduced if is_pipelined else sum(sorted(waiting)[-2:])


def _unsharded(parameter: Tensor) -> int:
    """Elements of a parameter once it is gathered over the data axis; its tensor axis stays split."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    names = parameter.device_mesh.mesh_dim_names or ()
    axes = zip(names, parameter.device_mesh.shape, parameter.placements, strict=True)
    split = math.prod(n for name, n, how in axes if name == "tensor_parallel" and not isinstance(how, Replicate))
    return -(-parameter.numel() // split)


def _activations(strategy: Any, part: Any) -> int | None:
    """Most that is kept by this rank's micro-batches in flight, as the probe counted one; whole blocks' if split."""
    facts: StepFacts = part.facts
    settings, how = strategy.settings, strategy.settings.activation_checkpointing
    if settings.whole_batch_loss or settings.compile is not False or how not in ("none", "full"):
        return None
    if None in (*facts.kept, *facts.kept_outside):
        return None
    whole, outside = ([number or 0 for number in found] for found in (facts.kept, facts.kept_outside))
    blocks = whole if how == "none" else facts.kept_arguments
    kept, recomputed = {}, {}
    for stage in _stages(strategy):
        kept[stage] = recomputed[stage] = 0
        for i in reversed(part.stages.ranges[stage]):  # as the backward goes: what it has passed is free
            kept[stage] += outside[i + 1]
            recomputed[stage] = max(recomputed[stage], whole[i] - kept[stage])
            kept[stage] += blocks[i]
        kept[stage] += outside[0] if stage == 0 else 0
    row = strategy.schedule_table(strategy.num_microbatches)[strategy.schedule_rank]
    return most_in_flight(row, kept, recomputed if how == "full" else {})


def _messages(strategy: Any, part: Any) -> int:
    """A stage sends what enters the next one, and gradients of what entered itself."""
    total, mine, last = 0, _stages(strategy), strategy.num_stages - 1
    for stage in mine:
        boundaries = [stage] * (stage - 1 not in mine and stage > 0)
        boundaries += [stage + 1] * (stage + 1 not in mine and stage < last)
        total += sum(part.facts.kept_arguments[part.stages.ranges[s].start] for s in boundaries)
    return total * int(strategy.num_microbatches)


def _stages(strategy: Any) -> list[int]:
    choice, num_ranks = strategy.choice, strategy.layout.pipeline_parallel_size
    found: list[int] = choice.spec.stages_of_rank(strategy.schedule_rank, num_ranks, choice.stages_per_rank)
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
