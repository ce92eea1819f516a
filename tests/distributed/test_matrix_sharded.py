"""Models x {tensor 2 and 4, shards 2 and 4, replicas of shards, mixes with stages}: all equal one process by parameter.

Every model meets 2 and 4 tensor ranks, most of its parameters really split, and a mix in which it is sharded; every mix
meets several models. Many runs share one fork of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch

import lightning_hybrid.parallelize
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel import styles
from lightning_hybrid.tensor_parallel.styles import SplitStyle
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.tensor_parallel_cases import Share, unchecked
from tests.distributed.zoo import ZOO, even_rows, text_rows
from tests.ranks import run_ranks

Run = tuple[str, dict[str, Any]]
"""Name of the model, and degrees."""

SPLIT = {name: 0.8 for name in ZOO if name != "convnet"}
SPLIT |= dict.fromkeys(("nanogpt", "nanogpt_checkpointed", "adapters_first", "adapters_last", "embedding_only"), 0.6)
"""At least this share of the blocks' parameters is split over tensor ranks. nanogpt's attention takes head sizes from
the block's own input, and stays whole."""
PLANS = {
    "two_lists": {f"model.{blocks}.*.1": "colwise_gather_output" for blocks in ("narrow", "wide")},
}
"""Of models in which no two linears follow each other in a block."""


def degrees(data: int = 1, tensor: int = 1, pipeline: int = 1, replicas: int = 1) -> dict[str, Any]:
    found = {"data_parallel_size": data, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    return {**found, "replicate_size": replicas} if replicas > 1 else found


MIXES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tp2": (degrees(tensor=2), tuple(SPLIT)),
    "tp4": (degrees(tensor=4), tuple(SPLIT)),
    "dp2": (degrees(2), ("adapters_first", "convnet", "embedding_only", "mlp", "t5", "two_lists", "vit")),
    "dp4": (degrees(4), ("adapters_last", "bert", "convnet", "gpt2", "nanogpt")),
    "hsdp": (degrees(4, replicas=2), ("gpt_neox", "llama", "mixtral", "nanogpt_checkpointed")),
    "dp2-tp2": (degrees(2, 2), ("gemma3", "gpt2", "llama_checkpointed", "transformer_encoder", "vit_hf")),
    "dp2-tp2-pp2": (degrees(2, 2, 2), ("llama", "nanogpt", "t5", "vit")),
    "hsdp-tp2": (degrees(4, 2, replicas=2), ("gpt2", "qwen3", "transformer_encoder")),
    "hsdp-pp2": (degrees(4, 1, 2, replicas=2), ("adapters_last", "llama", "nanogpt")),
}
"""Degrees, and the models that meet them."""


def rows_of(name: str) -> Any:
    """Data ranks average their own means, so all rows have as many labels."""
    return even_rows(16) if ZOO[name].rows is text_rows else ZOO[name].rows()


def runs(rank: int, todo: list[Run], sabotage: Callable[[], None] | None = None) -> list[tuple[Trace, float, str]]:
    if sabotage is not None:
        sabotage()
    found = []
    for name, given in todo:
        torch.manual_seed(0)
        note = Share() if given else L.Callback()
        options = {**given, "tp_plan": PLANS.get(name)} if given.get("tensor_parallel_size", 1) > 1 else given
        seen = trace(
            rank, lambda name=name: ZOO[name].make(4 if name == "t5" else 2), rows_of(name), options, callbacks=[note]
        )
        found.append((seen, getattr(note, "share", 0.0), getattr(note, "text", "")))
    return found


def number(given: dict[str, Any]) -> int:
    found: int = given["data_parallel_size"] * given["tensor_parallel_size"] * given["pipeline_parallel_size"]
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Trace]:
    pytest.importorskip("transformers")
    found = run_ranks(1, runs, [(name, ONE_PROCESS) for name in ZOO], timeout=200)[0]
    return {name: seen for name, (seen, *_) in zip(ZOO, found, strict=True)}


@pytest.mark.parametrize("mix", MIXES)
def test_every_model_equals_one_process(mix: str, expected: dict[str, Trace]) -> None:
    given, names = MIXES[mix]
    found = run_ranks(number(given), runs, [(name, given) for name in names], timeout=280)
    wrong = []
    for index, name in enumerate(names):
        try:
            assert_equal(expected[name], [run[index][0] for run in found])
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
        _, share, text = found[0][index]
        if given["tensor_parallel_size"] > 1 and share < SPLIT[name]:
            wrong.append(f"{name}: only {share:.0%} are split\n{text}")
    assert not wrong, "\n".join(wrong)


def test_every_model_is_here() -> None:
    assert set(SPLIT) == set(ZOO) - {"convnet"}
    sharded = {name for given, names in MIXES.values() if given["data_parallel_size"] > 1 for name in names}
    assert sharded == set(ZOO)


def test_convolutions_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"nothing can be split.*The largest parts are .*conv"):
        run_ranks(2, runs, [("convnet", degrees(tensor=2))])


# ---- the same comparisons must fail when something is wrong ---------------------------------------------------------


def partial_gradients_of_norms_not_summed() -> None:
    unchecked()
    SplitStyle.replicated_with_grad_allreduce = lambda self, module, forward, *args, **kwargs: forward(*args, **kwargs)  # type: ignore[method-assign]
    styles._RUN = {**styles._RUN, "replicated_with_grad_allreduce": SplitStyle.replicated_with_grad_allreduce}  # type: ignore[misc]


def bias_added_on_every_rank() -> None:
    unchecked()
    right = styles._local_parameters

    @contextmanager
    def wrong(module: torch.nn.Module, *, without_bias: bool = False) -> Iterator[None]:
        with right(module):
            yield

    styles._local_parameters = wrong


def replicas_not_averaged() -> None:
    lightning_hybrid.parallelize.data_mesh = lambda mesh, **options: mesh["data_parallel_shard"]


@pytest.mark.parametrize(
    ("sabotage", "name", "given"),
    [
        (unchecked, "gpt2", degrees(tensor=2)),  # query, key and value in one are cut contiguously
        (partial_gradients_of_norms_not_summed, "qwen3", degrees(tensor=2)),
        (bias_added_on_every_rank, "vit", degrees(tensor=2)),
        (replicas_not_averaged, "nanogpt", degrees(4, replicas=2)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_run_is_noticed(
    sabotage: Callable[[], None], name: str, given: dict[str, Any], expected: dict[str, Trace]
) -> None:
    found = run_ranks(number(given), runs, [(name, given)], sabotage, timeout=100)
    with must_differ():
        assert_equal(expected[name], [run[0][0] for run in found])
