"""Nothing grows from one ``fit`` to the next in one process. The long form is ``benchmarks/soak.py``."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from benchmarks import soak
from examples.gpt.module import LitGPT
from lightning_hybrid.pipeline import stage
from tests.ranks import run_ranks


def counts_of_fits(rank: int, sabotage: bool = False) -> tuple[list[soak.Counts], int]:
    if sabotage:
        stage.StageRun.forget = lambda self: None  # type: ignore[method-assign]
    found = soak.many_fits((1, 1, 2), 4, 2)
    return found, sum(isinstance(thing, LitGPT) for thing in gc.get_objects())


def test_nothing_is_left_of_earlier_fits() -> None:
    for (before, after), modules in run_ranks(2, counts_of_fits):
        assert modules == 0
        assert after.groups == before.groups
        # fewer: a rank's last connections to torch's store may still be open at the first count
        assert after.descriptors <= before.descriptors and after.threads <= before.threads
        assert after.tensors <= before.tensors


def test_wrong_variant_runs_that_are_not_forgotten() -> None:
    found: list[Any] = run_ranks(2, counts_of_fits, True)
    with pytest.raises(AssertionError):
        assert all(modules == 0 for _, modules in found)
