"""Sharding of parameters, gradients and optimizer state over the data axis, by torch's ``fully_shard``.

[Note: the root that a step runs in]
The root unit holds what no block holds. Its hooks want to see a call of a module, but a step is a method that may call
anything. So the root is a module of its own around the LightningModule, and a step runs inside of the root's call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torchmetrics import Metric

from lightning_hybrid.checkpoint.pretrained import is_waiting
from lightning_hybrid.data_parallel.gloo import exchange_directly
from lightning_hybrid.data_parallel.lockstep import Lockstep
from lightning_hybrid.errors import UnsupportedError

__all__ = [
    "ShardedRoot",
    "apply_sharding",
    "backward_of",
    "call_inside",
    "move_all_but_shards",
    "reduce_gradients",
    "reshard",
    "reshard_inside",
    "set_gradient_sync",
    "shards_explained",
    "to_device",
    "without_gradient_sync",
]


class ShardedRoot(nn.Module):
    """Holds the module whose parameters are sharded; see the note above."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.is_running = self.was_freed = False

    def forward(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` while the root unit's parameters are gathered."""
        self.is_running = True
        try:
            return function()
        finally:
            self.is_running = False


def apply_sharding(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    reshard: bool,
    cpu_offload: bool = False,
    is_pipelined: bool = False,
) -> ShardedRoot:
    """Shard ``module`` over ``mesh``, each block a unit of its own and the rest one unit. Returns the root.

    Args:
        module: Changed in place.
        blocks: Units that are gathered and freed by themselves.
        mesh: 1-D to shard, or 2-D ``(replicate, shard)``.
        reshard: Whether a block's gathered parameters are freed after its forward (ZeRO-3) or kept until after its
            backward (ZeRO-2; with a pipeline, where each micro-batch would gather them again).
        group: All of the data axis.
        device: Where units are computed.
        cpu_offload: Whether shards, their gradients and optimizer states stay on the CPU; copied as units are gathered.
        is_pipelined: Whether :func:`reduce_gradients` reduces, once a step.
    """
    tied, policy = _shared_parameters(module), _reduction(module)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    scalars = _scalars(module)  # fully_shard refuses them
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    options["ignored_params"] = set(scalars)
    units = [b for b in blocks if _has_shards(b) and tied.isdisjoint(map(id, b.parameters()))]
    for unit in units:
        if cpu_offload:
            unit.to(device)  # one by one: they may not fit all at once
        _give_memory(unit)
        fully_shard(unit, reshard_after_forward=reshard, **options)
    if cpu_offload:
        move_all_but_shards(module, device)
    root = ShardedRoot(module)
    _give_memory(root)
    fully_shard(root, reshard_after_forward=False, **options)
    if dist.get_backend(mesh.get_group(mesh.ndim - 1)) == "gloo":
        for unit in (*units, root):
            exchange_directly(unit)  # type: ignore[arg-type]  # fully_shard has made it one
    for part in {held._module_info.module for held in _sharded(root)}:
        part.register_forward_pre_hook(lambda *_: _gather_again(root))
    names = {part: name for name, part in module.named_modules()}
    for part in {held._module_info.module for held in _sharded(root)} | set(units):
        part.register_forward_pre_hook(functools.partial(_refuse_outside, root, names.get(part, "")), prepend=True)
    if group.size() > 1:
        Lockstep(root, units, group, scalars=scalars, is_pipelined=is_pipelined, reshard=reshard)
    return root


def _scalars(module: nn.Module) -> list[nn.Parameter]:
    """Parameters without dimensions (a learnt temperature): every rank keeps them whole."""
    return [parameter for parameter in module.parameters() if parameter.ndim == 0]


def _has_shards(block: nn.Module) -> bool:
    return any(parameter.ndim > 0 for parameter in block.parameters())


def _give_memory(unit: nn.Module) -> None:
    """What waits for values from files has none until its unit is sharded: one whole unit at a time has."""
    for parameter in unit.parameters():
        if is_waiting(parameter):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def move_all_but_shards(module: nn.Module, device: torch.device) -> None:
    """Move buffers, and parameters that ``fully_shard`` does not hold, and say that the module is on that device.

    Offloaded shards stay on the CPU.
    """
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    held = {id(p.sharded_param) for unit in units for p in _sharded(unit)}
    for part in module.modules():
        if isinstance(part, Metric):
            part.to(device)
        elif not any(id(p) in held for p in part.parameters(recurse=False)):
            part._apply(lambda tensor: tensor.to(device), recurse=False)
        else:
            part._buffers.update({name: b if b is None else b.to(device) for name, b in part._buffers.items()})
        if isinstance(part, _DeviceDtypeModuleMixin):
            part._device = device  # what a step reads as self.device


def _sharded(unit: nn.Module) -> Iterator[Any]:
    for group in fully_shard.state(unit)._fsdp_param_groups:  # type: ignore[attr-defined]
        yield from group.fsdp_params


def to_device(module: nn.Module, root: ShardedRoot | None, device: torch.device, *, cpu_offload: bool) -> None:
    """Move a module that may be sharded, where it is not yet there."""
    if cpu_offload:
        move_all_but_shards(module, device)
        return
    if root is not None:  # sharded parameters move by their own rules
        root.to(device)
    if any(t.device != device for t in (*module.parameters(), *module.buffers())):
        module.to(device)


def _reduction(module: nn.Module) -> MixedPrecisionPolicy:
    """16-bit gradients are accumulated and reduced in fp32, then rounded once. Nothing else is cast."""
    is_short = any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_short else None, cast_forward_inputs=False)


def _shared_parameters(module: nn.Module) -> set[int]:
    """Ids of parameters that more than one module holds; they must all be in one unit: the root's."""
    owners: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {key for key, count in owners.items() if count > 1}


def call_inside(root: ShardedRoot | None, function: Callable[[], Any]) -> Any:
    """Run ``function`` inside of the root's call; without sharding there is no root."""
    with shards_explained():
        if root is None:
            return function()
        output = root(function)
        if root.was_freed:
            root.was_freed = False
            reshard(root)
        return output


@contextmanager
def shards_explained() -> Iterator[None]:
    """Around a step and its backward: say what torch's errors about shards and replicas mean.

    Raises:
        UnsupportedError: in its place.
    """
    try:
        yield
    except RuntimeError as error:
        known = {
            "mixed torch.Tensor and DTensor": _OUTSIDE,
            "setStorage": _FREED,
            "mark a variable ready only once": _REENTRANT,
        }
        explained = next((words for sign, words in known.items() if sign in str(error)), None)
        if explained is None:
            raise
        raise UnsupportedError(f"{explained} {error}") from error


_REPLICAS = "keep whole replicas (replicate_size equal to data_parallel_size, without another degree)"
_OUTSIDE = (
    "The step computes with parameters of a block outside of the block's call, where a rank holds its shard only: a"
    " penalty over self.parameters()? Use the optimizer's weight_decay, add the penalty in the blocks' forward, or use"
    " data_parallel_size=1 and tensor_parallel_size=1. Or a forward after a backward of the same step (manual"
    f" optimization), which has let parameters go? Add the losses and call one backward, or {_REPLICAS}."
)
_REENTRANT = (
    "Replicas average each gradient once in a backward, but it came twice: torch.utils.checkpoint with"
    " use_reentrant=True? Use checkpoint(..., use_reentrant=False), or the strategy's activation_checkpointing."
)
_FREED = (
    "A backward went through a block whose gathered parameters were let go already: a second one through the same graph"
    f" (retain_graph=True)? Add the losses and call one backward, or {_REPLICAS}."
)


@contextmanager
def backward_of(root: ShardedRoot | None, loss: Tensor) -> Iterator[None]:
    """Around a backward: see :func:`shards_explained`, and the note below.

    [Note: backward inside of the step]
    With manual optimization backwards and updates run inside of the root's call. ``fully_shard`` reduces the root
    unit's gradients by hooks on what that call returns, which then come too late: so this is asked for at the loss.
    Afterwards, and after an update, the module holds shards, so that hooks and clipping find their gradients; a module
    of the root unit that is called later in the step gathers the unit again (:func:`_gather_again`). What
    ``toggle_optimizer`` has frozen keeps the gradient that it had.
    """
    with shards_explained():
        if root is None or not root.is_running:
            yield
            return
        frozen = [(p, p.grad) for p in _shards(root) if not p.requires_grad]
        state = fully_shard.state(root)  # type: ignore[attr-defined]
        if loss.requires_grad:
            loss.register_hook(lambda _: state._register_root_post_backward_final_callback())
        yield
        for parameter, gradient in frozen:
            parameter.grad = gradient
        reshard_inside(root)


def reshard_inside(root: ShardedRoot | None) -> None:
    """Free what is gathered if a step is still running: what follows computes with new values, or reads gradients."""
    if root is not None and root.is_running:
        reshard(root)
        root.was_freed = True


def _gather_again(root: ShardedRoot) -> None:
    """Before a module of the root unit is called."""
    if root.is_running and root.was_freed:
        root.unshard()  # type: ignore[operator]  # fully_shard has made it an FSDPModule


def _refuse_outside(root: ShardedRoot, name: str, part: nn.Module, _: Any) -> None:
    """Before a call that would gather weights: where only some ranks make it, as rank 0 to log, they would wait.

    Raises:
        UnsupportedError: outside of a step and of its backward, which may call modules again.
    """
    if not root.is_running and torch._C._current_graph_task_id() == -1:
        raise UnsupportedError(
            f"{name or type(part).__name__} was called outside of a training, validation, test or predict step, where"
            f" a data rank holds its shard of the weights only. Call the model inside of a step, {_REPLICAS}, or use"
            " data_parallel_size=1."
        )


def _shards(root: ShardedRoot) -> list[nn.Parameter]:
    units = [part for part in root.modules() if isinstance(part, FSDPModule)]
    return [held.sharded_param for unit in units for held in _sharded(unit)]


def reshard(root: ShardedRoot | None) -> None:
    """Free gathered parameters, so that what the module holds are its shards again."""
    for part in root.modules() if root is not None else ():
        if isinstance(part, FSDPModule):
            part.reshard()


def set_gradient_sync(root: ShardedRoot | None, enabled: bool) -> None:
    """Say whether backwards reduce gradients over the data axis, or only accumulate them on each rank."""
    if root is not None:
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(enabled)
        root.set_is_last_backward(enabled)
        root.set_reshard_after_backward(enabled)


@contextmanager
def without_gradient_sync(root: ShardedRoot | None) -> Iterator[None]:
    """In it backwards only accumulate gradients."""
    set_gradient_sync(root, False)
    try:
        yield
    finally:
        set_gradient_sync(root, True)


def reduce_gradients(module: nn.Module, root: ShardedRoot | None, scale: float) -> None:
    """Scale the gradients that backwards without synchronisation have accumulated, then reduce them over the data axis.

    The scale is applied first, because it may differ between data ranks.
    """
    if root is None:
        _scale([p.grad for p in module.parameters()], scale)
        return
    set_gradient_sync(root, True)
    _scale([p.grad for p in _scalars(root)], scale)
    root_state = fully_shard.state(root)  # type: ignore[attr-defined]
    for state in root_state._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            for param in group.fsdp_params:
                unsharded = getattr(param, "_unsharded_param", None)
                _scale([param.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad], scale)
            group.post_backward()
    root_state._root_post_backward_final_callback()


def _scale(gradients: Iterable[Tensor | None], scale: float) -> None:
    if scale != 1.0:
        with torch.no_grad():
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(scale)
