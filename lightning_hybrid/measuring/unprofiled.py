"""Collectives that outlive the step, which a profiler of one step must not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

__all__ = ["unprofiled"]


@contextmanager
def unprofiled(group: dist.ProcessGroup) -> Iterator[None]:
    """Begin collectives of which no profiler is told, where their own threads would tell it (gloo).

    gloo's threads write to the profiler that ran when a collective was made, as they begin and end it; a collective
    that is still on its way when the profiler stops would write to what is taken apart by then. NCCL's are told of by
    the thread that makes them.
    """
    if dist.get_backend(group) != "gloo":
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)
