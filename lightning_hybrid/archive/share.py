"""Entries on the way between archives: found, compared, written as JSON lines, read again without trust. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec

from lightning_hybrid.archive.document import to_plain
from lightning_hybrid.archive.entry import STATUSES, TIME, Entry
from lightning_hybrid.archive.row import Known, Row
from lightning_hybrid.archive.store import MAX_BYTES, Archive
from lightning_hybrid.errors import ArchiveError

__all__ = ["Filter", "Taken", "differences", "find_entry", "entries_of_folder", "read_entries", "take", "to_lines"]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which entries are meant; ``None`` means any."""

    model: str | None = None
    """Model class."""
    status: str | None = None
    device: str | None = None
    """Part of the device's name, in any case."""
    num_devices: int | None = None
    precision: str | None = None
    since: str | None = None
    """Beginning of a time, such as ``2026-07``."""
    until: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no entry can have.

        Raises:
            ArchiveError: if a value is of another type, the status is none, or a time is not the beginning of one.
        """
        for name, value in vars(self).items():
            wanted = int if name == "num_devices" else str
            if value is not None and type(value) is not wanted:
                kind = "an integer" if wanted is int else "a text"
                raise ArchiveError(f"{name}={value!r} must be {kind}, or None for any")
        if self.status is not None and self.status not in STATUSES:
            raise ArchiveError(f"status={self.status!r} is none; entries have {', '.join(STATUSES)}")
        for name, value in (("since", self.since), ("until", self.until)):
            if value is not None and not _begins_a_time(value):
                raise ArchiveError(
                    f"{name}={value!r} is no time or beginning of one, such as 2026-07 or 2026-07-31T09:30"
                )

    def __call__(self, row: Row) -> bool:
        """Whether an entry's row is meant."""
        return (
            self.model in (None, row.model_class)
            and self.status in (None, row.status)
            and (self.device is None or self.device.lower() in f"{row.device} {row.kind}".lower())
            and self.num_devices in (None, row.num_devices)
            and self.precision in (None, row.precision)
            and (self.since is None or row.time >= self.since)
            and (self.until is None or row.time[: len(self.until)] <= self.until)
        )

    def entries(self, known: Known, *, last: int = 0) -> list[Entry]:
        """Return the entries that are meant, oldest first; of the newest at most ``last`` (0: all)."""
        if last < 0:
            raise ArchiveError(f"last={last} must be at least 0 (all)")
        rows = sorted((row for row in known if self(row)), key=lambda row: (row.time, row.id))
        loaded = (known.load(row) for row in (rows[-last:] if last else rows))
        return [entry for entry in loaded if entry is not None]


def _begins_a_time(text: str) -> bool:
    first = "0001-01-01T00:00:00Z"
    try:
        datetime.strptime(text + first[len(text) :], TIME)
    except ValueError:
        return False
    return True


def find_entry(wanted: Entry | str | os.PathLike[str] | dict[str, Any], archive: str | os.PathLike[str]) -> Entry:
    """Return the entry that is meant.

    Args:
        wanted: The entry, its document's path, its id or the beginning of it; or the fields of a :class:`Filter`, of
            whose entries the known-good one with the highest throughput of a device is taken.
        archive: Where ids and filters are looked up.

    Raises:
        ArchiveError: if there is none, or a filter has an unknown field.
    """
    if isinstance(wanted, Entry):
        return wanted
    if isinstance(wanted, dict):
        fields = Filter.__dataclass_fields__
        if unknown := [name for name in wanted if name not in fields]:
            raise ArchiveError(f"entries have no {', '.join(map(repr, unknown))}; a query may name {', '.join(fields)}")
        meant, known = Filter(**wanted), Archive(archive).known()
        rows = [row for row in known if row.is_good and meant(row)]
        for row in sorted(rows, key=lambda row: (row.samples_per_second or 0.0) / row.num_devices, reverse=True):
            if (entry := known.load(row)) is not None:
                return entry
        models = ", ".join(sorted({row.model_class for row in known if row.is_good})) or "none"
        raise ArchiveError(
            f"no known-good entry of {Archive(archive)} has {wanted} ({len(known)} entries in all; models of those that"
            f" are known to work: {models})"
        )
    if not isinstance(wanted, (str, os.PathLike)):
        raise ArchiveError(
            f"{wanted!r} is no entry, nor an id, a document's path or a query such as {{'model': 'GPT'}}"
        )
    name = os.fspath(wanted)
    if name.endswith(".json"):
        read = next(iter(read_entries(name)))
        if isinstance(read, Entry):
            return read
        raise ArchiveError(read)
    return Archive(archive).get(name)


def differences(one: Entry, other: Entry) -> dict[str, tuple[Any, Any]]:
    """Return what two entries say differently, by the path of the field; ``None`` where one says nothing."""
    left, right = dict(_leaves(to_plain(one))), dict(_leaves(to_plain(other)))
    paths = [path for path in {**left, **right} if left.get(path) != right.get(path)]
    return {path: (left.get(path), right.get(path)) for path in sorted(paths)}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def read_entries(source: str) -> Iterator[Entry | str]:
    """Yield the entries of a document (``.json``) or of JSON lines; for what is none of them, why not.

    Nothing of the content decides where anything is read or written.

    Raises:
        ArchiveError: if the source cannot be read.
    """
    try:
        with fsspec.open(source, "rb") as file:
            if not source.endswith(".jsonl"):
                yield _entry_or_reason(file.read(MAX_BYTES + 1), source)
                return
            number = 0
            while line := file.readline(MAX_BYTES + 1):
                number += 1
                yield _entry_or_reason(line, f"{source}, line {number}")
                while len(line) > MAX_BYTES and not line.endswith(b"\n"):  # the rest of a line that is too long
                    line = file.readline(MAX_BYTES + 1)
    except Exception as error:  # file systems are plug-ins and raise what they like
        raise ArchiveError(f"cannot read {source}: {type(error).__name__}: {error}") from error


def _entry_or_reason(data: bytes, where: str) -> Entry | str:
    if len(data) > MAX_BYTES:
        return f"{where}: more than the {MAX_BYTES} bytes that an entry may have"
    try:
        return Entry.from_json(data.decode())
    except (ArchiveError, UnicodeDecodeError) as error:
        return f"{where}: {error}"


@dataclass
class Taken:
    """What an import did."""

    new: int = 0
    updated: int = 0
    known: int = 0
    skipped: list[str] = field(default_factory=list)
    """Why, for each."""


def take(entries: Iterable[Entry | str], archive: Archive) -> Taken:
    """Write entries into an archive that it has not, or has in an older state.

    Raises:
        ArchiveError: if the archive cannot be written.
    """
    there = {row.id: row.updated for row in archive.known()}
    taken = Taken()
    for entry in entries:
        if isinstance(entry, str):
            taken.skipped.append(entry)
        elif there.get(entry.id, "") >= entry.updated:
            taken.known += 1
        else:
            archive.write(entry)
            taken.new += entry.id not in there
            taken.updated += entry.id in there
            there[entry.id] = entry.updated
    return taken


def to_lines(entries: Iterable[Entry]) -> Iterator[str]:
    """Yield a line of JSON for each entry."""
    for entry in entries:
        yield json.dumps(to_plain(entry), sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def entries_of_folder(folder: str | os.PathLike[str]) -> Iterator[Entry | str]:
    """Yield the entries of a folder's documents, whatever they are called."""
    for path in sorted(Path(folder).glob("*.json")):
        yield from read_entries(str(path))
