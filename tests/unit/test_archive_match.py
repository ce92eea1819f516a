"""The choice: tables of entries with their right answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lightning_hybrid.archive import Archive, Batch, Entry, Settings, best_entry, choose_degrees, find_baseline
from lightning_hybrid.archive.match import failed_degrees, rescale
from tests.unit.archive_entries import GPT, H200, layout, make_entry

OTHER = dataclasses.replace(GPT, hash="bbbb0000bbbb0000")
LARGER = dataclasses.replace(OTHER, num_parameters=1_900_000)
TOO_LARGE = dataclasses.replace(OTHER, num_parameters=2_100_000)
BERT = dataclasses.replace(OTHER, model_class="BERT")


def later(minute: int) -> dict[str, str]:
    return {"time": f"2026-07-31T10:{minute:02d}:00Z", "updated": f"2026-07-31T10:{minute:02d}:00Z"}


CASES: dict[str, tuple[list[Entry], int, str | None]] = {
    "nothing": ([], 8, None),
    "the only one": ([make_entry("a")], 8, "a"),
    "fastest": ([make_entry("a", rate=10), make_entry("b", (4, 2, 1), rate=20), make_entry("c", rate=15)], 8, "b"),
    "fastest by tokens": ([make_entry("a", rate=10, tokens=900), make_entry("b", rate=20, tokens=800)], 8, "a"),
    "samples while one has no tokens": ([make_entry("a", rate=10, tokens=900), make_entry("b", rate=20)], 8, "b"),
    "newest among equals": ([make_entry("b", **later(1)), make_entry("a", **later(2))], 8, "a"),
    "same model before faster similar one": ([make_entry("a", rate=1), make_entry("b", model=OTHER, rate=99)], 8, "a"),
    "same model at other count before similar one": (
        [make_entry("a", (1, 2, 2)), make_entry("b", model=OTHER)],
        8,
        "a",
    ),
    "similar model": ([make_entry("a", model=LARGER), make_entry("b", model=TOO_LARGE, rate=99)], 8, "a"),
    "nearest size": ([make_entry("a", model=LARGER, rate=99), make_entry("b", model=OTHER)], 8, "b"),
    "another class": ([make_entry("a", model=BERT)], 8, None),
    "another device": ([make_entry("a", kind="NVIDIA A100")], 8, None),
    "nearest count": ([make_entry("a", (2, 2, 1), rate=50), make_entry("b", (8, 2, 1), rate=50)], 12, "b"),
    "same count before faster": ([make_entry("a", (2, 2, 2), rate=1), make_entry("b", (4, 2, 2), rate=99)], 8, "a"),
    "does not divide": ([make_entry("a", (1, 2, 4))], 12, None),
    "more devices than exist": ([make_entry("a", (1, 2, 4))], 4, None),
    "more stages than blocks": ([make_entry("a", (1, 1, 16))], 16, None),
    "running is not known to work": ([make_entry("a", status="running")], 8, None),
    "interrupted but measured works": ([make_entry("a", status="interrupted")], 8, "a"),
    "not measured": ([make_entry("a", rate=None)], 8, None),
    "not a number": ([make_entry("a", rate=float("nan")), make_entry("b", rate=float("inf"))], 8, None),
    "out of memory": ([make_entry("a", status="oom", rate=99)], 8, None),
    "failed later": ([make_entry("a", **later(1)), make_entry("b", status="failed", **later(2))], 8, None),
    "an error of the program later": (
        [make_entry("a", **later(1)), make_entry("b", status="error", **later(2))],
        8,
        "a",
    ),
    "works again": ([make_entry("a", status="oom", **later(1)), make_entry("b", **later(2))], 8, "b"),
    "failed at the degrees that rescaling gives": (
        [make_entry("a", (2, 2, 2)), make_entry("b", (4, 2, 2), status="oom")],
        16,
        None,
    ),
    "failed at other degrees": ([make_entry("a"), make_entry("b", (4, 2, 1), status="oom", rate=99)], 8, "a"),
    "failed for another model": ([make_entry("a"), make_entry("b", status="oom", model=OTHER, **later(2))], 8, "a"),
    "failed on other hardware": ([make_entry("a"), make_entry("b", status="oom", kind="L4", **later(2))], 8, "a"),
    "next best when the best failed": (
        [
            make_entry("a", rate=9),
            make_entry("b", (4, 2, 1), rate=99),
            make_entry("c", (4, 2, 1), status="oom", **later(3)),
        ],
        8,
        "a",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backwards", [False, True])
def test_choice(name: str, backwards: bool) -> None:
    entries, num_devices, expected = CASES[name]
    match = best_entry(entries[::-1] if backwards else entries, GPT, H200, num_devices)
    assert (match and match.entry.id) == expected
    if match:
        assert match.degrees.world_size == num_devices
        assert match.entry.id in match.reason


def test_the_cases_can_fail() -> None:
    """Wrong variant: the fastest good entry, whatever it is, gets many of the table's rows wrong."""

    def naive(entries: list[Entry]) -> str | None:
        good = [entry for entry in entries if entry.result.status == "ok"]
        return max(good, key=lambda entry: entry.result.samples_per_second or 0.0).id if good else None

    wrong = [name for name, (entries, _, expected) in CASES.items() if naive(entries) != expected]
    assert len(wrong) >= 15


@pytest.mark.parametrize(
    ("before", "num_devices", "after"),
    [
        ((2, 2, 2), 8, (2, 2, 2)),
        ((2, 2, 2), 16, (4, 2, 2)),
        ((2, 2, 2), 4, (1, 2, 2)),
        ((2, 2, 2), 6, None),
        ((2, 2, 2), 2, None),
        ((8, 1, 1, 2), 16, (16, 1, 1, 4)),  # shards of 4 stay
        ((8, 1, 1, 2), 4, (4, 1, 1, 1)),
        ((8, 1, 1, 2), 6, (6, 1, 1, 1)),  # 4 does not divide 6: everything shards
        ((8, 1, 1, 8), 4, (4, 1, 1, 4)),  # replicas only, as in plain data parallelism
        ((8, 1, 1, 1), 16, (16, 1, 1, 1)),
    ],
)
def test_rescale(before: tuple[int, ...], num_devices: int, after: tuple[int, ...] | None) -> None:
    assert rescale(layout(*before), num_devices) == (after and layout(*after))


def test_models_whose_parameters_do_not_exist_yet_match_nothing() -> None:
    empty = dataclasses.replace(GPT, num_parameters=0, hash="e3b0c44298fc1c14")
    assert best_entry([make_entry("a", model=empty)], empty, H200, 8) is None
    assert find_baseline([make_entry("a", (1, 1, 1), model=empty)], empty, H200) is None


def test_accept_has_the_last_word() -> None:
    entries = [make_entry("a", (2, 2, 2), rate=99), make_entry("b", (4, 1, 2))]
    match = best_entry(entries, GPT, H200, 8, accept=lambda degrees, _: degrees.tensor_parallel_size == 1)
    assert match is not None
    assert match.entry.id == "b"


def test_reason_says_which_and_why() -> None:
    match = best_entry([make_entry("a"), make_entry("b", rate=5)], GPT, H200, 16)
    assert match is not None
    assert match.reason == (
        "starting from archive entry a: the same model (1,000,000 parameters) ran with data 2 x tensor 2 x pipeline 2"
        " on 8 x NVIDIA H200 at 10 samples/s, its data axis resized from 2 to 4 for 16 devices;"
        " of 2 entries known to work it is the nearest and fastest."
    )
    match = best_entry([make_entry("a", model=LARGER)], GPT, H200, 8)
    assert match is not None
    assert "a similar GPT (1,900,000 parameters)" in match.reason


def test_failed_degrees_name_their_entry() -> None:
    failure = make_entry("b", (4, 2, 1), status="oom")
    assert failed_degrees([make_entry("a"), failure], GPT, H200) == {layout(4, 2, 1): failure}


def batch(per_rank: int | None, global_size: int | None) -> dict[str, Any]:
    return {"batch": Batch(size_per_data_rank=per_rank, global_size=global_size)}


def test_baseline_is_one_device_same_model_and_comparable_batch() -> None:
    entries = [
        make_entry("eight"),
        make_entry("other-model", (1, 1, 1), model=OTHER, rate=99),
        make_entry("other-device", (1, 1, 1), kind="L4", rate=99),
        make_entry("failed", (1, 1, 1), status="oom", rate=99),
        make_entry("fast", (1, 1, 1), rate=9, **batch(8, 8)),
        make_entry("weak", (1, 1, 1), rate=5, **batch(16, 16)),
        make_entry("strong", (1, 1, 1), rate=4, **batch(64, 64)),
        make_entry("half", (1, 1, 1), rate=7, settings=Settings(precision="bf16-mixed"), **batch(16, 16)),
    ]

    def found(**wanted: Any) -> str | None:
        entry = find_baseline(entries, GPT, H200, **wanted)
        return entry and entry.id

    assert found(precision="32-true") == "fast"
    assert found(precision="32-true", batch=Batch(size_per_data_rank=16, global_size=999)) == "weak"
    assert found(precision="32-true", batch=Batch(size_per_data_rank=32, global_size=64)) == "strong"
    assert found(precision="bf16-mixed", batch=Batch(size_per_data_rank=16)) == "half"
    assert found(precision="32-true", batch=Batch()) == "fast"  # unknown sizes compare with nothing
    assert find_baseline(entries[:4], GPT, H200) is None


def test_choose_degrees_reads_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = tmp_path / "archive"
    assert choose_degrees(url, GPT, H200, 8) is None
    Archive(url).write(make_entry("a"))
    match = choose_degrees(url, GPT, H200, 16)
    assert match is not None
    assert (match.entry.id, match.degrees) == ("a", layout(4, 2, 2))
    assert not caplog.records
    Archive(url).write(make_entry("b", (4, 2, 2), status="oom"))
    assert choose_degrees(url, GPT, H200, 16) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "data 4 x tensor 2 x pipeline 2 ran out of memory in archive entry b and will not be chosen;"
        " give these degrees to try them again."
    )
    assert choose_degrees(url, GPT, H200, 8) is not None  # on other devices this is nobody's concern
    assert len(caplog.records) == 1
