"""What the user set. Refused here where it cannot be meant: later it would fail far from its cause."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal

from torch.distributed import Backend

from lightning_hybrid.building.per_block import ActivationCheckpointing, check_per_block
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.pipeline.blocks import Blocks
from lightning_hybrid.replicas.options import ReplicaSync

__all__ = ["Settings", "options_of", "with_options"]

#: For each argument whether a value can be meant, and what would be right.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "blocks": (
        lambda value: value is None or callable(value) or isinstance(value, str) or _are_names(value),
        'the name of a list of blocks, such as "model.layers", of a method or property that returns the blocks, a list'
        " of names of lists, or a function that returns the blocks of a module",
    ),
    "unbatched": (
        lambda value: value is None or _are_names(value),
        'a list of names of the batch\'s tensors, such as ["rel_bias"] ([]: all have a row per sample)',
    ),
    "load_once": (lambda value: isinstance(value, bool), "True or False"),
    "whole_batch_loss": (lambda value: isinstance(value, bool), "True or False"),
    "loss_parallel": (lambda value: isinstance(value, bool), "True or False"),
    "sequence_parallel": (lambda value: isinstance(value, bool), "True or False"),
    "tp_plan": (
        lambda value: value is None or (isinstance(value, Mapping) and _are_names(value)),
        'a dict from patterns of module names to styles, such as {"layers.*.q_proj": "colwise"}',
    ),
    "reshard_after_forward": (lambda value: value is None or isinstance(value, bool), "True, False or None"),
    "cpu_offload": (lambda value: isinstance(value, bool), "True or False"),
    "save_distributed_checkpoint": (
        lambda value: isinstance(value, bool) or value == "async",
        'True (a directory), "async" (a directory, written while training goes on) or False (one file)',
    ),
    "archive": (
        lambda value: value is None or isinstance(value, (str, os.PathLike)),
        "a folder, an fsspec URL, or None",
    ),
    "tune": (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
        "the number of plans to try, or 0",
    ),
    "verify": (
        lambda value: isinstance(value, int) and value >= 0,
        "True, False, or how many optimizer steps to compare with one process",
    ),
    "start_method": (lambda value: value in ("popen", "fork", "spawn"), '"popen", "fork" or "spawn"'),
    "process_group_backend": (
        lambda value: value is None or (isinstance(value, str) and _is_backend(value)),
        f"None or one of torch's backends ({', '.join(b for b in Backend.backend_list if b != 'undefined')})",
    ),
    "timeout": (
        lambda value: value is None or (isinstance(value, timedelta) and value > timedelta(0)),
        "a positive datetime.timedelta, such as timedelta(minutes=30), or None",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of the strategy that nothing changes later; see :class:`~lightning_hybrid.Hybrid3DStrategy`.

    Raises:
        ConfigurationError: names the argument, its value, and what would be right.
    """

    blocks: Blocks
    unbatched: Collection[str] | None
    load_once: bool
    whole_batch_loss: bool
    tp_plan: Mapping[str, Any] | None
    loss_parallel: bool
    sequence_parallel: bool
    reshard_after_forward: bool | None
    cpu_offload: bool
    activation_checkpointing: ActivationCheckpointing
    compile: bool | Mapping[str, Any]
    save_distributed_checkpoint: bool | Literal["async"]
    archive: str | os.PathLike[str] | None
    tune: int
    verify: bool | int
    start_method: Literal["popen", "fork", "spawn"]
    process_group_backend: str | None
    timeout: timedelta | None
    replica_sync: ReplicaSync = field(default_factory=lambda: ReplicaSync(interval=1))

    def __post_init__(self) -> None:
        for argument in fields(self):
            can_be_meant, right = _RULES.get(argument.name, (lambda value: True, ""))
            if not can_be_meant(value := getattr(self, argument.name)):
                raise ConfigurationError(f"{argument.name}={value!r} must be {right}.")
        check_per_block(**self.per_block)
        if self.sequence_parallel and self.compile is not False:
            raise ConfigurationError(
                "sequence_parallel=True hands shares of the sequence from block to block, which compiled blocks do not"
                " take. Use compile=False, or sequence_parallel=False."
            )

    @property
    def step_axis(self) -> str:
        """The mesh axis over which a step averages and talks; replicas may be apart between exchanges."""
        return "data_parallel" if self.replica_sync.is_every_step else "data_parallel_shard"

    @property
    def per_block(self) -> dict[str, Any]:
        """What is done to each block besides splitting it."""
        return {"activation_checkpointing": self.activation_checkpointing, "compile": self.compile}


#: Arguments that decide whether a run fits into memory, and what they are if nobody gives them.
_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "activation_checkpointing": "none",
        "reshard_after_forward": None,
        "cpu_offload": False,
        "sequence_parallel": False,
        "loss_parallel": False,
    }
)


def options_of(settings: Settings) -> dict[str, bool | str]:
    """Return what an archive entry keeps of the settings: those that are given and that JSON has a value for."""
    given = {name: getattr(settings, name) for name, usual in _OPTIONS.items() if getattr(settings, name) != usual}
    return {name: value for name, value in given.items() if isinstance(value, (bool, str))}


def with_options(settings: Settings, options: Mapping[str, Any]) -> Settings:
    """Return settings with an entry's :func:`options_of`, where nobody gave others.

    Raises:
        ConfigurationError: if they cannot be meant; the entry may be of another version.
    """
    taken = {
        name: options[name] for name, usual in _OPTIONS.items() if name in options and getattr(settings, name) == usual
    }
    return replace(settings, **taken)


def _are_names(value: Any) -> bool:
    is_collection = isinstance(value, Collection) and not isinstance(value, (str, bytes))
    return is_collection and all(isinstance(name, str) for name in value)


def _is_backend(value: str) -> bool:
    """Whether a text is the name of a backend, or names one for each device (``"cpu:gloo,cuda:nccl"``)."""
    return all(part.rpartition(":")[2].lower() in Backend.backend_list for part in value.split(","))
