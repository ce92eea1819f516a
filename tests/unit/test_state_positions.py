"""Optimizer states follow the names of parameters, not their places."""

from __future__ import annotations

import pytest

from lightning_hybrid.checkpoint.consolidate import _positions
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
