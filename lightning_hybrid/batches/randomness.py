"""Random streams: data the same in a tensor/pipeline group, dropout as each axis wants it.

[Note: streams]
What runs outside of a step (shuffling, augmentation in the main process, worker seeds) must draw the same numbers on
all ranks of a data coordinate. A step must draw others on other data ranks. And within a pipelined step, code outside
of the model's parts (noise that is added to the input and is the target too) must draw the same on all stages, which
run different amounts of it. So

* a step runs on a stream of its own, put in place for the step and taken out afterwards;
* in a pipeline, each micro-batch starts that stream anew from a seed that all stages derive alike;
* each call of a part of the model takes one number from that stream, on stages that leave the part out too, and the
  part draws from a stream that starts with it. So a block's masks do not depend on which stage it is on.

[Note: shares draw for themselves]
Tensor ranks agree in all of these, so replicated activations get the same masks. Between a column-wise layer's output
and the next row-wise layer's input each rank holds other features or heads: there, a stream is in place that starts
from the surrounding one and the tensor rank.

Every stream follows from the state of the one around it: when a checkpoint restores that state and runs the code again
in the backward, all masks are repeated.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "SHARES",
    "ShareStream",
    "StepRandomness",
    "derive_seed",
    "is_same_state",
    "random_mark",
    "random_state",
    "restore_random_state",
    "same_random_state",
]


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


def is_same_state(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Whether two states of :func:`random_state` are equal."""
    same_numpy = all(numpy.array_equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    return first[0] == second[0] and same_numpy and torch.equal(first[2], second[2])


def random_mark(device: torch.device | None = None) -> str:
    """Return a text that changes when a random number is drawn, on a CUDA ``device`` too if one is given."""
    python, numbers, cpu = random_state()
    cuda = [] if device is None else torch.cuda.get_rng_state(device).tolist()
    return repr((hash(python), hash((numbers[1].tobytes(), *numbers[2:])), hash(cpu.numpy().tobytes()), cuda))


def same_random_state(mesh: DeviceMesh) -> None:
    """Give all ranks of one data coordinate the random state of the first one. A collective."""
    for axis in ("pipeline_parallel", "tensor_parallel"):
        carrier = [random_state()]
        dist.broadcast_object_list(carrier, group=mesh[axis].get_group(), group_src=0)
        restore_random_state(carrier[0])


class StepRandomness:
    """The random streams inside of steps."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """``seed`` is the data coordinate's."""
        self._seed, self._device = seed, device
        surrounding = _read(device)
        _start(derive_seed(seed, "steps"), device)
        self._steps = _read(device)
        _write(surrounding, device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around a step without a pipeline: draw from the steps' stream; the surrounding one stays where it is."""
        surrounding = _read(self._device)
        _write(self._steps, self._device)
        try:
            yield
        finally:
            SHARES.close()
            self._steps = _read(self._device)
            _write(surrounding, self._device)

    @contextmanager
    def pipelined(self) -> Iterator[None]:
        """Around a pipelined step: whatever it draws, the surrounding streams stay where they are."""
        surrounding, others = _read(self._device), random_state()
        try:
            yield
        finally:
            restore_random_state(others)
            _write(surrounding, self._device)

    def part(self) -> AbstractContextManager[None]:
        """At the call of a part of the model; in the ``with`` block it draws from its own stream.

        To be called on every stage, whether it runs the part or not: a number is taken from the surrounding stream.
        """
        return self._from(_draw())

    @contextmanager
    def _from(self, seed: int) -> Iterator[None]:
        surrounding = _read(self._device)
        _start(seed, self._device)
        try:
            yield
        finally:
            _write(surrounding, self._device)

    def start_microbatch(self, *position: int) -> None:
        """Start the stream that all stages share, from the step's and the micro-batch's number."""
        seed = derive_seed(self._seed, *position)
        _start(seed, self._device)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)


class ShareStream:
    """The stream of what each tensor rank draws for its own share of a tensor; see the note above."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._seed: int | None = None
        self._fresh: list[Tensor] = []
        self._surrounding: list[list[Tensor]] = []

    @property
    def is_open(self) -> bool:
        """Whether it is in place. Whoever put other states in place (a checkpoint's recomputation) has closed it."""
        return self._seed is not None and self._seed == torch.initial_seed()

    def open(self, rank: int, device: torch.device) -> None:
        """Put the stream of this tensor rank in place, unless it is."""
        if torch.compiler.is_compiling() or self.is_open:
            return
        before = _read(device)
        self._device, self._seed = device, derive_seed(_draw(), "share", rank)
        self._surrounding = [before, _read(device)]
        _start(self._seed, device)
        self._fresh = _read(device)

    def close(self) -> None:
        """Go back to the surrounding stream, one number further if anything was drawn since."""
        if torch.compiler.is_compiling():
            return
        if self.is_open:
            pairs = zip(self._fresh, _read(self._device), strict=True)
            drawn = any(not torch.equal(fresh, now) for fresh, now in pairs)
            _write(self._surrounding[drawn], self._device)
        self._seed = None


#: Of this process, as torch's generators are.
SHARES = ShareStream()


def _draw() -> int:
    return int(torch.randint(2**62, (), device="cpu"))


def _start(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also queues a call for each device not in use
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _read(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _write(state: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
