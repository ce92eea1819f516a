"""Averages of the weights (``WeightAveraging``, ``StochasticWeightAveraging``): of a rank's part, beside that part.

Lightning's callbacks copy the whole module in their ``setup``, before it is cut and sharded. Afterwards they pair the
parameters of the copy and of the module one by one. So the copy is replaced by :class:`Average`, which has a shard for
each shard; averaging by element is then right as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_swa_avg_fn

from lightning_hybrid.building.materialize import on_meta
from lightning_hybrid.checkpoint.tensors import keep
from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.parallelize import synchronise
from lightning_hybrid.sharding import reshard

__all__ = ["AVERAGING", "Average", "average_shares"]

#: What :func:`average_shares` is for.
AVERAGING = (WeightAveraging, StochasticWeightAveraging)


class Average(nn.Module):
    """A copy of each parameter and buffer that this rank holds, in the module's order; its state is the whole model's.

    ``state_dict`` and loading are collectives, as those of the strategy are.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self._strategy = strategy
        reshard(strategy._root)
        for i, parameter in enumerate(strategy.lightning_module.parameters()):
            self.register_parameter(f"parameter_{i}", nn.Parameter(parameter.detach().clone(), requires_grad=False))
        for i, buffer in enumerate(strategy.lightning_module.buffers()):
            self.register_buffer(f"buffer_{i}", buffer.detach().clone())

    def _apply(self, fn: Any, recurse: bool = True) -> Average:
        return self  # it stays beside the weights, whatever ``device`` the callback has

    def state_dict(self, *_: Any, destination: Any = None, prefix: str = "", **__: Any) -> Any:
        """Return the whole average on global rank 0, as one process has it; elsewhere its names and shapes."""
        with self._in_the_module():
            state = keep(self._strategy.lightning_module_state_dict())
        named = {f"{prefix}{name}": value for name, value in state.items()}
        if destination is None:
            return named
        destination.update(named)
        return destination

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, _: Any, strict: bool, *__: Any) -> None:
        state = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        with self._in_the_module():
            self._strategy.load_model_state_dict({"state_dict": state}, strict)

    @contextmanager
    def _in_the_module(self) -> Iterator[None]:
        """Let the module hold the average for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        module = self._strategy.lightning_module
        reshard(self._strategy._root)
        pairs = zip(chain(self.parameters(), self.buffers()), chain(module.parameters(), module.buffers()), strict=True)
        for mine, theirs in pairs:
            kept = mine.detach().clone()
            mine.copy_(theirs)
            theirs.copy_(kept)


class _Later(nn.Module):
    """Stands for the average of a module that has no memory yet."""

    def _load_from_state_dict(self, *_: Any) -> None:
        raise UnsupportedError(
            "The average of the weights cannot be taken from a checkpoint into a module on the meta device. Build the"
            " module on the CPU to resume, or leave WeightAveraging or StochasticWeightAveraging out."
        )


def average_shares(callback: Any, strategy: Any) -> None:
    """Let an averaging callback of Lightning's average this rank's part. To be called before its ``setup``."""
    vars(callback)["setup"] = partial(_set_up, callback, strategy)
    vars(callback)["on_fit_start"] = partial(_start, callback, strategy)
    vars(callback)["on_load_checkpoint"] = partial(_load, callback, strategy)


def _set_up(callback: Any, strategy: Any, trainer: Any, pl_module: Any, stage: str) -> None:
    """The callback's ``setup``, which makes a deep copy of the module."""
    pl_module.__dict__["__deepcopy__"] = partial(_copy, strategy, pl_module)
    try:
        type(callback).setup(callback, trainer, pl_module, stage)
    finally:
        pl_module.__dict__.pop("__deepcopy__", None)


def _copy(strategy: Any, module: Any, memo: dict[int, Any]) -> Any:
    del module.__dict__["__deepcopy__"]
    if module is strategy._module_of_part:  # set up by an earlier fit or evaluation
        return Average(strategy)
    return _Later() if on_meta(module) else deepcopy(module, memo)


def _start(callback: Any, strategy: Any, trainer: Any, pl_module: Any) -> None:
    """Before the callback's ``on_fit_start``, when there are parts: put shares in the place of a whole copy."""
    is_wrapped = isinstance(callback, WeightAveraging)
    owner, name = (callback._average_model, "module") if is_wrapped else (callback, "_average_model")
    whole = getattr(owner, name)
    if not isinstance(whole, Average):
        setattr(owner, name, average := Average(strategy))
        if not isinstance(whole, _Later):  # it may hold what a checkpoint had
            synchronise(whole, strategy.root_device)
            average.load_state_dict(whole.state_dict())
    if is_wrapped:
        _by_element(owner)
    type(callback).on_fit_start(callback, trainer, pl_module)


def _by_element(average: Any) -> None:
    """Use the same formulas without torch's operations on lists, which take no mix of tensors and DTensors."""
    if average.multi_avg_fn is not None:
        average.multi_avg_fn = partial(_on_shares, average.multi_avg_fn)
    elif average.avg_fn is None:
        average.avg_fn = get_swa_avg_fn()


def _on_shares(function: Any, mine: list[Tensor], theirs: list[Tensor], number: Any) -> None:
    function(_local(mine), _local(theirs), number)


def _local(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _load(callback: Any, strategy: Any, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
    """The callback's ``on_load_checkpoint``, where a module that is already a part takes a whole state."""
    module = _TakesWholeStates(strategy, pl_module) if pl_module is strategy._module_of_part else pl_module
    type(callback).on_load_checkpoint(callback, trainer, module, checkpoint)


class _TakesWholeStates:
    def __init__(self, strategy: Any, module: Any) -> None:
        self._strategy, self._module = strategy, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        self._strategy.load_model_state_dict({"state_dict": state_dict}, strict)
