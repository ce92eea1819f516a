"""Activation checkpointing and compilation by block: the same numbers, the same names, less memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.building.per_block import apply_per_block
from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import LENGTH, VOCABULARY, LitNano, NanoBlock, NanoGPT, generator
from tests.ranks import run_ranks

ROWS = [{"input_ids": r, "labels": r} for r in torch.randint(0, VOCABULARY, (16, LENGTH), generator=generator())]
TP_PLAN = {"h.*.mlp.0": "colwise", "h.*.mlp.2": "rowwise"}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "operations": {"activation_checkpointing": [torch.ops.aten.gelu.default]},
    "compiled": {"compile": {"backend": "aot_eager"}},
    "both": {"activation_checkpointing": "full", "compile": {"backend": "aot_eager"}},
}


def run(rank: int, degrees: dict[str, Any], names: list[str], sabotage: Any = None) -> list[Trace]:
    return [
        trace(
            rank, lambda: LitNano(NanoGPT()), ROWS, {**degrees, **OPTIONS[name]} if degrees else {}, sabotage=sabotage
        )
        for name in names
    ]


@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline_parallel_size": 2, "schedule": "1F1B"},
        {"data_parallel_size": 2, "reshard_after_forward": True},
        {"data_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "1F1B"},
        {"tensor_parallel_size": 2, "tp_plan": TP_PLAN},
    ],
    ids=lambda d: "-".join(str(v) for v in d.values() if not isinstance(v, dict)),
)
def test_equals_one_process(degrees: dict[str, Any]) -> None:
    expected = run_ranks(1, run, ONE_PROCESS, ["full"])[0][0]
    num_ranks = 4 if len(degrees) == 3 and "data_parallel_size" in degrees else 2
    names = ["both"] if num_ranks == 4 else list(OPTIONS)
    found = run_ranks(num_ranks, run, degrees, names, timeout=240)
    for traces in zip(*found, strict=True):
        assert_equal(expected, list(traces))


def test_split_backwards() -> None:
    degrees = {"pipeline_parallel_size": 2, "schedule": "InterleavedZeroBubble"}
    expected = run_ranks(1, run, ONE_PROCESS, ["full"])[0][0]
    assert_equal(expected, [traces[0] for traces in run_ranks(2, run, degrees, ["full"])])
    for name in ("selective", "compiled"):
        with pytest.raises(UnsupportedError, match=r'InterleavedZeroBubble.*activation_checkpointing="full"'):
            run_ranks(2, run, degrees, [name])


def recompute_something_else() -> None:
    """The recomputation gets an argument that is twice the forward's."""
    right = NanoBlock.forward
    NanoBlock.forward = lambda self, x: right(self, x * (2 if torch._C._current_graph_task_id() != -1 else 1))  # type: ignore[method-assign]


def test_a_wrong_recomputation_is_noticed() -> None:
    expected = run_ranks(1, run, ONE_PROCESS, ["full"])[0][0]
    found = run_ranks(2, run, {"pipeline_parallel_size": 2}, ["full"], recompute_something_else)
    with must_differ():
        assert_equal(expected, [traces[0] for traces in found])


def kept_elements(activation_checkpointing: Any) -> int:
    """How many elements are kept between the forward and the backward of a block."""
    block = NanoBlock()
    names = list(block.state_dict())
    apply_per_block([block], activation_checkpointing=activation_checkpointing, compile=False)
    assert list(block.state_dict()) == names and isinstance(block, NanoBlock)
    alive = _Alive(block)
    with alive:
        out = block(torch.randn(4, 12, 16, requires_grad=True))
    assert out.requires_grad
    return alive.num_elements()


class _Alive(TorchDispatchMode):
    """Counts the elements of results of operations that are still alive."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._parameters = {p.untyped_storage()._cdata for p in block.parameters()}
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._parameters:
                self._storages[leaf.untyped_storage()._cdata] = (weakref.ref(leaf.untyped_storage()), leaf.numel())
        return out

    def num_elements(self) -> int:
        return sum(n for ref, n in self._storages.values() if ref() is not None)


def test_memory_is_saved() -> None:
    everything, selective, full = (kept_elements(how) for how in ("none", "selective", "full"))
    assert full == 2 * 4 * 12 * 16  # the block's argument and its result
    assert full < selective < everything


def test_values_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'activation_checkpointing=True.*"full"'):
        Hybrid3DStrategy(activation_checkpointing=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="compile='inductor'"):
        Hybrid3DStrategy(compile="inductor")  # type: ignore[arg-type]
