"""Predictions corrected by what real steps took: part by part, from runs on like devices only."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from lightning_hybrid.archive import Entry, Planned, planned_entries
from lightning_hybrid.errors import ArchiveError
from lightning_hybrid.layout import Layout
from lightning_hybrid.planner import Cluster, ModelProfile, Setup, estimate
from lightning_hybrid.planner.calibration import MOST, Observed, calibrate, correct
from tests.unit.archive_entries import H200, make_entry

PREDICTED = {"compute": 0.6, "recompute": 0.2, "data": 0.1, "bubble": 0.005, "host": 0.095}


def measured(**factors: float) -> dict[str, float]:
    """A step whose compute and data exchanges took so many times what was predicted."""
    data = 0.1 * factors.get("data", 1.0)
    return {
        "step/compute_s": 0.8 * factors.get("compute", 1.0),
        "step/communication_data_shard_s": 0.75 * data,
        "step/communication_data_replicate_s": 0.25 * data,
        "step/bubble_s": 0.5,
    }


def test_each_part_has_its_own_factor_and_one_run_is_believed_by_half() -> None:
    runs = [Observed(predicted=PREDICTED, measured=measured(compute=1.21, data=0.25))]
    assert calibrate([]) == {}
    expected = {"compute": 1.1, "recompute": 1.1, "data": 0.5}
    whole = (0.8 * 1.21 + 0.1 * 0.25) / 0.9
    rest = ("tensor", "pipeline", "optimizer", "context", "host", "bubble")  # too short, or not there: as the whole
    expected |= dict.fromkeys(rest, math.sqrt(whole))
    assert calibrate(runs) == pytest.approx(expected)
    many = calibrate(runs * 99)
    assert many == pytest.approx({part: factor**1.98 for part, factor in expected.items()})
    corrected = correct(PREDICTED, many)
    # The wrong variant, one factor for the whole step, gets the parts wrong.
    assert corrected["data"] == pytest.approx(0.025, rel=0.02)
    assert abs(0.1 * whole / 0.025 - 1) > 1


def test_corrected_predictions_are_not_corrected_twice() -> None:
    """Runs that were predicted with a factor show the same factor, not what is left of it."""
    plain = Observed(predicted=PREDICTED, measured=measured(compute=1.5))
    factors = calibrate([plain])
    again = dataclasses.replace(plain, predicted=correct(PREDICTED, factors), factors=factors)
    assert calibrate([again]) == pytest.approx(factors)
    forgotten = dataclasses.replace(again, factors={})
    assert calibrate([forgotten])["compute"] != pytest.approx(factors["compute"])


def test_a_machine_that_is_slow_in_all_keeps_the_order_of_plans() -> None:
    """Parts that the runs had not (a pipeline) slow down with the others."""
    slow = calibrate([Observed(predicted=PREDICTED, measured=measured(compute=3.0, data=3.0))])
    assert slow == pytest.approx(dict.fromkeys(slow, math.sqrt(3)))
    assert set(PREDICTED) | {"pipeline", "tensor"} <= set(slow)


def test_no_ratio_is_believed_beyond_a_limit() -> None:
    found = calibrate([Observed(predicted=PREDICTED, measured=measured(compute=1e6))])
    assert found["compute"] == pytest.approx(math.sqrt(MOST))


def test_an_estimate_is_corrected_by_its_cluster_s_factors() -> None:
    profile = ModelProfile.from_sizes(num_layers=8, hidden_size=1024, num_heads=16, seq_length=1024)
    setup = Setup(layout=Layout(data_parallel_size=8), micro_batch=2, num_microbatches=1)
    cluster = Cluster.named("H100", 8)
    plain = estimate(profile, cluster, setup)
    found = estimate(profile, dataclasses.replace(cluster, factors={"compute": 2.0}), setup)
    assert found.seconds == pytest.approx(plain.seconds + plain.parts["compute"])
    assert found.tokens_per_second < plain.tokens_per_second


def run_of(name: str, **hardware: Any) -> Entry:
    entry = make_entry(name)
    planned = Planned(step_time=1.0, samples_per_second=1.0, tokens_per_second=1.0, memory_bytes=1.0, parts=PREDICTED)
    return dataclasses.replace(
        entry, planned=planned, hardware=dataclasses.replace(entry.hardware, num_devices=8, **hardware)
    )


def test_other_hardware_says_nothing() -> None:
    own = run_of("own")
    entries = [
        own,
        run_of("kind", kind="NVIDIA H100"),
        run_of("memory", memory_bytes=80_000_000_000),
        run_of("nodes", num_nodes=2),
        dataclasses.replace(own, id="precision", settings=dataclasses.replace(own.settings, precision="bf16-mixed")),
        dataclasses.replace(own, id="failed", result=dataclasses.replace(own.result, status="oom")),
        dataclasses.replace(own, id="unmeasured", result=dataclasses.replace(own.result, breakdown={})),
        make_entry("unplanned"),
    ]
    assert [entry.id for entry in planned_entries(entries, H200, precision="32-true")] == ["own"]
    assert Entry.from_json(own.to_json()) == own


@pytest.mark.parametrize("damage", [{"parts": {"data": -1.0}}, {"step_time": "NaN"}, {"factors": {"data": 0.0}}])
def test_impossible_predictions_are_damage(damage: dict[str, Any]) -> None:
    document = json.loads(run_of("one").to_json())
    document["planned"] |= damage
    with pytest.raises(ArchiveError, match="planned has impossible values"):
        Entry.from_json(json.dumps(document))
