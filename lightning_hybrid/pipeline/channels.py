"""Messages between pipeline ranks: tensors of one boundary, and small reports from the last stage."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import irecv, isend, recv  # by name: a step's own collectives go elsewhere

from lightning_hybrid.errors import PipelineError

__all__ = ["Channels", "has_tags"]

_REPORT_TAG = 1


#: The most tensors that may cross one boundary, and tags for as many second messages.
_MOST = 32


def has_tags(group: dist.ProcessGroup) -> bool:
    """Whether messages between two ranks of a group are told apart by tags."""
    return "nccl" not in dist.get_backend_config(group)  # it may name one for each kind of device


class Channels:
    """Sends and receives between the ranks of one pipeline. Sends never block; :meth:`flush` waits for them.

    Messages of different boundaries or directions may be posted in different orders on both ends. gloo keeps them apart
    by their tags. NCCL has none, and would wait for itself: there each boundary and direction has a group of its own,
    within which both ends go through the micro-batches in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        global_ranks: Sequence[int],
        num_stages: int,
        groups: Mapping[tuple[str, int], dist.ProcessGroup] | None = None,
    ) -> None:
        """Make the channels of one pipeline.

        Args:
            group: All its ranks.
            global_ranks: For each schedule rank its global rank.
            num_stages: Virtual ones included.
            groups: For each kind of message and receiving stage the group to use instead of tags.
        """
        self._group, self._groups = group, groups
        self._ranks, self._rank = list(global_ranks), dist.get_rank()
        self._num_stages = num_stages
        self._pending: list[tuple[dist.Work, Tensor]] = []

    def send(
        self, kind: str, tensors: Sequence[Tensor], to: int, stage: int, microbatch: int, *, again: bool = False
    ) -> None:
        """Send the tensors of one boundary (``kind`` "F" or "B") to schedule rank ``to``, for its ``stage``.

        ``again``: the second message of that micro-batch, where the receiver had expected other shapes.
        """
        self._pending = [(work, data) for work, data in self._pending if not work.is_completed()]  # frees their memory
        group, tags = self._way(kind, stage, microbatch, len(tensors), again)
        for tensor, tag in zip(tensors, tags, strict=True):
            data = tensor.detach().contiguous()
            work = isend(data, self._ranks[to], group=group, tag=tag)
            assert work is not None
            self._pending.append((work, data))

    def post(
        self, kind: str, buffers: Sequence[Tensor], source: int, stage: int, microbatch: int, *, again: bool = False
    ) -> list[dist.Work]:
        """Start to receive the tensors of one boundary into ``buffers``."""
        works = []
        group, tags = self._way(kind, stage, microbatch, len(buffers), again)
        for buffer, tag in zip(buffers, tags, strict=True):
            work = irecv(buffer, self._ranks[source], group=group, tag=tag)
            assert work is not None
            works.append(work)
        return works

    def report(self, message: Any, device: torch.device) -> None:
        """Send a small object to all other ranks of the pipeline, without waiting for them."""
        buffer = io.BytesIO()
        torch.save(message, buffer)
        payload = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).to(device)
        size = torch.tensor([payload.numel()], dtype=torch.int64, device=device)
        for rank in self._ranks:
            if rank != self._rank:
                for data in (size, payload):
                    work = isend(data, rank, group=self._group, tag=_REPORT_TAG)
                    assert work is not None
                    self._pending.append((work, data))

    def receive_report(self, source: int, device: torch.device) -> Any:
        """Receive the object that schedule rank ``source`` reported."""
        size = torch.zeros(1, dtype=torch.int64, device=device)
        recv(size, self._ranks[source], group=self._group, tag=_REPORT_TAG)
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        recv(payload, self._ranks[source], group=self._group, tag=_REPORT_TAG)
        here = {f"cuda:{index}": str(device) for index in range(torch.cuda.device_count())}  # not the sender's device
        return torch.load(io.BytesIO(payload.cpu().numpy().tobytes()), map_location=here, weights_only=False)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _way(
        self, kind: str, stage: int, microbatch: int, num_tensors: int, again: bool
    ) -> tuple[dist.ProcessGroup, Sequence[int]]:
        """Return the group and the tags of one message's tensors."""
        if self._groups is not None:
            return self._groups[kind, stage], [0] * num_tensors
        if num_tensors > _MOST:
            raise PipelineError(
                f"{num_tensors} tensors would go from stage {stage - 1} to stage {stage}, but at most {_MOST} can; pass"
                " fewer tensors to the blocks (stack them), or use pipeline_parallel_size=1."
            )
        boundary = microbatch * 2 * self._num_stages + stage * 2 + (kind == "B")
        first = 2 + (boundary * 2 + again) * _MOST
        return self._group, range(first, first + num_tensors)
