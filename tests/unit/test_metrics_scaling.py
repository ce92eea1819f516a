"""Efficiency only where two runs compare; otherwise the reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hybrid.metrics import Reference, compare

ONE = Reference(num_devices=1, samples_per_second=10.0, global_batch_size=8, model="gpt-1", precision="32-true")
EIGHT = Reference(num_devices=8, samples_per_second=60.0, global_batch_size=64, model="gpt-1", precision="32-true")


def test_weak_and_strong() -> None:
    weak = compare(EIGHT, ONE)
    assert (weak.kind, weak.speedup, weak.efficiency) == ("weak", 6.0, 0.75)
    strong = compare(replace(EIGHT, global_batch_size=8, samples_per_second=40.0), ONE)
    assert (strong.kind, strong.speedup, strong.efficiency) == ("strong", 4.0, 0.5)


def test_same_batch_on_each_data_rank_is_weak_and_says_so() -> None:
    """2 x 2 x 2: each replica of 4 devices works on the batch that the one device worked on."""
    run = replace(EIGHT, global_batch_size=16, num_data_ranks=2, samples_per_second=40.0)
    assert compare(run, ONE).kind == "weak per data rank"
    assert compare(run, ONE).efficiency == 0.5
    assert compare(replace(run, num_data_ranks=8), ONE).kind == "none"
    assert compare(replace(run, num_data_ranks=None), ONE).kind == "none"


def test_gain_of_a_doubling() -> None:
    assert compare(EIGHT, ONE).per_doubling == pytest.approx(6 ** (1 / 3))
    assert compare(replace(EIGHT, samples_per_second=80.0), ONE).per_doubling == pytest.approx(2)
    assert compare(replace(ONE, samples_per_second=12.0), ONE).per_doubling is None
    fewer = compare(replace(ONE, samples_per_second=10.0, global_batch_size=8), EIGHT)
    assert fewer.per_doubling == pytest.approx(6 ** (1 / 3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "gpt-2"}, "model: gpt-2 there, gpt-1 here"),
        ({"precision": "bf16-mixed"}, "precision"),
        ({"global_batch_size": 32}, "use 32 a device or a data rank (weak) or 32 in all (strong)"),
        ({"samples_per_second": None}, "neither tokens nor samples"),
    ],
)
def test_what_does_not_compare_has_reasons_and_no_number(change: dict[str, object], says: str) -> None:
    got = compare(EIGHT, replace(ONE, **change))
    assert (got.kind, got.efficiency, got.speedup, got.per_doubling) == ("none", None, None, None)
    assert says in got.reasons[0]
    assert compare(EIGHT, ONE).reasons == ()


def test_a_baseline_that_says_little_is_labelled() -> None:
    got = compare(EIGHT, Reference(num_devices=1, samples_per_second=10.0))
    assert (got.kind, got.efficiency) == ("unchecked", 0.75)
    assert "does not say" in got.reasons[0]


def test_same_number_of_devices() -> None:
    got = compare(replace(EIGHT, samples_per_second=66.0), EIGHT)
    assert (got.kind, got.efficiency) == ("same size", pytest.approx(1.1))
    assert compare(replace(EIGHT, global_batch_size=128), EIGHT).kind == "none"


def test_tokens_come_before_samples() -> None:
    ours, theirs = replace(EIGHT, tokens_per_second=700.0), replace(ONE, tokens_per_second=100.0)
    assert compare(ours, theirs).speedup == 7.0
    assert compare(ours, ONE).speedup == 6.0
