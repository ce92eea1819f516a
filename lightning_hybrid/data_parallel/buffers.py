"""Buffers that steps update (BatchNorm's statistics, averages), kept alike on data ranks as ``ddp`` does.

Each data rank updates them by its own samples. Before a step the values of the first data rank take the others' place,
as in ``DistributedDataParallel.forward``, and as there only if the step before was one that ended with averaged
gradients. So what is validated is what rank 0 saves. Unlike there, only buffers that have changed on any rank travel (a
causal mask need not), and caches that grow to different sizes stay what they are.

Replicas that exchange now and then (:mod:`lightning_hybrid.replicas`) average them instead, with weights that no
optimizer trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.mesh import broadcast_bits

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """The buffers of a module that ranks of one group hold alike."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        trained: Callable[[], Collection[nn.Parameter]] | None = None,
    ) -> None:
        """Take the module's buffers, and what of its parameters is not among those that ``trained`` tells later.

        Args:
            module: whose they are.
            group: ranks that hold them alike.
            device: one that the group can send from.
            trained: ``None``: no parameters at all.
        """
        self._group, self._device, self._trained = group, device, trained
        self._places: list[tuple[dict[str, Any], str]] = [
            (part._buffers, name)
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and not isinstance(buffer, DTensor)
        ]
        if trained is not None:
            parameters = {p: (part._parameters, n) for part in module.modules() for n, p in part._parameters.items()}
            self._places += [place for parameter, place in parameters.items() if parameter is not None]
        self._seen: list[_Look | None] = [None] * len(self._places)
        self._is_due = dist.get_world_size(group) > 1 and bool(self._places)

    def before_step(self, *, trains: bool) -> None:
        """Take the first rank's values if they are due. ``trains``: the gradients of this step will be averaged.

        A collective over the group, then.
        """
        if self._is_due:
            self._synchronise()
        self._is_due = trains and dist.get_world_size(self._group) > 1 and bool(self._places)

    def note(self) -> None:
        """All ranks hold the same values now: only what changes from here on travels."""
        self._seen = [None if buffer is None else _Look.at(buffer) for buffer in self._held()]

    def average(self) -> None:
        """Take the mean over the ranks of what has changed on any of them; the first one's where it is no float.

        A collective over the group.
        """
        if self._places:
            self._synchronise(averages=True)

    @torch.no_grad()
    def _synchronise(self, *, averages: bool = False) -> None:
        buffers = self._held()
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._changed_anywhere(buffers):
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        source = dist.get_global_rank(self._group, 0)
        for dtype, found in by_dtype.items():
            flat = torch.cat([buffer.reshape(-1).to(self._device) for buffer in found])
            if averages and (dtype.is_floating_point or dtype.is_complex):
                wide = flat.float() if flat.element_size() < 4 else flat
                dist.all_reduce(wide, group=self._group)
                flat = wide.div_(dist.get_world_size(self._group))
            else:
                broadcast_bits(flat, source, self._group)
            for buffer, values in zip(found, flat.split([b.numel() for b in found]), strict=True):
                buffer.copy_(values.view(buffer.shape))
        self.note()

    def _held(self) -> list[Tensor | None]:
        """What this rank has of each; nothing where an optimizer trains it."""
        trained = {id(parameter) for parameter in self._trained()} if self._trained is not None else set()
        tensors: list[Any] = [owner.get(name) for owner, name in self._places]
        held = [None if tensor is None or id(tensor) in trained else tensor.detach() for tensor in tensors]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]

    def _changed_anywhere(self, buffers: list[Tensor | None]) -> list[Tensor]:
        """Return those that have changed on any rank and have one size on all. A collective.

        By value: what a batch norm or ``buffer.data`` writes is not counted by a tensor's version.
        """
        sizes = [-1 if buffer is None else buffer.nbytes for buffer in buffers]
        facts = torch.tensor([[1] * len(sizes), sizes, [-size for size in sizes]], device=self._device)
        for index, (buffer, seen) in enumerate(zip(buffers, self._seen, strict=True)):
            if buffer is not None and seen is not None:
                facts[0, index] = seen.differs(_Look.at(buffer))
        dist.all_reduce(facts, dist.ReduceOp.MAX, group=self._group)
        rows = zip(buffers, *facts.tolist(), strict=True)
        return [
            buffer
            for buffer, anywhere, most, least in rows
            if anywhere and buffer is not None and most == -least and most > 0
        ]


@dataclass(frozen=True)
class _Look:
    """What a buffer's values were, without a copy of them: masks may be large."""

    shape: torch.Size
    dtype: torch.dtype
    sums: Tensor

    @classmethod
    def at(cls, buffer: Tensor) -> _Look:
        values = (torch.view_as_real(buffer) if buffer.is_complex() else buffer).reshape(-1)
        if not values.is_floating_point() and values.element_size() == 8:
            values = values.view(torch.int32)  # of which doubles hold every digit
        if not values.is_floating_point() or values.element_size() == 1:
            values = values.double()
        norm = torch.linalg.vector_norm(values, dtype=torch.float64)
        return cls(
            buffer.shape, buffer.dtype, torch.stack([values.sum(dtype=torch.float64), norm, _by_place(values).double()])
        )

    def differs(self, other: _Look) -> Tensor | bool:
        """Whether values changed; NaN counts as changed."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return True
        return (self.sums != other.sums.to(self.sums.device)).any()


#: Values that have weights of their own in :func:`_by_place`.
_ROW = 1024


def _by_place(values: Tensor) -> Tensor:
    """Return a sum in which each place has a weight of its own: a queue that is shifted keeps its sum and its norm."""
    with torch.autocast(values.device.type, enabled=False):
        values = values.float() if values.element_size() == 2 else values
        weights = _weights(values.dtype, values.device)
        num_rows = len(values) // _ROW
        rest = values[num_rows * _ROW :]
        last = torch.dot(rest, weights[: len(rest)])
        if not num_rows:
            return last
        of_rows = torch.arange(2, num_rows + 2, dtype=values.dtype, device=values.device).log_()
        return last + torch.dot(values[: num_rows * _ROW].view(-1, _ROW) @ weights, of_rows)


@functools.cache
def _weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(1, _ROW + 1, dtype=dtype, device=device).sqrt_()
