"""What torch.distributed.checkpoint (DCP) writes and reads: the parts of tensors that stand for others.

DCP's own planner asks a DTensor for its one box. A share may be several (rows of a joined projection), and DTensor's
arithmetic of uneven shards is not ours (see the note in :mod:`lightning_hybrid.checkpoint.shares`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_hybrid.checkpoint.format import METADATA, nested
from lightning_hybrid.checkpoint.tensors import Share, Stored
from lightning_hybrid.errors import CheckpointError

__all__ = ["SharePlanner", "StoredTensors"]


class SharePlanner(DefaultSavePlanner):
    """Writes the pieces of shares, each where the state dict says so.

    Args:
        wanted: on the first rank, the names of all tensors that the checkpoint will refer to.
    """

    def __init__(self, wanted: Collection[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._wanted = set(wanted)

    def create_local_plan(self) -> SavePlan:
        """One item for each piece; shares that other ranks write have none."""
        items = [_item(key, share, piece) for key, share in self.state_dict.items() for piece in share.pieces]
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP's own, which sees that parts make up the whole; and all that is referred to must come.

        Raises:
            CheckpointError: DCP makes it a failure of all ranks.
        """
        found = {item.index.fqn for plan in all_plans for item in plan.items}
        if found != self._wanted:
            lost, more = sorted(self._wanted - found), sorted(found - self._wanted)
            raise CheckpointError(
                f"The ranks do not have the same checkpoint: nobody writes {lost[:5]}, and {more[:5]} are not asked"
                " for. Edit checkpoints alike on all ranks (on_save_checkpoint), not under a condition on the rank."
            )
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {key: nested(key) for key in self._wanted}
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the piece that begins at an item's place; of another directory it is read now, and not kept."""
        found = next(tensor for start, tensor in self.state_dict[index.fqn].pieces if start == index.offset)
        return found.whole() if isinstance(found, Stored) else found


def _item(key: str, share: Share, piece: tuple[tuple[int, ...], Tensor]) -> WriteItem:
    start, tensor = piece
    chunk = ChunkStorageMetadata(offsets=torch.Size(start), sizes=tensor.shape)
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=share.dtype), size=share.shape)
    return WriteItem(index=MetadataIndex(key, start), type=WriteItemType.SHARD, tensor_data=data)


class StoredTensors:
    """The tensors of one DCP directory, read box by box and without any exchange between ranks.

    Args:
        reader: of the directory.
        trusted: let the directory's ``.metadata``, a pickle, hold anything. Otherwise it may only hold what DCP writes.

    Raises:
        pickle.UnpicklingError: if it holds something else, which might run code.
    """

    def __init__(self, reader: FileSystemReader, *, trusted: bool = False) -> None:
        self._reader = reader
        self._metadata = reader.read_metadata() if trusted else _read_metadata(reader)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def keys(self) -> Collection[str]:
        """Names of all tensors."""
        return self._metadata.state_dict_metadata.keys()

    def __getitem__(self, key: str) -> Any:
        """Stand for a tensor; nothing is read yet."""
        entry = self._entry(key)
        return Stored.make(entry.size, entry.properties.dtype, partial(self.read, key))

    def read(self, key: str, start: Sequence[int], size: Sequence[int], into: Tensor | None = None) -> Tensor:
        """Return the box of the tensor that begins at ``start``: ``into``, or a new one on the CPU."""
        entry = self._entry(key)
        box = torch.empty(tuple(size), dtype=entry.properties.dtype) if into is None else into
        chunk = ChunkStorageMetadata(offsets=torch.Size(start), sizes=torch.Size(size))
        items = create_read_items_for_chunk_list(key, entry, [chunk]) if box.numel() else []
        self._reader.read_data(LoadPlan(items), _Into(box)).wait()
        return box

    def _entry(self, key: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self._reader.checkpoint_id} has no tensor {key!r}, to which its meta.pt refers.")
        return entry


def _read_metadata(reader: FileSystemReader) -> Metadata:
    with reader.fs.create_stream(reader.fs.concat_path(reader.path, METADATA), "rb") as file:
        metadata: Metadata = _MetadataUnpickler(file).load()
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        of_dcp = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        if of_dcp or module in ("torch", "torch.serialization", "pathlib"):
            found = super().find_class(module, name)
            is_path = module == "pathlib" and issubclass(found, PurePath)
            is_of_torch = isinstance(found, torch.dtype) or (module, name) in _OTHERS
            if (of_dcp and isinstance(found, type)) or is_path or is_of_torch:
                return found
        raise pickle.UnpicklingError(
            f"The checkpoint's {METADATA} refers to {module}.{name}, which torch.distributed.checkpoint does not write"
            " there. If you trust whoever wrote it, load it with weights_only=False."
        )


_OTHERS = {("torch", "Size"), ("torch.serialization", "_get_layout")}


class _Into(DefaultLoadPlanner):
    """Hands out the places of one tensor."""

    def __init__(self, box: Tensor) -> None:
        super().__init__()
        self._box = box

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._box[tuple(slice(start, start + length) for start, length in places)]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.storage_index.fqn!r} is not a tensor.")
