"""Layout -> DeviceMesh, and what is asked of it: groups, ranks, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_hybrid.layout import AXES, Layout

__all__ = [
    "axis_group",
    "broadcast_bits",
    "build_mesh",
    "data_mesh",
    "pipeline_subgroup",
    "replica_group",
    "replica_mesh",
]

_built: dict[tuple[Any, ...], tuple[DeviceMesh, DeviceMesh]] = {}


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Return the mesh of the running job with the axes of :data:`~lightning_hybrid.layout.AXES`.

    Also makes the flattened axis ``"data_parallel"``. One mesh is made per process group: a second ``fit`` gets the
    same one, so that process groups do not pile up.
    """
    key = (layout, device_type, dist.group.WORLD)  # the group itself: an id may come again
    if key not in _built:
        mesh = init_device_mesh(device_type, layout.shape, mesh_dim_names=AXES)
        flat = mesh["data_parallel_replicate", "data_parallel_shard"]._flatten("data_parallel")
        _built.clear()
        _built[key] = (mesh, flat)
    return _built[key][0]


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """Return the process group of this rank along an axis; ``"data_parallel"`` is the flattened one."""
    if axis == "data_parallel":  # slicing a flattened axis is deprecated in torch
        flat = next((flat for built, flat in _built.values() if built is mesh), None)
        return mesh[axis].get_group() if flat is None else flat.get_group()
    return mesh[axis].get_group()


def data_mesh(mesh: DeviceMesh, *, of_one: bool = False, axis: str = "data_parallel") -> DeviceMesh | None:
    """Return the mesh that ``fully_shard`` works on: 1-D, or 2-D with replicas (HSDP).

    For one data rank that is ``None``, or with ``of_one`` a mesh of that rank. ``axis``: over which gradients are
    averaged at every step, all of the data axis or ``"data_parallel_shard"``.
    """
    replicas, shards = mesh["data_parallel_replicate"].size(), mesh["data_parallel_shard"].size()
    replicas = replicas if axis == "data_parallel" else 1
    if replicas * shards == 1 and not of_one:
        return None
    return mesh["data_parallel_shard"] if replicas == 1 else mesh["data_parallel_replicate", "data_parallel_shard"]


def replica_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of this rank's replica: all axes but ``data_parallel_replicate``."""
    return mesh["pipeline_parallel", "data_parallel_shard", "tensor_parallel"]


def replica_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Make a group of each replica's ranks; return this rank's. A collective over the world."""
    replicas = mesh.mesh.transpose(0, 1).flatten(1).tolist()
    group: dist.ProcessGroup  # every rank is in one
    group, _ = dist.new_subgroups_by_enumeration(replicas)
    return group


def pipeline_subgroup(mesh: DeviceMesh, positions: Sequence[int]) -> dist.ProcessGroup | None:
    """Make a group of these pipeline coordinates in every pipeline; return this rank's, ``None`` if it is in none.

    A collective over the world, in the same order on all ranks. (torch's ``use_local_synchronization`` would let only
    members take part, but names groups by how many a rank is in, so that ranks in several of them do not meet.)
    """
    pipelines = mesh.mesh.flatten(1).T.tolist()
    group: dist.ProcessGroup | None
    group, _ = dist.new_subgroups_by_enumeration([[ranks[p] for p in positions] for ranks in pipelines])
    return group


def broadcast_bits(tensor: Tensor, src: int, group: dist.ProcessGroup | None = None) -> None:
    """Fill a contiguous tensor with the bits that global rank ``src`` has in it. A collective.

    As bytes, since backends know some types only: gloo neither complex numbers nor those of 8 bits.
    """
    if tensor.numel():
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=src, group=group)
