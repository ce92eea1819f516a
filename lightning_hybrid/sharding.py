"""Sharding of parameters, gradients and optimizer state over the data axis, by torch's ``fully_shard``.

[Note: the module that a step runs in]
The root unit is the LightningModule itself: it holds what no block holds. Its hooks want to see a call, but a step is
a method; so the step runs inside of the module's ``__call__`` with ``forward`` replaced for that call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

__all__ = ["apply_sharding", "call_inside", "reduce_gradients", "reshard", "set_gradient_sync"]


def apply_sharding(module: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, *, reshard: bool) -> None:
    """Shard ``module`` over ``mesh``, each block a unit of its own and the rest one unit.

    Args:
        module: The root; changed in place.
        blocks: Units that are gathered and freed by themselves.
        mesh: 1-D to shard, or 2-D ``(replicate, shard)``.
        reshard: Whether a block's gathered parameters are freed after its forward (ZeRO-3) or kept until after its
            backward (ZeRO-2; with a pipeline, where each micro-batch would gather them again).
    """
    tied = _shared_parameters(module)
    for block in blocks:
        if any(True for _ in block.parameters()) and not any(id(p) in tied for p in block.parameters()):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)


def _shared_parameters(module: nn.Module) -> set[int]:
    """Ids of parameters that more than one module holds; they must all be in one unit: the root's."""
    owners: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {key for key, count in owners.items() if count > 1}


def call_inside(module: nn.Module, function: Callable[[], Any]) -> Any:
    """Run ``function`` as the forward of ``module``, with all its hooks (see the note above)."""
    if not isinstance(module, FSDPModule):
        return function()
    original = module.__dict__.get("forward")

    def forward() -> Any:
        _restore(module, original)  # the step may want to call the real forward
        return function()

    module.forward = forward
    try:
        return module()
    finally:
        _restore(module, original)


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, so that what the module holds are its shards again."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _restore(module: nn.Module, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = forward


def set_gradient_sync(module: nn.Module, enabled: bool) -> None:
    """Say whether backwards reduce gradients over the data axis, or only accumulate them on each rank."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
        module.set_is_last_backward(enabled)
        module.set_reshard_after_backward(enabled)


def reduce_gradients(module: nn.Module, scale: float) -> None:
    """Scale the gradients that backwards without synchronisation have accumulated, then reduce them over the data axis.

    The scale is applied first, because it may differ between data ranks.
    """
    if not isinstance(module, FSDPModule):
        _scale([p.grad for p in module.parameters()], scale)
        return
    set_gradient_sync(module, True)
    root = fully_shard.state(module)  # type: ignore[attr-defined]
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            for param in group.fsdp_params:
                unsharded = getattr(param, "_unsharded_param", None)
                _scale([param.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad], scale)
            group.post_backward()
    root._root_post_backward_final_callback()


def _scale(gradients: Iterable[Tensor | None], scale: float) -> None:
    if scale != 1.0:
        with torch.no_grad():
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(scale)
