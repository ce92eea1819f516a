"""How can the layers of a block be split of which no plan says anything? By trying, on one block of each kind.

[Note: what is tried]
One forward of a block shows which linears take their whole input from other linears, without a residual in between:
the last one becomes row-wise, those before it column-wise (query, key, value -> output; gate, up -> down). Whether that
is right depends on the code between them, so each group is tried: whole and split must agree in values and gradients
(:mod:`check`). What fails stays whole, with the reason in the plan. For each group, in this order:

1. rows split contiguously (separate projections, or one that is viewed as ``[heads, 3, head_dim]``); then, for a linear
   that joins several projections, each of them by itself (``chunk(3)``, ``[3, heads, head_dim]``, gate and up);
2. with the module's own counts of heads divided, then also its widths (``n_embd``, ``embed_dim``);
3. with code that takes head sizes from its input's width (``C // n_head``) shown an input of this rank's width. That
   *stand-in* has a shape and no values; the column-wise linears know the whole input by it (:mod:`styles`). So the
   module runs as an attention of width ``C / ranks`` with ``n_head / ranks`` heads.

Keys and values with fewer heads than ranks are ``colwise_shared`` in all ways. What an attention gets or gives for each
head (a position bias ``[1, heads, L, L]``) is cut to this rank's heads and joined again, with the tables it comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel.attention import cuts_a_head, why_not_split
from lightning_hybrid.tensor_parallel.beside import copied
from lightning_hybrid.tensor_parallel.check import (
    Call,
    WholeBlock,
    too_large,
    try_block,
)
from lightning_hybrid.tensor_parallel.heads import NUM_HEADS, head_counts, shared_groups, shared_heads, widths
from lightning_hybrid.tensor_parallel.linears import features_of, is_linear
from lightning_hybrid.tensor_parallel.plan import WHOLE, PlanEntry, TensorParallelPlan
from lightning_hybrid.tensor_parallel.random_inputs import random_call, random_weights
from lightning_hybrid.tensor_parallel.styles import NOTHING_BY_HEAD, ByHead

__all__ = ["Group", "check_not_empty", "find_groups", "infer_plan", "put_block"]

_ALONE = (
    "no other linear of its block takes exactly its output, or gives exactly its input;"
    ' "colwise_gather_output" in tp_plan splits it alone'
)
_LOCAL = "what can be split: attention in a module of its own, or heads sized by view(..., -1, head_dim)"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Linears of one block that can be split together; FQNs in the block."""

    first: tuple[str, ...]
    last: str
    owner: str
    """The module whose code runs between them."""
    stand_ins: tuple[int | str, ...]
    """Arguments of the owner that the first linears get as they are."""
    by_head: ByHead = NOTHING_BY_HEAD
    """What the owner gets and gives for each head."""


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """One block to try plans on."""

    block: nn.Module
    mesh: DeviceMesh
    call: Call
    is_compiled: bool

    @cached_property
    def whole(self) -> WholeBlock:
        """What every split of the block must compute."""
        return WholeBlock.of(self.block, self.call)

    @property
    def size(self) -> int:
        return self.mesh.size()

    def run(self, part: TensorParallelPlan) -> tuple[TensorParallelPlan, str]:
        """The plan, mended where that is possible, and what is wrong with it (nothing: empty)."""
        return try_block(self.whole, self.mesh, part, is_compiled=self.is_compiled)


def infer_plan(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: TensorParallelPlan,
    calls: Mapping[str, Call],
    alike: Mapping[str, Sequence[str]],
    *,
    is_compiled: bool = False,
) -> TensorParallelPlan:
    """Return the plan with what trying found, for blocks of which neither the user nor Hugging Face says anything.

    A collective of the tensor axis. The module stays as it is; it must be whole.

    Args:
        module: the module the plan was built for.
        mesh: the 1-D tensor axis.
        plan: from :func:`~lightning_hybrid.tensor_parallel.plan.build_tp_plan`.
        calls: arguments of one block of each kind, see :func:`~lightning_hybrid.tensor_parallel.check.check_plan`.
        alike: by FQN of that block, all blocks of its kind.
        is_compiled: whether blocks will be compiled.
    """
    tied = _tied(module)
    for name, call in calls.items() if mesh.size() > 1 else ():
        part, block = plan.within(name), module.get_submodule(name)
        if any(entry.source in ("user", "huggingface", "tied") for entry in part.entries):
            continue
        trial = _Trial(block=block, mesh=mesh, call=call, is_compiled=is_compiled)
        part = _infer_block(trial, part, {n[len(name) + 1 :] for n in tied if n.startswith(f"{name}.")})
        for other in alike[name]:
            plan = put_block(plan, other, part, module)
    return plan


def _tied(module: nn.Module) -> set[str]:
    """Modules with a parameter that another module has too."""
    owners: dict[int, set[str]] = {}
    for name, child in module.named_modules():
        for parameter in child._parameters.values():
            owners.setdefault(id(parameter), set()).add(name)
    return {name for key, names in owners.items() if len(names) > 1 and key != id(None) for name in names}


def put_block(plan: TensorParallelPlan, name: str, part: TensorParallelPlan, module: nn.Module) -> TensorParallelPlan:
    """Give one block the entries of its like, in the model's order."""
    ours = {}
    for entry in part.entries:
        full = f"{name}.{entry.name}".rstrip(".")
        ours[full] = replace(entry, name=full, parameters=tuple(f"{name}.{p}" for p in entry.parameters))
    theirs = [entry for entry in plan.entries if entry.name not in ours]
    place = {found: index for index, (found, _) in enumerate(module.named_modules())}
    entries = sorted(
        [*theirs, *ours.values()],
        key=lambda e: place.get(e.name, place[e.name.rpartition(".")[0]] if e.is_parameter else 0),
    )
    counts = {entry.name: plan.num_parameters.get(entry.name, 0) for entry in entries}
    regions = {**plan.regions, **({name: part.regions[""]} if part.regions else {})}
    return replace(plan, entries=tuple(entries), num_parameters=counts, regions=regions)


def _infer_block(trial: _Trial, part: TensorParallelPlan, shared: set[str]) -> TensorParallelPlan:
    block = trial.block
    if reason := too_large(block):
        return _noted(part, [name for name, _ in _linears(block)], f"{reason}; name it in tp_plan")
    try:
        _ = trial.whole
        groups = find_groups(block, trial.call)
    except Exception as error:  # a block that needs more than its arguments
        return _noted(part, [name for name, _ in _linears(block)], f"the block does not run alone: {_short(error)}")
    part = _noted(part, [name for name, _ in _linears(block)], _ALONE)
    for name, attention in block.named_modules():
        if isinstance(attention, nn.MultiheadAttention):
            part = _try_attention(name, attention, trial, part)
    for group in groups:
        names = [*group.first, group.last]
        if tied := sorted(shared & set(names)):
            part = _noted(part, names, f"{', '.join(tied)} shares its weight with another module")
        else:
            part = _try_group(group, trial, part)
    return part


def _try_attention(
    name: str, attention: nn.MultiheadAttention, trial: _Trial, part: TensorParallelPlan
) -> TensorParallelPlan:
    names = [name, f"{name}.out_proj".lstrip(".")]
    if reason := why_not_split(attention, trial.size):
        return _noted(part, names, reason)
    changes: dict[str, dict[str, Any]] = {
        names[0]: {"style": "attention", "parts": (attention.embed_dim,) * 3},
        names[1]: {"style": "rowwise"},
    }
    found, reason = trial.run(_changed(part, changes))
    return _noted(part, names, reason) if reason else found


def _try_group(group: Group, trial: _Trial, part: TensorParallelPlan) -> TensorParallelPlan:
    """Try the ways of the note above, simplest first; the first that is right is taken."""
    names = [*group.first, group.last]
    block, size, reasons = trial.block, trial.size, list[str]()
    shared = _shared(block, group, size)
    if reason := _does_not_divide(block, group, size, shared):
        return _noted(part, names, reason)
    for changes in _ways(block, group, size, shared):
        found, reason = trial.run(_changed(part, changes))
        if not reason:
            return found
        reasons.append(reason)
    counts = head_counts(block.get_submodule(group.owner)).items()
    if odd := next(((n, c) for n, c in counts if c % size and not (shared and size % c == 0)), None):
        return _noted(part, names, cuts_a_head(*odd, size))
    furthest = min(reasons, key=lambda reason: (reason.startswith("fails"), reason.startswith("differs")))
    remedy = f"; {_LOCAL}" if furthest.startswith(("fails", "differs")) else ""
    if remedy and not counts:
        remedy += f"; no attribute has a usual name for the number of heads ({', '.join(NUM_HEADS[:4])}, ...)"
    return _noted(part, names, furthest + remedy)


def _shared(block: nn.Module, group: Group, size: int) -> dict[str, tuple[int, ...]]:
    """Keys and values with fewer heads than ranks, with the rows of each head."""
    widths_of = {name: features_of(block.get_submodule(name))[0] for name in group.first}
    return shared_heads(block.get_submodule(group.owner), widths_of, size)


def _ways(
    block: nn.Module, group: Group, size: int, shared: Mapping[str, tuple[int, ...]]
) -> Iterator[dict[str, dict[str, Any]]]:
    """What may be changed in the plan, by name: the ways of the note above in their order."""
    tables = _embeddings_by_head(group.owner, block.get_submodule(group.owner))
    for parts in _parts(block, group):
        if any(rows % size for of_linear in parts.values() for rows in of_linear):
            continue
        for numbers, stand_ins in _numbers(block, group, size, bool(shared)):
            for by_head in _by_head(group.by_head):
                local = {"numbers": numbers, "stand_ins": stand_ins, "by_head": by_head}
                changes: dict[str, dict[str, Any]] = {
                    name: {"style": "colwise", "parts": parts.get(name, ())} for name in group.first
                }
                changes |= {name: {"style": "colwise_shared", "parts": rows} for name, rows in shared.items()}
                changes[group.last] = {"style": "rowwise"}
                if numbers or stand_ins or by_head != NOTHING_BY_HEAD:
                    changes[group.owner] = {"style": "local_numbers", **local}
                if by_head.results:
                    changes |= {name: {"style": "embedding_by_head"} for name in tables}
                yield changes


def _by_head(known: ByHead) -> Iterator[ByHead]:
    """Nothing, then arguments with ever more results: attention weights that nobody reads need not be joined."""
    yield NOTHING_BY_HEAD
    for number in range(len(known.results) + 1) if known != NOTHING_BY_HEAD else ():
        if (way := ByHead(arguments=known.arguments, results=known.results[:number])) != NOTHING_BY_HEAD:
            yield way


def _embeddings_by_head(name: str, owner: nn.Module) -> list[str]:
    """Tables of an attention with one feature for each head (relative positions)."""
    counts = head_counts(owner).values()
    tables = [(child, table) for child, table in owner.named_children() if isinstance(table, nn.Embedding)]
    return [f"{name}.{child}".lstrip(".") for child, table in tables if table.embedding_dim in counts]


def _does_not_divide(block: nn.Module, group: Group, size: int, shared: Collection[str]) -> str | None:
    split = [name for name in group.first if name not in shared]
    sizes = [(f"out_features of {name}", features_of(block.get_submodule(name))[0]) for name in split]
    sizes.append((f"in_features of {group.last}", features_of(block.get_submodule(group.last))[1]))
    for word, number in sizes:
        if number % size:
            return f"tensor_parallel_size={size} does not divide {word}, {number}"
    return None


def _parts(block: nn.Module, group: Group) -> Iterator[dict[str, tuple[int, ...]]]:
    """What the first linears may join: nothing; or several projections, by their widths beside the last one's input."""
    yield {}
    inner = features_of(block.get_submodule(group.last))[1]
    guesses = {name: _joins(features_of(block.get_submodule(name))[0], inner) for name in group.first}
    for number in range(max(map(len, guesses.values()))):
        yield {name: found[number] for name, found in guesses.items() if number < len(found)}


def _joins(rows: int, inner: int) -> list[tuple[int, ...]]:
    """Sizes of the projections that a linear of so many rows may join, where attention's inner width is ``inner``."""
    found: dict[tuple[int, ...], None] = {}
    if rows > inner and rows % inner == 0:  # query, key, value; gate, up
        found[(inner,) * (rows // inner)] = None
    if rows > inner and (rows - inner) % 2 == 0:  # keys and values have fewer heads
        found[(inner, (rows - inner) // 2, (rows - inner) // 2)] = None
    if rows != inner and rows % 2 == 0:  # key and value, beside the query
        found[(rows // 2,) * 2] = None
    return list(found)


def _numbers(
    block: nn.Module, group: Group, size: int, shares_heads: bool
) -> Iterator[tuple[tuple[tuple[str, int], ...], tuple[int | str, ...]]]:
    """Attributes of the owner to set to this rank's, and arguments to show as its width; from none to all."""
    owner = block.get_submodule(group.owner)
    counts = head_counts(owner)
    inner = features_of(block.get_submodule(group.last))[1]
    sizes = {inner, *(features_of(block.get_submodule(name))[0] for name in group.first)}
    sizes |= {rows // 3 for rows in sizes if rows % 3 == 0} | {rows // 2 for rows in sizes if rows % 2 == 0}
    wide = widths(owner, sizes)
    always = shared_groups(owner, size) if shares_heads else ()
    yield always, ()
    divided = {name: 1 if shares_heads and size % count == 0 else count / size for name, count in counts.items()}
    divided |= {name: width / size for name, width in wide.items()}
    if any(value != int(value) for value in divided.values()):
        return
    few = (*always, *((name, int(divided[name])) for name in counts))
    many = (*few, *((name, int(divided[name])) for name in wide))
    ways = [(few, ()), (many, ()), (few, group.stand_ins), (many, group.stand_ins)]
    yield from (way for way in dict.fromkeys(ways) if way[0] or way[1])


def find_groups(block: nn.Module, call: Call) -> list[Group]:
    """Run a copy of the block once and read from its autograd graph which linears feed which.

    Raises:
        Exception: whatever the block raises on the arguments of ``call``.
    """
    block = random_weights(copied(block).float()).eval()
    args, kwargs = random_call(call, torch.float32)
    seen: dict[str, list[tuple[Any, Any, Any]]] = {}
    for name, child in block.named_modules():
        child.register_forward_hook(
            lambda _, a, k, out, name=name: seen.setdefault(name, []).append((a, k, out)), with_kwargs=True
        )
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        nn.Module.__call__(block, *args, **kwargs)
    once = {
        name: calls[0]
        for name, _ in _linears(block)
        if len(calls := seen.get(name, [])) == 1 and isinstance(calls[0][2], Tensor) and calls[0][0]
    }
    producers = {out.grad_fn: name for name, (_, _, out) in once.items() if out.grad_fn is not None}
    counts = {count for child in block.modules() for count in head_counts(child).values()}
    groups: list[Group] = []
    taken: set[str] = set()
    for name, (linear_args, _, _) in once.items():
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not _is_by_head(x, counts)]
        feeds = _feeds(linear_args[0], producers, inputs)
        if feeds and name not in taken and not feeds & taken:
            taken |= {name, *feeds}
            first = tuple(other for other in once if other in feeds)
            groups.append(_group(first, name, once, seen, counts))
    return groups


def _is_by_head(x: Any, counts: Collection[int]) -> bool:
    """Whether a tensor is added to scores: ``[1 or batch, heads, ...]``."""
    return isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] in counts and x.shape[1] > 1


def _feeds(x: Tensor, producers: Mapping[Any, str], inputs: list[Tensor]) -> set[str]:
    """Linears from whose outputs alone ``x`` is computed; none if something else of the block's input gets there."""
    if x.grad_fn is None:
        return set()
    found: set[str] = set()
    waiting, visited = [x.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        if node in producers:
            found.add(producers[node])
        elif any(getattr(node, "variable", None) is leaf for leaf in inputs):
            return set()
        else:
            waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _group(
    first: tuple[str, ...], last: str, once: Mapping[str, Any], seen: Mapping[str, Any], counts: Collection[int]
) -> Group:
    owner = first[0].rpartition(".")[0]
    while not all(f"{name}.".startswith(f"{owner}." if owner else "") for name in first):
        owner = owner.rpartition(".")[0]
    args, kwargs, out = seen[owner][0] if len(seen.get(owner, [])) == 1 else ((), {}, None)
    given = [once[name][0][0] for name in first]
    handed = {**dict(enumerate(args)), **kwargs}
    stand_ins = tuple(key for key, value in handed.items() if any(value is x for x in given))
    results = out if isinstance(out, tuple) else ()
    by_head = ByHead(
        arguments=tuple(key for key, value in handed.items() if _is_by_head(value, counts)),
        results=tuple(index for index, value in enumerate(results) if _is_by_head(value, counts)),
    )
    return Group(first=first, last=last, owner=owner, stand_ins=stand_ins, by_head=by_head)


def _linears(block: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in block.named_modules() if name and is_linear(child)]


def _changed(part: TensorParallelPlan, changes: Mapping[str, Mapping[str, Any]]) -> TensorParallelPlan:
    """The plan with other entries for some modules; what stands outside of a change stays."""
    known = {entry.name: entry for entry in part.entries if not entry.is_parameter}
    for name, change in changes.items():
        before = known.get(name, PlanEntry(name=name, style=WHOLE, source="inferred"))
        known[name] = dataclasses.replace(before, source="inferred", note="", **change)
    entries = (*(e for e in part.entries if e.is_parameter), *known.values())
    counts = {entry.name: part.num_parameters.get(entry.name, 0) for entry in entries}
    return replace(part, entries=entries, num_parameters=counts)


def _noted(part: TensorParallelPlan, names: Sequence[str], note: str) -> TensorParallelPlan:
    """The plan with the reason why these stay whole."""
    entries = tuple(
        replace(entry, note=note) if entry.name in names and not entry.is_split else entry for entry in part.entries
    )
    return replace(part, entries=entries)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:120]


def check_not_empty(module: nn.Module, plan: TensorParallelPlan) -> None:
    """Refuse a degree above 1 for which nothing is split: all ranks would do all of the work.

    Raises:
        ConfigurationError: with what stays whole and why.
    """
    is_distributed = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if plan.tensor_parallel_size == 1 or plan.split or is_distributed:
        return
    large = sorted((row for row in plan.rows() if row.num_parameters), key=lambda row: -row.num_parameters)[:6]
    raise ConfigurationError(
        f"tensor_parallel_size={plan.tensor_parallel_size}, but nothing can be split: the model has no Hugging Face"
        " plan, tp_plan names nothing that is split, and no layers of its blocks can be split by themselves. Pass"
        ' tp_plan={"...attention.q": "colwise", "...attention.o": "rowwise", ...}, or use tensor_parallel_size=1. The'
        f" largest parts are {'; '.join(f'{row.pattern} ({row.note})' for row in large)}."
    )
