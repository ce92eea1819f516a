"""Activations on their way between stages: sent as soon as they are there, received while something else runs.

[Note: receiving ahead]
A receive needs a buffer of the right shape, which a stage knows only once it has run the code before its first block.
So that the message can travel during the action before, shapes are taken to be those that crossed the same boundary
the last time a micro-batch looked the same (shapes and dtypes of its tensors). Sender and receiver keep the same memory
of earlier steps, hence expect the same. Where a step decides otherwise (a random crop), the sender knows what the
receiver has posted: it fills that with a message that nobody reads, and sends the real one after it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.batches.structure import leaves_of
from lightning_hybrid.pipeline.channels import Channels

__all__ = ["Activations", "look_of"]

#: Looks of micro-batches that are remembered for each boundary.
_MOST_LOOKS = 1024


def look_of(values: Any) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Return the shapes and dtypes of the tensors among ``values``."""
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves_of(values) if isinstance(leaf, Tensor))


class Activations:
    """Sends and receives the tensors that enter stages which another rank feeds."""

    def __init__(self, channels: Channels, device: torch.device) -> None:
        self._channels, self._device = channels, device
        self._looks: Sequence[Hashable] = ()
        self._known: dict[int, dict[Hashable, Any]] = {}
        self._new: list[tuple[int, Hashable, Any]] = []
        self._posted: dict[tuple[int, int], tuple[list[Tensor], list[dist.Work]]] = {}
        self.num_ahead = 0
        """Receives whose message was the expected one, so far."""

    def begin(self, looks: Sequence[Hashable]) -> None:
        """Start a step, given what its micro-batches look like."""
        for stage, look, shapes in self._new:
            known = self._known.setdefault(stage, {})
            if len(known) >= _MOST_LOOKS:
                known.clear()
            known[look] = shapes
        self._looks, self._new = looks, []
        self._posted.clear()

    def send(self, tensors: Sequence[Tensor], to: int, stage: int, microbatch: int) -> None:
        """Send what enters ``stage`` to schedule rank ``to``."""
        expected, found = self._expected(stage, microbatch), look_of(tensors)
        differs = expected is not None and expected != found
        if differs:
            self._channels.send("F", self._buffers(expected), to, stage, microbatch)
        self._channels.send("F", tensors, to, stage, microbatch, again=differs)
        self._new.append((stage, self._looks[microbatch], found))

    def receive_ahead(self, source: int, stage: int, microbatch: int) -> None:
        """Start to receive what will enter ``stage``, if its shapes can be expected."""
        expected = self._expected(stage, microbatch)
        if expected is not None and (stage, microbatch) not in self._posted:
            buffers = self._buffers(expected)
            works = self._channels.post("F", buffers, source, stage, microbatch)
            self._posted[stage, microbatch] = buffers, works

    def receive(self, local: Sequence[Tensor], source: int, stage: int, microbatch: int) -> list[Tensor]:
        """Return what enters ``stage``; ``local`` has its shapes."""
        self.receive_ahead(source, stage, microbatch)
        buffers, works = self._posted.pop((stage, microbatch), ([], []))
        found = look_of(local)
        differs = look_of(buffers) != found
        if differs:
            again = bool(works)
            for work in works:
                work.wait()
            buffers = self._buffers(found)
            works = self._channels.post("F", buffers, source, stage, microbatch, again=again)
        for work in works:
            work.wait()
        self.num_ahead += not differs
        self._new.append((stage, self._looks[microbatch], found))
        return buffers

    def _expected(self, stage: int, microbatch: int) -> Any:
        return self._known.get(stage, {}).get(self._looks[microbatch])

    def _buffers(self, looks: Any) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in looks]
