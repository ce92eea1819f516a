"""The fit finds constants that made the measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planner_fit import fit, predict
from benchmarks.planner_rows import Case
from lightning_hybrid.layout import Layout
from lightning_hybrid.planner import Cluster, ModelProfile, Setup
from lightning_hybrid.planner.constants import Constants


def made_up(truth: Constants) -> list[Case]:
    """Steps that took exactly what the formulas say with other constants."""
    cases = []
    for hidden in (1024, 4096, 8192):
        for tensor in (1, 4):
            profile = ModelProfile.from_sizes(num_layers=8, hidden_size=hidden, num_heads=16, seq_length=2048)
            layout = Layout(data_parallel_size=8 // tensor, tensor_parallel_size=tensor)
            setup = Setup(layout=layout, micro_batch=2, num_microbatches=4)
            case = Case({"source": f"{hidden}"}, profile, Cluster.named("A100", 8), setup, None, None)
            cases.append(replace(case, seconds=predict(case, truth)))
    return cases


def test_made_up_measurements_are_fitted():
    truth = replace(Constants(), matmul=0.7, link=0.5)
    cases = made_up(truth)
    before = max(abs(predict(case, Constants()) / case.seconds - 1) for case in cases)
    found = fit(cases, Constants(), rounds=4)
    after = max(abs(predict(case, found) / case.seconds - 1) for case in cases)
    assert before > 0.1 and after < before / 2
    assert found.matmul < Constants().matmul and found.memory == Constants().memory


def test_one_wrong_row_does_not_decide():
    cases = made_up(Constants())
    cases[0] = replace(cases[0], seconds=20 * cases[0].seconds)
    found = fit(cases, Constants(), rounds=2)
    assert max(abs(predict(case, found) / case.seconds - 1) for case in cases[1:]) < 0.1
    assert found.matmul == pytest.approx(Constants().matmul, rel=0.1)
