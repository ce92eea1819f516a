"""Messages between pipeline ranks: tensors of one boundary, and small reports from the last stage."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Channels"]

_REPORT_TAG = 1


class Channels:
    """Sends and receives between the ranks of one pipeline. Sends never block; :meth:`flush` waits for them.

    Every message has a tag of its own, so the order of sends and receives need not agree on both ends (gloo).
    """

    def __init__(self, group: dist.ProcessGroup, global_ranks: Sequence[int], num_stages: int) -> None:
        """``global_ranks[r]`` is the global rank of schedule rank ``r``."""
        self._group = group
        self._ranks = list(global_ranks)
        self._num_stages = num_stages
        self._pending: list[tuple[dist.Work, Tensor]] = []

    def send(self, kind: str, tensors: Sequence[Tensor], to: int, stage: int, microbatch: int) -> None:
        """Send the tensors of one boundary (``kind`` "F" or "B") to schedule rank ``to``, for its ``stage``."""
        for index, tensor in enumerate(tensors):
            data = tensor.detach().contiguous()
            work = dist.isend(data, self._ranks[to], group=self._group, tag=self._tag(kind, stage, microbatch, index))
            assert work is not None
            self._pending.append((work, data))

    def post(self, kind: str, buffers: Sequence[Tensor], source: int, stage: int, microbatch: int) -> list[dist.Work]:
        """Start to receive the tensors of one boundary into ``buffers``."""
        works = []
        for index, buffer in enumerate(buffers):
            tag = self._tag(kind, stage, microbatch, index)
            work = dist.irecv(buffer, self._ranks[source], group=self._group, tag=tag)
            assert work is not None
            works.append(work)
        return works

    def report(self, message: Any, device: torch.device) -> None:
        """Send a small object to all other ranks of the pipeline, without waiting for them."""
        payload = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8).to(device)
        size = torch.tensor([payload.numel()], dtype=torch.int64, device=device)
        for rank in self._ranks:
            if rank != dist.get_rank():
                for data in (size, payload):
                    work = dist.isend(data, rank, group=self._group, tag=_REPORT_TAG)
                    assert work is not None
                    self._pending.append((work, data))

    def receive_report(self, source: int, device: torch.device) -> Any:
        """Receive the object that schedule rank ``source`` reported."""
        size = torch.zeros(1, dtype=torch.int64, device=device)
        dist.recv(size, self._ranks[source], group=self._group, tag=_REPORT_TAG)
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        dist.recv(payload, self._ranks[source], group=self._group, tag=_REPORT_TAG)
        return pickle.loads(payload.cpu().numpy().tobytes())

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _tag(self, kind: str, stage: int, microbatch: int, index: int) -> int:
        boundary = stage * 2 + (kind == "B")
        return 2 + (microbatch * 2 * self._num_stages + boundary) * 64 + index
