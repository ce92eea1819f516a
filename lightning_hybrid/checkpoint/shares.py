"""Whole tensors <-> the shares that ranks hold, without communication on the way in and over one hop on the way out.

[Note: which rows a rank holds]
DTensor's own ``compute_local_shape_and_global_offset`` applies placements from left to right. ``fully_shard`` after
``parallelize_module`` cuts the *tensor-parallel share*: it says so by ``_StridedShard(dim, split_factor)``, to the left
of the ``Shard`` that came first. Reading left to right gives the same rows when sizes divide, and not always when they
do not (7 rows on 3 data x 2 tensor ranks); nor is the result one run of rows then. So the cuts are followed here in the
order in which they were made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_hybrid.checkpoint.tensors import Piece, Share, Stored
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.tensor_parallel.collectives import JoinedRows

__all__ = ["collect", "leave_in_place", "load_share", "local_slices", "share_of"]

#: Start and end along each dimension.
Bounds = tuple[tuple[int, int], ...]


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Return which part of the whole tensor this rank holds, one slice per dimension (empty ones included).

    Raises:
        CheckpointError: if the placements are partial sums, or cut in a way that is not known here.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointError(f"This rank is not part of the mesh {tensor.device_mesh} of a tensor that it holds.")
    bounds = [(0, size) for size in tensor.shape]
    for axis in _order_of_cuts(tensor):
        dim = tensor.placements[axis].dim  # type: ignore[attr-defined]
        start, end = bounds[dim]
        chunk = -(-(end - start) // tensor.device_mesh.size(axis))
        start = min(start + coordinate[axis] * chunk, end)
        bounds[dim] = (start, min(start + chunk, end))
    slices = tuple(slice(start, end) for start, end in bounds)
    expected, local = [end - start for start, end in bounds], tensor.to_local()
    if local.numel() != math.prod(expected) or (local.numel() and list(local.shape) != expected):
        raise CheckpointError(
            f"A share of shape {list(local.shape)} was found where {tensor.placements} of {list(tensor.shape)} over a"
            f" mesh of {tuple(tensor.device_mesh.shape)} leaves {expected}. Cut parameters with torch's"
            " parallelize_module, distribute_tensor and fully_shard only."
        )
    return slices


def _order_of_cuts(tensor: DTensor) -> list[int]:
    """Mesh axes in the order in which they cut the tensor: see the note above."""
    sizes, placements = tensor.device_mesh.shape, tensor.placements
    strided = [axis for axis, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    plain = [axis for axis, placement in enumerate(placements) if isinstance(placement, Shard) and axis not in strided]
    for axis, placement in enumerate(placements):
        known = isinstance(placement, (Shard, _StridedShard, Replicate))
        if known and isinstance(placement, _StridedShard):
            later = [a for a in (*plain, *strided) if a > axis and placements[a].dim == placement.dim]  # type: ignore[attr-defined]
            known = placement.split_factor == math.prod(sizes[a] for a in later)
        if not known:
            raise CheckpointError(
                f"A tensor of shape {list(tensor.shape)} is placed as {placements} on a mesh of {tuple(sizes)}, which"
                " checkpoints cannot take apart. Use Shard or Replicate, or fully_shard after parallelize_module."
            )
    return [*plain, *reversed(strided)]


def share_of(like: DTensor, whole: Tensor, *, replicate: bool = False, rows: JoinedRows | None = None) -> DTensor:
    """Return this rank's share of ``whole``, placed as ``like`` (or whole on every rank), on its device. No exchange.

    Args:
        like: a tensor of the same shape; of any shape with ``replicate``.
        whole: a plain tensor, in memory or mapped from a file: only the share's bytes are read.
        replicate: keep all of it on each rank of ``like``'s mesh.
        rows: the order in which ``like`` keeps its rows; by default that of ``whole``.
    """
    placements = [Replicate()] * like.device_mesh.ndim if replicate else like.placements
    slices = () if replicate else local_slices(like)
    if rows is None or not rows.fit(whole):
        part = whole.box(slices) if isinstance(whole, Stored) else whole[slices]
    elif replicate:
        part = whole.index_select(rows.dim, rows.order)
    else:
        mine = rows.order[slices[rows.dim]]
        part = whole.index_select(rows.dim, mine)[(*slices[: rows.dim], slice(None), *slices[rows.dim + 1 :])]
    is_own = isinstance(whole, Stored)  # in memory that nobody else has
    local = part.detach().to(like.to_local().device, copy=not is_own, memory_format=torch.contiguous_format)
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, placements, run_check=False, shape=whole.shape, stride=stride)


def load_share(own: DTensor, whole: Tensor, rows: JoinedRows | None) -> DTensor:
    """Return what to copy into ``own``: the share of ``whole``, or itself if that could be read into it straight."""
    if isinstance(whole, Stored) and (rows is None or not rows.fit(whole)):
        whole.read_into(own.to_local(), local_slices(own))
        return own
    return share_of(own, whole, rows=rows)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one rank can contribute to one entry."""

    shape: torch.Size
    """Of the whole tensor."""
    dtype: torch.dtype
    bounds: Bounds
    rows: JoinedRows | None = None
    """In which order the ranks hold the whole tensor's rows, if it is not that of one process."""
    is_equal_everywhere: bool = False
    """Whether ranks with the same bounds hold the same values for certain; buffers of data ranks may differ."""


def collect(
    entries: Mapping[Any, Any], device: torch.device, rows: Mapping[Any, JoinedRows] | None = None
) -> dict[Any, Any]:
    """Put whole tensors together on global rank 0. A collective over the world.

    Every rank says which parts it holds; rank 0 picks one holder for each part, and each holder sends straight to it.
    So no rank but rank 0 ever has a whole tensor, values are copied bit by bit, and it does not matter along which
    axes of which mesh a tensor is cut or repeated.

    Args:
        entries: this rank's tensors (plain ones are whole), DTensors and picklable objects. Of what several ranks
            hold, the lowest rank's counts. An exception as value is raised on every rank.
        device: on which the process group can send.
        rows: of entries whose rows this rank's mesh keeps in another order than one process.

    Returns:
        On rank 0 all entries, with plain CPU tensors; ``{}`` on the other ranks.

    Raises:
        CheckpointError: on every rank, if an entry of some rank is unfit, or parts of a tensor are nowhere.
    """
    _, everyone, sends = _agree(entries, rows, balanced=False)
    rank = dist.get_rank() if dist.is_initialized() else 0
    found: dict[Any, Any] = {}
    if rank == 0:
        found = _receive(everyone, sends, entries, device)
    mine = [_local(entries[key]) for key, _, source in sends if source == rank and rank != 0]
    if device.type != "cpu":
        for tensor in mine:  # one by one: what is offloaded does not fit on the device at once
            dist.send(_as_bytes(tensor.to(device)), dst=0)
        return found
    sent = [dist.isend(_as_bytes(tensor), dst=0) for tensor in mine]
    if any(source != 0 for _, _, source in sends):
        dist.barrier()  # gloo may wait for ever for a send whose receiver dies, not for a collective
    for work in filter(None, sent):
        work.wait()
    return found


def leave_in_place(
    entries: Mapping[Any, Any], device: torch.device, rows: Mapping[Any, JoinedRows] | None = None
) -> dict[Any, Any]:
    """Say which rank writes which part of each tensor, and move nothing. A collective over the world.

    Arguments, and what is raised, are those of :func:`collect`. Parts that several ranks hold are shared out among
    them; of plain tensors the lowest rank's count, as there.

    Returns:
        A :class:`~lightning_hybrid.checkpoint.tensors.Share` for each tensor: on rank 0 of all entries, on other ranks
        of their own. Tensors without elements are plain, and objects are as they came.
    """
    offers, everyone, sends = _agree(entries, rows, balanced=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    pieces: dict[Any, list[Piece]] = {}
    for key, bounds, source in sends:
        if source == rank:
            pieces.setdefault(key, []).extend(_pieces(_local(entries[key]), bounds, offers[key].rows))
    found: dict[Any, Any] = {}
    for key, offer in {key: offer for some in reversed(everyone or [offers]) for key, offer in some.items()}.items():
        if not isinstance(offer, _Part):
            found[key] = offer
        elif offer.shape.numel() == 0:
            found[key] = torch.empty(offer.shape, dtype=offer.dtype)
        else:
            found[key] = Share.make(offer.shape, offer.dtype, pieces.get(key, ()))
            found[key].source = entries.get(key)
    return found


def _pieces(local: Tensor, bounds: Bounds, rows: JoinedRows | None) -> list[Piece]:
    """A rank's part as boxes of the whole tensor: one, or one for each run of rows that stay together."""
    start = [begin for begin, _ in bounds]
    if rows is None:
        return [(tuple(start), local)]
    mine = rows.order[slice(*bounds[rows.dim])]
    breaks = (mine.diff() != 1).nonzero().flatten().add(1).tolist()
    pieces = []
    for first, last in zip([0, *breaks], [*breaks, len(mine)], strict=True):
        start[rows.dim] = int(mine[first])
        pieces.append((tuple(start), local.narrow(rows.dim, first, last - first)))
    return pieces


_Sends = list[tuple[Any, Bounds, int]]


def _agree(
    entries: Mapping[Any, Any], rows: Mapping[Any, JoinedRows] | None, *, balanced: bool
) -> tuple[dict[Any, Any], list[dict[Any, Any]], _Sends]:
    """This rank's offers, on rank 0 everyone's, and which rank gives which part."""
    offers = {key: _offer(value, (rows or {}).get(key)) for key, value in entries.items()}
    everyone = _gather_to_first(offers)
    sends, error = _plan(everyone, balanced) if everyone else ([], None)
    sends, error = _from_first((sends, error))
    if error is not None:
        raise CheckpointError(error)
    return offers, everyone, sends


def _offer(value: Any, rows: JoinedRows | None) -> Any:
    try:
        if isinstance(value, DTensor):
            bounds = tuple((s.start, s.stop) for s in local_slices(value))
            joined = rows if rows and rows.fit(value) else None
            return _Part(shape=value.shape, dtype=value.dtype, bounds=bounds, rows=joined, is_equal_everywhere=True)
    except CheckpointError as error:
        return error
    if isinstance(value, Tensor):
        return _Part(shape=value.shape, dtype=value.dtype, bounds=tuple((0, size) for size in value.shape))
    return value


def _plan(everyone: list[dict[Any, Any]], balanced: bool) -> tuple[_Sends, str | None]:
    """Pick a rank for each part, keys in the order in which ranks have them; or say what is wrong."""
    shapes: dict[Any, tuple[torch.Size, torch.dtype]] = {}
    sources: dict[Any, dict[Bounds, list[int]]] = {}
    for rank, offers in enumerate(everyone):
        for key, offer in offers.items():
            if isinstance(offer, Exception):
                return [], f"{_text(key)}, on rank {rank}: {offer}"
            if isinstance(offer, _Part):
                if shapes.setdefault(key, (offer.shape, offer.dtype)) != (offer.shape, offer.dtype):
                    return [], (
                        f"{_text(key)} is {tuple(offer.shape)} {offer.dtype} on rank {rank} and"
                        f" {tuple(shapes[key][0])} {shapes[key][1]} on a lower rank; all must hold the same tensor."
                    )
                holders = sources.setdefault(key, {}).setdefault(offer.bounds, [])
                if not holders or (balanced and offer.is_equal_everywhere):
                    holders.append(rank)
    sends: _Sends = []
    load = [0] * len(everyone)
    for key, parts in sources.items():
        whole = {bounds: ranks for bounds, ranks in parts.items() if _numel(bounds) == shapes[key][0].numel()}
        chosen = dict(list(whole.items())[:1]) or {b: ranks for b, ranks in parts.items() if _numel(b)}
        if sum(map(_numel, chosen)) != shapes[key][0].numel():
            return [], f"{_text(key)}: the parts {sorted(chosen)} do not make up the shape {tuple(shapes[key][0])}."
        for bounds, ranks in chosen.items():
            if _numel(bounds):
                rank = min(ranks, key=load.__getitem__)
                load[rank] += _numel(bounds) * shapes[key][1].itemsize
                sends.append((key, bounds, rank))
    return sends, None


def _receive(
    everyone: list[dict[Any, Any]], sends: _Sends, entries: Mapping[Any, Any], device: torch.device
) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for offers in everyone:
        for key, offer in offers.items():
            if key not in found:
                found[key] = torch.empty(offer.shape, dtype=offer.dtype) if isinstance(offer, _Part) else offer
    for key, bounds, source in sends:
        into = found[key][tuple(slice(start, end) for start, end in bounds)]
        if source == 0:
            into.copy_(_local(entries[key]))
        else:
            buffer = torch.empty(into.shape, dtype=into.dtype, device=device)
            dist.recv(_as_bytes(buffer), src=source)
            into.copy_(buffer)
    for key, offer in {key: offer for offers in everyone for key, offer in offers.items()}.items():
        if isinstance(offer, _Part) and offer.rows is not None:
            found[key] = offer.rows.sorted(found[key])
    return found


def _local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: any dtype can be sent, and nothing is rounded."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _numel(bounds: Bounds) -> int:
    return math.prod(end - start for start, end in bounds)


def _text(key: Any) -> str:
    return " of ".join(repr(part) for part in reversed(key)) if isinstance(key, tuple) else repr(key)


def _gather_to_first(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values or []


def _from_first(value: Any) -> Any:
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
