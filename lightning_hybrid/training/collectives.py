"""What a strategy's collectives mean with several axes: values go over the data axis, decisions over the world.

Inside of a pipelined step, all of them (and the user's own, :mod:`~lightning_hybrid.training.step_world`) go over the
data axis: other stages do
not run a step to its end, and the ranks
of the data axis do whatever this rank does (so ``trainer.log_dir`` in a step, which is a broadcast, does not hang).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _distributed_is_initialized,
    _sync_ddp_if_available,
)
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.failures.watch import Watch
from lightning_hybrid.mesh import axis_group
from lightning_hybrid.settings import Settings
from lightning_hybrid.training.step_world import StepWorld

__all__ = ["AxisCollectives"]


class AxisCollectives(ParallelStrategy):
    """The part of the strategy that talks between ranks."""

    _mesh: DeviceMesh | None = None
    _apart = False
    _trains = False
    """Whether a training step is running."""
    settings: Settings
    _step_world: StepWorld | None = None
    watch: Watch | None = None
    """While a run goes on with several ranks: what tells them of each other's failures."""

    def _leave_watch(self) -> None:
        if self.watch is not None:
            self.watch.leave()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around a step of the user's, in which other stages are elsewhere."""
        if self._step_world is None:
            self._step_world = StepWorld(axis_group(self.device_mesh, self.settings.step_axis))
        self._apart, before = True, self._apart
        try:
            with self._step_world.entered():
                yield
        finally:
            self._apart = before

    @property
    def talks_in_steps(self) -> bool:
        """Whether steps have talked to the data axis, whose ranks then must have equally many micro-batches."""
        return self._step_world is not None and self._step_world.talks

    def refuse_apart(self, what: str) -> None:
        """Refuse what needs all ranks where they do not all come.

        Raises:
            UnsupportedError: inside of a pipelined step.
        """
        if self._apart:
            raise UnsupportedError(
                f"{what} inside of a step needs all ranks, but with a pipeline only the last stage runs a step to its"
                " end. Do it in a hook, such as on_train_batch_end, or use pipeline_parallel_size=1."
            )

    @property
    def _all_here(self) -> Any:
        return axis_group(self.device_mesh, self.settings.step_axis) if self._apart else None

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the running job."""
        if self._mesh is None:
            raise RuntimeError("There is no device mesh before the processes have been set up.")
        return self._mesh

    def all_gather_object(self, value: Any, axis: str | None = None) -> list[Any]:
        """Gather a picklable object from all ranks of a mesh axis, or of the world. A collective."""
        group = axis_group(self.device_mesh, axis) if axis else dist.group.WORLD
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    @override
    def barrier(self, name: str | None = None) -> None:
        if _distributed_is_initialized():
            dist.barrier(
                self._all_here, device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None
            )

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        carrier, group = [obj], self._all_here
        dist.broadcast_object_list(carrier, src if group is None else dist.get_global_rank(group, 0), group=group)
        return carrier[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data axis unless a group is given: other axes hold the same samples."""
        if not isinstance(tensor, Tensor) or not _distributed_is_initialized():
            return tensor
        return _sync_ddp_if_available(tensor, self._data_group(group), reduce_op=reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data axis unless a group is given; the result has one entry per data rank."""
        if not _distributed_is_initialized():
            return tensor
        return _all_gather_ddp_if_available(tensor, group=self._data_group(group), sync_grads=sync_grads)

    def _data_group(self, group: Any) -> Any:
        """``LightningModule.all_gather`` passes the world where its user gave nothing."""
        given = None if group is dist.group.WORLD else group
        axis = self.settings.step_axis if self._trains else "data_parallel"
        return axis_group(self.device_mesh, axis) if given is None else given

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide over the whole world, whatever axis values are reduced over."""
        if not _distributed_is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, group=self._all_here)
        return bool(votes == dist.get_world_size(self._all_here)) if all else bool(votes > 0)
