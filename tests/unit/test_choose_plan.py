"""Degrees that nobody gave: what the planner is told of a run, what it may choose, and what happens where it cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.gpt.module import LitGPT
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.archive import Match, fingerprint_module
from lightning_hybrid.batches.randomness import is_same_state, random_state
from lightning_hybrid.callbacks import ConfigArchive
from lightning_hybrid.choosing import choose as choose_layouts
from lightning_hybrid.choosing import plan as choose_plan
from lightning_hybrid.choosing.logged import chosen_values, remark_on_failure
from lightning_hybrid.choosing.plan import PlanChoice, _beside, choose_by_plan
from lightning_hybrid.choosing.run_facts import BatchFacts, batch_facts, cluster_here, whole_model
from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.layout import Layout
from lightning_hybrid.planner import Cluster
from lightning_hybrid.planner.setup import describe
from tests.distributed.zoo import ZOO
from tests.unit.archive_entries import make_entry


def small() -> LitGPT:
    return LitGPT(num_blocks=4, width=32, num_heads=4, context_length=16)


def run_of(module: Any, loader: Any = None, **arguments: Any) -> Any:
    """A strategy as it is before its mesh is built."""
    strategy = Hybrid3DStrategy(archive=None, **arguments)
    strategy.parallel_devices = [torch.device("cpu")] * 8
    source = SimpleNamespace(instance=loader)
    fit_loop = SimpleNamespace(_data_source=source)
    module._trainer = SimpleNamespace(fit_loop=fit_loop, datamodule=None, accumulate_grad_batches=1)
    return SimpleNamespace(
        choice=strategy.choice,
        root_device=torch.device("cpu"),
        num_nodes=1,
        precision_plugin=SimpleNamespace(precision="32-true"),
    )


def choose(module: Any, num_devices: int = 4, *, failed: Any = (), samples: int = 16, **arguments: Any) -> PlanChoice:
    rows = torch.zeros(64, 17, dtype=torch.long)
    strategy = run_of(module, DataLoader(rows, batch_size=samples), **arguments)  # type: ignore[arg-type]
    return choose_by_plan(strategy, module, num_devices, failed=failed)


def on(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    def cluster(_: torch.device, num_devices: int, num_nodes: int) -> Cluster:
        return Cluster.named(device, num_devices)

    monkeypatch.setattr(choose_plan, "cluster_here", cluster)


def test_a_small_model_is_replicated_and_the_choice_explained() -> None:
    found = choose(small())
    assert found.layout == Layout(data_parallel_size=4, replicate_size=4)
    text = "\n".join(found.lines)
    for said in ("4 CPU ranks", "predicted: a step of", "GiB a device", "an update sees 64 samples", "runner-up: "):
        assert said in text, text
    made = found.planned
    assert made is not None
    assert sum(made.parts.values()) == pytest.approx(made.step_time)
    assert made.samples_per_second == pytest.approx(64 / made.step_time)
    assert made.runner_up is not None
    assert made.runner_up in text


@pytest.mark.parametrize("num_devices", [2, 3, 5, 6, 7, 8])
def test_all_devices_are_used(num_devices: int) -> None:
    assert choose(small(), num_devices).layout.world_size == num_devices


def test_what_was_given_stays() -> None:
    assert choose(small(), replicate_size=1).layout.replicate_size == 1
    assert choose(small(), replicate_size=2).layout.replicate_size == 2


def large() -> LitGPT:
    """1.6 billion parameters on the meta device: 26 GB of states."""
    with torch.device("meta"):
        return LitGPT(num_blocks=32, width=2048, num_heads=16, context_length=16)


def test_a_model_that_one_device_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "V100-16GB")
    found = choose(large(), 8)
    assert found.layout.replicate_size < 8 or found.layout.pipeline_parallel_size > 1
    assert found.planned is not None
    assert found.planned.memory_bytes <= 0.8 * 16 * 2**30
    manual = large()
    manual.automatic_optimization = False
    assert choose(manual, 8).layout.pipeline_parallel_size == 1


def test_what_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = choose(small()).layout
    second = choose(small(), failed=[first]).layout
    third = choose(small(), failed=[first, second]).layout
    assert len({first, second, third}) == 3


def test_chosen_degrees_that_are_refused_give_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before anything is built; what the refused ones had set is taken back, and given degrees are refused at once."""

    def no_replicas(choice: Any, module: Any, precision: Any) -> None:
        if choice.layout.replicate_size > 1:
            choice.settings = None  # which must not stay
            raise UnsupportedError("no replicas")

    monkeypatch.setattr(choose_layouts, "check_run", no_replicas)
    module = small()
    strategy = run_of(module, DataLoader(torch.zeros(64, 17, dtype=torch.long), batch_size=16))  # type: ignore[arg-type]
    strategy.num_processes, strategy.global_rank, strategy.lightning_module = 4, 0, module
    strategy.broadcast = lambda value: value
    module._trainer.state = SimpleNamespace(fn="fit")
    first = choose(small()).layout
    assert first.replicate_size > 1
    with caplog.at_level("INFO"):
        found = choose_layouts.choose_layout(strategy)
    assert found.world_size == 4
    assert found.replicate_size == 1
    assert strategy.choice.settings is not None
    assert "(in 4 replicas) cannot run, so others are taken: no replicas" in caplog.text
    assert chosen_values(strategy.choice)["hybrid3d/chosen_by"] == "planner"
    trainer = SimpleNamespace(global_step=0, callbacks=[])
    remark = remark_on_failure(strategy, trainer, RuntimeError("x"))
    assert remark is not None
    assert "add ConfigArchive()" in remark
    trainer.callbacks = [ConfigArchive("a")]
    for error, told in ((RuntimeError("x"), "the next start takes others"), (KeyError("x"), "takes them again")):
        assert told in (remark_on_failure(strategy, trainer, error) or "")
    trainer.global_step = 1
    assert remark_on_failure(strategy, trainer, KeyError("x")) is None
    given = run_of(module, data_parallel_size=4, replicate_size=4)
    given.num_processes, given.lightning_module = 4, module
    with pytest.raises(UnsupportedError, match="no replicas"):
        choose_layouts.choose_layout(given)
    assert chosen_values(given.choice) == {}


def test_an_entry_of_another_number_of_devices_meets_the_planner_s_opinion() -> None:
    module, strategy = small(), run_of(small())

    def said(entry: Any, degrees: Layout) -> str:
        match = Match(entry=entry, degrees=degrees, reason="")
        return choose_layouts._second_opinion(strategy, module, 4, match, set())

    best = choose(module).layout
    other = Layout(pipeline_parallel_size=4)
    assert best != other
    assert f"the planner would take {describe(best)}: give them" in said(make_entry("a", (1, 1, 2)), other)
    assert said(make_entry("a", (1, 1, 2)), best) == ""
    assert said(make_entry("a", (1, 1, 4)), other) == ""  # measured facts count


def test_tensor_parallelism_only_where_a_plan_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "V100-16GB")
    llama = ZOO["llama"].make()
    every = [
        Layout(data_parallel_size=4 // p, pipeline_parallel_size=p, replicate_size=r)
        for p in (1, 2, 4)
        for r in (1, 2, 4)
        if 4 // p % r == 0
    ]
    assert choose(llama, failed=every).layout.tensor_parallel_size > 1
    found = choose(small(), failed=every)  # nothing but trying says how it is split
    assert found.layout.tensor_parallel_size == 1
    assert "simple rule" in found.lines[0]


class Convolutions(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))


class Dynamic(L.LightningModule):
    """It wants what only a run has."""

    def configure_model(self) -> None:
        self.net = nn.Linear(4, self.device_mesh["tensor_parallel"].size())  # type: ignore[index]


@pytest.mark.parametrize("module", [Convolutions(), Dynamic()])
def test_the_simple_rule_where_the_planner_knows_nothing(module: Any) -> None:
    found = choose(module)
    assert found.layout == Layout(data_parallel_size=4)
    (line,) = found.lines
    assert "data 4 x tensor 1 x pipeline 1, by the simple rule (all data): the planner cannot plan this run (" in line
    assert choose(module, failed=[found.layout]).layout == Layout(data_parallel_size=4, replicate_size=4)


class Late(L.LightningModule):
    """Built in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def configure_model(self) -> None:
        self.model = small().model
        self.extra = nn.Parameter(torch.randn(3))


def test_a_model_that_does_not_exist_yet_is_known_all_the_same() -> None:
    module, before = Late(), random_state()
    whole = whole_model(module)
    assert is_same_state(before, random_state())
    assert list(module.parameters()) == []
    assert not hasattr(module, "model")
    assert all(parameter.is_meta for parameter in whole.parameters())
    built = Late()
    built.configure_model()
    assert fingerprint_module(whole) == fingerprint_module(built)
    assert whole_model(built) is built
    assert choose(Late()).planned is not None


@pytest.mark.parametrize(
    ("loader", "hyperparameters", "expected"),
    [
        (DataLoader(torch.zeros(8, 17), batch_size=4), {}, BatchFacts(samples=4, length=17)),  # type: ignore[arg-type]
        (DataLoader(TensorDataset(torch.zeros(8, 9)), batch_size=2), {}, BatchFacts(samples=2, length=9)),
        (DataLoader([{"input_ids": [1, 2, 3]}], batch_size=3), {}, BatchFacts(samples=3, length=3)),  # type: ignore[arg-type]
        (None, {"batch_size": 6, "block_size": 128}, BatchFacts(samples=6, length=128)),
        (None, {}, BatchFacts(samples=8, length=512, assumed=("batches of 8", "samples of 512 tokens"))),
    ],
)
def test_what_a_script_says_of_its_batches(loader: Any, hyperparameters: dict[str, int], expected: BatchFacts) -> None:
    module = Convolutions()
    module.save_hyperparameters(hyperparameters)
    run_of(module, loader)
    assert batch_facts(module, module._trainer) == expected


def test_the_host_s_ranks_share_its_cores() -> None:
    cluster = cluster_here(torch.device("cpu"), 8, 2)
    assert (cluster.num_nodes, cluster.per_node) == (2, 4)
    assert cluster.seats is not None
    assert 1 <= cluster.seats <= 1024
    assert cluster.gpu.tflops["fp32"] > 1e-3


def test_a_runner_up_with_the_same_sizes_is_told_apart() -> None:
    replicas = Layout(data_parallel_size=2, replicate_size=2)
    shards = Layout(data_parallel_size=2)
    assert _beside(shards, replicas) == "data 2 x tensor 1 x pipeline 1 (in shards over 2 ranks)"
    assert _beside(replicas, shards) == "data 2 x tensor 1 x pipeline 1 (in 2 replicas)"
    assert _beside(Layout(pipeline_parallel_size=2), shards) == "data 1 x tensor 1 x pipeline 2"
