"""Which modules are the blocks between which a step may be cut. Pure: reads the module tree only."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn

from lightning_hybrid.errors import ConfigurationError

__all__ = ["Blocks", "find_block_lists", "list_blocks"]

#: How users name the blocks; see :func:`list_blocks`.
Blocks: TypeAlias = str | list[str] | Callable[[Any], Any] | None

#: A further list of blocks joins the chain if it holds at least this share of the parameters (encoder and decoder).
MIN_SHARE = 0.1


def list_blocks(module: nn.Module, names: Blocks = None, *, whole: bool = False) -> list[str]:
    """Return the FQNs of all blocks, list by list.

    Args:
        module: The module to cut.
        names: FQN(s) of the list(s) of blocks, such as ``"model.layers"``; the dotted name of a method or property that
            returns the blocks, or a function that does so given ``module`` (modules or their FQNs); found by itself if
            ``None``.
        whole: Whether an entry that only holds others (attention and MLP in a list) is one block. It is never called,
            so a step is cut at those others, but work is counted for all of it.

    Raises:
        ConfigurationError: if a name is not a list of modules in ``module``, or no list of blocks is found.
    """
    if callable(names):
        return _given(module, names(module), f"blocks={getattr(names, '__name__', names)}")
    chosen = [names] if isinstance(names, str) else names
    if chosen is None:
        chosen = find_block_lists(module)
        if not chosen:
            raise ConfigurationError(
                f"No list of blocks was found in {type(module).__name__}: a ModuleList, ModuleDict or Sequential with"
                ' at least two entries that hold parameters. Name it with blocks="path.to.list". A layer that is called'
                " several times (ALBERT's) cannot be cut; then use pipeline_parallel_size=1."
            )
    return [block for name in chosen for block in _named(module, name, whole)]


def _named(module: nn.Module, name: str, whole: bool) -> list[str]:
    """The blocks that one name stands for."""
    try:
        container = module.get_submodule(name)
    except AttributeError:
        try:
            value = operator.attrgetter(name)(module)
        except AttributeError:
            known = ", ".join(find_block_lists(module)) or "none"
            raise ConfigurationError(
                f"blocks={name!r} is not a module, method or property of {type(module).__name__}; use one of its lists"
                f" of blocks: {known}."
            ) from None
        return _given(module, value() if callable(value) else value, f"blocks={name!r}")
    children = _entries(container, whole)
    if not children:
        raise ConfigurationError(f"blocks={name!r} is a {type(container).__name__} without entries.")
    return [f"{name}.{child}" if name else child for child in children]


def _entries(container: nn.Module, whole: bool) -> list[str]:
    """Names of what is called of a list: of entries that only hold others, those."""
    every = list(container.named_children())
    # an activation function between layers is no place to cut, and may be one object that is called again and again
    entries = [(name, part) for name, part in every if num_parameters(part)] or every
    found = []
    for name, part in entries:
        only_holds = not whole and getattr(type(part), "forward", None) is nn.Module.forward  # scripts have none
        inner = _entries(part, whole) if only_holds else []
        found += [f"{name}.{entry}" for entry in inner] or [name]
    return found


def _given(module: nn.Module, found: Any, what: str) -> list[str]:
    """FQNs of the modules that a user's method or function returned."""
    known = {part: name for name, part in module.named_modules()}
    entries = list(found) if isinstance(found, Iterable) and not isinstance(found, (str, Mapping)) else []
    names = [entry if isinstance(entry, str) else known.get(entry) for entry in entries]
    strange = [entry for entry, name in zip(entries, names, strict=True) if name not in known.values()]
    if not names or strange or len(set(names)) < len(names):
        problem = f"{type(strange[0]).__name__} {strange[0]!r:.60} among them" if strange else f"got {found!r:.60}"
        raise ConfigurationError(
            f"{what} must return a list of {type(module).__name__}'s modules or of their names, each once; {problem}."
        )
    return [name for name in names if name is not None]


def find_block_lists(module: nn.Module) -> list[str]:
    """Return the FQNs of the lists of blocks, in registration order.

    A list is a ``ModuleList``, ``ModuleDict`` or ``Sequential`` with at least two entries that hold parameters. Of
    lists that contain each other, the one that can be cut most finely wins: the largest number of parameters outside
    of its largest entry.
    """
    sizes = {}
    for name, candidate in module.named_modules():
        if isinstance(candidate, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            counts = [num_parameters(child) for child in candidate.children()]
            if sum(count > 0 for count in counts) >= 2:
                sizes[name] = (sum(counts) - max(counts), sum(counts))
    total = num_parameters(module)
    chosen: list[str] = []
    for name in sorted(sizes, key=lambda n: sizes[n][0], reverse=True):
        apart = not any(_contains(name, other) or _contains(other, name) for other in chosen)
        if apart and (not chosen or sizes[name][1] >= MIN_SHARE * total):
            chosen.append(name)
    return [name for name in sizes if name in chosen]


def num_parameters(module: nn.Module) -> int:
    """Number of elements of all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _contains(outer: str, inner: str) -> bool:
    return outer == "" or inner == outer or inner.startswith(outer + ".")
