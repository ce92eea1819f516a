"""Copies in the host's memory of what a checkpoint writes, made while training goes on.

Parameters and buffers are copied at once, since hooks may change them at any time. Large states of optimizers (two
thirds of AdamW's bytes) are copied by another thread, during the next forward and backward: ``optimizer.step()``, which
alone changes them, waits until they are. Whoever changes them in place elsewhere is noticed: by torch's count of
changes, which fused steps and those on lists of DTensors pass over, and by a sample of the values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_hybrid.checkpoint.tensors import Share
from lightning_hybrid.errors import CheckpointError

__all__ = ["HostCopies"]

#: Bytes below which a state is copied at once: step counts, and what is not worth a look for changes.
SMALL = 1 << 14
SAMPLES = 32


@dataclass(frozen=True)
class _Late:
    """A piece of an optimizer's state that is to be copied."""

    key: str
    start: tuple[int, ...]
    piece: Tensor
    source: Tensor
    """The optimizer's own tensor, of which the piece is a view."""
    into: Any
    """The share that gets the copy."""
    before: tuple[int, int, Tensor]
    """What :func:`_looks` returned when the checkpoint was made."""


class HostCopies:
    """The copies of one checkpoint after the other, in the same memory.

    :meth:`begin` is to be called by the thread that trains, :meth:`finish` afterwards by any other. Between the two,
    steps of optimizers wait.
    """

    def __init__(self) -> None:
        self._memory: dict[Any, Tensor] = {}
        self._kept: dict[Any, Tensor] = {}
        self._late: list[_Late] = []
        self._ready: dict[torch.device, Any] = {}
        self._finished: threading.Event | None = (
            None  # not before there is a checkpoint: it cannot be sent to processes
        )
        self._hook: Any = None
        self._around_wait: Callable[[], AbstractContextManager[Any]] = nullcontext

    def begin(
        self, shares: Mapping[str, Any], around_wait: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> dict[str, Any]:
        """Return the shares with pieces that training does not change; large states of optimizers come later.

        Args:
            shares: what this rank writes, by name.
            around_wait: makes a context around each step's waiting, such as a profiler's.
        """
        self._kept, self._late, self._around_wait = {}, [], around_wait
        copied, devices = {}, set()
        for key, share in shares.items():
            copied[key] = Share.make(share.shape, share.dtype, (), share.key)
            for start, piece in share.pieces:
                devices.add(piece.device)
                if _may_wait(share, piece):
                    before = _looks(piece, share.source)
                    self._late.append(_Late(key, start, piece, share.source, copied[key], before))
                else:
                    copied[key].pieces.append((start, self._copy(key, start, piece)))
        for device in devices:
            if device.type != "cpu":
                module = torch.get_device_module(device)
                self._ready[device] = module.current_stream(device).record_event()
                module.synchronize(device)
        self._finished = threading.Event()
        if self._late:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
        return copied

    def finish(self) -> None:
        """Copy what is left, and let steps go on.

        Raises:
            CheckpointError: if a state was changed meanwhile.
        """
        try:
            with ExitStack() as stack:
                streams = [_enter_stream(stack, device, event) for device, event in self._ready.items()]
                for late in self._late:
                    late.into.pieces.append((late.start, self._copy(late.key, late.start, late.piece)))
                for stream in streams:
                    stream.synchronize()
                changed = [late.key for late in self._late if not _equal(_looks(late.piece, late.source), late.before)]
        finally:
            self._memory, self._kept, self._late, self._ready = self._kept, {}, [], {}
            if self._finished is not None:
                self._finished.set()
        if changed:
            raise CheckpointError(
                f"{changed[0]}, and {len(changed) - 1} other states of optimizers, were changed in place while they"
                " were copied, and not by optimizer.step(), which waits. Change them before checkpoints are made, or"
                " replace them by new tensors; or use save_distributed_checkpoint=True, which copies nothing."
            )

    def release(self) -> None:
        """Have steps look no more; to be called by the thread that trains, when all is copied."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _copy(self, key: str, start: tuple[int, ...], piece: Tensor) -> Tensor:
        copy = self._memory.get((key, start))
        if copy is None or copy.shape != piece.shape or copy.dtype != piece.dtype:
            copy = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.device.type != "cpu")
        self._kept[key, start] = copy.copy_(piece, non_blocking=True)
        return copy

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of every optimizer: wait; or, where a closure brings the forward and backward, after that.

        Only torch's own are known to call it before they change anything.
        """
        if self._finished is None or self._finished.is_set():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not type(optimizer).step.__module__.startswith("torch.optim."):
            self._wait()
            return None

        def closure_then_wait() -> Any:
            result = closure()
            self._wait()
            return result

        return (args[0], closure_then_wait, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _wait(self) -> None:
        if self._finished is not None and not self._finished.is_set():
            with self._around_wait():
                self._finished.wait()


def _may_wait(share: Any, piece: Tensor) -> bool:
    is_large_state = share.key is not None and share.source is not None and piece.nbytes > SMALL
    return is_large_state and piece.is_contiguous() and not piece.is_inference() and not share.source.is_inference()


def _looks(piece: Tensor, source: Tensor) -> tuple[int, int, Tensor]:
    """Numbers and values that are others after almost any change in place."""
    sample = piece.view(-1)[:: max(1, piece.numel() // SAMPLES)].clone().view(torch.uint8)  # so that NaN equals NaN
    return source._version, piece._version, sample


def _equal(one: tuple[int, int, Tensor], other: tuple[int, int, Tensor]) -> bool:
    return one[:2] == other[:2] and torch.equal(one[2], other[2])


def _enter_stream(stack: ExitStack, device: torch.device, ready: Any) -> Any:
    """Copy beside what the device computes, after what it was to do when the checkpoint was made."""
    module = torch.get_device_module(device)
    stream = module.Stream(device)
    stream.wait_event(ready)
    stack.enter_context(module.stream(stream))
    return stream
