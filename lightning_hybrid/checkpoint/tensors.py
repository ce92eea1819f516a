"""Tensors that stand for others in a checkpoint's dict, so that no rank need hold the whole model.

:class:`Share`
    while saving: the whole tensor's shape, and the parts of it that this rank writes.
:class:`Stored`
    while loading: the whole tensor in a directory, of which each rank reads its part. What hooks do with it
    (``state["head.weight"] * 2`` in ``on_load_checkpoint``) is done with the tensor read as a whole, also in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.errors import CheckpointError

__all__ = ["Elsewhere", "Piece", "Share", "Stored", "keep"]

#: Where a part begins in the whole tensor, along each dimension, and its values.
Piece = tuple[tuple[int, ...], Tensor]
#: Reads the box that begins at the given place and has the given size, into a tensor of this size if one is given.
Reader = Callable[[Sequence[int], Sequence[int], Tensor | None], Tensor]

_DESCRIBE = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.nbytes.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    Tensor.__hash__,
}
_KEEP = {Tensor.detach, Tensor.clone, Tensor.cpu, Tensor.contiguous}
_DEVICE, _IS_META = Tensor.device.__get__, Tensor.is_meta.__get__  # type: ignore[attr-defined]


class _StandIn(Tensor):
    """A tensor without memory of the shape and dtype of another."""

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """Make one; what it stands for is set afterwards."""
        return torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)

    @classmethod
    def _describe(cls, func: Any, args: Any) -> Any:
        """What the user may ask without the values; ``NotImplemented`` for everything else."""
        if func == _DEVICE:
            return torch.device("cpu")
        if func == _IS_META:
            return False
        if func not in _DESCRIBE:
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)


class Share(_StandIn):
    """The parts of a tensor that this rank writes; it may be moved around in the checkpoint, not computed with."""

    pieces: list[Piece]
    key: str | None
    """The tensor's name, where it is not the path at which it is found."""
    source: Tensor | None = None
    """This rank's tensor, of which the pieces are views; DTensors count the changes of their own, not of views."""

    @classmethod
    def make(
        cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece] = (), key: str | None = None
    ) -> Any:
        """Stand for a tensor of which this rank writes ``pieces`` (none, if others write all of it)."""
        share = cls.of(shape, dtype)
        share.pieces, share.key = list(pieces), key
        return share

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = cls._describe(func, args)
        if found is not NotImplemented:
            return found
        if func in _KEEP:  # common in hooks, and without effect on what is written
            return args[0]
        raise CheckpointError(
            f"{getattr(func, '__name__', func)} was called on a tensor of the checkpoint, of which this rank has a part"
            " only. While a sharded checkpoint is saved, on_save_checkpoint may pick, rename, add and remove entries,"
            " but not compute with weights. Do that where it is loaded (on_load_checkpoint), or use"
            " save_distributed_checkpoint=False."
        )


class Elsewhere(_StandIn):
    """A tensor that global rank 0 has: what is computed with it has shapes and no values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEEP:
            return args[0]
        try:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"{getattr(func, '__name__', func)} was called on a weight of the checkpoint on a rank that does not"
                " have it: a plain file is written from global rank 0's memory. In on_save_checkpoint, do what needs"
                f" values under `if self.trainer.is_global_zero`. ({error})"
            ) from error


def keep(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with shares whose values stay as they are now, whatever the module holds later."""
    kept: dict[int, Any] = {}
    for value in state.values():
        if isinstance(value, Share) and id(value) not in kept:
            pieces = [(start, piece.clone()) for start, piece in value.pieces]
            kept[id(value)] = Share.make(value.shape, value.dtype, pieces, value.key)
    return {key: kept.get(id(value), value) for key, value in state.items()}


class Stored(_StandIn):
    """A tensor in a directory. Boxes and rows are read when they are taken; anything else reads all of it."""

    read: Reader
    kept: Tensor | None = None
    """All of it, once somebody has a view of it or has changed it: what is loaded from then on."""

    @classmethod
    def make(cls, shape: Sequence[int], dtype: torch.dtype, read: Reader) -> Any:
        """Stand for a tensor whose boxes ``read`` reads."""
        stored = cls.of(shape, dtype)
        stored.read = read
        return stored

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], Stored) else None
        if first is not None and first.kept is None:
            found = cls._describe(func, args)
            if found is not NotImplemented:
                return found
            if func is Tensor.index_select and len(args) == 3 and args[2].numel():
                return first._rows(*args[1:])
        elif first is None and func is Tensor.copy_ and _is_alike(*args[:2]):
            args[1].read_into(args[0])
            return args[0]
        read: dict[int, tuple[Stored, Tensor]] = {}
        result = func(*_read_all(args, read), **_read_all(kwargs or {}, read))
        for stored, values in read.values():
            if not _is_apart(result, values):
                stored.kept = values
        return result

    def box(self, slices: Sequence[slice]) -> Tensor:
        """Return a part, in memory that nobody else has."""
        return self._box(slices) if self.kept is None else self.kept[tuple(slices)].clone()

    def read_into(self, tensor: Tensor, slices: Sequence[slice] = ()) -> None:
        """Read a box (by default all of it) into a tensor of its size, without a copy in between."""
        with torch.no_grad():
            if self.kept is None:
                self._box(slices, tensor.detach())
            else:
                tensor.copy_(self.kept[tuple(slices)])

    def whole(self) -> Tensor:
        """Return all of it."""
        return self._box(()) if self.kept is None else self.kept

    def _rows(self, dim: int, index: Tensor) -> Tensor:
        first, last = int(index.min()), int(index.max())
        dim = range(self.ndim)[dim]
        return self._box((slice(None),) * dim + (slice(first, last + 1),)).index_select(dim, index - first)

    def _box(self, slices: Sequence[slice], into: Tensor | None = None) -> Tensor:
        bounds = [part.indices(size) for part, size in zip(slices, self.shape, strict=False)]
        bounds += [(0, size, 1) for size in self.shape[len(bounds) :]]
        return self.read([start for start, *_ in bounds], [max(0, end - start) for start, end, _ in bounds], into)


def _is_alike(tensor: Tensor, other: Any = None) -> bool:
    return isinstance(other, Stored) and tensor.shape == other.shape


def _is_apart(result: Any, values: Tensor) -> bool:
    """Whether nobody has got hold of values, or changed them: only then the next one may read them anew."""
    if isinstance(result, Tensor):
        is_plain = result.layout == torch.strided
        return not is_plain or result.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()
    if isinstance(result, (list, tuple)):
        return all(_is_apart(item, values) for item in result)
    return isinstance(result, (bool, float, complex, str))  # not None, of operations in place; nor data_ptr()


def _read_all(value: Any, read: dict[int, tuple[Stored, Tensor]]) -> Any:
    if isinstance(value, Stored):
        return read.setdefault(id(value), (value, value.whole()))[1]
    if isinstance(value, (list, tuple)):
        return type(value)(_read_all(item, read) for item in value)
    if isinstance(value, dict):
        return {key: _read_all(item, read) for key, item in value.items()}
    return value
