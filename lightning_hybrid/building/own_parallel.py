"""Modules that split and shard themselves in ``configure_model``, as for Lightning's ``ModelParallelStrategy``.

The strategy leaves them as they are, so what it would have done itself must not be asked of it, and what the module
left undone must not go unnoticed: a parameter that no ``fully_shard`` covers has gradients of one data rank only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from lightning_hybrid.layout import Layout
from lightning_hybrid.mesh import axis_group, broadcast_bits
from lightning_hybrid.replicas.options import ReplicaSync
from lightning_hybrid.settings import Settings

__all__ = ["check_own", "is_parallel", "synchronise_own"]

#: Arguments that change blocks, and what they are when nothing is asked for.
_LEFT_ALONE = {
    "tp_plan": None,
    "loss_parallel": False,
    "sequence_parallel": False,
    "reshard_after_forward": None,
    "cpu_offload": False,
    "activation_checkpointing": "none",
    "compile": False,
    "replica_sync": ReplicaSync(interval=1),
}


def is_parallel(module: nn.Module) -> bool:
    """Whether a module has split or sharded itself."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def check_own(module: nn.Module, layout: Layout, mesh: DeviceMesh, settings: Settings) -> None:
    """Refuse what would not be done to a module that has split or sharded itself.

    Raises:
        UnsupportedError: if it is to be cut into pipeline stages.
        ConfigurationError: for an argument of the strategy that would be ignored, and for parameters that train on
            several data ranks without a mesh over which their gradients are averaged.
    """
    if layout.pipeline_parallel_size > 1:
        raise UnsupportedError(
            "configure_model has already split or sharded parameters, which cannot be cut into"
            f" {layout.pipeline_parallel_size} pipeline stages afterwards. Leave parallelism to the strategy, or use"
            " pipeline_parallel_size=1."
        )
    for name, nothing in _LEFT_ALONE.items():
        if (value := getattr(settings, name)) != nothing:
            raise ConfigurationError(
                f"configure_model has already split or sharded parameters, so {name}={value!r} would not be applied."
                f" Do it in configure_model and leave {name} out, or leave parallelism to the strategy."
            )
    group = axis_group(mesh, "data_parallel")
    alone = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not _is_over(parameter, group) and not parameter._post_accumulate_grad_hooks
    ]
    if alone and layout.data_parallel_size > 1 and not _averages_itself(module):
        raise ConfigurationError(
            f"configure_model has split parameters, but {len(alone)} ({', '.join(alone[:3])}, ...) are not on the"
            f" data axis: each of {layout.data_parallel_size} data ranks would train its own copy. Call"
            ' fully_shard(..., mesh=self.device_mesh["data_parallel"]) on the module that holds them, or use'
            " data_parallel_size=1."
        )


def synchronise_own(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give ranks that hold the same part of a parameter, or a buffer, the values of the first of them.

    ``parallelize_module`` and ``fully_shard`` take what each rank holds, and what they leave alone was drawn by each
    rank for itself.
    """
    groups = [axis_group(mesh, axis) for axis in ("tensor_parallel", "data_parallel")]
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for group in groups:
                if not _is_over(tensor, group) and dist.get_world_size(group) > 1 and local.numel():
                    carrier = local.detach().contiguous()
                    broadcast_bits(carrier, dist.get_global_rank(group, 0), group)
                    local.copy_(carrier)


def _is_over(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a tensor lies on a mesh that has all ranks of ``group``."""
    ranks = set(dist.get_process_group_ranks(group))
    return isinstance(tensor, DTensor) and ranks <= set(tensor.device_mesh.mesh.flatten().tolist())


def _averages_itself(module: nn.Module) -> bool:
    return any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules())
