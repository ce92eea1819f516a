"""Where data loaders stood, by data rank.

Lightning keeps the state of rank 0's loaders (those with a ``state_dict``). Data ranks read different samples, so each
one's are kept. Loaders without states begin their epoch anew, as Lightning does in one process (and says so).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_hybrid.checkpoint.format import ENTRY
from lightning_hybrid.layout import Coordinate, Layout

__all__ = ["add_loader_states", "take_loader_states"]

KEY = "loader_states"


def add_loader_states(checkpoint: dict[str, Any], layout: Layout, coordinate: Coordinate) -> None:
    """Put the states of all data ranks' loaders into rank 0's checkpoint. A collective over the world."""
    if layout.data_parallel_size == 1:
        return
    mine = None
    if coordinate.pipeline == coordinate.tensor == 0:
        mine = coordinate.data, _fit_loop(checkpoint).get("combined_loader")
    found: list[Any] | None = [None] * layout.world_size if dist.get_rank() == 0 else None
    dist.gather_object(mine, found, dst=0)
    states = dict(entry for entry in found or () if entry is not None)
    if any(states.values()):
        entry = checkpoint.setdefault(ENTRY, {})
        entry[KEY] = [states[data] for data in range(layout.data_parallel_size)]


def take_loader_states(checkpoint: Mapping[str, Any], layout: Layout, coordinate: Coordinate) -> None:
    """Leave this rank's own loader states in the checkpoint.

    At another number of data ranks all get the one state that all had: that of a loader that counts batches, which is
    right where the global batch is as large as before. If the states differ, loaders begin the epoch anew. Both are
    said in a warning.
    """
    fit_loop = _fit_loop(checkpoint)
    states = checkpoint.get(ENTRY, {}).pop(KEY, None) or [fit_loop.get("combined_loader")]
    if not states[0]:
        return
    before, now = len(states), layout.data_parallel_size
    if before == now:
        fit_loop["combined_loader"] = states[coordinate.data]
    elif all(_equal(state, states[0]) for state in states):
        fit_loop["combined_loader"] = states[0]
        rank_zero_warn(
            f"The data loaders' state was saved by {before} data ranks and is given to {now}. If it counts batches,"
            f" no sample is lost or repeated as long as each rank's batches are {before}/{now} of the size before."
        )
    else:
        del fit_loop["combined_loader"]
        rank_zero_warn(
            f"The data loaders of the {before} data ranks that wrote the checkpoint stood at different places, which"
            f" cannot be given to {now} data ranks. The loaders begin the epoch anew, so samples that were seen are"
            f" repeated in it. Resume with data_parallel_size={before}, or from the end of an epoch."
        )


def _fit_loop(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and one.tolist() == other.tolist()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
