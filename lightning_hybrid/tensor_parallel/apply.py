"""Split a module in place, as its plan says."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel.collectives import JoinedRows, share_bounds
from lightning_hybrid.tensor_parallel.linears import is_transposed
from lightning_hybrid.tensor_parallel.plan import STYLES, PlanEntry, TensorParallelPlan
from lightning_hybrid.tensor_parallel.sequence import Sequence, sequence_of
from lightning_hybrid.tensor_parallel.styles import (
    SplitStyle,
    is_split,
    placement_of,
    split_module,
    transformers_styles,
)

__all__ = ["apply_tensor_parallel"]

logger = logging.getLogger(__name__)


def apply_tensor_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: TensorParallelPlan,
    *,
    only: Callable[[str], bool] | None = None,
) -> None:
    """Split the modules of ``plan`` over ``mesh``, in place and without communication.

    Every rank cuts its share from the values it holds, so all ranks must hold equal ones. Afterwards a parameter is
    either a ``DTensor`` on ``mesh`` (split; its placement says along which dimension) or a plain tensor (every rank
    holds all of it and gets its complete, identical gradient). Names do not change. Parameters that share storage by
    being one object still are one object. Apply ``fully_shard`` afterwards, on a mesh with the same root.

    Args:
        module: the module the plan was built for.
        mesh: the 1-D tensor axis.
        plan: from :func:`~lightning_hybrid.tensor_parallel.plan.build_tp_plan`.
        only: tells by FQN which modules this rank holds (pipeline stages hold some); all by default. Modules that are
            missing, or whose parameters are None, are passed over in any case.

    Raises:
        ConfigurationError: if ``mesh`` does not have the plan's size.
    """
    if mesh.ndim != 1 or mesh.size() != plan.tensor_parallel_size:
        raise ConfigurationError(
            f"The plan is for tensor_parallel_size={plan.tensor_parallel_size}, but the mesh has shape"
            f" {tuple(mesh.shape)}; pass the 1-D tensor_parallel axis of that size."
        )
    modules = dict(module.named_modules())
    shares: dict[nn.Parameter, nn.Parameter] = {}
    held = {name for name in modules if only is None or only(name)} if mesh.size() > 1 else set()
    sequences = {
        name: sequence_of(modules[name], region, mesh) for name, region in plan.regions.items() if name in held
    }
    for entry in plan.split:
        owner_name = entry.name.rpartition(".")[0] if entry.is_parameter else entry.name
        if owner_name in held:
            sequence = next((s for name, s in sequences.items() if _is_within(owner_name, name)), None)
            _apply_entry(entry, modules[owner_name], mesh, shares, sequence)
    for name, sequence in sequences.items():
        sequence.split(modules[name])
    _leave_fast_paths(module)


def _is_within(name: str, block: str) -> bool:
    return not block or f"{name}.".startswith(f"{block}.")


def _apply_entry(
    entry: PlanEntry,
    owner: nn.Module,
    mesh: DeviceMesh,
    shares: dict[nn.Parameter, nn.Parameter],
    sequence: Sequence | None,
) -> None:
    names = [name.rpartition(".")[2] for name in entry.parameters]
    if names and all(owner._parameters.get(name) is None for name in names):
        return  # a hole
    if isinstance(entry.style, ParallelStyle):
        parallelize_module(owner, mesh, entry.style)
    elif entry.style not in STYLES:
        _apply_transformers_style(entry, owner, names, mesh)
    else:
        for name in names:
            _split_parameter(owner, name, entry, mesh, shares)
        if not entry.is_parameter:
            _set_numbers(owner, entry.numbers)
            style = SplitStyle(
                style=entry.style_name,
                mesh=mesh,
                parts=entry.parts,
                stand_ins=entry.stand_ins,
                by_head=entry.by_head,
                sides=entry.sides,
                sequence=sequence,
            )
            split_module(owner, style)


def _split_parameter(
    owner: nn.Module, name: str, entry: PlanEntry, mesh: DeviceMesh, shares: dict[nn.Parameter, nn.Parameter]
) -> None:
    whole = owner._parameters.get(name)
    if whole is None or isinstance(whole, DTensor):
        return
    transposed = is_transposed(owner)
    placement = placement_of(entry.style_name, "" if entry.is_parameter else name, whole.ndim, transposed=transposed)
    if placement is None:
        return
    if whole not in shares:
        shares[whole] = _share_of(whole, placement, mesh, entry.parts)
    owner._parameters[name] = shares[whole]


def _share_of(whole: nn.Parameter, placement: Shard, mesh: DeviceMesh, parts: Listed[int]) -> nn.Parameter:
    """This rank's part of a parameter, with the parameter's own attributes; the whole can be freed afterwards.

    Of several projections in one (``parts``) it holds its rows of each. The DTensor then is the whole with its rows in
    the order of :class:`JoinedRows`; checkpoints put them back.
    """
    values = whole.detach()
    if parts:
        order = JoinedRows(parts=tuple(parts), num_shares=mesh.size()).order
        values = values.index_select(placement.dim, order.to(values.device))
    start, end = share_bounds(whole.shape[placement.dim], mesh.size(), mesh.get_local_rank())
    local = values.narrow(placement.dim, start, end - start).clone(memory_format=torch.contiguous_format)
    stride = torch.empty(whole.shape, device="meta").stride()
    distributed = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=stride)
    share = nn.Parameter(distributed, requires_grad=whole.requires_grad)
    share.__dict__.update(whole.__dict__)
    return share


def _set_numbers(owner: nn.Module, numbers: Listed[tuple[str, int]]) -> None:
    """Let a module speak of this rank's heads and width; of a config, which others share, it gets its own copy."""
    configs: dict[str, Any] = {}
    for name, value in numbers:
        holder, _, attribute = name.rpartition(".")
        if holder and holder not in configs:
            configs[holder] = copy.copy(getattr(owner, holder))
            setattr(owner, holder, configs[holder])
        target = configs[holder] if holder else owner
        setattr(target, attribute, value)


def _leave_fast_paths(module: nn.Module) -> None:
    """torch's encoder layers have fused code for inference, which reads weights past the modules that hold them."""
    for child in module.modules():
        if not isinstance(child, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        if any(is_split(part) for part in child.modules()):
            if isinstance(child, nn.TransformerEncoderLayer):
                child.activation_relu_or_gelu = 0
            else:
                child.use_nested_tensor = False


def _apply_transformers_style(entry: PlanEntry, owner: nn.Module, names: list[str], mesh: DeviceMesh) -> None:
    """Mixtures of experts and other special layers: transformers knows best how its own models are split."""
    style = transformers_styles()[entry.style_name]
    for name in names:
        if not isinstance(owner._parameters.get(name), DTensor):
            style.shard_param(owner, name, mesh)
    if not entry.is_parameter:
        if entry.style == "mla_kv_a_proj" and not hasattr(owner, "config"):
            raise ConfigurationError(f"{entry.name!r}: the style 'mla_kv_a_proj' needs a Hugging Face config there.")
        style.install_forward(owner, mesh)
