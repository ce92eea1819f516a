"""One plain checkpoint <-> modules and optimizers that are spread over ranks.

What is saved is what one process would have saved: the whole module's ``state_dict()`` and each optimizer's, so any
Trainer can resume from it, and files of any Trainer can be loaded at any degrees.

[Note: the completed module]
A pipeline stage has let go of other stages' parameters. While a state dict is made or loaded they are put back as
tensors on the meta device, which have shapes and no memory. So hooks and overrides of the user (and of torch) see the
whole module on every rank, and every rank comes to the same missing keys, unexpected keys and errors.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.partial_states import state_of_part
from lightning_hybrid.checkpoint.shares import collect, leave_in_place, load_share, share_of
from lightning_hybrid.checkpoint.tensors import Elsewhere, Share
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.tensor_parallel.collectives import JoinedRows
from lightning_hybrid.tensor_parallel.styles import joined_rows, rows_of

__all__ = [
    "StateKeys",
    "gather_model_state",
    "gather_optimizer_state",
    "scatter_model_state",
    "scatter_optimizer_state",
    "state_in_parts",
]

logger = logging.getLogger(__name__)

#: How an optimizer computes, which depends on the layout; not what it computes. Never taken from a file.
IMPLEMENTATION = ("foreach", "fused")


@dataclass(frozen=True, kw_only=True)
class StateKeys:
    """The names in a module's state before it was cut into stages, and which of them this rank's stage answers for."""

    all_keys: tuple[str, ...]
    """Keys of the whole module's state dict, in order."""
    canonical: Mapping[str, str]
    """Key or parameter name -> the one name of that tensor; differs from the key for tied weights."""
    parameter_order: tuple[str, ...]
    """Names of the whole module's parameters, each once, in order."""
    owned: frozenset[str]
    """Keys and parameter names that this rank's stage contributes to a checkpoint."""
    twins: Mapping[str, nn.Parameter]
    """Every parameter by name (all names of tied ones), on the meta device."""

    @classmethod
    def of(cls, module: nn.Module, owns: Callable[[str], bool]) -> StateKeys:
        """Read the names from a whole module (real or on meta).

        Args:
            module: not yet cut, split or sharded.
            owns: given the canonical name of a parameter or buffer, or the key of a module's extra state, tells
                whether this rank's stage contributes it. Exactly one stage must.
        """
        order = tuple(name for name, _ in module.named_parameters())
        parameters = dict(module.named_parameters(remove_duplicate=False))
        first_name: dict[int, str] = {}
        canonical: dict[str, str] = {}
        for name, tensor in (*parameters.items(), *module.state_dict(keep_vars=True).items()):
            if isinstance(tensor, Tensor):
                canonical[name] = first_name.setdefault(id(tensor), name)
            else:
                canonical[name] = name
        twin = {
            name: nn.Parameter(_weightless(p), requires_grad=p.requires_grad) for name, p in module.named_parameters()
        }
        return cls(
            all_keys=tuple(module.state_dict()),
            canonical=canonical,
            parameter_order=order,
            owned=frozenset(key for key, name in canonical.items() if owns(name)),
            twins={name: twin[canonical[name]] for name in parameters},
        )

    @contextmanager
    def completed(self, module: nn.Module) -> Iterator[None]:
        """Let the module have all its parameters for a while: see the note at the top of this file."""
        added: list[tuple[nn.Module, str, Any]] = []
        for name, twin in self.twins.items():
            path, _, attribute = name.rpartition(".")
            part = module.get_submodule(path)
            if attribute not in part._parameters:
                added.append((part, attribute, part.__dict__.pop(attribute, None)))  # a stand-in for forwards
                part._parameters[attribute] = twin
            else:  # behind those before it: in one process's order, which optimizers number them by
                part._parameters[attribute] = part._parameters.pop(attribute)
        try:
            with state_of_part():
                yield
        finally:
            for part, attribute, stand_in in added:
                del part._parameters[attribute]
                if stand_in is not None:
                    part.__dict__[attribute] = stand_in

    def release(self, optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
        """Take what other stages hold out of an optimizer that was configured on the completed module.

        So ``configure_optimizers`` may name any parameter of the model, and every stage has the same groups (some of
        them empty). Settings, and the state of what stays, are not touched.

        Returns:
            The canonical names of each group as one process has them, in the user's own order: what
            :func:`gather_optimizer_state` and :func:`scatter_optimizer_state` take as ``order``.
        """
        twins = {id(twin): self.canonical[name] for name, twin in self.twins.items()}
        with self.completed(module):
            names = _names(optimizer, module, self)
        for group in optimizer.param_groups:
            for twin in [p for p in group["params"] if id(p) in twins]:
                optimizer.state.pop(twin, None)
            group["params"][:] = [p for p in group["params"] if id(p) not in twins]
        return names


def gather_model_state(
    module: nn.Module, keys: StateKeys, mesh: DeviceMesh | None, *, in_place: bool = False, holds: bool = True
) -> dict[str, Any]:
    """Return the whole module's state dict. A collective over the world.

    On rank 0 tensors are plain, on the CPU, and tied ones are one object, as in one process; buffers and extra state
    come from the stage that owns them, from its lowest rank. On the other ranks there are the same keys, with tensors
    on the meta device: enough for an ``on_save_checkpoint`` that picks, renames or casts, see
    :class:`~lightning_hybrid.checkpoint.tensors.Elsewhere`.

    With ``in_place`` nothing is moved: every rank has a :class:`~lightning_hybrid.checkpoint.tensors.Share` for each
    tensor, one object for tied ones. ``holds``: whether this rank's values count, where others hold others.

    Raises:
        CheckpointError: on every rank, if a tensor is held by no stage or cannot be put together.
    """
    _reshard(module)
    with keys.completed(module):
        state = module.state_dict()
    entries: dict[Any, Any] = {}
    for key, value in state.items() if holds else ():
        if (key in keys.owned or key not in keys.canonical) and not (isinstance(value, Tensor) and value.is_meta):
            entries.setdefault(keys.canonical.get(key, key), value)
    rows = {keys.canonical.get(name, name): found for name, found in joined_rows(module).items()}
    found = (leave_in_place if in_place else collect)(entries, _device(mesh), rows)
    wanted = [key for key in keys.all_keys if key in state] + [key for key in state if key not in keys.all_keys]
    if not _is_first() and in_place:
        for key in wanted:
            found.setdefault(keys.canonical.get(key, key), _nothing_of(state[key]))
    elif not _is_first():
        return OrderedDict((key, _elsewhere(state[key])) for key in wanted)
    missing = [key for key in wanted if keys.canonical.get(key, key) not in found]
    if missing:
        raise CheckpointError(f"No pipeline stage contributes {missing} to the checkpoint.")
    whole: OrderedDict[str, Any] = OrderedDict((key, found[keys.canonical.get(key, key)]) for key in wanted)
    whole._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]  # torch's versions of modules
    return whole


def _elsewhere(value: Any) -> Any:
    return Elsewhere.of(value.shape, value.dtype) if isinstance(value, Tensor) else value


def _nothing_of(value: Any) -> Any:
    return Share.make(value.shape, value.dtype) if isinstance(value, Tensor) else value


def state_in_parts(
    module: nn.Module, keys: StateKeys, mesh: DeviceMesh | None
) -> tuple[dict[str, Any], Callable[[Sequence[str]], dict[str, Any]]]:
    """Return the whole module's state without values, and a function that gathers some of it (a collective).

    So rank 0 need not hold all of it at once. Given the same keys on every rank the function returns them with values
    on rank 0, as :func:`gather_model_state`, and ``{}`` elsewhere.
    """
    _reshard(module)
    with keys.completed(module):
        state = module.state_dict()
    rows = {keys.canonical.get(name, name): found for name, found in joined_rows(module).items()}

    def gather(wanted: Sequence[str]) -> dict[str, Any]:
        mine = [key for key in wanted if (key in keys.owned or key not in keys.canonical) and not state[key].is_meta]
        entries = {keys.canonical.get(key, key): state[key] for key in mine}
        found = collect(entries, _device(mesh), rows)
        return {key: found[keys.canonical.get(key, key)] for key in wanted} if _is_first() else {}

    return {key: _weightless(value) for key, value in state.items()}, gather


def _weightless(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def scatter_model_state(
    module: nn.Module, state_dict: Mapping[str, Any], keys: StateKeys, strict: bool
) -> tuple[list[str], list[str]]:
    """Load a whole state dict into what this rank holds, in place and without communication.

    Args:
        module: cut, split and sharded as the run wants it.
        state_dict: plain tensors; the same on every rank. Mapped from a file, each rank reads its own part only.
        keys: of this module.
        strict: raise if keys are missing or unexpected.

    Returns:
        Missing and unexpected keys, as ``load_state_dict`` of the whole module returns them; alike on every rank.

    Raises:
        RuntimeError: torch's own, on every rank alike, for other shapes, or with ``strict`` for other keys.
    """
    _reshard(module)
    with ExitStack() as stack:
        stack.enter_context(keys.completed(module))
        for part in module.modules():  # after the user's own hooks, which may rename keys
            stack.callback(part.register_load_state_dict_pre_hook(_cut).remove)
        result = module.load_state_dict(state_dict, strict=strict)
    return list(result.missing_keys), list(result.unexpected_keys)


def _cut(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole tensors by this rank's shares just before a module copies them."""
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        value = state_dict.get(prefix + name)
        if own is None or not isinstance(value, Tensor):
            continue
        if own.is_meta:
            state_dict[prefix + name] = torch.empty_like(value, device="meta")
        elif isinstance(own, DTensor) and not isinstance(value, DTensor) and own.shape == value.shape:
            state_dict[prefix + name] = load_share(own, value, rows_of(module, name))


def gather_optimizer_state(
    optimizer: Optimizer,
    module: nn.Module,
    keys: StateKeys,
    mesh: DeviceMesh | None,
    order: Sequence[Sequence[str]] = (),
    *,
    in_place: bool = False,
    holds: bool = True,
) -> dict[str, Any]:
    """Return the optimizer's state as one process would have it, on rank 0; ``{}`` elsewhere. A collective.

    ``state`` is by integer and ``param_groups`` lists integers, so any ``Optimizer.load_state_dict`` takes it. The
    names stand beside them, in ``"param_names"`` (a list per group), which torch passes over. (Names inside of a group
    would load as well, but a later ``add_param_group`` without names is then refused.)

    Args:
        optimizer: this rank's.
        module: this rank's part.
        keys: of this module.
        mesh: with the axis ``pipeline_parallel``; ``None`` for one process.
        order: names of each group as one process has them, from :meth:`StateKeys.release`. For groups without, stages
            are joined in the order of the module's parameters.
        in_place: move nothing, see :func:`gather_model_state`. Rank 0 has an entry for every state, other ranks for
            those that they hold; a share's ``key`` is ``<parameter name>.<name of the state>``.
        holds: whether this rank's values count, where others hold others.

    Raises:
        CheckpointError: on every rank, if state of a split parameter has a shape of its own (and is not a DTensor), or
            stages have different numbers of groups.
    """
    _reshard(module)
    state = optimizer.state_dict()
    names = _names(optimizer, module, keys)
    whole = _names_of_all_stages(names, keys, mesh, order)
    flat = [name for group in names for name in group]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    joined = {keys.canonical.get(name, name): found for name, found in joined_rows(module).items()}
    entries: dict[Any, Any] = {}
    for index, values in state["state"].items() if holds else ():
        if not isinstance(index, int):
            entries[(index,)] = values
        elif flat[index] in keys.owned:
            for key, value in values.items():
                entries[flat[index], key] = _checked(optimizer, parameters[index], value)
    rows = {key: joined[key[0]] for key in entries if key[0] in joined}
    found = (leave_in_place if in_place else collect)(entries, _device(mesh), rows)
    if not _is_first() and not in_place:
        return {}
    for name_and_key, value in found.items():
        if isinstance(value, Share):
            value.key = ".".join(map(str, name_and_key))
    position = {name: i for i, name in enumerate(name for group in whole for name in group)}
    per_parameter = {key[0]: value for key, value in found.items() if len(key) == 1}
    for name, key in sorted((key for key in found if len(key) == 2), key=lambda key: position[key[0]]):
        per_parameter.setdefault(position[name], {})[key] = found[name, key]
    groups = [
        _whole_group(optimizer, group, [position[name] for name in group_names], group_names)
        for group, group_names in zip(state["param_groups"], whole, strict=True)
    ]
    return {"state": per_parameter, "param_groups": groups, "param_names": whole}


def _checked(optimizer: Optimizer, parameter: Tensor, value: Any) -> Any:
    """State that can be put together: DTensors, scalars, and anything of a parameter that is not split."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim:
        return CheckpointError(
            f"{type(optimizer).__name__} keeps a plain tensor of shape {tuple(value.shape)} for a split parameter of"
            f" shape {tuple(parameter.shape)}; how the parts belong together is not known. Use an optimizer whose state"
            " has the parameter's shape, or tensor_parallel_size=1 and one data rank per replica."
        )
    return value


def _whole_group(
    optimizer: Optimizer, group: Mapping[str, Any], indices: list[int], names: list[str]
) -> dict[str, Any]:
    whole = {**group, "params": indices}
    if "param_names" in group:
        whole["param_names"] = names
    for key in IMPLEMENTATION:
        if key in group and key in optimizer.defaults:  # as the user asked for it, whatever this layout made of it
            whole[key] = optimizer.defaults[key]
    return whole


def scatter_optimizer_state(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    module: nn.Module,
    keys: StateKeys,
    mesh: DeviceMesh | None,
    order: Sequence[Sequence[str]] = (),
) -> None:
    """Load a whole optimizer's state into this rank's optimizer: state of what it holds, settings of all groups.

    Parameters are found by name where the file has it, else by their place among the others in one process's optimizer,
    as torch finds them (``order``, see :func:`gather_optimizer_state`). Tensors of a parameter's shape are
    cut as the parameter is; others stay whole on every rank. Names are exchanged over the pipeline axis; tensors are
    not.

    Raises:
        CheckpointError: on every rank alike, if the number of groups, or of parameters in a group, differs, a parameter
            is in another group, or the state is of an optimizer with other settings.
    """
    _reshard(module)
    names = _names(optimizer, module, keys)
    position = _positions(state, _names_of_all_stages(names, keys, mesh, order))
    rows = {keys.canonical.get(name, name): found for name, found in joined_rows(module).items()}
    local: dict[str, Any] = {"state": {k: v for k, v in state["state"].items() if not isinstance(k, int)}}
    local["param_groups"] = []
    index = 0
    for group, saved, group_names in zip(optimizer.param_groups, state["param_groups"], names, strict=True):
        own = {key: group[key] for key in (*IMPLEMENTATION, "param_names") if key in group}
        settings = {key: value for key, value in saved.items() if key not in (*IMPLEMENTATION, "param_names")}
        local["param_groups"].append({**settings, **own, "params": [*range(index, index + len(group_names))]})
        for name, parameter in zip(group_names, group["params"], strict=True):
            values = state["state"].get(position[name])
            if values is not None:
                local["state"][index] = {
                    key: _share(parameter, key, value, rows.get(name)) for key, value in values.items()
                }
            index += 1
    needed = {key for group in optimizer.param_groups for key in group if key in optimizer.defaults}
    optimizer.load_state_dict(local)  # settings that are new in torch are filled in here
    if lost := sorted(key for key in needed if any(key not in group for group in optimizer.param_groups)):
        raise CheckpointError(
            f"The checkpoint's optimizer has no {', '.join(lost)}, which {type(optimizer).__name__} needs: it is of"
            " another class. Resume with the configure_optimizers that wrote it, or load the weights only."
        )


def _positions(state: Mapping[str, Any], whole: list[list[str]]) -> dict[str, int]:
    """Each parameter's index in a saved state."""
    groups = state["param_groups"]
    sizes, expected = [len(group["params"]) for group in groups], [len(group) for group in whole]
    if sizes != expected:
        raise CheckpointError(
            f"The checkpoint's optimizer has {len(sizes)} groups of {sizes} parameters, this run's has {len(expected)}"
            f" groups of {expected}. Resume with the configure_optimizers that wrote it, or load the weights only."
        )
    saved = state.get("param_names") or [group.get("param_names") for group in groups]
    found: dict[str, int] = {}
    for group, names, own in zip(groups, saved, whole, strict=True):
        found.update(_paired(names or own, own, group["params"]))
    before = {name: i for i, names in enumerate(saved) for name in names or ()}
    moved = [name for i, own in enumerate(whole) for name in own if before.get(name, i) != i]
    if moved:
        raise CheckpointError(
            f"{moved[0]}, and {len(moved) - 1} other parameters, are in group {before[moved[0]]} of the checkpoint's"
            " optimizer and in another one here, so their state and settings do not belong together. Resume with the"
            " configure_optimizers that wrote it, or load the weights only."
        )
    return found


def _paired(saved: Sequence[str], own: Sequence[str], indices: Sequence[int]) -> dict[str, int]:
    """Names that both have by name; the others, which were renamed, by their order."""
    by_name = dict(zip(saved, indices, strict=True))
    others = iter([index for name, index in by_name.items() if name not in set(own)])
    return {name: by_name[name] if name in by_name else next(others) for name in own}


def _share(parameter: Tensor, key: Any, value: Any, rows: JoinedRows | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == "step" or not isinstance(parameter, DTensor):  # torch keeps the step count a plain tensor
        return value.clone()
    return share_of(parameter, value, replicate=value.shape != parameter.shape, rows=rows)


def _names(optimizer: Optimizer, module: nn.Module, keys: StateKeys) -> list[list[str]]:
    """Canonical names of the parameters of each group, in the optimizer's order."""
    known = {id(p): keys.canonical.get(name, name) for name, p in module.named_parameters()}
    unknown = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if unknown:
        raise CheckpointError(
            f"{type(optimizer).__name__} holds parameters of shapes {unknown} that the LightningModule does not have"
            " under any name. Assign them to the module, or leave them out of the optimizer."
        )
    return [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _names_of_all_stages(
    names: list[list[str]], keys: StateKeys, mesh: DeviceMesh | None, order: Sequence[Sequence[str]]
) -> list[list[str]]:
    """The groups as the whole module's optimizer has them: stages joined by group. Exchanges names between stages."""
    axis = None if mesh is None or not dist.is_initialized() else mesh["pipeline_parallel"]
    if axis is None or axis.size() == 1:
        return names
    stages: list[Any] = [None] * axis.size()
    dist.all_gather_object(stages, names, group=axis.get_group())
    if len({len(stage) for stage in stages}) > 1:
        raise CheckpointError(
            f"The pipeline stages' optimizers have {[len(stage) for stage in stages]} parameter groups; configure the"
            " same groups on every stage (empty ones included)."
        )
    known = {frozenset(group): list(group) for group in order}
    place = {name: i for i, name in enumerate(keys.parameter_order)}
    joined = [frozenset(name for stage in groups for name in stage) for groups in zip(*stages, strict=True)]
    return [known.get(group) or sorted(group, key=place.__getitem__) for group in joined]


def _reshard(module: nn.Module) -> None:
    """Parameters that ``fully_shard`` still holds gathered become shards again, under which optimizers know them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _device(mesh: DeviceMesh | None) -> torch.device:
    """On which the process group sends: gloo from the CPU, also where the ranks compute on accelerators."""
    if mesh is None or mesh.device_type == "cpu" or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
