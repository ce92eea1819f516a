"""Ordinary ``.ckpt`` files of a module that is spread over ranks: what a strategy's checkpoint hooks call."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.consolidate import (
    StateKeys,
    gather_model_state,
    gather_optimizer_state,
    scatter_model_state,
    scatter_optimizer_state,
)
from lightning_hybrid.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_hybrid.parallelize import StageMap

__all__ = ["PlainCheckpoints", "owning_stage", "read_checkpoint"]


def owning_stage(name: str, stages: StageMap) -> int:
    """Return the one stage that contributes a parameter, buffer or extra state to checkpoints. Pure.

    A parameter belongs to the first stage that holds it; anything else to its block, or to the parameters beside it
    (running statistics to their norm). What is left, such as counters and metrics of the LightningModule, belongs to
    the last stage, the only one that runs the step to its end.
    """
    if name in stages.stages_of_parameter:
        return stages.stages_of_parameter[name][0]
    for stage, blocks in enumerate(stages.ranges):
        if any(name.startswith(f"{stages.blocks[index]}.") for index in blocks):
            return stage
    path = name.rpartition(".")[0]
    beside = [owners[0] for other, owners in stages.stages_of_parameter.items() if other.rpartition(".")[0] == path]
    return beside[0] if beside else len(stages.ranges) - 1


def read_checkpoint(path: Any, checkpoint_io: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a file on every rank; local ones are mapped, so that each rank reads only the bytes that it keeps."""
    if type(checkpoint_io) is TorchCheckpointIO and os.path.isfile(path) and zipfile.is_zipfile(path):
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return checkpoint
    checkpoint = checkpoint_io.load_checkpoint(path, weights_only=weights_only)
    return checkpoint


class PlainCheckpoints:
    """State dicts of one spread module and its optimizers, as one process has them. All methods are collectives."""

    def __init__(self, module: nn.Module, keys: StateKeys, mesh: DeviceMesh | None) -> None:
        """``keys`` were read before ``module`` was cut; ``mesh`` is the mesh of the whole world."""
        self._module, self._keys, self._mesh = module, keys, mesh
        self._orders: list[list[list[str]]] = []

    def completed(self) -> AbstractContextManager[None]:
        """While ``configure_optimizers`` runs: the module has all its parameters (others' on meta)."""
        return self._keys.completed(self._module)

    def release(self, optimizers: Iterable[Optimizer]) -> None:
        """After ``configure_optimizers``: leave each optimizer with what this rank holds."""
        self._orders = [self._keys.release(optimizer, self._module) for optimizer in optimizers]

    def module_state(self) -> dict[str, Any]:
        """Return the state dict of the whole module; weightless on other ranks than 0."""
        return gather_model_state(self._module, self._keys, self._mesh)

    def load_module(self, state_dict: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
        """Load a whole state dict; returns missing and unexpected keys."""
        return scatter_model_state(self._module, state_dict, self._keys, strict)

    def optimizer_state(self, optimizers: Sequence[Optimizer], optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of one of ``optimizers``; empty on other ranks than 0."""
        order = self._order(next(i for i, known in enumerate(optimizers) if known is optimizer))
        return gather_optimizer_state(optimizer, self._module, self._keys, self._mesh, order)

    def load_optimizers(self, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
        """Load whole states, one for each optimizer."""
        if len(optimizers) != len(states):
            raise CheckpointError(
                f"The checkpoint has the states of {len(states)} optimizers, this run has {len(optimizers)}. Resume with"
                " the configure_optimizers that wrote it, or load the weights only."
            )
        for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
            scatter_optimizer_state(optimizer, state, self._module, self._keys, self._mesh, self._order(index))

    def _order(self, index: int) -> list[list[str]]:
        return self._orders[index] if index < len(self._orders) else []
