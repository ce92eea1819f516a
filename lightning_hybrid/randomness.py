"""Random streams: data the same in a tensor/pipeline group, dropout as each axis wants it.

[Note: three streams]
What runs outside of a step (shuffling, augmentation in the main process, worker seeds) must draw the same numbers on
all ranks of a data coordinate. A step must draw others on other data ranks. And within a pipelined step, code outside
of the model's parts (noise that is added to the input and is the target too) must draw the same on all stages, which
run different amounts of it, while dropout inside of a stage's blocks is the stage's own. So

* a step runs on a stream of its own, put in place for the step and taken out afterwards;
* in a pipeline, each micro-batch starts that stream anew from a seed that all stages derive alike;
* the parts of the model that a stage runs draw from the stage's stream.

Tensor ranks agree in all three.
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

__all__ = ["StepRandomness", "derive_seed", "random_mark", "random_state", "restore_random_state", "same_random_state"]


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


def random_mark(device: torch.device | None = None) -> str:
    """Return a text that changes when a random number is drawn, on a CUDA ``device`` too if one is given."""
    python, numbers, cpu = random_state()
    cuda = [] if device is None else torch.cuda.get_rng_state(device).tolist()
    return repr((hash(python), hash((numbers[1].tobytes(), *numbers[2:])), hash(cpu.numpy().tobytes()), cuda))


def same_random_state(group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the random state of its first one. A collective."""
    carrier = [random_state()]
    dist.broadcast_object_list(carrier, group=group, group_src=0)
    restore_random_state(carrier[0])


class StepRandomness:
    """The random streams inside of steps."""

    def __init__(self, seed: int, stage: int, device: torch.device) -> None:
        """``seed`` is the data coordinate's; ``stage`` tells pipeline ranks apart."""
        self._seed = seed
        self._device = device if device.type == "cuda" else None
        surrounding = self._read()
        torch.manual_seed(derive_seed(seed, "stage", stage))
        self._stage = self._read()
        self._write(surrounding)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from the stage's stream within the ``with`` block; the surrounding stream stays where it is."""
        surrounding = self._read()
        self._write(self._stage)
        try:
            yield
        finally:
            self._stage = self._read()
            self._write(surrounding)

    @contextmanager
    def pipelined(self) -> Iterator[None]:
        """Around a pipelined step: whatever it draws, the surrounding streams stay where they are."""
        surrounding, others = self._read(), random_state()
        try:
            yield
        finally:
            restore_random_state(others)
            self._write(surrounding)

    def start_microbatch(self, *position: int) -> None:
        """Start the stream that all stages share, from the step's and the micro-batch's number."""
        seed = derive_seed(self._seed, *position)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also queues a call for each device not in use
        if self._device is not None:
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)

    def _read(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return states if self._device is None else [*states, torch.cuda.get_rng_state(self._device)]

    def _write(self, state: list[torch.Tensor]) -> None:
        torch.set_rng_state(state[0])
        if self._device is not None:
            torch.cuda.set_rng_state(state[1], self._device)
