"""Sequence parallelism: between split layers each tensor rank works on its share of the tokens.

[Note: where the sequence is split]
Norms, dropout and residual additions do the same to every token. With tensor parallelism alone all tensor ranks do that
work on all tokens, and keep all of it for the backward. Here a block's hidden states are split along the sequence when
they enter it; a split layer's input is joined where it is needed whole, and a row-wise layer's sum is scattered instead
of kept everywhere, which together move as many bytes as the sums they replace (Korthikanti et al., arXiv:2205.05198,
section 4.2.2).

A block's output is a :class:`SequenceShare`: it has the whole's shape, and the next block takes the share from it. Any
other code that looks at it gets the joined tensor. A block is split so only if trying shows that it computes the same
(:mod:`infer_sequence`).

[Note: three layers of a call]
The share travels as a :class:`_Carried`, a node of torch's pytrees, through the block's hooks (``fully_shard`` wants to
find plain tensors in arguments) and through recomputation; :meth:`Sequence.call` around all of them turns hidden states
into one and back, :meth:`Sequence.inside` right around the block's own ``forward`` unpacks it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_map_only, tree_unflatten

from lightning_hybrid.batches.randomness import SHARES
from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.tensor_parallel.collectives import gather_tokens, join_shares, keep_share
from lightning_hybrid.tensor_parallel.joined_late import JoinedLate, joined

__all__ = ["Region", "Sequence", "SequenceShare", "Sides", "call_whole", "intercept", "sequence_of"]


@dataclass(frozen=True, kw_only=True)
class Region:
    """Where a block's hidden states come in and go out."""

    argument: int | str
    """Which argument they are."""
    output: int
    """Which of the tensors that the block returns they are."""
    dim: int
    """The dimension that is split."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What a module inside such a block does to cross from shares of the sequence to all of it, and back."""

    arguments: tuple[int | str, ...] = ()
    """Arguments that are joined."""
    are_summed: bool = True
    """Whether gradients of what was joined are each rank's part (it enters split layers only)."""
    output: Literal["", "scatter", "keep"] = ""
    """Whether a row-wise layer's sum is scattered, or a whole output's share kept."""
    dim: int = 0
    """The dimension of the output that is split."""


class SequenceShare(JoinedLate):
    """Hidden states of which this rank holds some of the tokens."""

    what = "a block's output, which is split over the sequence (sequence_parallel=True),"
    remedy = "sequence_parallel=False"


@dataclass(kw_only=True)
class _Carried:
    """A share on its way through a block's hooks."""

    local: Tensor
    size: int

    def __getattr__(self, name: str) -> Any:
        """What a hook on the block asks of its hidden states."""
        raise _HookedError(_HOOKED)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedError(_HOOKED)


class _HookedError(UnsupportedError, AttributeError):
    """For ``hasattr``, by which torch looks for tensors, an attribute that is not there."""


_HOOKED = (
    "A hook on a block (or output_hidden_states=True of a Hugging Face model, which uses one) got hidden states that"
    " are split over the sequence. Take them from what the block returns, or use sequence_parallel=False."
)

register_pytree_node(
    _Carried,
    lambda carried: ([carried.local], carried.size),
    lambda found, size: _Carried(local=next(iter(found)), size=size),
)


class Sequence:
    """Splits the sequence for one block."""

    def __init__(self, region: Region, mesh: DeviceMesh) -> None:
        self.region, self._mesh = region, mesh
        self.is_active = False
        """Whether the block's layers are split; before, it is called as it is."""
        self.is_open = False
        """Whether the block's forward is running on a share."""
        self._size = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Sequence:
        """Of a copied block, whose sequence stays whole."""
        memo[id(self)] = copied = Sequence(self.region, self._mesh)
        return copied

    def split(self, block: nn.Module) -> None:
        """From now on the block works on shares; its layers must be split."""
        _override(block, "forward", self.inside)
        self.is_active = True

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the sequence."""
        return self._mesh.get_group()

    def call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Around a call of the block."""
        if not self.is_active:
            return call(*args, **kwargs)
        where = self.region.argument
        given = kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
        if not isinstance(given, Tensor) or given.dim() <= self.region.dim + 1:
            raise UnsupportedError(
                f"A block got {type(given).__name__} as argument {where!r}, where the first batch had hidden states to"
                " split over the sequence. Call blocks alike in all steps, or use sequence_parallel=False."
            )
        carried = self._split(given)
        if isinstance(where, str):
            kwargs = {**kwargs, where: carried}
        else:
            args = (*args[:where], carried, *args[where + 1 :])
        return tree_map_only(_Carried, self._leave, call(*args, **kwargs), is_leaf=lambda x: isinstance(x, _Carried))

    def _split(self, given: Tensor) -> _Carried:
        dim, size = self.region.dim, given.shape[self.region.dim]
        if isinstance(given, SequenceShare) and given._dim == dim and (share := given.share) is not None:
            return _Carried(local=share, size=size)
        whole = given.join() if isinstance(given, JoinedLate) else given
        return _Carried(local=keep_share(whole, self.group, dim), size=size)

    def _leave(self, carried: _Carried) -> SequenceShare:
        return SequenceShare(carried.local, carried.size, self.group, self.region.dim)

    def inside(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Around the block's own forward, each time it runs."""
        flat, spec = tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, _Carried))
        carried = next((leaf for leaf in flat if isinstance(leaf, _Carried)), None)
        if carried is None:
            return forward(*args, **kwargs)
        args, kwargs = tree_unflatten([leaf.local if leaf is carried else leaf for leaf in flat], spec)
        self._size, self.is_open = carried.size, True
        SHARES.open(self._mesh.get_local_rank(), carried.local.device)
        try:
            output = forward(*args, **kwargs)
        finally:
            self.is_open = False
            SHARES.close()
        flat, spec = tree_flatten(output)
        place = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)][self.region.output]
        flat[place] = _Carried(local=flat[place], size=carried.size)
        return tree_unflatten(flat, spec)

    def gather(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sides: Sides
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Join the arguments of a module inside of the block that needs all of the sequence."""
        joined = tuple(self._whole(x, sides) if i in sides.arguments else x for i, x in enumerate(args))
        named = {name: self._whole(x, sides) if name in sides.arguments else x for name, x in kwargs.items()}
        return joined, named

    def _whole(self, x: Any, sides: Sides) -> Any:
        """The joined tensor, once for all modules that want it."""
        if not isinstance(x, Tensor):
            return x
        key = x._version, sides.are_summed
        found, whole = getattr(x, "_hybrid_sequence", (None, None))
        if found != key:
            join = gather_tokens if sides.are_summed else join_shares
            whole = join(x, self._size, self.group, self.region.dim)
            whole._hybrid_gathered = sides.are_summed  # type: ignore[attr-defined]
            if not x.is_leaf:  # remembered on a leaf, it would hold the leaf in a cycle
                x._hybrid_sequence = key, whole  # type: ignore[attr-defined]
        return whole

    def keep(self, output: Any, dim: int) -> Any:
        """Keep the share of the first tensor that a module returns."""
        flat, spec = tree_flatten(output)
        place = next(i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor))
        flat[place] = keep_share(flat[place], self.group, dim)
        return tree_unflatten(flat, spec)


def sequence_of(block: nn.Module, region: Region, mesh: DeviceMesh) -> Sequence:
    """Return what splits the block's sequence, made once."""
    sequence: Sequence = block.__dict__.setdefault("_sequence", Sequence(region, mesh))
    return sequence


def call_whole(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a block past a ``__call__`` of its class that only cuts stages or recomputes; its result is whole."""
    call = functools.partial(nn.Module.__call__, block)
    sequence: Sequence | None = block.__dict__.get("_sequence")
    return call(*args, **kwargs) if sequence is None else joined(sequence.call(call, args, kwargs))


def intercept(blocks: Collection[nn.Module], regions: Collection[Region], mesh: DeviceMesh) -> None:
    """Let calls of blocks go through their :meth:`Sequence.call`, which does nothing until they are split.

    To be called before anything else takes calls over that should see hidden states, not their shares.
    """
    for block, region in zip(blocks, regions, strict=True):
        _override(block, "__call__", sequence_of(block, region, mesh).call)


def _override(block: nn.Module, name: str, around: Callable[..., Any]) -> None:
    """Give one instance a class whose method goes through ``around``."""
    base: Any = type(block)

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        here = getattr(self.__dict__["_sequence"], around.__name__)
        return here(functools.partial(getattr(base, name), self), args, kwargs)

    namespace = {name: method, "__module__": base.__module__, "__qualname__": base.__qualname__}
    block.__class__ = type(base.__name__, (base,), namespace)
