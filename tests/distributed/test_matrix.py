"""Models x stages x schedules x {alone, sharded, tensor parallel} x accumulation: all equal one process by parameter.

Every model meets 2 and 4 ranks and up to 8 virtual stages under two schedules; every schedule meets sharding over 2
data ranks, tensor parallelism and accumulation on one of three models: one with a tied embedding, one where two
tensors enter a stage (a decoder's), one plain. Many runs share one fork of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_hybrid.pipeline.step
import lightning_hybrid.training.pipelined
import lightning_hybrid.training.setup_pipeline
from lightning_hybrid.pipeline.schedule import SCHEDULES
from lightning_hybrid.pipeline.step import PipelineRank
from lightning_hybrid.training.gradients import GradientLedger
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace, worst_error
from tests.distributed.zoo import ZOO, even_rows
from tests.ranks import run_ranks

Run = dict[str, Any]
"""Arguments of :func:`runs` for one run: degrees, and ``accumulate``."""

OWN = """\
1F0,1F1,,1F2,1B0,1F3,1B1,1B2,1B3
0F0,0F1,0F2,0F3,2F0,2B0,2F1,2I1,0B0,2F2,0I1,2W1,2B2,0W1,2F3,2B3,0B2,0B3
"""
"""A user's own table: three stages on two ranks, whole and split backwards side by side."""


def runs(
    rank: int, name: str, todo: list[Run], rows: Any = None, sabotage: Callable[[], None] | None = None
) -> list[Trace]:
    """Train the model once for each run, one after the other in the same processes.

    With its own rows it has 8 blocks, for 8 stages; with ``rows`` 4.
    """
    traces = []
    if sabotage is not None:
        sabotage()
    for run in todo:
        degrees = dict(run)
        accumulate = degrees.pop("accumulate", 1)
        torch.manual_seed(0)
        data = ZOO[name].rows() if rows is None else rows
        make = lambda: ZOO[name].make(num_blocks=8 if rows is None else 4)  # noqa: E731
        traces.append(trace(rank, make, data, degrees, accumulate_grad_batches=accumulate))
    return traces


def assert_all_equal(expected: list[Trace], found: list[list[Trace]], todo: list[Run]) -> None:
    """``found`` is by rank, then by run; ``expected`` by run. The last update's gradients are looked at too."""
    for right, traces, run in zip(expected, zip(*found, strict=True), todo, strict=True):
        try:
            assert_equal(right, list(traces))
            last = {name: g for part in traces for name, g in part.gradients[-1].items()}
            error, name = worst_error(right.gradients[-1], last)
            assert error <= 5e-5, f"gradient of {name} in the last update is off by {error:.1e}"
        except AssertionError as error_:
            raise AssertionError(f"{run}: {error_}") from error_


# ---- every model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_model_at_two_and_four_stages(name: str) -> None:
    expected = run_ranks(1, runs, name, [ONE_PROCESS])[0]
    for num_ranks, schedules in {
        2: ("ZBVZeroBubble",),
        4: ("Interleaved1F1B",),
    }.items():
        todo = [{"pipeline_parallel_size": num_ranks, "schedule": schedule} for schedule in schedules]
        found = run_ranks(num_ranks, runs, name, todo, timeout=200)
        assert_all_equal(expected * len(todo), found, todo)


# ---- every schedule --------------------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, str] | None] = {
    "gemma3": None,
    "t5": {
        "model.*.block.*.layer.*.DenseReluDense.wi": "colwise",
        "model.*.block.*.layer.*.DenseReluDense.wo": "rowwise",
    },
    "llama": None,
}
"""Names of the zoo, and their tensor plans where Hugging Face has none."""
WAYS: dict[str, Run] = {
    "alone": {},
    "sharded": {"data_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
}


@pytest.fixture
def schedules(tmp_path: Path) -> list[str]:
    """All there are, and a user's own."""
    (tmp_path / "own.csv").write_text(OWN)
    return [*(spec.name for spec in SCHEDULES.values()), str(tmp_path / "own.csv")]


@pytest.mark.parametrize(
    ("way", "name"),
    [("alone", "gemma3"), ("alone", "t5"), ("sharded", "llama"), ("tensor", "gemma3")],
)
def test_every_schedule(way: str, name: str, schedules: list[str]) -> None:
    """Accumulating over 2 batches, the third of three is an update of its own."""
    rows, accumulations = even_rows(24), (1, 2) if (way, name) == ("alone", "gemma3") else (2,)
    plan = {"tp_plan": MODELS[name]} if way == "tensor" else {}
    todo = [
        {"pipeline_parallel_size": 2, "schedule": schedule, "accumulate": accumulate, **WAYS[way], **plan}
        for accumulate in accumulations
        for schedule in schedules
    ]
    expected = run_ranks(1, runs, name, [{"accumulate": accumulate} for accumulate in accumulations], rows)[0]
    found = run_ranks(2 if way == "alone" else 4, runs, name, todo, rows, timeout=280)
    assert_all_equal([right for right in expected for _ in schedules], found, todo)


# ---- the same comparisons must fail when something is wrong ---------------------------------------------------------


def weights_halves_lost() -> None:
    lightning_hybrid.pipeline.step.backward_of_weights = lambda weights, rest: None


def gradients_of_a_boundary_halved() -> None:
    right = PipelineRank._await_gradients

    def wrong(self: PipelineRank, flight: Any, stage: int, microbatch: int) -> None:
        right(self, flight, stage, microbatch)
        if microbatch == 1:
            flight.gradients = [gradient / 2 for gradient in flight.gradients]

    PipelineRank._await_gradients = wrong  # type: ignore[method-assign]


def tied_sum_left_out() -> None:
    lightning_hybrid.training.setup_pipeline.sync_tied_gradients = lambda *args: None


def mean_over_data_ranks_left_out() -> None:
    right = lightning_hybrid.training.pipelined.reduce_gradients
    lightning_hybrid.training.pipelined.reduce_gradients = lambda module, root, scale: right(module, root, 2 * scale)


def earlier_batch_forgotten() -> None:
    right = GradientLedger.open

    def wrong(self: GradientLedger) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        right(self)

    GradientLedger.open = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("sabotage", "name", "run"),
    [
        (weights_halves_lost, "llama", {"schedule": "ZBVZeroBubble"}),
        (gradients_of_a_boundary_halved, "llama", {"schedule": "own.csv"}),
        (gradients_of_a_boundary_halved, "t5", {"schedule": "DualPipeV"}),
        (tied_sum_left_out, "gemma3", {"schedule": "Interleaved1F1B"}),
        (mean_over_data_ranks_left_out, "llama", {"schedule": "InterleavedZeroBubble", **WAYS["sharded"]}),
        (earlier_batch_forgotten, "llama", {"schedule": "1F1B", "accumulate": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_run_is_noticed(
    sabotage: Callable[[], None], name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.csv").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    rows, todo = even_rows(24), [{"pipeline_parallel_size": 2, **run}]
    expected = run_ranks(1, runs, name, [{"accumulate": run.get("accumulate", 1)}], rows)[0]
    found = run_ranks(2 * run.get("data_parallel_size", 1), runs, name, todo, rows, sabotage, timeout=100)
    with must_differ():
        assert_all_equal(expected, found, todo)
