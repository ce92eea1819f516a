"""Values that stand for those of another stage. Whatever is computed from one is one too, until a step would use it.

The probe sees one step; a later one may do something else (an auxiliary loss from the second epoch on, a weight that is
used directly for some batches). It would then compute with a hole's zeros, and nothing would fail. So what comes out of
holes has a type of its own, which every operation hands on. Where such a value would leave a stage, enter a loss or be
logged, the step is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_hybrid.errors import PipelineError

__all__ = ["Hollow", "hollow", "memory_of", "plain", "refuse_hollow", "refuse_leaked", "takes_only_the_shape"]

#: Functions whose second argument only says how the first one is to look.
_AS_OTHER = ("expand_as", "view_as", "reshape_as", "type_as", "to")


class Hollow(Tensor):
    """A tensor of the right shape and dtype, without the right values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            try:
                output = func(*args, **kwargs)
            except RuntimeError as error:
                if "single memory location" not in str(error):
                    raise
                args = (*map(_with_memory, args[:1]), *args[1:])
                kwargs = {key: _with_memory(value) if key == "tensor" else value for key, value in kwargs.items()}
                output = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            if any(type(value) is cls for value in inputs):
                inputs[0].__class__ = cls
            return output
        if takes_only_the_shape(name) or (name in _AS_OTHER and type(args[0]) is not cls):
            return output
        real = {memory_of(value)[0] for value in inputs if type(value) is not cls}  # of which an output may be a view
        return tree_map_only(Tensor, lambda t: t if memory_of(t)[0] in real else hollow(t), output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Without values there is nothing to copy."""
        memo[id(self)] = copied = hollow(plain(self).detach())
        return copied


def _with_memory(tensor: Any) -> Any:
    """Return something to write to in the place of a weight of another stage: a hook may draw it anew.

    It is thrown away, but as many numbers are drawn as in one process.
    """
    return tensor.detach().clone(memory_format=torch.contiguous_format) if type(tensor) is Hollow else tensor


def takes_only_the_shape(name: str) -> bool:
    """Whether the operation of that name reads no values of its arguments (``zeros_like``, ``new_zeros``)."""
    operation = name.split(".")[0]
    return operation.startswith("new_") or operation.endswith("_like")


def hollow(values: Any) -> Any:
    """Return ``values`` with every tensor among them marked."""
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map_only(Tensor, lambda tensor: tensor.as_subclass(Hollow), values)


def plain(values: Any) -> Any:
    """Return ``values`` without the marks."""
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map_only(Hollow, lambda tensor: tensor.as_subclass(Tensor), values)


def refuse_hollow(what: str, values: Iterable[Any]) -> None:
    """Refuse values that are computed from what another stage has.

    Raises:
        PipelineError: names ``what`` they are, and the remedy.
    """
    if any(type(value) is Hollow for value in values):
        raise PipelineError(
            f"{what} is computed from weights or values of another stage that did not come through the arguments of the"
            " blocks, which the first batch's step did not do. Have every step do the same (multiply a part of the loss"
            " by 0 rather than leave it out), pass the value through the blocks, or use pipeline_parallel_size=1."
        )


def refuse_leaked(values: Iterable[Any]) -> None:
    """Refuse values made from fake tensors, in which a hole learns shapes: user code must have kept one.

    Raises:
        PipelineError: names the remedy.
    """
    if any(isinstance(value, FakeTensor) for value in values):
        raise PipelineError(
            "The step computes with what a block, or a forward hook on it, appends to a list or keeps in an object"
            " outside of itself, which is there on the stage of that block only. Return it from the block and hand it"
            " on through the blocks' arguments, or use pipeline_parallel_size=1."
        )


def memory_of(tensor: Tensor) -> tuple[int, Any]:
    """Return the address of a tensor's memory, and the storage; a tensor without one stands for itself."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and the like: no memory that could be shared
        return id(tensor), tensor
    return storage._cdata, storage
