"""Data ranks that each hold all of the model: their gradients are averaged by torch's ``DistributedDataParallel``.

It is used for its reducer alone (buckets, overlapped with the backward). A step calls the module as it is, and says
before each backward which loss it starts from, as Lightning does for manual optimization.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.layout import Layout

__all__ = ["Replication", "replicates_only"]


def replicates_only(layout: Layout, module: nn.Module) -> bool:
    """Whether nothing but whole replicas over the data axis is asked for, in numbers that may be summed as they are."""
    short = (torch.bfloat16, torch.float16)  # whose gradients are reduced in fp32
    is_short = any(p.dtype in short for p in module.parameters())
    return layout.world_size == layout.replicate_size > 1 and not is_short


class Replication:
    """Averages the gradients of one module over a group, whose ranks hold equal values."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module, self._group = module, group
        self._known: set[nn.Parameter] = set()
        self._reducer: DistributedDataParallel | None = None
        self._num_backwards = 0
        self._stepped: dict[Optimizer, int] = {}
        self._learn()

    def prepare(self, loss: Tensor) -> None:
        """Before each backward from ``loss``: what it reaches is averaged, what no rank's reaches has no gradient."""
        self._num_backwards += 1
        self._learn()
        if self._reducer is not None:
            with warnings.catch_warnings():  # it finds every parameter used: nothing to tell a user
                warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
                prepare_for_backward(self._reducer, loss)

    def check(self, optimizer: Optimizer) -> None:
        """Before each update: have its gradients been averaged?

        Raises:
            UnsupportedError: if none of the backwards since the optimizer's last update was announced.
        """
        if self._stepped.get(optimizer) == self._num_backwards or not self._num_backwards:
            raise UnsupportedError(
                f"{type(optimizer).__name__} would step without a self.manual_backward(loss) since its last step: the"
                " replicas' gradients are not averaged, as they are not after loss.backward() or torch.autograd.grad."
                " Use self.manual_backward(loss), or data_parallel_size=1."
            )
        self._stepped[optimizer] = self._num_backwards

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in here accumulate on each rank."""
        with nullcontext() if self._reducer is None else self._reducer.no_sync():
            yield

    def _learn(self) -> None:
        """Build the reducer anew for parameters that were frozen so far. A collective then."""
        trained = {p for p in self._module.parameters() if p.requires_grad}
        if trained <= self._known:
            return
        self._known |= trained
        is_paused = self._reducer is not None and not self._reducer.require_backward_grad_sync
        self._reducer = None  # its hooks on the parameters go with it
        frozen = self._known - trained  # for now (an optimizer's turn): it must see them, too
        for parameter in frozen:
            parameter.requires_grad_(True)
        self._reducer = DistributedDataParallel(
            self._module,
            process_group=self._group,
            forward_sync_buffers=False,
            init_sync=False,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )
        for parameter in frozen:
            parameter.requires_grad_(False)
        self._reducer.require_backward_grad_sync = not is_paused
