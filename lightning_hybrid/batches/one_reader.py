"""One rank of a data coordinate reads its loaders for all ranks that share its batches (``load_once=True``).

The ranks of a pipeline and of its tensor groups work on the same batches. Where they are many, each of them reading
means as many processes that tokenize or decode the same samples. Here the rank of the last stage (tensor rank 0) reads,
and the others get each batch from it, whatever their part of the step needs of it: hooks and callbacks see the same on
all ranks. Reading draws random numbers too (shuffling, augmentation in the main process), so the state in which it left
the generators travels along.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_hybrid.batches.randomness import random_state, restore_random_state
from lightning_hybrid.batches.structure import map_leaves
from lightning_hybrid.errors import ConfigurationError, HybridError
from lightning_hybrid.mesh import axis_group

__all__ = ["OneReader", "SharedIterator"]


class OneReader:
    """Knows which rank of this data coordinate reads, and gets what it has read to the others."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Messages go through ``device``, along the pipeline to tensor ranks 0, and from each to its tensor group."""
        self._device = device
        self._pipeline, self._tensor = (axis_group(mesh, name) for name in ("pipeline_parallel", "tensor_parallel"))
        self._is_first_tensor_rank = dist.get_rank(self._tensor) == 0
        self.reads = self._is_first_tensor_rank and dist.get_rank(self._pipeline) == 0
        """Whether it is this rank."""

    def share(self, read: Callable[[], Any]) -> Any:
        """Return on all ranks of the data coordinate what ``read()`` returns on the reading one. A collective.

        Raises:
            StopIteration: on all ranks, if the reader's ``read()`` does.
            Exception: on the reader whatever ``read()`` raises, or that a batch cannot be pickled.
            HybridError: on the other ranks then, with its text.
        """
        item, parcel = None, torch.empty(0, dtype=torch.uint8)
        failure: Exception | None = None
        if self.reads:
            try:
                item = read()
                parcel = _packed("item", item)
            except StopIteration as end:
                failure, parcel = end, _packed("end", None)
            except Exception as error:
                text = f"rank {dist.get_rank()}, which reads for all of its data coordinate (load_once=True), failed:"
                failure, parcel = error, _packed("error", f"{text} {type(error).__name__}: {error}")
        if self._is_first_tensor_rank:
            parcel = self._broadcast(parcel, self._pipeline)
        parcel = self._broadcast(parcel, self._tensor)
        if failure is not None:
            raise failure
        return item if self.reads else _unpacked(parcel)

    def _broadcast(self, parcel: Tensor, group: dist.ProcessGroup) -> Tensor:
        if dist.get_world_size(group) == 1:
            return parcel
        size = torch.tensor([parcel.numel()], device=self._device)
        dist.broadcast(size, group=group, group_src=0)
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        if dist.get_rank(group) == 0:
            data.copy_(parcel)
        dist.broadcast(data, group=group, group_src=0)
        return data.cpu()


class SharedIterator:
    """An iterator over what the reading rank's iterator gives. To be made, and asked, on all ranks alike."""

    def __init__(self, reader: OneReader, make: Callable[[], Iterator[Any]]) -> None:
        """``make`` is called on the reading rank only: no workers are started on the others."""
        self._reader, self._make = reader, make
        self._iterator: Iterator[Any] = iter(())
        reader.share(self._start)

    def _start(self) -> None:
        self._iterator = self._make()

    def __iter__(self) -> SharedIterator:
        return self

    def __next__(self) -> Any:
        return self._reader.share(lambda: next(self._iterator))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _packed(kind: str, value: Any) -> Tensor:
    """Bytes of a message, and of the random state that reading has left.

    Raises:
        ConfigurationError: if the value cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save((kind, map_leaves(lambda _, leaf: _without_rest(leaf), value), random_state()), buffer)
    except Exception as error:
        raise ConfigurationError(
            f"A batch ({type(value).__name__}) cannot be sent to other ranks, as load_once=True does: {error}. Have the"
            " collate function return what can be pickled, or use load_once=False."
        ) from error
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _without_rest(leaf: Any) -> Any:
    """A view of a large tensor (a row of the data set) would be pickled with all of it."""
    is_plain = isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested
    return leaf.clone() if is_plain and leaf.untyped_storage().nbytes() > leaf.nbytes else leaf


def _unpacked(parcel: Tensor) -> Any:
    kind, value, state = torch.load(io.BytesIO(parcel.numpy().tobytes()), weights_only=False)
    if kind == "error":
        raise HybridError(f"A data loader's {value}")
    restore_random_state(state)
    if kind == "end":
        raise StopIteration
    return value
