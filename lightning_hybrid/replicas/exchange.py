"""Means over replicas: of some tensors at once, in the background if that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Averager", "Running", "buckets_of"]

#: Bytes of what is sent at once: enough for any link's full rate, and what is needed twice in memory.
BUCKET = 2**25


@dataclass
class Running:
    """A sum that is on its way."""

    flat: Tensor
    work: Any
    shapes: list[torch.Size]
    size: int

    def wait(self) -> list[Tensor]:
        """Return the means, in the order of the tensors, on the device that exchanges; fp32 where bf16 was sent."""
        self.work.wait()
        wide = self.flat.float() if self.flat.element_size() < 4 else self.flat
        parts = wide.div_(self.size).split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Averager:
    """Averages tensors over the ranks of one group, which all call it alike."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype | None) -> None:
        """``device``: one that the group can send from. ``dtype``: what is sent; ``None``: fp32, or wider if they are.

        A sum of ``n`` numbers in bf16 is rounded at most ``2 n - 1`` times by ``2**-8`` of what is rounded.
        """
        self.group, self.device, self._dtype = group, device, dtype

    def start(self, tensors: Sequence[Tensor]) -> Running:
        """Begin to average tensors of one dtype, of equal shapes on all ranks. A collective that runs beside others."""
        wide = torch.float32 if tensors[0].element_size() < 4 else tensors[0].dtype
        dtype = self._dtype or wide
        flat = torch.cat([tensor.detach().reshape(-1).to(self.device, dtype) for tensor in tensors])
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        return Running(flat, work, [tensor.shape for tensor in tensors], dist.get_world_size(self.group))


def buckets_of(tensors: Mapping[str, Tensor], alone: AbstractSet[str]) -> Iterator[list[str]]:
    """Names of tensors of one dtype that are exchanged together; those in ``alone`` are by themselves.

    The order in which a ring adds numbers up depends on their place in what is sent. So copies of one tensor that other
    groups exchange would differ by rounding if they were not sent alone.
    """
    filling: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        if name in alone:
            yield [name]
            continue
        bucket = filling.setdefault(tensor.dtype, [])
        bucket.append(name)
        if sum(tensors[held].nbytes for held in bucket) >= BUCKET:
            yield filling.pop(tensor.dtype)
    yield from filling.values()
