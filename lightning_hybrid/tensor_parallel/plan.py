"""Which module is split how, and who said so. Pure: no process group, no mesh, nothing is changed.

A plan is looked for in the user's ``tp_plan``, then in Hugging Face's own plans. What neither names stays whole here;
:mod:`infer` may then find a way for blocks of which neither says anything.
Everything that can be known to go wrong from numbers alone is refused here, before any process group exists.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel.collectives import share_bounds
from lightning_hybrid.tensor_parallel.heads import check_heads, shared_groups, shared_heads
from lightning_hybrid.tensor_parallel.huggingface import pretrained_models
from lightning_hybrid.tensor_parallel.linears import features_of, is_linear
from lightning_hybrid.tensor_parallel.sequence import Region, Sides
from lightning_hybrid.tensor_parallel.styles import NOTHING_BY_HEAD, ByHead, placement_of, transformers_styles

__all__ = [
    "SMALL",
    "STYLES",
    "WHOLE",
    "PlanEntry",
    "PlanRow",
    "TensorParallelPlan",
    "build_tp_plan",
    "layers_joined",
]

WHOLE = "whole"
#: Why norms and the like stay whole.
SMALL = "small: computed alike on every rank"

#: What each style does. The names are Hugging Face's; ``whole`` is ours.
STYLES: Mapping[str, str] = {
    "colwise": "output features split; the output stays split",
    "colwise_gather_output": "output features split; the output is joined",
    "colwise_shared": "whole; fewer heads than ranks: each rank computes the head that its query heads attend to",
    "rowwise": "input features split; the input comes split",
    "rowwise_split_input": "input features split; the input comes whole",
    "embedding_rowwise": "vocabulary split",
    "embedding_colwise": "embedding features split; the output is joined",
    "embedding_by_head": "one feature for each head: split like the heads",
    "replicated_with_grad_allreduce": "whole, applied to split features: its gradient is summed",
    "attention": "nn.MultiheadAttention on this rank's heads; the output stays split until out_proj",
    "local_numbers": "a module whose numbers of heads and widths are this rank's",
    WHOLE: "computed alike on every rank",
}

_ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "replicate": WHOLE,
    "replicated": WHOLE,
}

#: Styles whose shares may differ in size, with what they share out.
_UNEVEN = {
    "embedding_rowwise": "num_embeddings",
    "embedding_colwise": "embedding_dim",
    "colwise_gather_output": "out_features",
    "rowwise_split_input": "in_features",
}

#: Styles that nobody can name: what they need is found out.
_FOUND = ("attention", "local_numbers", "colwise_shared", "embedding_by_head")

Source = Literal["user", "huggingface", "tied", "measured", "inferred", "none"]


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """How one module (or one bare parameter of a module) is treated."""

    name: str
    """FQN of the module, or of the parameter, in the LightningModule."""
    style: str | ParallelStyle
    """A name of :data:`STYLES` or of a transformers style, or a ``torch.distributed.tensor.parallel`` style."""
    source: Source
    """Who said so."""
    note: str = ""
    """Why it stays whole, or what else is worth knowing."""
    is_parameter: bool = False
    """``name`` is a parameter's."""
    parameters: tuple[str, ...] = ()
    """FQNs of the parameters that this entry decides on (not those of a module that have entries of their own)."""
    parts: tuple[int, ...] = ()
    """Rows of each of several projections that one linear joins (query, key, value); each is split by itself. With
    style ``colwise_shared``: rows of each head."""
    numbers: tuple[tuple[str, int], ...] = ()
    """Attributes of the module and what they are on each rank, with style ``local_numbers``."""
    stand_ins: tuple[int | str, ...] = ()
    """Arguments of which the module's code sees the shape of this rank's share, with style ``local_numbers``."""
    by_head: ByHead = NOTHING_BY_HEAD
    """What the module's code gets or gives for each head, with style ``local_numbers``."""

    sides: Sides | None = None
    """What is done besides where the block works on a share of the sequence."""

    @property
    def style_name(self) -> str:
        """The style as text."""
        return self.style if isinstance(self.style, str) else type(self.style).__name__

    @property
    def is_split(self) -> bool:
        """Whether anything is to be done for tensor parallelism."""
        return self.style != WHOLE or self.sides is not None


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One line of the table: equal entries of all layers together (numbers in names become ``*``)."""

    pattern: str
    style: str
    source: Source
    note: str
    num_modules: int
    num_parameters: int


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlan:
    """The plan of a whole model: one entry for each module that owns parameters, in the model's order."""

    tensor_parallel_size: int
    entries: tuple[PlanEntry, ...]
    num_parameters: Mapping[str, int]
    """Elements owned by each entry (of the whole model), by its name."""
    regions: Mapping[str, Region] = field(default_factory=dict)
    """Blocks whose sequence is split, by FQN."""
    whole_sequences: Mapping[str, str] = field(default_factory=dict)
    """Blocks whose sequence stays whole though it was to be split, and why; one of each kind."""

    @property
    def split(self) -> tuple[PlanEntry, ...]:
        """The entries that are split or need an exchange."""
        return tuple(entry for entry in self.entries if entry.is_split)

    @property
    def styles(self) -> dict[str, str]:
        """Style names by FQN."""
        return {entry.name: entry.style_name for entry in self.entries}

    @property
    def signature(self) -> tuple[Any, ...]:
        """What is equal for blocks that are split alike."""
        return tuple((entry.name, entry.style, entry.parts) for entry in self.entries)

    def within(self, prefix: str) -> TensorParallelPlan:
        """The plan of one module inside, with names as they are there."""
        start = prefix + "."
        entries = tuple(
            replace(
                entry,
                name=entry.name[len(start) :],
                parameters=tuple(parameter[len(start) :] for parameter in entry.parameters),
            )
            for entry in self.entries
            if entry.name == prefix or entry.name.startswith(start)
        )
        counts = {name[len(start) :]: count for name, count in self.num_parameters.items() if name.startswith(prefix)}
        regions = {"": self.regions[prefix]} if prefix in self.regions else {}
        return replace(self, entries=entries, num_parameters=counts, regions=regions)

    def rows(self) -> list[PlanRow]:
        """Return the plan as a table, layers taken together."""
        rows: dict[tuple[str, str, Source, str], PlanRow] = {}
        for entry in self.entries:
            pattern = layers_joined(entry.name)
            key = (pattern, entry.style_name, entry.source, entry.note)
            row = rows.get(key) or PlanRow(
                pattern=pattern,
                style=entry.style_name,
                source=entry.source,
                note=entry.note,
                num_modules=0,
                num_parameters=0,
            )
            count = self.num_parameters[entry.name]
            rows[key] = replace(row, num_modules=row.num_modules + 1, num_parameters=row.num_parameters + count)
        return list(rows.values())

    def __str__(self) -> str:
        rows = self.rows()
        width = max((len(row.pattern) for row in rows), default=0)
        return "\n".join(f"{r.pattern:{width}}  {r.style:22}  {r.source:11}  {r.note}".rstrip() for r in rows)


def layers_joined(name: str) -> str:
    """The name with ``*`` for every number of a layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def build_tp_plan(
    module: nn.Module, user_plan: Mapping[str, str | ParallelStyle] | None, tensor_parallel_size: int
) -> TensorParallelPlan:
    """Decide for every module how tensor parallelism treats it.

    A pattern of ``user_plan`` is an FQN in which ``*`` stands for exactly one component (``blocks.*.attention.q``). It
    may leave out leading components: ``layers.*.self_attn.q_proj`` means every module whose FQN is that or *ends* with
    it at a dot. A full FQN without ``*`` goes before a pattern; two patterns that give one module different styles are
    refused. The user's styles go before Hugging Face's, module by module; ``"whole"`` keeps a module whole.

    Raises:
        ConfigurationError: if a pattern matches nothing, a style is unknown or does not fit its module, the degree does
            not divide features or heads, or tied weights would be split differently.
    """
    names = _Names(module)
    chosen = _huggingface_entries(module, names) | _user_entries(user_plan or {}, names)
    entries = tuple(_unless_empty(module, entry, tensor_parallel_size) for entry in _complete(module, chosen))
    entries = _share_heads(module, _keep_tied_together(module, entries), tensor_parallel_size)
    for entry in entries:
        _check_entry(module, entry, tensor_parallel_size)
    check_heads(module, {e.name: e.style_name for e in entries if not e.is_parameter}, tensor_parallel_size)
    counts = {entry.name: sum(p.numel() for p in _parameters_of(module, entry)) for entry in entries}
    return TensorParallelPlan(tensor_parallel_size=tensor_parallel_size, entries=entries, num_parameters=counts)


class _Names:
    """The names a pattern can mean: modules, and parameters."""

    def __init__(self, module: nn.Module) -> None:
        canonical = {id(child): name for name, child in module.named_modules()}
        #: every FQN of a module -> its first FQN (a shared module has several)
        self.modules = {name: canonical[id(child)] for name, child in module.named_modules(remove_duplicate=False)}
        self.modules.pop("", None)
        owners = [(name, child) for name, child in module.named_modules()]
        self.parameters = {
            f"{owner}.{name}" if owner else name for owner, child in owners for name in _own_parameters(child)
        }

    def matching(self, pattern: str, prefix: str | None = None) -> dict[str, bool]:
        """FQNs that ``pattern`` means -> whether each is a parameter. With ``prefix`` the pattern starts there."""
        body = r"[^.]+".join(re.escape(part) for part in pattern.split("*"))
        start = r"(?:.+\.)?" if prefix is None else re.escape(prefix + "." if prefix else "")
        matches = re.compile(start + body).fullmatch
        found = {canonical: False for name, canonical in self.modules.items() if matches(name)}
        return found or {name: True for name in sorted(self.parameters) if matches(name)}


def _user_entries(user_plan: Mapping[str, str | ParallelStyle], names: _Names) -> dict[str, PlanEntry]:
    entries: dict[str, PlanEntry] = {}
    said_by: dict[str, str] = {}
    exact_last = sorted(user_plan.items(), key=lambda item: item[0] in names.modules or item[0] in names.parameters)
    for pattern, style in exact_last:
        found = names.matching(pattern)
        if not found:
            raise ConfigurationError(_no_match(pattern, names))
        is_exact = pattern in found and "*" not in pattern
        style = _ALIASES.get(style, style) if isinstance(style, str) else style
        for name, is_parameter in found.items():
            if is_exact and name != pattern:
                continue
            if name in entries and entries[name].style != style and not is_exact:
                raise ConfigurationError(
                    f"tp_plan: {said_by[name]!r} and {pattern!r} give {name!r} two styles ({entries[name].style_name!r}"
                    f" and {style!r}). Make one of the patterns narrower, or add the full name {name!r}."
                )
            entries[name] = PlanEntry(name=name, style=style, source="user", is_parameter=is_parameter)
            said_by[name] = pattern
    return entries


def _no_match(pattern: str, names: _Names) -> str:
    known = sorted({layers_joined(name) for name in [*names.modules, *names.parameters]})
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    last = pattern.rpartition(".")[2]
    near += [name for name in known if name.rpartition(".")[2] == last and name not in near][:3]
    hint = f"Near names: {', '.join(near)}." if near else f"The model has for example: {', '.join(known[:6])}."
    return f"tp_plan: {pattern!r} matches no module and no parameter ('*' stands for one component of a name). {hint}"


def _huggingface_entries(module: nn.Module, names: _Names) -> dict[str, PlanEntry]:
    entries: dict[str, PlanEntry] = {}
    for prefix, model in pretrained_models(module):
        for pattern, style in (getattr(model, "_tp_plan", None) or {}).items():
            for name, is_parameter in names.matching(pattern, prefix).items():
                style = _ALIASES.get(style, style)
                # Outer models come first and already contain their children's plans.
                entry = PlanEntry(name=name, style=style, source="huggingface", is_parameter=is_parameter)
                entries.setdefault(name, entry)
    return entries


def _complete(module: nn.Module, chosen: Mapping[str, PlanEntry]) -> tuple[PlanEntry, ...]:
    """Add an entry for every module that owns parameters and that nobody named; put all in the model's order."""
    entries: list[PlanEntry] = []
    for name, child in module.named_modules():
        own = [f"{name}.{parameter}" if name else parameter for parameter in _own_parameters(child)]
        entries += [replace(chosen[parameter], parameters=(parameter,)) for parameter in own if parameter in chosen]
        rest = tuple(parameter for parameter in own if parameter not in chosen)
        if name in chosen:
            entries.append(replace(_finished(chosen[name], child), parameters=rest))
        elif rest:
            entries.append(PlanEntry(name=name, style=WHOLE, source="none", note=_why_whole(child), parameters=rest))
    return tuple(entries)


def _finished(entry: PlanEntry, child: nn.Module) -> PlanEntry:
    """Complete an entry; a container (attention, a block) is no target of a style that splits parameters."""
    if entry.style in STYLES and entry.style != WHOLE and not _own_parameters(child):
        inside = [name for name, inner in child.named_modules() if isinstance(inner, nn.Linear)][:4]
        raise ConfigurationError(
            f"tp_plan: {entry.name!r} is a {type(child).__name__} without parameters of its own, so there is nothing to"
            f" split by {entry.style_name!r}; name the layers inside"
            + (f", such as {', '.join(f'{entry.name}.{name}' for name in inside)}." if inside else ".")
        )
    return entry


def _why_whole(child: nn.Module) -> str:
    if any(isinstance(parameter, DTensor) for parameter in child.parameters(recurse=False)):
        return "already distributed by configure_model"
    if all(parameter.ndim < 2 for parameter in child.parameters(recurse=False)):
        return SMALL
    if (style := _tied_style(child)) is not None:
        return f'named by no plan; "{style}" in tp_plan splits it'
    return "named by no plan" if is_linear(child) else "named by no plan; without one only linear layers are split"


def _unless_empty(module: nn.Module, entry: PlanEntry, size: int) -> PlanEntry:
    """Keep whole what is so small that the last rank would hold nothing of it, which ``fully_shard`` cannot handle."""
    if entry.style not in _UNEVEN or entry.is_parameter:
        return entry
    child = module.get_submodule(entry.name)
    number: int = getattr(child, _UNEVEN[entry.style], 0)
    start, end = share_bounds(number, size, size - 1)
    if number == 0 or start < end:
        return entry
    return replace(
        entry, style=WHOLE, note=f"{_UNEVEN[entry.style]}={number} would leave rank {size - 1} of {size} without any"
    )


def _keep_tied_together(module: nn.Module, entries: tuple[PlanEntry, ...]) -> tuple[PlanEntry, ...]:
    """Give modules that share a weight one way of splitting it, or refuse."""
    owners: dict[int, list[PlanEntry]] = {}
    for entry in entries:
        for parameter in _parameters_of(module, entry):
            owners.setdefault(id(parameter), []).append(entry)
    changed: dict[str, PlanEntry] = {}
    for group in owners.values():
        leaders = [entry for entry in group if _is_split_by_rows(entry)]
        for entry in group if len(group) > 1 else ():
            if not any(other.is_split for other in group) or _is_split_by_rows(entry):
                continue
            style = _tied_style(module.get_submodule(entry.name)) if leaders and not entry.is_parameter else None
            if entry.is_split or style is None or entry.source == "user":
                said = ", ".join(f"{other.name}: {other.style_name}" for other in group)
                raise ConfigurationError(
                    f"One weight is shared by modules that would split it differently ({said}). Give all of them styles"
                    ' that split its rows ("embedding_rowwise", "colwise_gather_output"), or all "whole", in tp_plan.'
                )
            note = f"shares its weight with {leaders[0].name}"
            changed[entry.name] = replace(entry, style=style, source="tied", note=note)
    return tuple(changed.get(entry.name, entry) for entry in entries)


def _share_heads(module: nn.Module, entries: tuple[PlanEntry, ...], size: int) -> tuple[PlanEntry, ...]:
    """Where keys and values have fewer heads than ranks, several ranks use each head: see :func:`shared_heads`."""
    owners: dict[str, dict[str, int]] = {}
    for entry in entries:
        if entry.style == "colwise" and not entry.is_parameter and is_linear(module.get_submodule(entry.name)):
            owner, width = entry.name.rpartition(".")[0], features_of(module.get_submodule(entry.name))[0]
            owners.setdefault(owner, {})[entry.name] = width
    changed: dict[str, PlanEntry] = {}
    for owner, linears in owners.items():
        shared, known = shared_heads(module.get_submodule(owner), linears, size), {e.name: e for e in entries}
        changed |= {name: replace(known[name], style="colwise_shared", parts=rows) for name, rows in shared.items()}
        numbers = shared_groups(module.get_submodule(owner), size) if shared else ()
        if numbers and owner not in known:
            source = known[next(iter(shared))].source
            changed[owner] = PlanEntry(name=owner, style="local_numbers", source=source, numbers=numbers)
    found = [changed.pop(entry.name, entry) for entry in entries]
    return (*found, *changed.values())


def _is_split_by_rows(entry: PlanEntry) -> bool:
    return entry.style in ("colwise", "colwise_gather_output", "embedding_rowwise")


def _tied_style(child: nn.Module) -> str | None:
    """The style that splits a module's weight by rows and yields whole outputs, if it has one."""
    if isinstance(child, nn.Embedding):
        return "embedding_rowwise"
    return "colwise_gather_output" if isinstance(child, nn.Linear) else None


def _own_parameters(child: nn.Module) -> list[str]:
    return [name for name, parameter in child._parameters.items() if parameter is not None]


def _parameters_of(module: nn.Module, entry: PlanEntry) -> list[nn.Parameter]:
    return [module.get_parameter(name) for name in entry.parameters]


def _check_entry(module: nn.Module, entry: PlanEntry, size: int) -> None:
    """Refuse a style that is unknown, does not fit its module, or whose features the degree does not divide."""
    if not isinstance(entry.style, str) or entry.style == WHOLE:
        return
    if entry.style not in STYLES:
        return _check_transformers_style(entry)
    if entry.style in _FOUND and not (entry.parts or entry.numbers):
        raise ConfigurationError(
            f"tp_plan: {entry.name!r} is given {entry.style_name!r}, which is found by trying, for blocks that tp_plan"
            " does not name; leave the block out of tp_plan."
        )
    if entry.is_parameter:
        return _check_bare_parameter(entry, module.get_parameter(entry.name), size)
    child = module.get_submodule(entry.name)
    if entry.style.startswith("embedding"):
        _check_embedding(entry, child, size)
    elif entry.style.startswith(("colwise", "rowwise")):
        _check_linear(entry, child, size)


def _check_transformers_style(entry: PlanEntry) -> None:
    known = transformers_styles()
    if entry.style_name not in known:
        named = [style for style in STYLES if style not in _FOUND]
        near = difflib.get_close_matches(entry.style_name, [*named, *known], n=2)
        raise ConfigurationError(
            f"tp_plan: {entry.name!r} has the unknown style {entry.style_name!r};"
            + (f" did you mean {' or '.join(map(repr, near))}?" if near else "")
            + f" Use one of {', '.join(named)}"
            + (", or a style of transformers." if known else ".")
        )


def _check_bare_parameter(entry: PlanEntry, parameter: nn.Parameter, size: int) -> None:
    placement = placement_of(entry.style_name, "", parameter.ndim)
    if placement is None:
        return
    number = parameter.shape[placement.dim]
    if number % size:
        raise ConfigurationError(_does_not_divide(entry, f"dimension {placement.dim}", number, size))


def _check_linear(entry: PlanEntry, child: nn.Module, size: int) -> None:
    weight = getattr(child, "weight", None)
    features = features_of(child)
    is_fit = isinstance(weight, nn.Parameter) and tuple(weight.shape) in (features, features[::-1])
    if not is_fit or 0 in features:
        raise ConfigurationError(
            f"tp_plan: {entry.style_name!r} splits linear layers (a weight of out_features x in_features), but"
            f' {entry.name!r} is a {type(child).__name__}; use "whole" for it.'
        )
    dim, word = (0, "out_features") if entry.style_name.startswith("colwise") else (1, "in_features")
    if features[dim] % size and entry.style not in _UNEVEN:
        raise ConfigurationError(_does_not_divide(entry, word, features[dim], size))


def _check_embedding(entry: PlanEntry, child: nn.Module, size: int) -> None:
    if not isinstance(child, nn.Embedding):
        raise ConfigurationError(
            f"tp_plan: {entry.style_name!r} splits nn.Embedding, but {entry.name!r} is a {type(child).__name__};"
            ' use "whole" for it.'
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if value := getattr(child, option):
            raise ConfigurationError(
                f"tp_plan: {entry.name!r} is an embedding with {option}={value}, which needs all of its rows in one"
                f' place, so it cannot be {entry.style_name!r}; use "whole" for it.'
            )


def _does_not_divide(entry: PlanEntry, word: str, number: int, size: int) -> str:
    fits = ", ".join(str(n) for n in range(1, size + 1) if number % n == 0)
    return (
        f"tensor_parallel_size={size} does not divide {word}={number} of {entry.name!r} ({entry.style_name});"
        f' use tensor_parallel_size={fits}, or keep it (and what belongs to it) "whole" in tp_plan.'
    )
