"""The index beside the entries: it makes choices fast, and whatever happens to it, they stay the same."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_hybrid.archive import Archive, Entry
from lightning_hybrid.archive import store as store_module
from lightning_hybrid.archive.row import INDEX_NAME, Row, read_index, row_of, to_line
from lightning_hybrid.errors import ArchiveError
from tests.unit.archive_entries import make_entry

NUM = 12


@pytest.fixture(autouse=True)
def small_folders_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "INDEX_FROM", 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(NUM):
        Archive(tmp_path).write(make_entry(f"run-{number}", rate=float(number)))
    Archive(tmp_path).known()
    assert (tmp_path / INDEX_NAME).exists()
    return tmp_path


def rows_of(url: Any) -> list[Row]:
    """All rows by the index, after checking that they are those of the documents."""
    rows = sorted(Archive(url).known())
    assert rows == sorted(row_of(entry) for entry in Archive(url).list())
    return rows


def documents_read(folder: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many documents the next reader reads."""
    names, read = [], Archive._read
    with monkeypatch.context() as patched:
        patched.setattr(Archive, "_read", lambda self, name: names.append(name) or read(self, name))  # type: ignore[func-returns-value]
        Archive(folder).known()
    return len(names)


def test_a_few_entries_have_no_index(tmp_path: Path) -> None:
    Archive(tmp_path).write(make_entry())
    assert len(rows_of(tmp_path)) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


def test_nothing_is_read_again_but_what_is_new(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert documents_read(folder, monkeypatch) == 0
    Archive(folder).write(make_entry("run-3", status="oom", rate=None))  # the writer says so itself
    assert documents_read(folder, monkeypatch) == 0
    assert [row.status for row in rows_of(folder) if row.id == "run-3"] == ["oom"]
    other = make_entry("of-an-older-release").to_json()  # which knows nothing of the index
    (folder / "of-an-older-release.json").write_text(other)
    assert documents_read(folder, monkeypatch) == 1
    assert documents_read(folder, monkeypatch) == 0
    assert len(rows_of(folder)) == NUM + 1


def rewrite(folder: Path) -> None:
    document = folder / "run-5.json"
    document.write_text(document.read_text().replace('"samples_per_second": 5.0', '"samples_per_second": 9.5'))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": lambda folder: (folder / INDEX_NAME).unlink(),
    "empty": lambda folder: (folder / INDEX_NAME).write_bytes(b""),
    "cut short": lambda folder: (folder / INDEX_NAME).write_bytes((folder / INDEX_NAME).read_bytes()[:-100]),
    "foreign": lambda folder: (folder / INDEX_NAME).write_bytes(bytes(range(256)) * 40),
    "foreign, with sums": lambda folder: (folder / INDEX_NAME).write_bytes(b"%08x [1]\n" % zlib.crc32(b"[1]")),
    "too large": lambda folder: (folder / INDEX_NAME).write_bytes(b"x" * 2**21),
    "a folder": lambda folder: ((folder / INDEX_NAME).unlink(), (folder / INDEX_NAME).mkdir()),
    "entry gone": lambda folder: (folder / "run-2.json").unlink(),
    "entry changed in place": rewrite,
    "entry broken": lambda folder: (folder / "run-7.json").write_text("{"),
    "line of an entry that never was": lambda folder: (folder / INDEX_NAME).write_bytes(
        to_line("ghost.json", "1-2-3", row_of(make_entry("ghost", rate=1e9)))
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_happens_rows_are_those_of_the_documents(folder: Path, damage: str) -> None:
    before = rows_of(folder)
    DAMAGE[damage](folder)
    after = rows_of(folder)
    assert (after != before) == damage.startswith("entry")
    assert rows_of(folder) == after


def test_flipped_bits(folder: Path) -> None:
    """A line with another value would be believed if it had no sum."""
    generator, whole = random.Random(3), (folder / INDEX_NAME).read_bytes()
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(3):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        (folder / INDEX_NAME).write_bytes(data)
        rows_of(folder)
    text = whole.replace(b",11.0,", b",99.0,")  # the wrong variant: the same line with its sum made anew
    assert text != whole
    wrong = [to_line(name, key, row) for name, (key, row) in _unchecked(text).items()]
    (folder / INDEX_NAME).write_bytes(b"".join(wrong))
    with pytest.raises(AssertionError):
        rows_of(folder)


def _unchecked(data: bytes) -> dict[str, tuple[str, Row | str]]:
    lines = [line[9:] for line in data.split(b"\n") if line]
    return read_index(b"\n".join(b"%08x %b" % (zlib.crc32(line), line) for line in lines))[0]


def test_many_rewrites_do_not_let_it_grow(folder: Path) -> None:
    for number in range(60):
        Archive(folder).write(make_entry("run-1", rate=float(number)))
    (folder / "new.json").write_text(make_entry("new").to_json())
    assert len(rows_of(folder)) == NUM + 1
    assert (folder / INDEX_NAME).read_bytes().count(b"\n") == NUM + 1


def test_broken_documents_are_named_without_being_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "bad.json").write_text("{")
    assert documents_read(folder, monkeypatch) == 1
    assert documents_read(folder, monkeypatch) == 0
    monkeypatch.setattr(store_module, "_warned", set())  # as another process
    caplog.clear()
    assert len(Archive(folder).known()) == NUM
    assert ["bad.json: it is not JSON" in record.getMessage() for record in caplog.records] == [True]


def test_object_stores_have_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://archive-index"
    try:
        for number in range(NUM):
            Archive(url).write(make_entry(f"run-{number}"))
        rows_of(url)
        assert fsspec.filesystem("memory").exists(f"/archive-index/{INDEX_NAME}")
        assert documents_read(url, monkeypatch) == 0
        assert len(rows_of(url)) == NUM
    finally:
        fsspec.filesystem("memory").rm("/archive-index", recursive=True)


def test_a_row_whose_entry_is_gone_loads_nothing(folder: Path) -> None:
    known = Archive(folder).known()
    (row,) = (row for row in known if row.id == "run-4")
    assert known.load(row) == make_entry("run-4", rate=4.0)
    (folder / "run-4.json").unlink()
    assert known.load(row) is None
    assert known.load(row._replace(id="../run-3")) is None


def test_rows_pickle_and_say_what_entries_say() -> None:
    for status in ("ok", "interrupted", "running", "oom", "failed", "error"):
        for rate in (None, 0.0, 3.0, float("nan")):
            entry: Entry = make_entry(status=status, rate=rate)
            row = row_of(entry)
            assert (row.is_good, row.is_failure) == (entry.result.is_good, entry.result.is_failure)
    with pytest.raises(ArchiveError):
        Entry.from_json("{}")
