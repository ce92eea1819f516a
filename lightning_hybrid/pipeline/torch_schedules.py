"""The one place that touches torch's private pipelining internals: reads the order of actions of its schedules.

torch builds the order in methods of its schedule classes, which want live stages and process groups. The methods
that compute one rank's order only read a few numbers, so they are called on a plain namespace that holds them
(read in torch 2.13, ``torch/distributed/pipelining/schedules.py``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import get_schedule_class

from lightning_hybrid.pipeline.schedule import Action, Kind, Table

__all__ = ["read_order"]

_KINDS = {kind.value: kind for kind in Kind}


def read_order(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Table:
    """Return torch's order of the compute actions of the schedule ``name`` for every rank."""
    schedule: Any = get_schedule_class(name)
    rounds = max(1, num_microbatches // num_ranks)
    numbers = SimpleNamespace(
        pp_group_size=num_ranks,
        n_local_stages=stages_per_rank,
        _stages=[None] * stages_per_rank,
        _num_stages=num_ranks * stages_per_rank,
        num_stages=num_ranks * stages_per_rank,
        _n_microbatches=num_microbatches,
        microbatches_per_round=num_microbatches // rounds,
    )
    order = {rank: schedule._calculate_single_rank_operations(numbers, rank) for rank in range(num_ranks)}
    return {rank: [action for item in items for action in _actions(item)] for rank, items in order.items()}


def _actions(item: Any) -> list[Action]:
    """Translate torch's action. Idle slots and reductions are not ours; overlapped pairs run one after the other."""
    if item is None:
        return []
    if item.sub_actions:
        return [action for sub in item.sub_actions for action in _actions(sub)]
    kind = _KINDS.get(item.computation_type.value)
    return [] if kind is None else [Action(kind, item.stage_index, item.microbatch_index)]
