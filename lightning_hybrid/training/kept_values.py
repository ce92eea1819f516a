"""What a step keeps in attributes of the module, made equal on all stages of a pipeline.

Only the last stage runs a step to its end. What it appends to a list (``self.outputs.append(loss)``), or keeps in a
number (``self.total += loss.item()``), is read in hooks at the end of an epoch, on every rank. So what changed on the
last stage is sent along with the loss, and takes the place of what the other stages have kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["KeptValues"]

_Path = tuple[Any, ...]


class KeptValues:
    """Lists, numbers and scalar tensors among the attributes of a LightningModule; not those of its parts."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._lengths: dict[_Path, int] = {}
        self._scalars: dict[str, Any] = {}

    def before(self) -> None:
        """Note what there is before a step."""
        self._lengths = {path: len(found) for path, found in self._lists()}
        self._scalars = {name: _identity(value) for name, value in self._attributes() if _is_scalar(value)}

    def changes(self, *, rows: bool) -> dict[str, Any]:
        """Return what the step changed. ``rows``: also tensors with dimensions that it has appended to lists."""
        lists = {path: found[self._lengths.get(path, 0) :] for path, found in self._lists()}
        scalars = {name: value for name, value in self._attributes() if _is_scalar(value)}
        return {
            "lists": {path: _detached(new) for path, new in lists.items() if new and _can_be_sent(new, rows)},
            "scalars": {
                name: _detached(value)
                for name, value in scalars.items()
                if name not in self._scalars or self._scalars[name] != _identity(value)
            },
        }

    def apply(self, changes: dict[str, Any]) -> None:
        """Make this rank's values equal to the last stage's."""
        for path, new in changes["lists"].items():
            found = self._at(path)
            found[self._lengths.get(path, 0) :] = new
        for name, value in changes["scalars"].items():
            setattr(self._module, name, value)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        registries = ("_parameters", "_modules")
        for name, value in [*self._module.__dict__.items(), *self._module._buffers.items()]:
            if name not in registries and "hooks" not in name:
                yield name, value

    def _lists(self) -> Iterator[tuple[_Path, list[Any]]]:
        """Attributes that are lists, and the lists in those that are dicts or lists (one for each data loader)."""
        for name, value in self._attributes():
            inner = value.items() if isinstance(value, dict) else enumerate(value) if _holds_lists(value) else ()
            if isinstance(value, list) and not _holds_lists(value):
                yield (name,), value
            for key, item in inner:
                if isinstance(item, list):
                    yield (name, key), item

    def _at(self, path: _Path) -> list[Any]:
        value: Any = getattr(self._module, path[0])
        for key in path[1:]:
            value = value.setdefault(key, []) if isinstance(value, dict) else value[key]
        found: list[Any] = value
        return found


def _holds_lists(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (type(value) is Tensor and value.dim() == 0)


def _identity(value: Any) -> Any:
    """Changes when a number is replaced, or a tensor's value is."""
    return (id(value), value._version) if isinstance(value, Tensor) else value


def _can_be_sent(new: list[Any], rows: bool) -> bool:
    return all(
        isinstance(leaf, (bool, int, float, str, type(None))) or (type(leaf) is Tensor and (rows or leaf.dim() == 0))
        for leaf in tree_leaves(new)
    )


def _detached(value: Any) -> Any:
    return tree_map_only(torch.Tensor, Tensor.detach, value)
