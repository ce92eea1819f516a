"""A strategy set to what an earlier run was set to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from lightning import LightningModule

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.archive import Archive
from lightning_hybrid.choosing.choose import choose_layout
from lightning_hybrid.errors import ArchiveError, ConfigurationError
from lightning_hybrid.layout import Layout
from lightning_hybrid.settings import options_of
from tests.unit.archive_entries import make_entry

SLOW, FAST = make_entry("slow", rate=5.0), make_entry("fast", (4, 1, 2), rate=50.0)


@pytest.fixture
def url(tmp_path: Path) -> str:
    for entry in (SLOW, FAST, make_entry("failed", (8, 1, 1), status="oom", rate=None)):
        Archive(tmp_path).write(entry)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("slow", SLOW),
        ("fa", None),
        ("fas", FAST),
        (SLOW, SLOW),
        ({"model": "GPT"}, FAST),
        ({"num_devices": 8, "device": "H200"}, FAST),
        ({"model": "BERT"}, None),
        ({"status": "oom"}, None),
    ],
)
def test_what_is_meant(url: str, wanted: Any, expected: Any) -> None:
    if expected is None:
        with pytest.raises(ArchiveError):
            Hybrid3DStrategy.from_archive(wanted, url)
        return
    strategy = Hybrid3DStrategy.from_archive(wanted, url)
    assert strategy.choice.resolve(8) == expected.degrees
    assert (strategy.started_from, strategy.choice.num_microbatches) == (expected.id, 4)
    assert (strategy.choice.spec.name, strategy.tp_plan) == ("1F1B", {"*.up": "colwise"})


def test_a_query_is_told_what_there_is(url: str) -> None:
    with pytest.raises(ArchiveError, match=r"no 'modle'; a query may name model, status"):
        Hybrid3DStrategy.from_archive({"modle": "GPT"}, url)
    with pytest.raises(ArchiveError, match=r"known to work: GPT\)"):
        Hybrid3DStrategy.from_archive({"model": "BERT"}, url)


def test_a_document_s_path_and_arguments_of_one_s_own(url: str) -> None:
    strategy = Hybrid3DStrategy.from_archive(f"{url}/slow.json", url, tp_plan={"*.down": "rowwise"}, schedule="GPipe")
    assert (strategy.choice.spec.name, strategy.tp_plan) == ("GPipe", {"*.down": "rowwise"})
    with pytest.raises(ConfigurationError, match="from_archive takes tensor_parallel_size from the entry"):
        Hybrid3DStrategy.from_archive("slow", url, tensor_parallel_size=2)


def test_what_saves_memory_is_kept_and_taken_over(url: str) -> None:
    kept = options_of(Hybrid3DStrategy(activation_checkpointing="full", cpu_offload=True).settings)
    assert kept == {"activation_checkpointing": "full", "cpu_offload": True}
    entry = dataclasses.replace(FAST, settings=dataclasses.replace(FAST.settings, options=kept))
    strategy = Hybrid3DStrategy.from_archive(entry, url)
    assert (strategy.settings.activation_checkpointing, strategy.settings.cpu_offload) == ("full", True)
    own = Hybrid3DStrategy.from_archive(entry, url, activation_checkpointing="selective")
    assert own.settings.activation_checkpointing == "selective"


class Run:
    """What choosing reads of a strategy."""

    def __init__(self, strategy: Hybrid3DStrategy, num_devices: int) -> None:
        self.choice, self.num_nodes, self.num_processes, self.global_rank = strategy.choice, 1, num_devices, 0
        self.lightning_module, self.precision_plugin = LightningModule(), None


def test_other_numbers_of_devices(url: str) -> None:
    assert choose_layout(Run(Hybrid3DStrategy.from_archive("fast", url), 4)) == Layout(
        data_parallel_size=2, pipeline_parallel_size=2
    )
    with pytest.raises(ConfigurationError, match="tensor x pipeline is 2, which does not divide it"):
        choose_layout(Run(Hybrid3DStrategy.from_archive("fast", url), 5))
