"""Random streams: data the same in a tensor/pipeline group, dropout as each axis wants it.

[Note: two streams]
What runs outside of a step (shuffling, augmentation in the main process, worker seeds) must draw the same numbers on
all ranks of a data coordinate. What runs inside of a step must differ between data ranks and pipeline stages, and
agree between tensor ranks. Stages draw different amounts, so one stream cannot serve both: a step runs on a stream of
its own, which is put in place for the step and taken out afterwards.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist

__all__ = ["StepRandomness", "derive_seed", "random_state", "restore_random_state", "same_random_state"]


def derive_seed(*parts: Any) -> int:
    """Return a 63-bit seed that depends on all parts, the same on every machine and in every run."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def random_state() -> tuple[Any, ...]:
    """Return the states of Python's, numpy's and torch's (CPU) generators."""
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def restore_random_state(state: tuple[Any, ...]) -> None:
    """Put states of :func:`random_state` back."""
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])


def same_random_state(group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the random state of its first one. A collective."""
    carrier = [random_state()]
    dist.broadcast_object_list(carrier, group=group, group_src=0)
    restore_random_state(carrier[0])


class StepRandomness:
    """torch's random stream inside of steps."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        with self._forked():
            torch.manual_seed(seed)
            self._state = self._read()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from the step's stream within the ``with`` block; the surrounding stream stays where it is."""
        with self._forked():
            self._write(self._state)
            yield
            self._state = self._read()

    def state_dict(self) -> dict[str, Any]:
        """The stream's position, for checkpoints."""
        return {"state": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a stream."""
        self._state = state["state"]

    def _forked(self) -> Any:
        return torch.random.fork_rng(devices=self._devices)

    def _read(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._devices)]

    def _write(self, state: list[torch.Tensor]) -> None:
        torch.set_rng_state(state[0])
        for device, device_state in zip(self._devices, state[1:], strict=True):
            torch.cuda.set_rng_state(device_state, device)
