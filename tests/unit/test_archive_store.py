"""The folder: atomic, append-only, any number of writers, and deaf to what is not an entry."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_hybrid.archive import Archive, Entry
from lightning_hybrid.archive import store as store_module
from lightning_hybrid.errors import ArchiveError
from tests.unit.archive_entries import make_entry

NUM_WRITERS, NUM_DOOMED, NUM_WRITES = 8, 4, 25


def test_an_archive_that_does_not_exist_is_empty_and_stays_so(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "none")
    assert archive.list() == []
    assert not (tmp_path / "none").exists()


def test_write_list_get(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "deep" / "archive")
    new, old = make_entry("b-new", time="2026-07-31T10:00:00Z"), make_entry("z-old", time="2026-07-30T10:00:00Z")
    paths = [archive.write(new), archive.write(old)]
    assert sorted(os.listdir(tmp_path / "deep" / "archive")) == ["b-new.json", "z-old.json"]
    assert Path(paths[0]).read_text() == new.to_json()
    assert archive.list() == [old, new]
    assert archive.get("z-old") == archive.get("z") == old


def test_a_run_rewrites_its_own_entry(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.write(make_entry(status="running"))
    archive.write(make_entry(status="ok"))
    assert [entry.result.status for entry in archive.list()] == ["ok"]


def test_get_refuses_what_is_not_one_entry(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    for name in ("run-1", "run-2"):
        archive.write(make_entry(name))
    with pytest.raises(ArchiveError, match="2 of the 2 ids begin so; give the whole id"):
        archive.get("run")
    for name in ("other", "", "../run-1", "*"):
        with pytest.raises(ArchiveError, match="none of the 2 ids begins so"):
            archive.get(name)
    (tmp_path / "run-1.json").write_text("{")
    with pytest.raises(ArchiveError, match="entry 'run-1': it is not JSON"):
        archive.get("run-1")


def spoil(folder: Path) -> dict[str, str]:
    """Put one file of each kind of damage into the folder; return name -> what the warning says."""
    good = make_entry("good").to_json()
    document = json.loads(good)
    files: dict[str, tuple[str | bytes, str]] = {
        "truncated.json": (good[:300], "not JSON"),
        "empty.json": ("", "not JSON"),
        "foreign.json": ('{"name": "left-pad", "version": "1.0"}', "not an archive entry"),
        "list.json": ("[1, 2, 3]", "not an archive entry"),
        "binary.json": (bytes(range(256)) * 4, "not text"),
        "newer.json": (json.dumps({**document, "id": "newer", "schema": 2}), "its schema is 2"),
        "damaged.json": (json.dumps({**document, "id": "damaged", "degrees": None}), "entry.degrees"),
        "copy.json": (good, "its name is not that of its id good"),
        "large.json": (" " * (store_module.MAX_BYTES + 1), "more than the"),
    }
    for name, (content, _) in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "folder.json").mkdir()
    (folder / "dangling.json").symlink_to(folder / "nowhere")
    for ignored in ("README.md", ".hidden.json", ".good.123-abcd.tmp", "no-suffix"):
        (folder / ignored).write_text("not for the archive")
    return {name: message for name, (_, message) in files.items()} | {"folder.json": "not a file"}


def test_damaged_files_are_skipped_with_one_warning_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = Archive(tmp_path)
    archive.write(make_entry("good"))
    expected = spoil(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with caplog.at_level(logging.DEBUG):
        assert [entry.id for entry in archive.list()] == ["good"]
        assert [entry.id for entry in Archive(tmp_path).list()] == ["good"]  # a second reader does not warn again
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    for name, message in expected.items():
        about = [text for text in warnings if f"/{name}: " in text]
        assert len(about) == 1, (name, about)
        assert message in about[0]
    assert len([text for text in warnings if "dangling.json" not in text]) == len(expected)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ArchiveError, match="give the archive a folder that this user may write"):
            Archive(tmp_path).write(make_entry())
    finally:
        tmp_path.chmod(0o700)


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArchiveError, match=r"cannot write archive entry .* give the archive a folder"):
        Archive(tmp_path / "file" / "archive").write(make_entry())
    assert (tmp_path / "file").read_text() == "in the way"


def test_unknown_protocol() -> None:
    with pytest.raises(ArchiveError, match="cannot open the archive"):
        Archive("nosuchprotocol://somewhere")


def test_a_failed_write_leaves_the_old_entry_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive(tmp_path)
    archive.write(make_entry(status="running"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArchiveError, match="No space left"):
        archive.write(make_entry(status="ok"))
    assert os.listdir(tmp_path) == ["one.json"]
    assert archive.list() == [make_entry(status="running")]


def test_temporaries_of_killed_writers_go_once_they_are_old(tmp_path: Path) -> None:
    fresh, stale = tmp_path / ".a.1-00.tmp", tmp_path / ".b.2-00.tmp"
    for file in (fresh, stale):
        file.write_text("half an ent")
    os.utime(stale, (time.time() - 2 * store_module.STALE_SECONDS,) * 2)
    Archive(tmp_path).write(make_entry())
    assert sorted(os.listdir(tmp_path)) == [fresh.name, "one.json"]


def test_object_stores_are_written_in_place_and_others_by_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    moves: list[tuple[str, str]] = []
    move = memory.mv
    monkeypatch.setattr(type(memory), "mv", lambda self, old, new, **_: (moves.append((old, new)), move(old, new)))
    archive = Archive("memory://archive-in-place")
    archive.write(make_entry())
    assert moves == []
    monkeypatch.setattr(store_module, "ATOMIC_PUT", frozenset())
    archive.write(make_entry("two"))
    assert [new for _, new in moves] == ["/archive-in-place/two.json"]
    assert [entry.id for entry in archive.list()] == ["one", "two"]
    assert str(archive) == "memory:///archive-in-place"
    assert all(not name.endswith(".tmp") for name in memory.ls("/archive-in-place", detail=False))


def write_in_place(archive: Archive, entry: Entry) -> None:
    """The wrong way: open the final name and write into it, piece by piece."""
    text = entry.to_json()
    with open(archive.file_of(entry.id), "w") as file:
        for start in range(0, len(text), 200):
            file.write(text[start : start + 200])
            file.flush()
            time.sleep(0.0002)


def write_many(folder: str, writer: int, write: Callable[[Archive, Entry], Any], reported: Any) -> None:
    archive = Archive(folder)
    for number in range(NUM_WRITES) if writer >= NUM_DOOMED else itertools.cycle(range(NUM_WRITES)):
        write(archive, make_entry(f"w{writer}-{number:02d}", parent="x" * 3000))
        reported[writer * NUM_WRITES + number] = 1


def run_and_kill(folder: Path, write: Callable[[Archive, Entry], Any]) -> tuple[set[str], int]:
    """Run all writers at once and kill the doomed at random times; return what was reported written, and the files."""
    context = multiprocessing.get_context("fork")
    reported = context.Array("b", NUM_WRITERS * NUM_WRITES, lock=False)
    writers = [
        context.Process(target=write_many, args=(str(folder), writer, write, reported)) for writer in range(NUM_WRITERS)
    ]
    for process in writers:
        process.start()
    chance = random.Random(0)
    for writer, process in enumerate(writers[:NUM_DOOMED]):
        first = chance.randrange(NUM_WRITES)
        while not reported[writer * NUM_WRITES + first]:
            time.sleep(chance.uniform(0.0, 0.001))
        process.kill()
    for process in writers:
        process.join(60)
    assert [process.exitcode for process in writers] == [-9] * NUM_DOOMED + [0] * (NUM_WRITERS - NUM_DOOMED)
    names = {f"w{i // NUM_WRITES}-{i % NUM_WRITES:02d}" for i, done in enumerate(reported) if done}
    return names, len([name for name in os.listdir(folder) if name.endswith(".json")])


def test_killed_writers_leave_each_entry_whole_or_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reported, num_files = run_and_kill(tmp_path, Archive.write)
    entries = Archive(tmp_path).list()
    assert not caplog.records
    assert len(entries) == num_files
    assert reported <= {entry.id for entry in entries}
    assert {f"w{NUM_DOOMED}-{number:02d}" for number in range(NUM_WRITES)} <= reported


def test_wrong_variant_writing_in_place_leaves_broken_entries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reported, num_files = run_and_kill(tmp_path, write_in_place)
    assert len(reported) <= num_files
    assert len(Archive(tmp_path).list()) < num_files
    assert any("not JSON" in record.getMessage() for record in caplog.records)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A device or a pipe would be read without end."""
    archive = Archive(tmp_path)
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / store_module.INDEX_NAME).symlink_to("/dev/zero")
    for name in ("zero", "pipe"):
        with pytest.raises(ArchiveError, match="it is not a file"):
            archive.get(name)
    assert archive.list() == []
