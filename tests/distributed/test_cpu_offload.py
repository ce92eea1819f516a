"""Offloaded shards: equal to one process, the policy on every unit, and what is said of memory and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy, parallelize
from lightning_hybrid.errors import ConfigurationError
from tests.distributed.equality import ONE_PROCESS, QUIET, Trace, assert_equal, full, must_differ, trace
from tests.distributed.test_sharding_options import ROWS, LitUneven
from tests.ranks import run_ranks

DEGREES: dict[str, dict[str, Any]] = {
    "one": {"data_parallel_size": 1},
    "dp2": {"data_parallel_size": 2, "reshard_after_forward": False},
    "dp2-pp2": {"data_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "1F1B"},
    "tp2": {"tensor_parallel_size": 2, "tp_plan": {"head": "colwise_gather_output"}},
}


class Look(L.Callback):
    """What each unit of ``fully_shard`` does with its shards; parameters that no unit holds."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        root = trainer.strategy._root
        units = [fully_shard.state(unit) for unit in root.modules() if isinstance(unit, FSDPModule)]
        groups = [group for unit in units for group in unit._fsdp_param_groups]
        self.policies = [group.offload_policy for group in groups]
        held = {id(p.sharded_param) for group in groups for p in group.fsdp_params}
        self.left_out = [name for name, p in pl_module.named_parameters() if id(p) not in held and p.ndim]
        self.memory = trainer.strategy.describe()["memory"]


def run(rank: int, names: list[str], sabotage: Any = None) -> list[tuple[Trace, Any, Any]]:
    found = []
    for name in names:
        look = Look()
        degrees = {**DEGREES[name], "cpu_offload": True}
        options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
        seen = trace(rank, LitUneven, ROWS, degrees, callbacks=[look], sabotage=sabotage, **options)
        found.append((seen, (look.policies, look.left_out), look.memory))
    return found


def run_one(rank: int) -> Trace:
    return trace(rank, LitUneven, ROWS, ONE_PROCESS, gradient_clip_val=0.5, accumulate_grad_batches=2)


def check_policies(policies: list[Any], left_out: list[str]) -> None:
    assert policies and not left_out
    assert all(isinstance(policy, CPUOffloadPolicy) and not policy.pin_memory for policy in policies)


@pytest.mark.parametrize("names", [["one"], ["dp2", "tp2"], ["dp2-pp2"]])
def test_offloaded_shards_equal_one_process(names: list[str]) -> None:
    expected = run_ranks(1, run_one)[0]
    for runs in zip(*run_ranks({"one": 1, "dp2": 2, "dp2-pp2": 4}[names[0]], run, names), strict=True):
        assert_equal(expected, [seen for seen, _, _ in runs])
        for seen, policies, memory in runs:
            check_policies(*policies)
            assert memory["parameters"] == memory["gradients"] == memory["optimizer"] == 0  # it has no buffers
            if names[0] == "one":
                share = 4 * sum(t.numel() for t in seen.after.values())
                states = 2 * share + 4 * len(seen.after)  # two moments, and AdamW's counts of steps
                assert memory["host"] == 2 * share + states


def without_the_policy() -> None:
    right = parallelize.apply_sharding
    parallelize.apply_sharding = lambda *a, **options: right(*a, **{**options, "cpu_offload": False})


def test_wrong_variant_shards_that_are_not_offloaded_are_seen() -> None:
    with must_differ():
        check_policies(*run_ranks(2, run, ["dp2"], without_the_policy)[0][0][1])


class Sharded(LitUneven):
    def configure_model(self) -> None:
        fully_shard(self.head, mesh=self.device_mesh["data_parallel"])


def fit_sharded(rank: int) -> None:
    strategy = Hybrid3DStrategy(data_parallel_size=2, cpu_offload=True, archive=None)
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=1, **QUIET)
    with pytest.raises(ConfigurationError, match=r"cpu_offload=True would not be applied"):
        trainer.fit(Sharded(), DataLoader(ROWS, batch_size=4))


def test_modules_that_are_sharded_already_are_refused() -> None:
    run_ranks(2, fit_sharded)


def resume(rank: int, folder: Path) -> list[Any]:
    """Train three epochs of one step at once, and with a checkpoint after the first; return weights of both."""
    weights = []
    for ends in ([3], [1, 3]):
        for number, max_epochs in enumerate(ends):
            L.seed_everything(0)
            strategy = Hybrid3DStrategy(data_parallel_size=2, cpu_offload=True, archive=None)
            trainer = L.Trainer(devices=2, strategy=strategy, max_epochs=max_epochs, limit_train_batches=1, **QUIET)
            module, loader = LitUneven(), DataLoader(ROWS, batch_size=4)
            path = folder / "first.ckpt"
            trainer.fit(module, loader, ckpt_path=path if number else None)
            trainer.save_checkpoint(path)
        weights.append(full({name: p.detach() for name, p in module.named_parameters()}))
    return weights


def test_checkpoints_resume(tmp_path: Path) -> None:
    straight, resumed = run_ranks(2, resume, tmp_path)[0]
    assert straight.keys() == dict(LitUneven().named_parameters()).keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert not torch.equal(straight["head.weight"], nn.Linear(13, 67).weight)
