"""Means over replicas: of many tensors at once, in the background if that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Averager", "Running"]

#: Bytes of what is sent at once: enough for any link's full rate, and all that is needed twice in memory.
BUCKET = 2**25


@dataclass
class Running:
    """Sums that are on their way."""

    buckets: list[tuple[list[int], Tensor, Any]]
    """Places of the tensors in a bucket, their sum, and what waits for it."""
    shapes: list[torch.Size]
    size: int

    def wait(self) -> list[Tensor]:
        """Return the means, in the order of the tensors, on the device that exchanges; fp32 where bf16 was sent."""
        means: dict[int, Tensor] = {}
        for places, flat, work in self.buckets:
            work.wait()
            wide = flat.float() if flat.element_size() < 4 else flat
            parts = wide.div_(self.size).split([self.shapes[place].numel() for place in places])
            means |= {place: part.view(self.shapes[place]) for place, part in zip(places, parts, strict=True)}
        self.buckets = []
        return [means[place] for place in range(len(self.shapes))]


class Averager:
    """Averages tensors over the ranks of one group, which all call it alike."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype | None) -> None:
        """``device``: one that the group can send from. ``dtype``: what is sent; ``None``: fp32, or wider if they are.

        A sum of ``n`` numbers in bf16 is rounded at most ``2 n - 1`` times by ``2**-8`` of what is rounded.
        """
        self._group, self.device, self._dtype = group, device, dtype

    def start(self, tensors: Sequence[Tensor], alone: Sequence[bool] = ()) -> Running:
        """Begin to average. A collective; it runs beside what follows.

        Args:
            tensors: of equal shapes on all ranks.
            alone: for each, whether it is sent by itself. The order in which a ring adds numbers up depends on their
                place in what is sent, so copies of one tensor that other groups exchange would else differ by rounding.
        """
        buckets = []
        for places in _buckets(tensors, alone or [False] * len(tensors)):
            flat = torch.cat([self._to_send(tensors[place]) for place in places])
            buckets.append((places, flat, dist.all_reduce(flat, group=self._group, async_op=True)))
        return Running(buckets, [tensor.shape for tensor in tensors], dist.get_world_size(self._group))

    def _to_send(self, tensor: Tensor) -> Tensor:
        wide = torch.float32 if tensor.element_size() < 4 else tensor.dtype
        return tensor.detach().reshape(-1).to(self.device, self._dtype or wide)


def _buckets(tensors: Sequence[Tensor], alone: Sequence[bool]) -> Iterator[list[int]]:
    """Places of tensors of one dtype that are sent together; those without elements in the first one."""
    filling: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    for place, tensor in enumerate(tensors):
        if alone[place]:
            yield [place]
            continue
        filling.setdefault(tensor.dtype, []).append(place)
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        if sizes[tensor.dtype] >= BUCKET:
            yield filling.pop(tensor.dtype)
            del sizes[tensor.dtype]
    yield from filling.values()
