"""Weights that a hook draws anew: what one process draws, on shards, shares and stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.data_parallel import sharded_draws
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import Classifier, labelled_rows, mlp
from tests.ranks import run_ranks

ROWS = labelled_rows((12,))
WAYS = {
    "data": {"data_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}


class DrawnAgain(Classifier):
    def on_train_start(self) -> None:
        torch.manual_seed(5)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                part.reset_parameters()
                nn.init.trunc_normal_(part.bias, std=0.1)


def make_module() -> DrawnAgain:
    return DrawnAgain(mlp())


def drawn(rank: int) -> dict[str, Trace]:
    found = {way: trace(rank, make_module, ROWS, degrees) for way, degrees in WAYS.items()}
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for operation in sharded_draws._DRAWS:
        del handlers[operation]
    sharded_draws._DRAWS = ()  # type: ignore[assignment]
    return {**found, "wrong": trace(rank, make_module, ROWS, WAYS["data"])}


def test_weights_drawn_in_a_hook_are_those_of_one_process() -> None:
    (expected,) = run_ranks(1, trace, make_module, ROWS, ONE_PROCESS)
    found = run_ranks(2, drawn)
    for way in WAYS:
        assert_equal(expected, [traces[way] for traces in found])
    with must_differ():
        assert_equal(expected, [traces["wrong"] for traces in found])
