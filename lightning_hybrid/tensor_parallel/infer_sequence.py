"""Where a block's sequence can be split, found by trying: see the notes in :mod:`sequence`.

A block's hidden states are the argument of the shape of its output. What a split layer needs whole is joined where the
module around the layer gets it (an attention's code looks at the sequence's length), else at the layer itself. The
gradient of what was joined is summed if it enters split layers only; a router beside them needs the other way. Each way
is tried on one block of each kind as any plan is (:mod:`check`), and the first that computes the same is taken.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel.check import Call, WholeBlock, too_large, try_block
from lightning_hybrid.tensor_parallel.infer import put_block
from lightning_hybrid.tensor_parallel.plan import SMALL, STYLES, WHOLE, PlanEntry, TensorParallelPlan
from lightning_hybrid.tensor_parallel.random_inputs import random_call
from lightning_hybrid.tensor_parallel.sequence import Region, Sides

__all__ = ["infer_sequence"]

#: How many modules up from a split layer its input may be joined; tried in this order.
_LEVELS = (1, 0, 2)


def infer_sequence(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: TensorParallelPlan,
    calls: Mapping[str, Call],
    alike: Mapping[str, Listed[str]],
) -> TensorParallelPlan:
    """Return the plan with the sequence split in every block where that computes the same.

    A collective of the tensor axis. The module stays as it is; it must be whole. Arguments are those of
    :func:`~lightning_hybrid.tensor_parallel.infer.infer_plan`, whose plan this takes.

    Raises:
        ConfigurationError: if the sequence can be split in no block; it says why.
    """
    reasons: dict[str, str] = {}
    for name, call in calls.items():
        part, block = plan.within(name), module.get_submodule(name)
        found, reasons[name] = _infer_block(block, mesh, part, call)
        for other in alike[name] if not reasons[name] else ():
            plan = put_block(plan, other, found, module)
    if not plan.regions:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "it has no list of blocks"
        raise ConfigurationError(
            f"sequence_parallel=True, but the sequence can be split in no block of this model ({why}). Use"
            " sequence_parallel=False."
        )
    return replace(plan, whole_sequences={name: reason for name, reason in reasons.items() if reason})


def _infer_block(
    block: nn.Module, mesh: DeviceMesh, part: TensorParallelPlan, call: Call
) -> tuple[TensorParallelPlan, str]:
    """The block's plan with its sequence split, and why it cannot be (nothing: empty)."""
    if not part.split:
        return part, "no layer of it is split"
    if reason := too_large(block):
        return part, reason
    try:
        whole = WholeBlock.of(block, call)
        look = _look(whole)
    except Exception as error:  # it needs more than its arguments
        return part, f"it does not run alone ({type(error).__name__}: {str(error).partition(chr(10))[0][:100]})"
    if look is None:
        return part, "its output has the shape of none of its arguments"
    if look.shape[look.region.dim] < 2:
        return part, f"the first batch has one token (hidden states of {list(look.shape)}), which shows nothing"
    first = ""
    for level, are_summed in itertools.product(_LEVELS, (True, False)):
        tried = _with_sides(block, part, look, level, are_summed)
        found, reason = try_block(whole, mesh, tried, is_compiled=False)
        if not reason:
            return found, ""
        first = first or reason
    left = [f"{e.name} ({e.note})" for e in part.entries if not e.is_split and e.note not in ("", SMALL)]
    what = f": {', '.join(left[:3])}" if left else ""
    return part, f"{first}. What stays whole of it may mix tokens, as an attention does{what}"


@dataclass(frozen=True, kw_only=True)
class _Look:
    """What one run of the whole block shows."""

    region: Region
    shape: torch.Size
    """Of the hidden states."""
    takes: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    """For each module the arguments that are computed from them and have their shape."""
    gives: dict[str, int] = field(default_factory=dict)
    """For each module that returns something of their shape, the dimension of it that is the sequence."""


def _look(whole: WholeBlock) -> _Look | None:
    block = copy.deepcopy(whole.fresh)
    args, kwargs = tree_map(_traced, random_call(whole.call, whole.dtype))
    seen: list[tuple[str, Any, Any, Any]] = []
    for name, child in block.named_modules():
        child.register_forward_hook(lambda _, a, k, out, name=name: seen.append((name, a, k, out)), with_kwargs=True)
    with torch.enable_grad():
        nn.Module.__call__(block, *args, **kwargs)
    output = next((leaf for leaf in tree_leaves(seen[-1][3]) if isinstance(leaf, Tensor)), None)
    handed = {**dict(enumerate(args)), **kwargs}
    found = [key for key, x in handed.items() if _is_like(x, output)]
    if not found:
        return None
    hidden: Tensor = handed[found[0]]
    dim = max(range(hidden.dim() - 1), key=lambda d: (hidden.shape[d], d))
    look = _Look(region=Region(argument=found[0], output=0, dim=dim), shape=hidden.shape)
    for name, a, k, out in seen[:-1]:
        given = {**dict(enumerate(a)), **k}
        look.takes[name] = tuple(
            key
            for key, x in given.items()
            if isinstance(x, Tensor) and _dim_of(x, hidden.shape, dim) == dim and _comes_from(x, hidden)
        )
        result = next((leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), None)
        if result is not None and (place := _dim_of(result, hidden.shape, dim)) is not None:
            look.gives[name] = place
    return look


def _traced(x: Any) -> Any:
    """Frozen weights before a block leave its hidden states without a gradient: here all have one."""
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def _is_like(x: Any, output: Tensor | None) -> bool:
    return isinstance(x, Tensor) and output is not None and x.dim() > 1 and x.requires_grad and x.shape == output.shape


def _dim_of(x: Tensor, shape: torch.Size, dim: int) -> int | None:
    """Where a tensor of the hidden states' shape, or with batch and sequence exchanged, has the sequence."""
    if x.shape == shape:
        return dim
    if len(shape) == 3 and x.shape == (shape[1], shape[0], shape[2]):
        return 1 - dim
    return None


def _comes_from(x: Tensor, hidden: Tensor) -> bool:
    """Whether a tensor is, or is computed from, the hidden states."""
    if x is hidden:
        return True
    waiting, visited = [x.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if getattr(node, "variable", None) is hidden:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


def _with_sides(
    block: nn.Module, part: TensorParallelPlan, look: _Look, level: int, are_summed: bool
) -> TensorParallelPlan:
    known = {entry.name: entry for entry in part.entries}
    for entry in [e for e in part.split if not e.is_parameter]:
        owner = known.get(entry.name.rpartition(".")[0])
        if entry.style == "rowwise" and owner is not None and owner.style == "attention":
            batch_first = block.get_submodule(owner.name).batch_first  # if not, it is called with both exchanged
            dim = look.region.dim if batch_first else 1 - look.region.dim
            known[entry.name] = replace(entry, sides=Sides(output="scatter", dim=dim))
        elif entry.style == "rowwise" and entry.name in look.gives:
            known[entry.name] = replace(entry, sides=Sides(output="scatter", dim=look.gives[entry.name]))
        elif entry.style not in STYLES:  # experts: what is around them runs on all tokens
            _run_whole(known, look, entry.name)
        elif entry.style in ("colwise", "colwise_gather_output", "colwise_shared", "attention"):
            places = [name for name in _upwards(entry.name) if look.takes.get(name)]
            if places:
                place = places[min(level, len(places) - 1)]
                sides = Sides(arguments=look.takes[place], are_summed=are_summed)
                known[place] = replace(known.get(place) or _container(place), sides=sides)
    counts = {**dict.fromkeys(known, 0), **part.num_parameters}
    entries = tuple(known.values())
    return replace(part, entries=entries, num_parameters=counts, regions={"": look.region})


def _run_whole(known: dict[str, PlanEntry], look: _Look, name: str) -> None:
    places = [place for place in _upwards(name) if look.takes.get(place) and place in look.gives]
    if places:
        sides = Sides(arguments=look.takes[places[-1]], are_summed=False, output="keep", dim=look.gives[places[-1]])
        known[places[-1]] = replace(known.get(places[-1]) or _container(places[-1]), sides=sides)


def _container(name: str) -> PlanEntry:
    return PlanEntry(name=name, style=WHOLE, source="inferred")


def _upwards(name: str) -> Iterator[str]:
    """The module itself and those around it, inside of the block."""
    while name:
        yield name
        name = name.rpartition(".")[0]
