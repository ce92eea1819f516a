"""The one place that touches torch's private pipelining internals: orders of actions, and the split backward.

torch builds the order in methods of its schedule classes, which want live stages and process groups. The methods
that compute one rank's order only read a few numbers, so they are called on a plain namespace that holds them
(read in torch 2.13, ``torch/distributed/pipelining/schedules.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import get_schedule_class

from lightning_hybrid.pipeline.schedule import Action, Kind, Table

__all__ = ["backward_of_inputs", "backward_of_weights", "read_order"]

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


def backward_of_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Iterable[nn.Parameter]
) -> tuple[list[Tensor | None], Any]:
    """Return the gradients of the leaves ``inputs``, and what :func:`backward_of_weights` needs later."""
    trainable = iter([weight for weight in weights if weight.requires_grad])
    roots = [output.clone() if output._is_view() else output for output in outputs]  # torch detaches them in place
    found, rest = stage_backward_input(roots, list(gradients), list(inputs), trainable)
    for leaf in inputs:
        leaf.grad = None
    return list(found), rest


def backward_of_weights(weights: Iterable[nn.Parameter], rest: Any) -> None:
    """Add the gradients of the weights that :func:`backward_of_inputs` left out."""
    stage_backward_weight(iter([weight for weight in weights if weight.requires_grad]), rest)
