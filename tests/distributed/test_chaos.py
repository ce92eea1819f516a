"""Whatever fails on whichever rank: all end soon, the cause is said once, and nothing is lost. The long form is
``benchmarks/chaos.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import KINDS, inject
from lightning_hybrid.failures import watch

STRIKES = [
    ("exception in a block's forward", "tp2xpp2", 1),
    ("StopIteration in the dataset", "tp2", 1),
    ("exception in on_save_checkpoint", "dp2", 0),
    ("out of memory", "pp2", 1),
    ("SIGKILL", "pp2", 0),
    ("os._exit(0)", "dp2", 1),
    ("StopIteration in a hook", "pp2", 1),
    ("no progress, holding the interpreter", "dp2", 1),
]


@pytest.fixture(autouse=True)
def less_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "QUIET", 1.0)
    monkeypatch.setattr(watch, "DEADLOCK", 2.0)
    monkeypatch.setitem(KINDS, STRIKES[-1][0], KINDS[STRIKES[-1][0]].with_timeout(8.0))


@pytest.mark.parametrize(("kind", "layout", "victim"), STRIKES, ids=lambda value: str(value))
def test_all_end_and_the_cause_is_said(kind: str, layout: str, victim: int, tmp_path: Path) -> None:
    outcome = inject(kind, layout, victim, 2, tmp_path / "run", more=60.0)
    assert not outcome.faults, outcome.output


def test_wrong_variant_without_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stands still keeps the others waiting, and nobody says anything."""
    monkeypatch.setattr(watch.Watch, "_look", lambda self: None)
    outcome = inject("a collective of its own", "pp2", 1, 2, tmp_path / "run", more=-36.0)
    assert "still run" in outcome.faults[0]
