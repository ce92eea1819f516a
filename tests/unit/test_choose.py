"""Which archive entries a run may start from: what would be refused later is passed over."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.archive import Entry
from lightning_hybrid.choosing.choose import can_run, without_effect
from tests.unit.archive_entries import make_entry


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return out


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 8)


PLAN = {"up": "colwise", "down": "rowwise"}


def entry(degrees: tuple[int, int, int], **settings: Any) -> Entry:
    made = make_entry("one", degrees)
    return dataclasses.replace(made, settings=dataclasses.replace(made.settings, **settings))


def may_start(found: Entry, module: L.LightningModule | None = None, **arguments: Any) -> bool:
    return can_run(found.degrees, found, module or Lit(), Hybrid3DStrategy(archive=None, **arguments).choice)


@pytest.mark.parametrize(
    ("degrees", "tp_plan", "arguments", "expected"),
    [
        ((2, 1, 1), PLAN, {}, True),
        ((2, 2, 1), PLAN, {}, False),  # the other run's plan is not this one's
        ((2, 2, 1), PLAN, {"tp_plan": PLAN}, True),
        ((2, 2, 1), None, {}, True),  # found by trying there, and so here
        ((2, 3, 1), PLAN, {"tp_plan": PLAN}, False),
        ((2, 2, 1), PLAN, {"tp_plan": PLAN, "loss_parallel": True}, False),
        ((2, 2, 1), PLAN, {"tp_plan": {**PLAN, "head": "colwise_gather_output"}, "loss_parallel": True}, True),
        ((2, 1, 1), PLAN, {"loss_parallel": True}, True),
    ],
)
def test_tensor_degrees(
    degrees: tuple[int, int, int], tp_plan: dict[str, str] | None, arguments: dict[str, Any], expected: bool
) -> None:
    assert may_start(entry(degrees, tp_plan=tp_plan), **arguments) is expected


@pytest.mark.parametrize(
    ("pipeline", "schedule", "arguments", "expected"),
    [
        (4, "1F1B", {}, True),
        (8, "1F1B", {}, False),
        (2, "Interleaved1F1B", {}, True),
        (4, "Interleaved1F1B", {}, False),
        (4, "Interleaved1F1B", {"schedule": "1F1B"}, True),
        (2, "1F1B", {"schedule": "Interleaved1F1B", "stages_per_rank": 3}, False),
    ],
)
def test_pipeline_degrees(pipeline: int, schedule: str, arguments: dict[str, Any], expected: bool) -> None:
    assert may_start(entry((1, 1, pipeline), schedule=schedule, options={}), **arguments) is expected


def test_no_pipeline_for_manual_optimization() -> None:
    module = Lit()
    module.automatic_optimization = False
    assert not may_start(entry((1, 1, 2)), module)
    assert may_start(entry((2, 1, 1)), module)


@pytest.mark.parametrize(
    ("num_devices", "degrees", "arguments", "expected"),
    [
        (2, {"data_parallel_size": 2}, {"sequence_parallel": True, "num_microbatches": 4}, 2),
        (2, {"data_parallel_size": 2, "replicate_size": 2}, {"reshard_after_forward": True, "schedule": "GPipe"}, 2),
        (2, {"tensor_parallel_size": 2}, {"sequence_parallel": True, "loss_parallel": True, "tp_plan": PLAN}, 0),
        (2, {"pipeline_parallel_size": 2}, {"num_microbatches": 4, "schedule": "GPipe"}, 0),
        (2, {"data_parallel_size": 2}, {"reshard_after_forward": True}, 0),
        (2, {"data_parallel_size": 2}, {}, 0),
    ],
)
def test_arguments_without_effect_are_named(
    num_devices: int, degrees: dict[str, int], arguments: dict[str, Any], expected: int
) -> None:
    choice = Hybrid3DStrategy(archive=None, **degrees, **arguments).choice
    found = without_effect(choice, choice.resolve(num_devices))
    assert len(found) == expected
    assert all(text.partition("=")[0] in arguments for text in found)
