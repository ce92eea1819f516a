"""One gradient norm over all axes, and clipping by it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid.errors import ConfigurationError

__all__ = [
    "clip_grad_norm",
    "clip_grad_value",
    "disable_foreach_on_mixed_tensors",
    "global_grad_norm",
    "grad_norm",
]

logger = logging.getLogger(__name__)


@torch.no_grad()
def global_grad_norm(
    parameters: Iterable[Tensor],
    *,
    mesh: DeviceMesh | None,
    group: dist.ProcessGroup | None = None,
    norm_type: float = 2.0,
    copies: Mapping[Parameter, int] | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Return the norm of the whole model's gradient, the same number on every rank. A collective over the world.

    Each rank adds up ``|g|^p`` of what it holds, divided by the number of ranks that hold the same values, and one
    all-reduce over the world makes the total: ``(sum |g|^p / holders)^(1/p)``; the largest ``|g|`` for ``p = inf``. So
    shards add up, replicated parameters count once, and pipeline stages need no exchange of their own. Computed in
    fp32 whatever the gradients are. Ranks without any gradient (an empty stage) must call it too.

    Args:
        parameters: this rank's parameters; plain tensors and DTensors (on any sub-mesh) may be mixed. Those without a
            gradient are passed over. Gradients that are still partial sums are completed first, in place.
        mesh: the mesh of the whole world, with a ``pipeline_parallel`` axis where there is one. Without a mesh the
            world is one pipeline stage; without a process group it is one rank.
        group: the ranks of ``mesh``, where it is not the whole world but one replica.
        norm_type: ``p``, positive or inf.
        copies: on how many pipeline stages a parameter lives at once (tied weights), with equal gradients; default 1.
        error_if_nonfinite: raise ``RuntimeError`` on every rank if the norm is NaN or infinite.

    Raises:
        ConfigurationError: if ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type={norm_type} must be positive; use 2.0, or inf for the largest element.")
    device = _reduction_device(mesh)
    local = _complete_local_gradients(parameters)
    per_stage = _ranks_per_stage(mesh)
    norms = _norms([gradient for _, gradient in local], norm_type, device)
    if math.isinf(norm_type):
        total = norms.max() if norms.numel() else torch.zeros((), device=device)
        _all_reduce(total, dist.ReduceOp.MAX, group)
    else:
        holders = [per_stage // _num_shards(p.grad) * (copies or {}).get(p, 1) for p, _ in local]
        total = (norms.pow(norm_type) / torch.tensor(holders, device=device, dtype=norms.dtype)).sum()
        _all_reduce(total, dist.ReduceOp.SUM, group)
        total = total.pow(1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The gradient's norm of order {norm_type} is {total.item()}, so gradients cannot be clipped by it. To go"
            " on all the same, pass error_if_nonfinite=False."
        )
    return total


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    mesh: DeviceMesh | None,
    group: dist.ProcessGroup | None = None,
    norm_type: float = 2.0,
    copies: Mapping[Parameter, int] | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that the whole model's norm is at most ``max_norm``; return the norm before.

    The factor is ``min(1, max_norm / (norm + 1e-6))``, as in :func:`torch.nn.utils.clip_grad_norm_`. For the other
    arguments, and what is collective, see :func:`global_grad_norm`.
    """
    parameters = list(parameters)
    norm = global_grad_norm(
        parameters, mesh=mesh, group=group, norm_type=norm_type, copies=copies, error_if_nonfinite=error_if_nonfinite
    )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for device, gradients in _by_device(parameters).items():
        torch._foreach_mul_(gradients, factor.to(device))
    return norm


@torch.no_grad()
def clip_grad_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every element of the gradients to ``[-clip_value, clip_value]`` in place. Only partial sums communicate."""
    for gradients in _by_device(parameters).values():
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)


def grad_norm(module: Any, norm_type: float = 2.0) -> Tensor:
    """Return the norm of the whole model's gradient, the same number on every rank: to be logged, or looked at.

    Shards add up, and what several ranks hold (replicated and tied parameters) counts once. To be called on all ranks,
    where there are gradients: in ``on_before_optimizer_step`` or ``configure_gradient_clipping``. A collective.

    Args:
        module: The LightningModule that is trained, with any strategy.
        norm_type: Positive or inf.
    """
    own = getattr(module.trainer.strategy, "grad_norm", None)
    norm: Tensor = own(norm_type) if own else global_grad_norm(module.parameters(), mesh=None, norm_type=norm_type)
    return norm


def disable_foreach_on_mixed_tensors(optimizer: Optimizer) -> bool:
    """Let an optimizer step one parameter at a time where a group mixes plain tensors and DTensors.

    The fused and foreach implementations take the whole group in one operation, which DTensor refuses for such a mix
    (as tensor parallelism without ``fully_shard`` leaves it). Groups of DTensors alone, whatever their meshes, are left
    as they are. Returns whether anything was changed.
    """
    changed = False
    for group in optimizer.param_groups:
        kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
        if len(kinds) > 1 and "foreach" in group and (group["foreach"] is not False or group.get("fused")):
            if group["foreach"] or group.get("fused"):
                logger.warning(
                    "%s: foreach and fused are off; a group mixes split and whole parameters.", type(optimizer)
                )
            group["foreach"] = False
            if "fused" in group:
                group["fused"] = False
            changed = True
    return changed


def _by_device(parameters: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for _, gradient in _complete_local_gradients(parameters):
        groups.setdefault(gradient.device, []).append(gradient)
    return groups


def _complete_local_gradients(parameters: Iterable[Tensor]) -> list[tuple[Any, Tensor]]:
    """This rank's part of each gradient (sharing its storage), parameters named twice taken once."""
    found: dict[int, tuple[Any, Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or id(parameter) in found:
            continue
        if isinstance(gradient, DTensor):
            if any(isinstance(placement, Partial) for placement in gradient.placements):
                whole = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
                parameter.grad = gradient = gradient.redistribute(placements=whole)
            gradient = gradient.to_local()
        found[id(parameter)] = (parameter, gradient)
    return list(found.values())


def _num_shards(gradient: Tensor) -> int:
    """On how many ranks the parts of a gradient differ."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))


def _ranks_per_stage(mesh: DeviceMesh | None) -> int:
    if mesh is None:
        return dist.get_world_size() if dist.is_initialized() else 1
    names = mesh.mesh_dim_names or ()
    sizes = zip(names, mesh.shape, strict=True) if names else ((None, mesh.size()),)
    return math.prod(size for name, size in sizes if name != "pipeline_parallel")


def _reduction_device(mesh: DeviceMesh | None) -> torch.device:
    """Where the total is reduced: NCCL takes nothing from the CPU, also when gradients are offloaded there."""
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu") if mesh is not None or not torch.cuda.is_available() else torch.device("cuda")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _norms(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """One norm per gradient, fp32, on ``device``; an empty share has norm zero."""
    norms: list[Tensor] = [torch.zeros((), device=device)] * len(gradients)
    groups: dict[torch.device, list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient.numel():
            groups.setdefault(gradient.device, []).append(index)
    for indices in groups.values():
        found = torch._foreach_norm([gradients[i] for i in indices], norm_type, dtype=torch.float32)
        for index, norm in zip(indices, found, strict=True):
            norms[index] = norm.to(device)
    return torch.stack(norms) if norms else torch.zeros(0, device=device)


def _all_reduce(total: Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(total, operation, group=group)
