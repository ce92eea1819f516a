"""What batches are made of: mappings, sequences, named tuples and dataclasses, of any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_hybrid.errors import UnsupportedError

__all__ = ["leaves_of", "map_leaves", "open_node", "outline_of", "run_on"]

Rebuild = Callable[[list[Any]], Any]


def open_node(node: Any) -> tuple[list[str], list[Any], Rebuild] | None:
    """Return the names of a node's entries, the entries, and what makes such a node of others; ``None`` for a leaf."""
    if isinstance(node, Mapping):
        return [str(key) for key in node], list(node.values()), lambda values: _mapping_like(node, values)
    if isinstance(node, (torch.Size, PackedSequence)):
        return None
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(node._fields), list(node), lambda values: type(node)(*values)
    if isinstance(node, (list, tuple, deque)):
        return [str(i) for i in range(len(node))], list(node), lambda values: type(node)(values)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        return names, [getattr(node, name) for name in names], lambda values: _dataclass_like(node, names, values)
    return None


def map_leaves(
    function: Callable[[str, Any], Any], node: Any, is_leaf: Callable[[Any], bool] = lambda node: False, name: str = ""
) -> Any:
    """Return ``node`` with ``function(name, leaf)`` in the place of each leaf; names are like ``"1.mask"``."""
    opened = None if is_leaf(node) else open_node(node)
    if opened is None:
        return function(name, node)
    names, entries, rebuild = opened
    inner = [f"{name}.{key}" if name else key for key in names]
    return rebuild([map_leaves(function, e, is_leaf, n) for n, e in zip(inner, entries, strict=True)])


def leaves_of(node: Any) -> list[Any]:
    """Return all leaves in order."""
    opened = open_node(node)
    return [node] if opened is None else [leaf for entry in opened[1] for leaf in leaves_of(entry)]


def run_on(step: Callable[..., Any], batch: Any, *rest: Any) -> Any:
    """Run a user's step on a batch that it will see again: containers are its own (it may ``pop``), tensors are not.

    Raises:
        UnsupportedError: if the step changes a tensor of the batch in place.
    """
    versions: list[tuple[str, torch.Tensor, int]] = []

    def note(name: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
            versions.append((name, leaf, leaf._version))
        return leaf

    own = map_leaves(note, batch)
    result = step(own, *rest)
    if changed := [name or "the batch" for name, tensor, version in versions if tensor._version != version]:
        raise UnsupportedError(
            f"{getattr(step, '__name__', 'The step')} changes {', '.join(changed)} in place. With a pipeline or a"
            " tensor plan a step runs on a batch more than once; use what returns a new tensor (x * 2 instead of"
            " x.mul_(2)), or clone it first."
        )
    return result


def outline_of(node: Any) -> Any:
    """Return what code may branch on in ``node`` without reading tensors: its structure, types, ranks and booleans.

    Sizes of tensors, and of lists whose entries are all alike, do not matter.
    """
    opened = open_node(node)
    if opened is None:
        kind = (node.dtype, node.ndim) if isinstance(node, (torch.Tensor, numpy.ndarray)) else type(node)
        return (kind, node) if isinstance(node, bool) else kind
    names, entries, _ = opened
    inner = tuple(outline_of(entry) for entry in entries)
    if isinstance(node, (list, tuple)) and len(set(inner)) == 1:
        return type(node), inner[0]
    return type(node), tuple(names), inner


def _mapping_like(node: Any, values: list[Any]) -> Any:
    if type(node) is dict:
        return dict(zip(node, values, strict=True))
    new = copy.copy(node)  # what else it holds stays
    if "_encodings" in getattr(new, "__dict__", {}):  # BatchEncoding's, one per sample of the whole batch
        new._encodings = None
    for key, value in zip(list(node), values, strict=True):
        new[key] = value
    return new


def _dataclass_like(node: Any, names: list[str], values: list[Any]) -> Any:
    new = copy.copy(node)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(new, name, value)  # frozen ones too
    return new
