"""Replicas that exchange now and then are what plain PyTorch makes of independent models and of the same formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_hybrid.replicas.outer import OuterWeights
from tests.distributed.equality import must_differ
from tests.distributed.replica_cases import (
    NUM_REPLICAS,
    WIDTH,
    Call,
    Calls,
    LitAdaptive,
    LitReplica,
    Outer,
    Seen,
    Streaming,
    simulate,
    simulate_streaming,
    train,
)
from tests.ranks import run_ranks

DILOCO = {"interval": 4, "method": "diloco", "outer_lr": 0.7, "outer_momentum": 0.9}
#: Inner model, the strategy's argument, and what the simulation is told.
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "average every 4": (LitReplica, 4, {"interval": 4}, {}),
    "every step": (LitReplica, {**DILOCO, "interval": 1}, {"interval": 1, "outer": Outer()}, {}),
    "diloco every 4, clipped": (
        LitAdaptive,
        DILOCO,
        {"interval": 4, "outer": Outer(), "clip": 0.5},
        {"gradient_clip_val": 0.5},
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "tp2": {"tensor_parallel_size": 2},
    "shards": {"data_parallel_size": 2 * NUM_REPLICAS},
}


def all_cases(rank: int, degrees: dict[str, Any], cases: list[str]) -> dict[str, Seen]:
    found = {}
    for name in cases:
        make, sync, _, options = CASES[name]
        found[name] = train(make, degrees, sync, **options)
    return found


def replica_of(rank: int, degrees: dict[str, Any]) -> int:
    """The replicate axis lies inside of the pipeline axis, outside of shards and tensor ranks."""
    inner = degrees.get("tensor_parallel_size", 1) * degrees.get("data_parallel_size", NUM_REPLICAS) // NUM_REPLICAS
    return rank // inner % NUM_REPLICAS


def assert_equal(wanted: Seen, found: Seen, *, ignores_mean: bool = False) -> None:
    """``ignores_mean``: ranks that share a replica take the first one's later, before the next step."""
    pairs = [*zip(wanted.steps, found.steps, strict=True), (wanted.after, found.after)]
    for step, (right, state) in enumerate(pairs, start=1):
        for name, tensor in state.items():  # a stage has some of them
            if name != "mean" or not ignores_mean:
                error = float((tensor - right[name]).abs().max())
                assert torch.allclose(tensor, right[name], rtol=1e-6, atol=1e-6), f"step {step}, {name}: {error}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_a_simulation(layout: str) -> None:
    degrees = LAYOUTS[layout]
    num_ranks = NUM_REPLICAS * (1 if layout == "alone" else 2)
    ranks = run_ranks(num_ranks, all_cases, degrees, list(CASES))
    for name, (make, _, told, _) in CASES.items():
        wanted = simulate(make, **told)
        for rank, found in enumerate(ranks):
            assert_equal(wanted[replica_of(rank, degrees)], found[name], ignores_mean=layout == "shards")


def test_an_outer_step_of_one_at_every_step_averages_gradients() -> None:
    """With plain SGD inside, which is linear: REPL-1 (a)."""
    one = {"interval": 1, "method": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0}
    for averaged, gradients in run_ranks(NUM_REPLICAS, lambda rank: [train(LitReplica, {}, sync) for sync in (one, 1)]):
        assert_equal(gradients, averaged, ignores_mean=True)


def backwards(rank: int) -> Seen:
    right = OuterWeights.difference
    OuterWeights.difference = lambda *args: -right(*args)  # type: ignore[method-assign]
    return train(LitReplica, {}, DILOCO)


def test_wrong_variant_the_sign_of_the_outer_gradient_is_seen() -> None:
    found = run_ranks(NUM_REPLICAS, backwards)[0]
    with must_differ():
        assert_equal(simulate(LitReplica, 4, outer=Outer())[0], found)
    assert_equal(simulate(LitReplica, 4, outer=Outer(), sign=-1.0)[0], found)


class SaveAfterEpoch(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def resumed(rank: int, folder: Path, sync: Any, degrees: dict[str, Any], both: bool) -> list[tuple[Seen, Seen]]:
    """Of 12 steps in two epochs the second six, without interruption and from a checkpoint after six."""
    pairs = []
    for kind in (True, False) if both else (True,):
        options = {"limit_train_batches": 6, "max_epochs": 2, "max_steps": -1}
        save = {"save_distributed_checkpoint": kind}
        path = folder / f"{kind}.ckpt"
        whole = train(LitAdaptive, {**degrees, **save}, sync, **options, callbacks=[SaveAfterEpoch(path)])
        whole.steps = whole.steps[6:]
        pairs.append((whole, train(LitAdaptive, {**degrees, **save}, sync, **options, ckpt_path=path)))
    return pairs


@pytest.mark.parametrize("closes", [(), ("checkpoint", "end")])
def test_resumed_in_the_middle_of_an_epoch(tmp_path: Path, closes: tuple[str, ...]) -> None:
    """Optimizers' states differ between replicas in any case; weights, and outer ones, where no window was closed."""
    sync = {"interval": 4, "method": "average" if closes else "diloco", "close_before": closes}
    degrees = {"pipeline_parallel_size": 2} if closes else {"data_parallel_size": 4}
    for pairs in run_ranks(4, resumed, tmp_path, sync, degrees, not closes):
        for whole, again in pairs:
            assert_equal(whole, again)


def test_fragments_in_turn_beside_training() -> None:
    """Streaming DiLoCo: each fragment at its own step, used two steps later, mixed with what was learnt meanwhile."""
    sync = {**DILOCO, "num_fragments": 2, "delay": 1, "mixing": 0.5, "offload": True}
    states = simulate_streaming(LitReplica, 4, Outer(), Streaming(2, 1, 0.5))
    for rank, found in enumerate(run_ranks(NUM_REPLICAS, lambda rank: train(LitReplica, {}, sync))):
        for step, (state, right) in enumerate(zip([*found.steps, found.after], states, strict=True), start=1):
            for name in state.keys() - {"mean", "count", "scale"}:
                wanted = right[f"{rank}.{name}"]
                assert torch.allclose(state[name], wanted, rtol=1e-6, atol=1e-6), f"step {step}, {name}"


def test_bf16_is_off_by_its_rounding_only() -> None:
    def both(rank: int) -> list[Seen]:
        return [train(LitReplica, {}, {"interval": 4, "dtype": dtype}, max_steps=4) for dtype in (None, "bfloat16")]

    before = {name: p.detach() for name, p in LitReplica().named_parameters()}
    ranks = run_ranks(NUM_REPLICAS, both)
    for name in before:
        exact, rounded = (seen.after[name] for seen in ranks[0])
        moved = max(float((seen[0].steps[2][name] - before[name]).abs().max()) for seen in ranks)
        error = float((exact - rounded).abs().max())
        assert error <= (2 * NUM_REPLICAS - 1) * 2**-8 * 1.5 * moved, name  # a step more than those that were seen
        assert (error > 0) == (name != "scale"), name
        assert torch.equal(rounded, ranks[1][1].after[name])


class LitLarge(LitReplica):
    """Large enough that a few bytes more for each exchange do not count; what is frozen must not travel at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2048), nn.Linear(2048, WIDTH)) for _ in range(2))
        self.base = nn.Linear(64, 64).requires_grad_(False)


def counted(rank: int, degrees: dict[str, Any], syncs: list[Any]) -> list[list[Call]]:
    found = []
    for sync in syncs:
        calls = Calls()
        options = {"max_steps": 9, "gradient_clip_val": 1.0}
        train(LitLarge, degrees, sync, callbacks=[calls], **options)
        calls.is_on = False
        found.append(calls.calls)
    return found


def test_bytes_between_replicas_are_hsdps_over_the_interval() -> None:
    """Steps 2 to 9 have two exchanges."""
    pairs = [[0, 2], [1, 3]]  # the same shard of replicas {0, 1} and {2, 3}
    for runs in run_ranks(4, counted, {"data_parallel_size": 4}, [1, 4]):
        every_step, seldom = [sum(c.num_bytes for c in calls if c.ranks in pairs) for calls in runs]
        assert every_step > 8 * 60_000
        assert seldom / every_step == pytest.approx(1 / 4, rel=0.02)


def test_nothing_crosses_replicas_between_exchanges() -> None:
    """Also at the 4th and 8th step only, in which the message about signals before the next batch counts."""
    across = [[0, 1], [2, 3], [0, 1, 2, 3]]  # of replicas {0, 2} and {1, 3}, each a pipeline
    degrees = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    for every_step, seldom in run_ranks(4, counted, degrees, [1, 4]):
        assert {c.step for c in seldom if c.ranks in across} == {3, 7}
        assert {c.step for c in every_step if c.ranks in across} == set(range(1, 9))
