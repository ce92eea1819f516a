"""What ``replica_sync`` may be, how its intervals are proposed, and which blocks travel together."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from rich.console import Console

from lightning_hybrid import Hybrid3DStrategy, ReplicaSync
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.planner import Cluster, ModelProfile, plan
from lightning_hybrid.planner.replicas import propose_for_plan, propose_replica_sync
from lightning_hybrid.planner.report import planning_tables
from lightning_hybrid.replicas.outer import OuterWeights
from lightning_hybrid.replicas.window import fragments_of
from tests.distributed.replica_cases import LitReplica

WRONG: dict[str, tuple[Any, str]] = {
    "zero": (0, "interval=0 must be an integer of at least 1"),
    "text": ("often", 'a number of optimizer steps, "auto", a ReplicaSync, or a dict'),
    "no interval": ({"method": "diloco"}, "with interval"),
    "unknown key": ({"interval": 2, "momentum": 0.9}, "outer_momentum"),
    "method": ({"interval": 2, "method": "sgd"}, '"average", "diloco" or "auto"'),
    "fragments": ({"interval": 2, "num_fragments": 3}, "at most 2 fragments, and a delay of at most 1"),
    "delay": ({"interval": 4, "delay": 4}, "a delay of at most 3"),
    "delay and no closing": ({"interval": 4, "delay": 1, "close_before": []}, 'Have "checkpoint" in close_before'),
    "auto and fragments": ({"interval": "auto", "num_fragments": 2}, "need a known interval"),
    "auto method": ({"interval": 4, "method": "auto"}, "chooses together with the interval"),
    "rate without diloco": (
        {"interval": 4, "outer_lr": 0.5},
        'outer_lr=0.5 has no effect with interval=4 and method="average". Leave it out, or give method="diloco"',
    ),
    "offload of nothing": ({"interval": 4, "offload": True}, "there are no outer weights"),
    "infinite rate": ({"interval": 4, "method": "diloco", "outer_lr": float("inf")}, "must be a positive number"),
    "mixing gradients": ({"interval": 1, "mixing": 0.5}, "an interval of at least 2"),
    "events": ({"interval": 4, "close_before": ["epoch"]}, "'validation', 'checkpoint', 'end'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused(name: str) -> None:
    value, words = WRONG[name]
    with pytest.raises(ConfigurationError) as caught:
        Hybrid3DStrategy(replicate_size=2, replica_sync=value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("8", ReplicaSync(interval=8)),
        ("auto", ReplicaSync(interval="auto", method="auto")),
        ("{interval: 8, method: diloco, outer_lr: 0.5}", ReplicaSync(interval=8, method="diloco", outer_lr=0.5)),
    ],
)
def test_from_yaml(given: str, meant: ReplicaSync, tmp_path: Any) -> None:
    config = tmp_path / "config.yaml"
    text = f"{{class_path: lightning_hybrid.Hybrid3DStrategy, init_args: {{replicate_size: 2, replica_sync: {given}}}}}"
    config.write_text(f"trainer: {{accelerator: cpu, devices: 2, logger: false, strategy: {text}}}")
    cli = LightningCLI(LitReplica, run=False, args=["--config", str(config)], save_config_callback=None)
    strategy: Any = cli.trainer.strategy
    assert strategy.settings.replica_sync == meant


def test_what_auto_has_chosen_leaves_out_what_has_no_effect() -> None:
    given = ReplicaSync(interval="auto", method="auto", outer_lr=0.5, offload=True)
    assert given.chosen(8, "average") == ReplicaSync(interval=8)
    assert given.chosen(64, "diloco") == ReplicaSync(interval=64, method="diloco", outer_lr=0.5, offload=True)


def test_options_are_told_as_they_would_be_given() -> None:
    assert str(ReplicaSync(interval=4)) == "4"
    given = ReplicaSync(interval=8, method="diloco", close_before=["end"])
    assert str(given) == "{interval: 8, method: diloco, close_before: [end]}"


@pytest.mark.parametrize(
    ("step", "exchange", "interval", "method"),
    [
        (1.0, 0.04, 1, "average"),
        (1.0, 0.2, 4, "average"),
        (1.0, 0.21, 8, "average"),
        (0.1, 1.0, 256, "diloco"),
        (0.01, 100, 512, "diloco"),
    ],
)
def test_the_interval_follows_from_step_and_link(step: float, exchange: float, interval: int, method: str) -> None:
    found = propose_replica_sync(step, exchange)
    assert (found.interval, found.method) == (interval, method)
    assert f"{step:.3g} s" in found.reason and f"{exchange:.3g} s" in found.reason


def test_a_plan_says_how_often_replicas_could_exchange() -> None:
    profile = ModelProfile.from_sizes(num_layers=12, hidden_size=768, num_heads=12, seq_length=512)
    slow, fast = (
        plan(profile, Cluster.named("H100", 16, per_node=8, network_gbits=gbits), global_batch=512)
        for gbits in (50, 12800)
    )
    found = [propose_for_plan(planning) for planning in (slow, fast)]
    assert found[0] is not None and found[1] is not None
    assert found[0][0] == found[1][0] == 2
    assert found[0][1].interval > 16 > found[1][1].interval == 1
    console = Console(width=400, file=io.StringIO())
    console.print(planning_tables(slow))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f'replicate_size=2, not compared above): replica_sync={{"interval": {found[0][1].interval}' in text
    assert propose_for_plan(plan(profile, Cluster.named("H100", 8), global_batch=64)) is None


def test_blocks_are_dealt_out_in_turn() -> None:
    fragment = fragments_of([f"blocks.{i}" for i in range(12)], 3)
    assert [fragment(f"blocks.{i}.up.weight") for i in (0, 1, 2, 3, 10, 11)] == [0, 1, 2, 0, 1, 2]
    assert fragment("head.weight") == 2
    with pytest.raises(ConfigurationError, match="has 2 blocks"):
        fragments_of(["a", "b"], 3)


def test_without_momentum_and_with_rate_one_outer_weights_are_the_mean() -> None:
    outer = OuterWeights(1.0, 0.0, None)
    outer.set("w", torch.tensor([1.0, 2.0]))
    outer.step({"w": outer.difference("w", torch.tensor([3.0, -1.0]))})
    assert outer["w"].tolist() == [3.0, -1.0] and outer.momentum("w") is None
