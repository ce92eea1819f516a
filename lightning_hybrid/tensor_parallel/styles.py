"""The styles: how a split module's parameters are placed, and what its forward does around the module's own.

Parameters are DTensors on the tensor axis (so ``fully_shard``, optimizers and checkpoints know what they are); the
arithmetic runs on local tensors with explicit exchanges (:mod:`collectives`), which is as fast as hand-written code
and leaves plain tensors before and after each module. A split module keeps its own ``forward``: it sees its local
weights, so subclasses of ``nn.Linear`` and ``nn.Embedding`` work too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_hybrid.batches.randomness import SHARES
from lightning_hybrid.tensor_parallel.attention import attend
from lightning_hybrid.tensor_parallel.collectives import (
    JoinedRows,
    enter_split,
    join_shares,
    keep_share,
    leave_partial,
    scatter_partial,
    share_bounds,
)
from lightning_hybrid.tensor_parallel.linears import features_of, is_transposed, product
from lightning_hybrid.tensor_parallel.sequence import Sequence, Sides
from lightning_hybrid.tensor_parallel.sharded_logits import ShardedLogits

__all__ = [
    "NOTHING_BY_HEAD",
    "ByHead",
    "SplitStyle",
    "is_split",
    "join_late",
    "joined_rows",
    "placement_of",
    "rows_of",
    "split_module",
    "transformers_styles",
]

Forward = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ByHead:
    """Tensors ``[1 or batch, heads, ...]`` that an attention gets or gives, such as a position bias."""

    arguments: tuple[int | str, ...] = ()
    """Positions or names."""
    results: tuple[int, ...] = ()
    """Positions in the tuple that it returns."""


def placement_of(style: str, parameter_name: str, num_dims: int, *, transposed: bool = False) -> Shard | None:
    """Return along which dimension a style splits a parameter; None where every rank keeps all of it.

    A bare parameter (expert weights ``[experts, out, in]``, attention sinks ``[heads]``) is split like a weight.
    ``transposed``: the weight is ``[in, out]``.
    """
    if style == "embedding_rowwise":
        return Shard(0)
    if style in ("embedding_colwise", "embedding_by_head"):
        return Shard(1)
    if style == "colwise_shared":
        return None
    if transposed and num_dims == 2:
        style = "rowwise" if style.startswith("colwise") else "colwise"
    if style == "attention":  # nn.MultiheadAttention's own parameters
        return Shard(0) if parameter_name.startswith("in_proj") else None
    if style.startswith("colwise"):
        return Shard(max(num_dims - 2, 0))
    if style.startswith("rowwise") and parameter_name != "bias":  # the bias is added once, to the summed output
        return Shard(num_dims - 1)
    return None


def transformers_styles() -> Mapping[str, Any]:
    """Return transformers' own styles by name (mixtures of experts, ...); empty without a recent transformers."""
    try:
        styles: Mapping[str, Any] = import_module("transformers.distributed.tensor_parallel").ALL_PARALLEL_STYLES
    except ImportError:
        return {}
    return styles


NOTHING_BY_HEAD = ByHead()


@dataclass(frozen=True, kw_only=True)
class SplitStyle:
    """One split module's style on its mesh; :meth:`run` is its forward."""

    style: str
    mesh: DeviceMesh
    """The 1-D tensor axis."""
    joins_late: bool = False
    """Whether outputs that are to be joined stay split until something other than a cross entropy needs them."""
    parts: tuple[int, ...] = ()
    """Rows of each of the projections that the module's weight joins, if it joins several."""
    stand_ins: tuple[int | str, ...] = ()
    """For ``local_numbers``: arguments of which the module's code sees the share's shape."""
    by_head: ByHead = NOTHING_BY_HEAD
    """For ``local_numbers``: what is handed in or out for each head."""
    sides: Sides | None = None
    """What is done besides while the module's block works on a share of the sequence."""
    sequence: Sequence | None = None
    """The block's."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the module."""
        return self.mesh.get_group()

    def run(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's own ``forward`` on this rank's share."""
        if is_transposed(module):
            forward = functools.partial(product, module)
        method, sequence, sides = _RUN[self.style], self.sequence, self.sides
        if sequence is None or sides is None or not sequence.is_open:
            return method(self, module, forward, *args, **kwargs)
        args, kwargs = sequence.gather(args, kwargs, sides)
        output = method(self, module, forward, *args, **kwargs)
        return sequence.keep(output, sides.dim) if sides.output == "keep" else output

    @property
    def _is_on_sequence(self) -> bool:
        """Whether the module's block works on a share of the sequence now."""
        return self.sequence is not None and self.sequence.is_open

    def whole(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """As it is."""
        return forward(*args, **kwargs)

    def colwise(self, module: nn.Module, forward: Forward, x: Tensor) -> Tensor:
        """Whole input, split output, for which each rank draws its own random numbers."""
        out = self._split_output(module, forward, x)
        SHARES.open(self.mesh.get_local_rank(), x.device)
        return out

    def _split_output(self, module: nn.Module, forward: Forward, x: Tensor) -> Tensor:
        x = getattr(x, "_hybrid_whole", x)  # of a stand-in
        with _local_parameters(module):
            out: Tensor = forward(enter_split(x, self.group))
        return out

    def colwise_gather_output(self, module: nn.Module, forward: Forward, x: Tensor) -> Tensor:
        """Whole input, output joined to the layer's full width."""
        width = features_of(module)[0]
        out = self._split_output(module, forward, x)
        return ShardedLogits(out, width, self.group) if self.joins_late else join_shares(out, width, self.group)

    def colwise_shared(self, module: nn.Module, forward: Forward, x: Tensor) -> Tensor:
        """Whole input, output of the one head (of ``parts``) that this rank's query heads attend to.

        Every rank holds the whole weight, and several ranks use each head: gradients are summed over ranks.
        """
        rank, rows = self.mesh.get_local_rank(), self.parts[0]
        start = rank * len(self.parts) // self.mesh.size() * rows
        mine: dict[str, Tensor | None] = {}
        for name, parameter in module._parameters.items():
            dim = 1 if is_transposed(module) and name == "weight" else 0
            mine[name] = None if parameter is None else enter_split(parameter, self.group).narrow(dim, start, rows)
        x = getattr(x, "_hybrid_whole", x)
        with _substituted(module, mine):
            out: Tensor = forward(enter_split(x, self.group))
        SHARES.open(rank, x.device)
        return out

    def rowwise(self, module: nn.Module, forward: Forward, x: Tensor) -> Tensor:
        """Split input, whole output (or its share of the sequence): partial products summed, then the bias."""
        scatters = self._is_on_sequence and self.sides is not None and self.sides.output == "scatter"
        if not self._is_on_sequence:
            SHARES.close()
        with _local_parameters(module, without_bias=True) as bias:
            out = forward(x)
        if scatters and self.sides is not None:
            out = scatter_partial(out, self.group, self.sides.dim)
            bias = None if bias is None else enter_split(bias, self.group)  # it meets this rank's tokens only
        else:
            out = leave_partial(out, self.group)
        # Under autocast the product is bf16 and the bias fp32, and one process returns bf16.
        return out if bias is None else out + bias.to(out.dtype)

    def rowwise_split_input(self, module: nn.Module, forward: Forward, x: Tensor) -> Tensor:
        """Whole input, of which this rank takes its share; whole output."""
        return self.rowwise(module, forward, keep_share(x, self.group))

    def embedding_rowwise(self, module: nn.Embedding, forward: Forward, ids: Tensor) -> Tensor:
        """Each rank looks up the ids of its part of the vocabulary; the others contribute zero."""
        start, end = share_bounds(module.num_embeddings, self.mesh.size(), self.mesh.get_local_rank())
        elsewhere = (ids < start) | (ids >= end)
        local_ids = (ids - start).masked_fill(elsewhere, 0)
        padding = module.padding_idx
        module.padding_idx = padding - start if padding is not None and start <= padding < end else None
        try:
            with _local_parameters(module):
                out: Tensor = forward(local_ids)
        finally:
            module.padding_idx = padding
        return leave_partial(out.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)

    def embedding_colwise(self, module: nn.Embedding, forward: Forward, ids: Tensor) -> Tensor:
        """Each rank looks up its share of the features of every id."""
        with _local_parameters(module):
            return join_shares(forward(ids), module.embedding_dim, self.group)

    def embedding_by_head(self, module: nn.Embedding, forward: Forward, ids: Tensor) -> Tensor:
        """Each rank looks up the features of its own heads, and only those."""
        with _local_parameters(module):
            out: Tensor = forward(ids)
        return out

    def attention(self, module: nn.MultiheadAttention, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """This rank's heads, with torch's in_proj; out_proj is a row-wise linear of its own."""
        with _local_parameters(module):
            return attend(module, self.group, *args, **kwargs)

    def local_numbers(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Code that takes head sizes from its input's width sees this rank's width: see the note in :mod:`infer`."""
        cut: dict[int, Tensor] = {}  # by the id of a share, which lives until the end of this call
        shown = tuple(self._shown(i, x, cut) for i, x in enumerate(args))
        named = {name: self._shown(name, x, cut) for name, x in kwargs.items()}
        results = forward(*shown, **named)
        if not self.by_head.results or not isinstance(results, tuple):
            return results
        return tuple(self._joined(x, cut) if i in self.by_head.results else x for i, x in enumerate(results))

    def _shown(self, key: int | str, x: Any, cut: dict[int, Tensor]) -> Any:
        """What the module's code sees of an argument; what is cut to this rank's heads is remembered in ``cut``."""
        if key in self.by_head.arguments and isinstance(x, Tensor):
            share = keep_share(x.movedim(1, -1), self.group).movedim(-1, 1)
            cut[id(share)] = x
            return share
        return self._stand_in(x) if key in self.stand_ins else x

    def _joined(self, x: Any, cut: Mapping[int, Tensor]) -> Any:
        """A result of all heads: as it came in, or put together."""
        if not isinstance(x, Tensor) or id(x) in cut:
            return cut.get(id(x), x)
        return join_shares(x.movedim(1, -1), x.shape[1] * self.mesh.size(), self.group).movedim(-1, 1)

    def _stand_in(self, x: Any) -> Any:
        """A tensor of the share's shape without values, by which column-wise linears know the whole one."""
        if not isinstance(x, Tensor):
            return x
        shown = x.new_zeros(()).expand(*x.shape[:-1], x.shape[-1] // self.mesh.size())
        shown._hybrid_whole = x  # type: ignore[attr-defined]
        return shown

    def replicated_with_grad_allreduce(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Whole parameters applied to split features (a norm over each head): their gradients are summed over ranks.

        At each use, not on ``.grad``: what accumulated from earlier micro-batches must not be summed again.
        """
        entered = {k: enter_split(p, self.group) for k, p in module._parameters.items() if p is not None}
        with _substituted(module, entered):
            return forward(*args, **kwargs)


_RUN: Mapping[str, Callable[..., Any]] = {
    name: getattr(SplitStyle, name)
    for name in (
        "whole",
        "colwise",
        "colwise_gather_output",
        "colwise_shared",
        "rowwise",
        "rowwise_split_input",
        "embedding_rowwise",
        "embedding_colwise",
        "embedding_by_head",
        "attention",
        "local_numbers",
        "replicated_with_grad_allreduce",
    )
}


@contextmanager
def _substituted(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Let the module's forward see other tensors in place of its parameters."""
    originals = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(originals)


@contextmanager
def _local_parameters(module: nn.Module, *, without_bias: bool = False) -> Iterator[Tensor | None]:
    """Let the module's forward see this rank's shares; optionally without its bias, which is handed out."""
    bias = module._parameters.get("bias") if without_bias else None
    parameters: dict[str, Any] = dict(
        module._parameters
    )  # nn.Parameters that are DTensors too: more than types can say
    local: dict[str, Tensor | None] = {k: p.to_local() for k, p in parameters.items() if isinstance(p, DTensor)}
    if bias is not None:
        local["bias"] = None
    with _substituted(module, local):
        yield bias


class _Split(nn.Module):
    """Mixed into a split module's class, as ``fully_shard`` does: names and ``isinstance`` stay, the repr tells."""

    _tensor_parallel: SplitStyle

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._tensor_parallel.run(self, super().forward, args, kwargs)


def split_module(module: nn.Module, style: SplitStyle) -> None:
    """Make ``module`` run split, in place. Its parameters must already hold this rank's shares."""
    cls = type(module)
    module.__class__ = type(f"TensorParallel{cls.__name__}", (_Split, cls), {"__module__": cls.__module__})
    module._tensor_parallel = style  # type: ignore[assignment]


def join_late(module: nn.Module) -> None:
    """Have outputs that would be joined (a head's logits) stay split until they must be."""
    for part in module.modules():
        style = getattr(part, "_tensor_parallel", None)
        if isinstance(style, SplitStyle) and style.style == "colwise_gather_output":
            part._tensor_parallel = replace(style, joins_late=True)  # type: ignore[assignment]


def is_split(module: nn.Module) -> bool:
    """Whether :func:`split_module` was called with the module."""
    return isinstance(module, _Split)


def rows_of(module: nn.Module, name: str) -> JoinedRows | None:
    """Return the order in which a module's own parameter keeps its rows, if it is not that of one process."""
    style: SplitStyle | None = getattr(module, "_tensor_parallel", None)
    parameter: Any = module._parameters.get(name)
    if style is None or not style.parts or not isinstance(parameter, DTensor):
        return None
    dim = 1 if is_transposed(module) and parameter.ndim == 2 else 0
    return JoinedRows(parts=style.parts, num_shares=style.mesh.size(), dim=dim)


def joined_rows(module: nn.Module) -> dict[str, JoinedRows]:
    """Return :func:`rows_of` for every parameter inside that has one, by FQN."""
    return {
        f"{prefix}.{name}" if prefix else name: rows
        for prefix, child in module.named_modules()
        for name in child._parameters
        if (rows := rows_of(child, name)) is not None
    }
