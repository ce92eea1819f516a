"""Ranks that are set differently: refused by name, before they wait for each other or train what nobody meant.

Every rank runs the user's script, so an ``if rank == 0:`` around a Trainer's argument, a file that is there on one node
only, or two versions of a script make ranks differ. A hash of what must be equal is compared; only where one differs do
texts travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.errors import ConfigurationError

__all__ = ["check_alike", "check_same_model", "check_same_optimizers", "check_same_settings"]

#: Arguments of the Trainer that decide which collectives a rank makes, and when.
_TRAINER = (
    "max_steps",
    "max_epochs",
    "min_steps",
    "min_epochs",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "reload_dataloaders_every_n_epochs",
)
#: Arguments of the strategy that may differ: where things are, and how long this rank waits.
_OWN = ("archive", "start_method", "process_group_backend", "timeout")
#: Of an optimizer's groups: how it computes, and the parameters, which are compared by name.
_NOT_SETTINGS = ("params", "param_names", "foreach", "fused")


def check_same_settings(strategy: Any) -> None:
    """Compare what the user gave to the strategy and the Trainer. A collective over the world.

    Raises:
        ConfigurationError: on every rank, with the first difference.
    """
    trainer, choice = strategy.lightning_module.trainer, strategy.choice
    mine = {f"{name}=": _plain(getattr(choice.settings, name)) for name in _names_of(choice.settings)}
    if choice.spec.sizes is None:  # else global rank 0's table is taken, which says them
        mine |= {f"{name}=": _plain(value) for name, value in choice.degrees.items()}
        mine |= {name: _plain(getattr(choice, name)) for name in ("num_microbatches", "stages_per_rank")}
        mine["schedule="] = choice.spec.name
    mine |= {f"Trainer's {name}": _plain(getattr(trainer, name, None)) for name in _TRAINER}
    mine["what the Trainer runs"] = str(trainer.state.fn)
    mine["class of the LightningModule"] = type(strategy.lightning_module).__qualname__
    check_alike(mine, "what is set")


def check_same_model(module: nn.Module) -> None:
    """Compare names, shapes and types of parameters and buffers, in their order. A collective over the world.

    Raises:
        ConfigurationError: on every rank, with the first difference.
    """
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
    check_alike({name: _kind(tensor) for name, tensor in tensors}, "the model")


def check_same_optimizers(optimizers: Sequence[Any], schedulers: Sequence[Any], names: Sequence[Any]) -> None:
    """Compare optimizers, their groups and settings, and when schedulers step. A collective over the world.

    Args:
        optimizers: as configured.
        schedulers: Lightning's configurations of them.
        names: of each optimizer's groups, those of all stages.

    Raises:
        ConfigurationError: on every rank, with the first difference.
    """
    mine = {"number of optimizers": str(len(optimizers)), "number of schedulers": str(len(schedulers))}
    for i, (optimizer, groups) in enumerate(zip(optimizers, names, strict=True)):
        mine[f"optimizer {i}"] = type(optimizer).__qualname__
        for j, (group, parameters) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            where = f"of group {j} of optimizer {i}"
            mine |= {f"{k} {where}": _plain(v) for k, v in group.items() if k not in _NOT_SETTINGS}
            mine[f"number of parameters {where}"] = str(len(parameters))
            order = hashlib.sha256("\n".join(parameters).encode()).hexdigest()[:6]
            mine[f"order of parameters {where}"] = f"{', '.join(parameters[:2])}, ... ({order})"
    for i, config in enumerate(schedulers):
        when = (config.interval, config.frequency, config.monitor)
        mine[f"scheduler {i}"] = f"{type(config.scheduler).__qualname__}, {when}"
    check_alike(mine, "configure_optimizers")


def check_alike(mine: Mapping[str, str], what: str) -> None:
    """Compare texts by name over all ranks. A collective over the world.

    Raises:
        ConfigurationError: on every rank, with the first difference from global rank 0.
    """
    if not dist.is_initialized() or (number := dist.get_world_size()) == 1:
        return
    hashes: list[Any] = [None] * number
    dist.all_gather_object(hashes, hashlib.sha256(repr([*mine.items()]).encode()).digest())
    if len(set(hashes)) == 1:
        return
    of_first: list[Any] = [mine if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(of_first, src=0)
    found: list[Any] = [None] * number
    dist.all_gather_object(found, _difference(of_first[0], mine))
    others = [rank for rank, text in enumerate(found) if text]
    where = f" Ranks {others[:8]} of {number} differ from rank 0." if others[1:] else ""
    raise ConfigurationError(
        f"Ranks differ in {what}: {found[others[0]].format(rank=others[0])}. All ranks must run the same script with"
        " the same arguments, without conditions on the rank: what is written and logged, rank 0 does alone anyway."
        + where
    )


def _difference(first: Mapping[str, str], mine: Mapping[str, str]) -> str:
    """What a rank has that global rank 0 has not, as a text in which ``{rank}`` is its number; empty if nothing."""
    names = [name for name in (*first, *mine) if first.get(name) != mine.get(name)]
    if not names and [*first] != [*mine]:
        names = [next(other for name, other in zip(first, mine, strict=True) if name != other)]
        return f"{names[0]} has another place in the order on rank {{rank}} than on rank 0"
    if not names:
        return ""
    here, there = (str(other.get(names[0], "missing")).replace("{", "{{").replace("}", "}}") for other in (mine, first))
    more = len(set(names)) - 1
    return f"{names[0].rstrip('=')} is {there} on rank 0 and {here} on rank {{rank}}" + (
        f" (and {more} more differ)" if more else ""
    )


def _names_of(settings: Any) -> list[str]:
    return [field.name for field in fields(settings) if field.name not in _OWN]


def _kind(tensor: Tensor) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{trained}"


def _plain(value: Any) -> str:
    """A text that is the same in all processes for one value; of functions and other objects the name of their type."""
    plain: dict[type, Callable[[Any], str]] = {
        Mapping: lambda v: str({str(k): _plain(v[k]) for k in sorted(v, key=str)}),
        Tensor: lambda v: str(v.tolist()) if v.numel() <= 16 else _kind(v),
    }
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    for kind, text in plain.items():
        if isinstance(value, kind):
            return text(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_plain, value)))}}}"
    if is_dataclass(value) and not isinstance(value, type):
        return str({field.name: _plain(getattr(value, field.name)) for field in fields(value)})
    named = value if hasattr(value, "__qualname__") else type(value)
    return str(named.__qualname__)
