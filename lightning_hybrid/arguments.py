"""The types of the strategy's arguments, refused where they are given: later they would fail far from their cause."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import Backend

from lightning_hybrid.errors import ConfigurationError

__all__ = ["check_types"]

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
    "whole_batch_loss": (lambda value: isinstance(value, bool), "True or False"),
    "tp_plan": (
        lambda value: value is None or (isinstance(value, Mapping) and _are_names(value)),
        'a dict from patterns of module names to styles, such as {"layers.*.q_proj": "colwise"}',
    ),
    "reshard_after_forward": (lambda value: value is None or isinstance(value, bool), "True, False or None"),
    "archive": (
        lambda value: value is None or isinstance(value, (str, os.PathLike)),
        "a folder, an fsspec URL, or None",
    ),
    "start_method": (lambda value: value in ("popen", "fork", "spawn"), '"popen", "fork" or "spawn"'),
    "process_group_backend": (
        lambda value: value is None or (isinstance(value, str) and _is_backend(value)),
        f"None or one of torch's backends ({', '.join(b for b in Backend.backend_list if b != 'undefined')})",
    ),
    "timeout": (
        lambda value: value is None or isinstance(value, timedelta),
        "a datetime.timedelta, such as timedelta(minutes=30), or None",
    ),
}


def check_types(**arguments: Any) -> None:
    """Refuse arguments of the strategy that cannot be meant.

    Raises:
        ConfigurationError: names the argument, its value, and what would be right.
    """
    for name, value in arguments.items():
        can_be_meant, right = _RULES[name]
        if not can_be_meant(value):
            raise ConfigurationError(f"{name}={value!r} must be {right}.")


def _are_names(value: Any) -> bool:
    is_collection = isinstance(value, Collection) and not isinstance(value, (str, bytes))
    return is_collection and all(isinstance(name, str) for name in value)


def _is_backend(value: str) -> bool:
    """Whether a text is the name of a backend, or names one for each device (``"cpu:gloo,cuda:nccl"``)."""
    return all(part.rpartition(":")[2].lower() in Backend.backend_list for part in value.split(","))
