"""Models built on the meta device: a rank gets memory for the weights it holds, with the same values at all degrees.

[Note: initialised in parts, alike everywhere]
A module that was built under ``torch.device("meta")`` has shapes and no values. These come from what its modules bring
for that: ``reset_parameters()``, as torch's do, and ``_init_weights(module)`` of the nearest module around them that
has one, as Hugging Face's (and many others') do. Both may do anything with the weights of a whole subtree, of which a
rank holds a part only. So all of them run on every rank, children before parents, and what a rank does not hold
stays on the meta device, where writing does nothing. Each draw of random numbers is seeded by the run's seed, the
module's name and the number of the draw, so that draws that have no effect here change none that do.

They run twice: once before the step is cut, with all weights on the meta device, which fills the buffers (masks and
rotary tables, which a first step needs) and tells on every rank alike what would get no values; then, when it is known
which weights are held, for those. In between, weights are zeros that take one element of memory.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hybrid.batches.randomness import derive_seed, random_state, restore_random_state
from lightning_hybrid.checkpoint.consolidate import StateKeys
from lightning_hybrid.checkpoint.pretrained import ORIGIN
from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.pipeline.holes import placeholder
from lightning_hybrid.pipeline.hollow import memory_of
from lightning_hybrid.pipeline.probe import written_tensors

__all__ = ["MetaWeights", "check_same_meta", "on_meta", "to_meta", "values_to_try_with"]

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_OFFSETS = 256
_MOST_TO_TRY_WITH = 2**27  # elements; half a gigabyte of fp32
_REMEDY = 'or build it outside of torch.device("meta").'


def on_meta(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers on the meta device."""
    return [name for name, _, tensor in _tensors(module) if tensor.is_meta]


def to_meta(module: nn.Module) -> None:
    """Move all parameters and buffers to the meta device; unlike with ``module.to("meta")`` tied ones stay tied."""
    for registry in ("_parameters", "_buffers"):
        _replace(module, registry, lambda t: torch.empty_like(t, device="meta"), lambda t: not t.is_meta)


def check_same_meta(module: nn.Module) -> None:
    """Refuse a module that is on the meta device on some ranks only. A collective over the world.

    Raises:
        UnsupportedError: on every rank.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, on_meta(module))
    for rank, names in enumerate(found):
        if names != found[0]:
            name = sorted(set(names) ^ set(found[0]))[0]
            on, off = (rank, 0) if name in names else (0, rank)
            raise UnsupportedError(
                f"{name} is on the meta device on rank {on} and has values on rank {off}. Build the model alike on all"
                " ranks: on the meta device, or for real (all ranks then get the values of rank 0)."
            )


@contextmanager
def values_to_try_with(module: nn.Module) -> Iterator[None]:
    """Let parameters that wait for their values have random ones, the same on all ranks, while a step is tried.

    With zeros, a step that is split wrongly may give what the right one gives, and kernels refuse their strides. All
    are views of one piece of memory, and the rows of a very large one overlap in it: nothing here grows with the model.
    """
    waiting = [p for p in module.parameters() if p.numel() > 1 and not p.is_meta and not any(p.stride())]
    memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    before = []
    try:
        for index, parameter in enumerate(p for p in waiting if p.is_floating_point()):
            kind = parameter.dtype, parameter.device
            if kind not in memory:
                like = [p for p in waiting if (p.dtype, p.device) == kind]
                memory[kind] = _random(max(_extent(p.shape) for p in like) + 16 * _OFFSETS, *kind)
            start = 16 * (37 * index % _OFFSETS)  # others for each, and aligned as kernels want it
            values = memory[kind].as_strided(parameter.shape, _strides(parameter.shape), start)
            before.append((parameter, parameter.data))
            parameter.data = values + 1 if parameter.ndim == 1 else values
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


def _random(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    return values.to(device, dtype)


def _strides(shape: torch.Size) -> list[int]:
    """Those of a contiguous tensor, where that is not too large; else the first dimensions overlap."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for dim in range(len(shape) - 1):
        if 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) <= _MOST_TO_TRY_WITH:
            break
        strides[dim] = 16
    return strides


def _extent(shape: torch.Size) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, _strides(shape), strict=True))


class MetaWeights:
    """The weights of one module that was built on the meta device, until they are needed."""

    def __init__(self, module: nn.Module, seed: int, given: Collection[str] = ()) -> None:
        """Fill the buffers, and let zeros of one element stand for the parameters.

        Args:
            module: whole, with some or all tensors on the meta device. Changed in place; others are left as they are.
            seed: the run's.
            given: keys that a checkpoint will overwrite, so that they need no values.

        Raises:
            UnsupportedError: on every rank, if something would get no values; it is named.
        """
        self._module, self._seed = module, seed
        self._waiting: dict[int, Tensor] = {id(p): p for p in module.parameters() if p.is_meta}
        self._buffers = {id(b): b for b in _replace(module, "_buffers", _real, lambda buffer: buffer.is_meta)}
        written = self._initialise()
        self._refuse_unfilled(written, given)
        stand_ins = _replace(module, "_parameters", placeholder, lambda p: p.is_meta)
        self._waiting = {id(p): p for p in stand_ins}
        _refuse_unregistered(module)

    def fill(self, keys: StateKeys) -> None:
        """Give memory and values to those parameters that the module still has. ``keys`` are the whole module's.

        Those whose values come from files stay without memory until they have been split and sharded.
        """
        streamed = {id(tensor) for _, _, tensor in _tensors(self._module) if hasattr(tensor, ORIGIN)}
        kept = _replace(self._module, "_parameters", _real, lambda p: id(p) in self._waiting and id(p) not in streamed)
        self._waiting = {id(p): p for p in kept}
        with keys.completed(self._module):
            self._initialise()
        self._waiting.clear()

    def _initialise(self) -> dict[int, int]:
        """Run all initialisers, on tensors that are waiting. Returns how many elements each memory got."""
        wanted = self._waiting.keys() | self._buffers.keys()
        first_holder: dict[int, nn.Module] = {}
        for _, part, tensor in _tensors(self._module):
            first_holder.setdefault(id(tensor), part)
        with _hidden(self._module, lambda key: key not in wanted), _drawing(self._seed) as draws:
            for name, part, functions in reversed(list(_initialisers(self._module))):
                if any(id(tensor) in wanted for _, _, tensor in _tensors(part)):
                    tied = {id(tensor) for _, tensor in _own(part) if first_holder.get(id(tensor), part) is not part}
                    with _hidden(part, tied.__contains__, recurse=False):  # its first holder gives it values
                        draws.start(name)
                        _run(name, functions)
        return draws.written

    def _refuse_unfilled(self, written: dict[int, int], given: Collection[str]) -> None:
        given_ids = {id(t) for name, _, t in _tensors(self._module) if name in given}
        for name, part, tensor in _tensors(self._module):
            ours = tensor.is_meta or id(tensor) in self._buffers
            if ours and id(tensor) not in given_ids and written.get(memory_of(tensor)[0], 0) < tensor.numel():
                raise UnsupportedError(
                    f"{name} was built on the meta device, and nothing gives it values. Define reset_parameters(self)"
                    f" in {type(part).__name__} that fills it, {_REMEDY}"
                )


def _refuse_unregistered(module: nn.Module) -> None:
    for name, part in module.named_modules():
        for attribute, value in part.__dict__.items():
            if attribute not in _REGISTRIES and any(_is_meta(leaf) for leaf in tree_leaves(value)):
                path = f"{name}.{attribute}" if name else attribute
                raise UnsupportedError(
                    f"{path} of {type(part).__name__} holds a tensor on the meta device that is neither a parameter nor"
                    " a buffer, so nothing gives it values. Make it a buffer (register_buffer) that"
                    f" reset_parameters(self) fills, {_REMEDY}"
                )


class _Draws(TorchDispatchMode):
    """While active, random numbers depend on the module and the number of the draw; counts what is written."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._name, self._position = seed, "", [0]
        self.written: dict[int, int] = {}

    def start(self, name: str) -> None:
        """Begin with a module."""
        self._name, self._position = name, [0]
        seed = derive_seed(self._seed, name)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(derive_seed(self._seed, self._name, *self._position))
            self._position[-1] += 1
        output = func(*args, **kwargs)
        for tensor in tree_leaves(written_tensors(func, args, kwargs)):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return output

    def _note(self, tensor: Tensor) -> None:
        self.written[memory_of(tensor)[0]] = self.written.get(memory_of(tensor)[0], 0) + tensor.numel()

    def trunc_normal(self, function: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Count as one draw what draws until all values are within bounds, and can do so on real memory only."""
        if tensor.device.type == "meta":
            self._note(tensor)
        else:
            self._position.append(0)
            function(tensor, *args, **kwargs)
            self._position.pop()
        self._position[-1] += 1
        return tensor


class _SayReal(TorchFunctionMode):
    """While active, tensors say that they are not on the meta device: torch's initialisers would pass them over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if func == _IS_META else func(*args, **(kwargs or {}))


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


@contextmanager
def _drawing(seed: int) -> Iterator[_Draws]:
    """Make draws depend on nothing but the seed, the module and their order in it, whatever has memory."""
    original, before = torch.nn.init._no_grad_trunc_normal_, random_state()
    draws = _Draws(seed)
    torch.nn.init._no_grad_trunc_normal_ = functools.partial(draws.trunc_normal, original)
    try:
        with torch.no_grad(), draws, _SayReal():
            yield draws
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original
        restore_random_state(before)


def _initialisers(module: nn.Module) -> Iterator[tuple[str, nn.Module, list[Callable[[], Any]]]]:
    """Yield every module, parents before children, with what initialises it, in order."""
    around: dict[str, Any] = {}
    for name, part in module.named_modules():
        method = getattr(part, "_init_weights", None)
        around[name] = method if _num_arguments(method) == 1 else around.get(name.rpartition(".")[0])
        own = [getattr(part, attribute, None) for attribute in ("reset_parameters", "_reset_parameters")]
        functions: list[Any] = [function for function in [*own, method] if _num_arguments(function) == 0]
        if (method := around[name]) is not None:
            functions.append(lambda method=method, part=part: method(part))
        yield name, part, functions


def _num_arguments(function: Any) -> int | None:
    """The number of arguments that a function must get; ``None`` if it is not callable."""
    if not callable(function):
        return None
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _run(name: str, functions: list[Callable[[], Any]]) -> None:
    for function in functions:
        try:
            function()
        except Exception as error:
            raise UnsupportedError(
                f"{name or 'The module'} was built on the meta device and cannot be initialised in parts: its"
                f" reset_parameters() or _init_weights() failed with {type(error).__name__}: {error}. They may write"
                f" weights, but not read them, since a rank holds some of them only. Change them, {_REMEDY}"
            ) from error


def _own(part: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, t in (*part._parameters.items(), *part._buffers.items()) if t is not None]


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield every parameter and buffer under each of its names, with its module."""
    for prefix, part in module.named_modules():
        for name, tensor in _own(part):
            yield f"{prefix}.{name}" if prefix else name, part, tensor


def _replace(
    module: nn.Module, registry: str, make: Callable[[Tensor], Tensor], which: Callable[[Tensor], bool]
) -> list[Tensor]:
    """Put new tensors in the place of some. Tied ones stay tied. Returns the new ones."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for part in module.modules():
        for name, old in list(getattr(part, registry).items()):
            if old is not None and which(old):
                if id(old) not in made:
                    made[id(old)] = old, _like(old, make(old))
                if registry == "_parameters":
                    setattr(part, name, made[id(old)][1])  # recurrent modules keep a list of theirs
                else:
                    part._buffers[name] = made[id(old)][1]
    return [new for _, new in made.values()]


def _like(old: Tensor, values: Tensor) -> Tensor:
    """Return values as the same kind of tensor as ``old``, with its attributes."""
    new = nn.Parameter(values, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else values
    marks = {"_is_hf_initialized"}  # of Hugging Face: it has values, initialise it no more
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in marks})
    return new


def _real(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


@contextmanager
def _hidden(module: nn.Module, which: Callable[[int], bool], recurse: bool = True) -> Iterator[None]:
    """For a while let tensors on the meta device, which nothing can change, stand for some of the module's (by id)."""
    hidden: list[tuple[dict[str, Any], str, Tensor]] = []
    registries: list[dict[str, Any]] = []
    for part in module.modules() if recurse else [module]:
        registries += [part._parameters, part._buffers]
    for registry in registries:
        for name, tensor in registry.items():
            if tensor is not None and which(id(tensor)):
                hidden.append((registry, name, tensor))
                registry[name] = _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    try:
        yield
    finally:
        for registry, name, tensor in hidden:
            registry[name] = tensor


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
