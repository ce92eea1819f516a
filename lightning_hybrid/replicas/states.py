"""Replicas in checkpoints.

A checkpoint's weights and optimizer states are those of replica 0, so that anything reads them. What only the others
have stands beside them: states of their optimizers, which replicas never exchange; their weights too if the checkpoint
was made in the middle of a window; and, once, the outer weights with their momentum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_hybrid.checkpoint.consolidate import (
    gather_model_state,
    gather_optimizer_state,
    scatter_model_state,
    scatter_optimizer_state,
)
from lightning_hybrid.checkpoint.format import ENTRY
from lightning_hybrid.checkpoint.tensors import Share
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.replicas.window import Replicas, local

__all__ = ["add_replica_states", "take_replica_states"]

KEY = "replicas"


def add_replica_states(checkpoint: dict[str, Any], strategy: Any) -> None:
    """Put what rank 0's replica does not have into a checkpoint with optimizer states. A collective over the world."""
    replicas: Replicas | None = strategy.replicas
    if replicas is None or "optimizer_states" not in checkpoint:
        return
    module, keys, mesh, number = (
        strategy.lightning_module,
        strategy._keys,
        strategy.device_mesh,
        strategy.layout.replicate_size,
    )
    states, weights = [], []
    for replica in range(1, number):
        options = {"in_place": strategy._is_sharded, "holds": strategy.coordinate.replicate == replica}
        states.append(
            [
                gather_optimizer_state(optimizer, module, keys, mesh, order, **options)
                for optimizer, order in zip(strategy.optimizers, strategy._group_names, strict=True)
            ]
        )
        if replicas.is_open:
            weights.append(gather_model_state(module, keys, mesh, **options))
    outer = None
    if replicas.outer is not None:
        carrier = _as_optimizer(replicas, replicas.trained)
        outer = gather_optimizer_state(carrier, module, keys, mesh, in_place=strategy._is_sharded)
        for share in tree_leaves(outer):
            if isinstance(share, Share):
                share.source = None  # to be copied at once: an exchange does not wait for copies, as steps do
    checkpoint.setdefault(ENTRY, {})[KEY] = {
        "number": number,
        "interval": replicas.options.interval,
        "method": replicas.options.method,
        "step": replicas.step,
        "since": list(replicas.since),
        "optimizer_states": states,
        "state_dicts": weights,
        "outer": outer,
    }


def take_replica_states(checkpoint: Mapping[str, Any], strategy: Any) -> list[Any]:
    """Load this replica's weights and the outer ones; return the states of its optimizers.

    At another number of replicas, replica ``r`` goes on from what replica ``r % number`` had.

    Raises:
        CheckpointError: if the checkpoint lies in the middle of a window, and lacks the outer weights that are needed.
    """
    replicas: Replicas | None = strategy.replicas
    states: list[Any] = checkpoint["optimizer_states"]
    entry = checkpoint.get(ENTRY, {}).get(KEY)
    if entry is None:
        return states
    _say_what_changes(entry, strategy)
    if replicas is None:
        return states
    if entry["interval"] != "auto":
        replicas.adopt(entry["interval"], entry["method"])
    mine = strategy.coordinate.replicate % entry["number"]
    module, keys = strategy.lightning_module, strategy._keys
    if mine and entry["state_dicts"]:
        scatter_model_state(module, entry["state_dicts"][mine - 1], keys, strict=True)
    moving: set[str] = set(replicas.trained) if any(entry["since"]) else set()
    if replicas.outer is not None and entry["outer"] is not None:
        saved = {name for group in entry["outer"]["param_names"] for name in group}
        own = [name for name, _ in module.named_parameters() if keys.canonical.get(name, name) in saved]
        replicas.know(own)  # what is frozen by now, or not trained yet
        carrier = _as_optimizer(replicas, own)
        scatter_optimizer_state(carrier, entry["outer"], module, keys, strategy.device_mesh)
        moving = _take_outer(replicas, carrier, own)
    elif replicas.outer is not None and any(entry["since"]):
        raise CheckpointError(
            "The checkpoint was made between two exchanges of replicas that kept no outer weights, which"
            f" replica_sync={replicas.options} needs. Resume with the replica_sync that wrote it up to a checkpoint"
            " after an exchange, or load the weights only."
        )
    replicas.resume(entry["step"], entry["since"], moving)
    return entry["optimizer_states"][mine - 1] if mine else states


def _say_what_changes(entry: Mapping[str, Any], strategy: Any) -> None:
    now = strategy.layout.replicate_size if strategy.replicas is not None else 1
    if entry["number"] == now:
        return
    where = "in the middle of a window, where their weights differ" if any(entry["since"]) else "after an exchange"
    what = f"replica r goes on from r % {entry['number']}" if now > 1 else "training goes on from replica 0"
    rank_zero_warn(
        f"The checkpoint has {entry['number']} replicas ({where}), and this run has {now}: {what}. States of the"
        " optimizers always differ between replicas."
    )


def _as_optimizer(replicas: Replicas, names: Iterable[str]) -> torch.optim.Optimizer:
    """Outer weights as the state of an optimizer of the weights: how that is cut and joined is known."""
    assert replicas.outer is not None
    trained = {name: replicas.trained[name] for name in names}
    optimizer = torch.optim.SGD([*trained.values()] or [nn.Parameter(torch.empty(0))], lr=0.0)
    if not trained:
        optimizer.param_groups[0]["params"] = []
    for name, parameter in trained.items():
        momentum = replicas.outer.momentum(name)
        state: dict[str, Any] = {"outer": _like(parameter, replicas.outer[name]), "moving": name in replicas.moving}
        if momentum is not None:
            state["momentum_buffer"] = _like(parameter, momentum)
        optimizer.state[parameter] = state
    return optimizer


def _take_outer(replicas: Replicas, carrier: torch.optim.Optimizer, names: Iterable[str]) -> set[str]:
    """Take outer weights; return which of them have been trained since their last exchange."""
    assert replicas.outer is not None
    moving = set()
    for name in names:
        state = carrier.state[replicas.trained[name]]
        replicas.outer.set(name, local(state["outer"]))
        if "momentum_buffer" in state:
            replicas.outer.set_momentum(name, local(state["momentum_buffer"]))
        if state.get("moving", True):
            moving.add(name)
    return moving


def _like(parameter: nn.Parameter, share: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return share
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        share, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
