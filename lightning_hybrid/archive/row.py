"""What a choice needs to know of an entry, short enough to keep 100,000 of them at hand. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from lightning_hybrid.archive.entry import FAILURES, REVISION, SCHEMA, Entry, worked

__all__ = ["INDEX_NAME", "Known", "Row", "known", "read_index", "row_of", "to_line"]

#: The index's name in the folder. It is made again where it is missing, damaged or of another schema.
INDEX_NAME = f".index-{SCHEMA}.{REVISION}"


class Row(NamedTuple):
    """The fields of an :class:`~lightning_hybrid.archive.Entry` by which entries are found and compared."""

    id: str
    time: str
    updated: str
    status: str
    model_class: str
    num_parameters: int
    hash: str
    device: str
    kind: str
    num_devices: int
    data: int
    tensor: int
    pipeline: int
    replicas: int
    precision: str
    schedule: str
    num_microbatches: int
    size_per_data_rank: int | None
    global_size: int | None
    samples_per_second: float | None
    tokens_per_second: float | None

    @property
    def is_good(self) -> bool:
        """See :attr:`Result.is_good <lightning_hybrid.archive.Result.is_good>`."""
        return worked(self.status, self.samples_per_second)

    @property
    def is_failure(self) -> bool:
        """See :attr:`Result.is_failure <lightning_hybrid.archive.Result.is_failure>`."""
        return self.status in FAILURES


def row_of(entry: Entry) -> Row:
    """Return an entry's row."""
    degrees, batch, result = entry.degrees, entry.batch, entry.result
    return Row(
        id=entry.id,
        time=entry.time,
        updated=entry.updated,
        status=result.status,
        model_class=entry.model.model_class,
        num_parameters=entry.model.num_parameters,
        hash=entry.model.hash,
        device=entry.hardware.device,
        kind=entry.hardware.kind,
        num_devices=entry.hardware.num_devices,
        data=degrees.data_parallel_size,
        tensor=degrees.tensor_parallel_size,
        pipeline=degrees.pipeline_parallel_size,
        replicas=degrees.replicate_size,
        precision=entry.settings.precision,
        schedule=entry.settings.schedule,
        num_microbatches=entry.settings.num_microbatches,
        size_per_data_rank=batch.size_per_data_rank,
        global_size=batch.global_size,
        samples_per_second=result.samples_per_second,
        tokens_per_second=result.tokens_per_second,
    )


class Known(Sequence[Row]):
    """Rows, and how to get at the entry of one.

    Args:
        rows: In any order.
        load: Returns a row's entry; ``None`` if it is gone or is not what the row says.
    """

    def __init__(self, rows: Sequence[Row], load: Callable[[Row], Entry | None]) -> None:
        self._rows, self.load = rows, load

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)


def known(entries: Known | Iterable[Entry]) -> Known:
    """Return rows of entries that are at hand."""
    if isinstance(entries, Known):
        return entries
    by_id = {entry.id: entry for entry in entries}
    return Known([row_of(entry) for entry in by_id.values()], lambda row: by_id[row.id])


# ---- the index: a line for each document that somebody has read ----------------------------------------------------
#
# A line holds a sum of what follows, the document's name, a key that changes with the document (bytes, time, inode) and
# its row, or why it is no entry. Later lines replace earlier ones of the same name. Lines with a wrong sum are none.


def to_line(name: str, key: str, row: Row | str) -> bytes:
    """Return a document's line."""
    text = json.dumps([name, key, row], separators=(",", ":"), ensure_ascii=True).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def read_index(data: bytes) -> tuple[dict[str, tuple[str, Row | str]], int]:
    """Return ``{name: (key, row or why it is no entry)}`` of an index's whole lines, and how many lines it has."""
    lines = data.split(b"\n")
    crc32 = zlib.crc32
    whole = [rest for line in lines if line[:8] == b"%08x" % crc32(rest := line[9:])]
    try:
        rows = json.loads(b"[" + b",".join(whole) + b"]")
        make = Row._make
        return {name: (key, row if isinstance(row, str) else make(row)) for name, key, row in rows}, len(lines)
    except (ValueError, TypeError, RecursionError):  # a foreign file with sums
        return {}, len(lines)
