"""Which blocks are alike, so that what is found out about one holds for the others.

Blocks of equal classes, shapes and settings may still compute different things, if their code looks at the number of
the layer (attention over a window in every other layer). Where a block's code does, a few of its like are run with the
same weights on the same arguments; if any differs, all of them are told apart so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hybrid.tensor_parallel.beside import copied
from lightning_hybrid.tensor_parallel.random_inputs import float_dtype, random_call, random_weights

__all__ = ["kind_of", "told_apart"]

_LAYER_NUMBER = re.compile(r"(idx|index|number|layer|layer_id|block_id)$")
#: Settings that only matter in training, where they may grow from layer to layer.
_DROPS = re.compile(r"drop")
#: Blocks of a kind that are compared first: cycles of 2, 3, 4 and 6 layers, and the last.
_FIRST_COMPARED = (0, 1, 2, 3, 5, -1)


def kind_of(block: nn.Module) -> Any:
    """Blocks of one kind have equal classes, shapes and settings throughout; only the layer's number may differ."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    buffers = tuple((name, tuple(buffer.shape), _sum_of(buffer)) for name, buffer in block.named_buffers())
    settings = tuple(
        (name, key, _plain(value))
        for name, part in block.named_modules()
        for key, value in vars(part).items()
        if _is_setting(key) and not isinstance(part, nn.Dropout)
    )
    return type(block).__name__, tuple(type(part).__name__ for part in block.modules()), shapes, buffers, settings


def told_apart(
    module: nn.Module, kinds: Mapping[str, Any], calls: Mapping[str, Any], plans: Mapping[str, Any]
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Group blocks that compute the same; return, by the first of each group, its members and arguments of a call.

    Args:
        module: the whole module.
        kinds: by FQN, the block's :func:`kind_of` before it ever ran, which may leave something in it.
        calls: by FQN, the arguments of one block of each kind; kinds without any are left out.
        plans: by FQN, what is planned for a block; unlike plans tell blocks apart.
    """
    by_kind: dict[Any, list[str]] = {}
    for name, kind in kinds.items():
        by_kind.setdefault(kind, []).append(name)
    groups: dict[str, list[str]] = {}
    found: dict[str, Any] = {}
    for names in by_kind.values():
        call = next((calls[name] for name in names if name in calls), None)
        if call is None:
            continue
        ways: dict[Any, list[str]] = {}
        numbers = _by_behaviour([module.get_submodule(name) for name in names], call)
        for name, number in zip(names, numbers, strict=True):
            ways.setdefault((number, plans[name]), []).append(name)
        for members in ways.values():
            first = next((name for name in members if name in calls), members[0])
            groups[first], found[first] = members, call
    return groups, found


def _by_behaviour(blocks: Sequence[nn.Module], call: Any) -> list[int]:
    """A number for each block, equal for those that compute the same."""
    if len(blocks) == 1 or not _uses_its_number(blocks[0], call):
        return [0] * len(blocks)
    some = {i % len(blocks) for i in _FIRST_COMPARED if -len(blocks) <= i < len(blocks)}
    outputs: list[Tensor] = []
    if len(set(_numbered(blocks, sorted(some), call, outputs))) == 1:
        return [0] * len(blocks)
    return _numbered(blocks, range(len(blocks)), call, [])


def _numbered(blocks: Sequence[nn.Module], which: Sequence[int], call: Any, outputs: list[Tensor]) -> list[int]:
    numbers = []
    for i in which:
        output = _output(blocks[i], call)
        known = (n for n, other in enumerate(outputs) if other.shape == output.shape and torch.equal(other, output))
        number = next(known, len(outputs))
        if number == len(outputs):
            outputs.append(output)
        numbers.append(number)
    return numbers


def _output(block: nn.Module, call: Any) -> Tensor:
    """What the block computes with weights that are equal for all of its kind; nothing if it does not run."""
    copy = random_weights(copied(block)).eval()
    dtype = float_dtype(copy)
    args, kwargs = random_call(call, dtype)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            result = nn.Module.__call__(copy, *args, **kwargs)
    except Exception:  # the check of its plan will say so
        return torch.zeros(0)
    tensors = [x.detach().float().flatten() for x in tree_leaves(result) if isinstance(x, Tensor)]
    return torch.nan_to_num(torch.cat(tensors)) if tensors else torch.zeros(0)


def _uses_its_number(block: nn.Module, call: Any) -> bool:
    """Whether the block's code does anything with the number of its layer."""
    copy, used = copied(block), list[str]()
    for part, key in list(_numbers(copy)):
        vars(part)[key] = _watched(vars(part)[key], used)
    _output(copy, call)
    return bool(used)


def _numbers(block: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for part in block.modules():
        for key, value in vars(part).items():
            if _LAYER_NUMBER.search(key) and type(value) is int:
                yield part, key


def _watched(number: int, used: list[str]) -> int:
    """An integer that notes what is done with it."""

    def note(name: str, self: int, *others: Any) -> Any:
        used.append(name)
        return getattr(int, name)(self, *others)

    methods = {name: functools.partialmethod(_call_noted, name, note) for name in _OPERATIONS}
    kind: Any = type("Watched", (int,), {**methods, "__deepcopy__": lambda self, memo: self})
    watched: int = kind(number)
    return watched


def _call_noted(self: int, name: str, note: Any, *others: Any) -> Any:
    return note(name, self, *others)


_WORDS = "eq ne lt le gt ge hash bool index int float and or xor neg abs".split()  # noqa: SIM905
_SIDES = "add sub mul truediv floordiv mod divmod pow".split()  # noqa: SIM905
_OPERATIONS = [*(f"__{word}__" for word in _WORDS), *(f"__{side}{word}__" for side in ("", "r") for word in _SIDES)]


def _is_setting(key: str) -> bool:
    return not (key.startswith("_") or key == "training" or _LAYER_NUMBER.search(key) or _DROPS.search(key))


def _plain(value: Any) -> Any:
    """A value as it can be compared; of objects that are not plain only the type."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value).__name__, tuple(map(_plain, sorted(value, key=repr) if isinstance(value, set) else value))
    if isinstance(value, dict):
        return "dict", tuple((repr(key), _plain(item)) for key, item in value.items())
    return type(value).__name__, getattr(value, "__qualname__", "")


def _sum_of(buffer: Tensor) -> Any:
    if buffer.is_meta or buffer.is_complex():
        return None
    values = torch.nan_to_num(buffer.detach().double())
    return float(values.sum()), float(values.square().sum())
