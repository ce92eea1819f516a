"""Optimizer states follow the names of parameters, not their places."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hybrid.checkpoint.consolidate import StateKeys, _positions, scatter_optimizer_state
from lightning_hybrid.errors import CheckpointError


def test_state_follows_names() -> None:
    groups = [{"params": [0, 1, 2]}, {"params": [3, 4, 5]}]
    whole = [["a", "b", "c"], ["x", "y", "z"]]

    def positions(*saved: list[str] | None) -> list[int]:
        found = _positions({"param_groups": groups, "param_names": saved if all(saved) else None}, whole)
        return [found[name] for name in "abcxyz"]

    assert positions(None) == [0, 1, 2, 3, 4, 5]
    assert positions(["c", "a", "b"], ["x", "y", "z"]) == [1, 2, 0, 3, 4, 5]
    assert positions(["b", "old", "c"], ["u", "v", "w"]) == [1, 0, 2, 3, 4, 5], "those that were renamed, by order"
    with pytest.raises(CheckpointError, match="a, and 5 other parameters, are in group 1 of the checkpoint's"):
        positions(["x", "y", "z"], ["a", "b", "c"])


def test_states_of_another_class_are_refused() -> None:
    """They would fail in the first step, by the name of a key."""
    module = nn.Linear(2, 2)
    keys = StateKeys.of(module, lambda name: True)
    saved = torch.optim.AdamW(module.parameters())
    scatter_optimizer_state(torch.optim.Adam(module.parameters()), saved.state_dict(), module, keys, None)
    with pytest.raises(CheckpointError, match="has no dampening, momentum, which SGD needs"):
        scatter_optimizer_state(torch.optim.SGD(module.parameters()), saved.state_dict(), module, keys, None)
