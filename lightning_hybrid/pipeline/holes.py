"""Holes: what stands for a module that a stage does not run. Right output shape and dtype, no weights, no work."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from lightning_hybrid.measuring.flops import count_flops
from lightning_hybrid.pipeline.hollow import plain

__all__ = ["Hole", "KeptBytes", "placeholder"]


def placeholder(parameter: Tensor, device: torch.device | None = None) -> Tensor:
    """Return zeros of the shape and dtype of ``parameter`` that take one element of memory."""
    device = device or (torch.device("cpu") if parameter.is_meta else parameter.device)
    return torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)


@dataclass(frozen=True, slots=True)
class _Template:
    """How to make a hole's output from its arguments."""

    leaves: tuple[tuple[str, Any], ...]
    """``("argument", position)`` hands an argument on, ``("zeros", (shape, dtype, device))``, ``("value", object)``."""
    spec: TreeSpec
    flops: int
    left_behind: tuple[tuple[str, str, Any], ...]
    """Tensors that the module keeps in plain attributes: module within it, attribute, ``(shape, dtype, device)``."""

    def build(self, arguments: list[Any]) -> Any:
        return tree_unflatten([_make(how, what, arguments) for how, what in self.leaves], self.spec)


def _make(how: str, what: Any, arguments: list[Any]) -> Any:
    if how == "argument":
        # a new object each time: later code tells values apart by identity
        return arguments[what].detach() if isinstance(arguments[what], Tensor) else arguments[what]
    if how == "zeros":
        shape, dtype, device = what
        return torch.zeros(shape, dtype=dtype, device=device)
    return what


class Hole:
    """Stands for one module. Outputs are remembered by what the arguments look like, for all modules of one kind.

    The shapes come from one run of a weightless copy of the module on fake tensors (no memory, no arithmetic). A
    module that branches on values cannot run so, and runs once on zeros instead.
    """

    def __init__(self, module: nn.Module, keep: dict[int, Any], memory: dict[Any, Any]) -> None:
        """``keep`` maps ids of objects that must not be copied to themselves; ``memory`` is shared between holes."""
        replaced: dict[int, Any] = dict(keep)
        for parameter in module.parameters():
            replaced[id(parameter)] = nn.Parameter(placeholder(parameter), requires_grad=False)
        self._twin = copy.deepcopy(module, replaced)
        self._trained = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
        self._kind = (type(module), tuple((name, p.shape) for name, p in module.named_parameters()))
        self._memory = memory

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an output like the module's, without its values."""
        args, kwargs = plain((args, kwargs))
        leaves, _ = tree_flatten((args, kwargs))
        return self._template(args, kwargs, leaves).build(leaves)

    def flops(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the floating point operations of one forward on such arguments (0 where it cannot be counted)."""
        args, kwargs = plain((args, kwargs))
        return self._template(args, kwargs, tree_flatten((args, kwargs))[0]).flops

    def left_behind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str, Tensor]]:
        """Return like tensors for those that a forward leaves in attributes: ``(module within, attribute, tensor)``."""
        args, kwargs = plain((args, kwargs))
        found = self._template(args, kwargs, tree_flatten((args, kwargs))[0]).left_behind
        return [(path, key, _make("zeros", look, [])) for path, key, look in found]

    def kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the bytes that autograd keeps of one forward on such arguments; ``None`` where they cannot be counted.

        Weights do not count, nor what the module keeps in attributes.
        """
        args, kwargs = plain((args, kwargs))
        leaves = tree_flatten((args, kwargs))[0]
        wants = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        signature = "kept", self._trained, wants, self._signature(args, kwargs, leaves)
        if signature not in self._memory:
            self._memory[signature] = self._count_kept(args, kwargs)
        found: int | None = self._memory[signature]
        return found

    def _count_kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        before, counted = self._attributes(), KeptBytes()
        try:
            with _unsaid(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
                fake = tree_map_only(Tensor, lambda t: _like(mode.from_tensor(t.detach()), t), (args, kwargs))
                weights = {name: w.requires_grad_(name in self._trained) for name, w in self._weights().items()}
                counted.ignore(weights.values())
                with counted:
                    _ = functional_call(self._twin, weights, fake[0], fake[1])
        except Exception:
            return None
        finally:
            list(self._take_new_attributes(before))
        return counted.total

    def to(self, device: torch.device) -> None:
        """Move the weightless copy to a device."""
        for module in self._twin.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(placeholder(parameter, device), requires_grad=False)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._memory.clear()

    def _template(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> _Template:
        signature = self._signature(args, kwargs, leaves)
        if signature not in self._memory:
            self._memory[signature] = self._learn(args, kwargs, leaves)
        found: _Template = self._memory[signature]
        return found

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> tuple[Any, ...]:
        autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        return (self._kind, self._twin.training, autocast, len(args), *kwargs, *map(_look, leaves))

    def _weights(self) -> dict[str, Tensor]:
        """Zeros that look like weights to kernels which mind strides; fake ones take no memory."""
        return {name: torch.zeros(p.shape, dtype=p.dtype, device=p.device) for name, p in self._twin.named_parameters()}

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> _Template:
        counter, before = count_flops(), self._attributes()
        try:
            with _unsaid(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode, counter:
                fake: Callable[[Tensor], Tensor] = mode.from_tensor
                fake_args, fake_kwargs = tree_map_only(Tensor, fake, (args, kwargs))
                output = functional_call(self._twin, self._weights(), fake_args, fake_kwargs)
        except Exception:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                zeros = tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))
                output = functional_call(self._twin, self._weights(), zeros[0], zeros[1])
        flat, spec = tree_flatten(output)
        looks = [_look(leaf) for leaf in leaves]
        how = tuple(_how(leaf, leaves, looks) for leaf in flat)
        return _Template(how, spec, counter.get_total_flops(), tuple(self._take_new_attributes(before)))

    def _attributes(self) -> dict[tuple[str, str], Any]:
        parts = self._twin.named_modules()
        return {
            (path, key): value
            for path, part in parts
            for key, value in part.__dict__.items()
            if isinstance(value, Tensor)
        }

    def _take_new_attributes(self, before: dict[tuple[str, str], Any]) -> Iterator[tuple[str, str, Any]]:
        for (path, key), value in self._attributes().items():
            if value is not before.get((path, key)):
                del self._twin.get_submodule(path).__dict__[key]
                yield path, key, (value.shape, value.dtype, torch.device(value.device))
        for (path, key), value in before.items():
            self._twin.get_submodule(path).__dict__[key] = value


class KeptBytes(saved_tensors_hooks):
    """While active, adds up the memory that autograd keeps for backwards, each piece once."""

    def __init__(self) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.total = 0
        self._seen: dict[int, Any] = {}

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Let these tensors' memory not count."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._seen[storage._cdata] = StorageWeakRef(storage)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen = self._seen.get(storage._cdata)
        if seen is None or seen.expired():
            self._seen[storage._cdata] = StorageWeakRef(storage)
            self.total += storage.nbytes()
        return tensor.detach()  # itself it would keep the node alive that made it, and saves it


@contextmanager
def _unsaid() -> Iterator[None]:
    """An operation that fake tensors cannot run is met by another way: the user need not read torch's report."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _like(fake: Tensor, real: Tensor) -> Tensor:
    """Have a fake argument require a gradient, without being a leaf, where the real one does."""
    return fake.requires_grad_().view_as(fake) if real.requires_grad else fake


def _how(leaf: Any, arguments: list[Any], looks: list[Any]) -> tuple[str, Any]:
    if isinstance(leaf, Tensor):
        device = torch.device(leaf.device)
        if leaf.is_floating_point() and (look := _look(leaf)) in looks:
            return "argument", looks.index(look)
        return "zeros", (leaf.shape, leaf.dtype, device)
    for position, argument in enumerate(arguments):
        if leaf is argument:
            return "argument", position
    return "value", leaf


def _look(leaf: Any) -> Any:
    """What a hole's output may depend on: a tensor's shape, dtype and device; a plain value itself; else the type."""
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.dtype, leaf.device.type)
    return leaf if isinstance(leaf, (int, float, str, bytes, type(None))) else type(leaf)
