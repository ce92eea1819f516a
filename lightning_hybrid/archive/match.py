"""Which entry should a new run start from? Pure: entries in, one choice with its reason out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from lightning_hybrid.archive.entry import Batch, Entry, Fingerprint, Hardware
from lightning_hybrid.archive.row import Known, Row, known, row_of
from lightning_hybrid.layout import Layout

__all__ = [
    "SIMILAR_SIZE",
    "Match",
    "best_entry",
    "failed_degrees",
    "fastest_schedule",
    "find_baseline",
    "planned_entries",
    "rescale",
]

#: Two models of one class are similar while neither has more than this many times the other's parameters.
SIMILAR_SIZE = 2.0
#: Entries of one model, degrees and schedule that are shown to ``accept``: what it refuses of one is refused of all.
_ASKED = 3
#: Entries that are read for those with a prediction.
_READ = 32


@dataclass(frozen=True, kw_only=True)
class Match:
    """An entry to start from."""

    entry: Entry
    """The entry; its ``settings`` (schedule, micro-batches, ...) are worth taking over too."""
    degrees: Layout
    """The entry's degrees, with the data axis rescaled to the devices at hand."""
    reason: str
    """One sentence: which entry, and why."""


def best_entry(
    entries: Known | Iterable[Entry],
    fingerprint: Fingerprint,
    hardware: Hardware,
    num_devices: int,
    *,
    accept: Callable[[Layout, Entry], bool] = lambda degrees, entry: True,
) -> Match | None:
    """Return the nearest entry that is known to work, or None.

    What counts: runs that ended in order, with a measured throughput, on the same kind of device, of the same model or
    one of its class and of similar size (:data:`SIMILAR_SIZE`). Nearest means, in this order: the same model; as many
    devices (then the nearest count, by its ratio); the nearest size; the highest throughput (tokens where all of them
    have tokens, else samples); the newest.

    Passed over: degrees whose latest outcome with this very model on this kind of device was a failure
    (:func:`failed_degrees`), that do not divide ``num_devices``, that cut more stages than the model has blocks, or
    that ``accept`` refuses.

    Args:
        entries: in any order; or an archive's rows (:meth:`Archive.known`), of which few become entries.
        fingerprint: of the model about to run.
        hardware: of this run; its ``num_devices`` is not looked at.
        num_devices: devices to use.
        accept: a last word on degrees and the entry they are from, such as the strategy's own check of divisibility.
    """
    rows = known(entries)
    candidates = _candidates(rows, fingerprint, hardware, num_devices)
    by_tokens = all(row.tokens_per_second for row, _ in candidates)

    def nearness(candidate: tuple[Row, Layout]) -> tuple[bool, float, float, float, str, str]:
        row, _ = candidate
        return (
            _same_model(row, fingerprint),
            -_ratio(row.num_devices, num_devices),
            -_ratio(row.num_parameters, fingerprint.num_parameters),
            _rate(row, by_tokens) / row.num_devices,
            row.time,
            row.id,
        )

    asked: Counter[tuple[str, Layout, str]] = Counter()
    for row, degrees in sorted(candidates, key=nearness, reverse=True):
        alike = (row.hash, degrees, row.schedule)
        if asked[alike] >= _ASKED:
            continue
        asked[alike] += 1
        entry = rows.load(row)
        if entry is not None and accept(degrees, entry):
            reason = _reason(entry, degrees, fingerprint, num_known=len(candidates), by_tokens=by_tokens)
            return Match(entry=entry, degrees=degrees, reason=reason)
    return None


def _candidates(
    rows: Known, fingerprint: Fingerprint, hardware: Hardware, num_devices: int
) -> list[tuple[Row, Layout]]:
    """Rows that are known to work, with their degrees for ``num_devices``."""
    device, kind = hardware.device, hardware.kind  # most rows are of others: one call less for each
    alike = [row for row in rows if row.kind == kind and row.device == device and _similar(row, fingerprint)]
    failed = set(_failed_rows(alike, fingerprint, hardware))
    max_stages = math.inf if fingerprint.num_blocks is None else fingerprint.num_blocks
    rescaled: dict[Layout, Layout | None] = {}
    found = []
    for row in (row for row in alike if row.is_good):
        before = _layout(row)
        if before not in rescaled:
            rescaled[before] = rescale(before, num_devices)
        degrees = rescaled[before]
        if degrees is not None and degrees not in failed and degrees.pipeline_parallel_size <= max_stages:
            found.append((row, degrees))
    return found


def rescale(degrees: Layout, num_devices: int) -> Layout | None:
    """Return ``degrees`` with the data axis resized to use ``num_devices``, or None where that does not divide.

    Tensor and pipeline degrees stay. So does the shard size of replicated runs (replicas come or go), as long as it
    divides the new data axis; else there is one replica and everything shards, which needs the least memory.
    """
    data, rest = divmod(num_devices, degrees.tensor_parallel_size * degrees.pipeline_parallel_size)
    if rest or data < 1:
        return None
    keeps_shards = degrees.replicate_size > 1 and data % degrees.shard_size == 0
    return Layout(
        data_parallel_size=data,
        tensor_parallel_size=degrees.tensor_parallel_size,
        pipeline_parallel_size=degrees.pipeline_parallel_size,
        replicate_size=data // degrees.shard_size if keeps_shards else 1,
    )


def failed_degrees(
    entries: Known | Iterable[Entry], fingerprint: Fingerprint, hardware: Hardware
) -> dict[Layout, Entry]:
    """Return the degrees whose latest outcome, for this model on this kind of device, was a failure, with its entry.

    The latest outcome counts so that a repaired cause (a bug, a smaller batch) can be shown by one run with these
    degrees given explicitly.
    """
    rows = known(entries)
    loaded = {degrees: rows.load(row) for degrees, row in _failed_rows(rows, fingerprint, hardware).items()}
    return {degrees: entry for degrees, entry in loaded.items() if entry is not None}


def _failed_rows(rows: Iterable[Row], fingerprint: Fingerprint, hardware: Hardware) -> dict[Layout, Row]:
    known_outcome = [
        row
        for row in rows
        if _same_hardware(row, hardware) and _same_model(row, fingerprint) and (row.is_good or row.is_failure)
    ]
    latest: dict[Layout, Row] = {}
    for row in sorted(known_outcome, key=lambda row: (row.updated, row.id)):
        latest[_layout(row)] = row
    return {degrees: row for degrees, row in latest.items() if row.is_failure}


def fastest_schedule(
    entries: Known | Iterable[Entry],
    fingerprint: Fingerprint,
    hardware: Hardware,
    degrees: Layout,
    *,
    precision: str,
    num_microbatches: int,
    size_per_data_rank: int | None,
) -> Entry | None:
    """Return the entry with the highest throughput among those that differ from a run in their schedule alone, or None.

    The same model, kind of device, degrees, precision, micro-batches and, where the entry knows it, batch size.
    """
    rows = known(entries)
    alike = [
        row
        for row in rows
        if _same_hardware(row, hardware)
        and _same_model(row, fingerprint)
        and row.is_good
        and _layout(row) == degrees
        and (row.precision, row.num_microbatches) == (precision, num_microbatches)
        and row.schedule != "none"
        and row.size_per_data_rank in (None, size_per_data_rank)
    ]
    return _first(rows, sorted(alike, key=lambda row: (row.samples_per_second or 0.0, row.id), reverse=True))


def find_baseline(
    entries: Known | Iterable[Entry],
    fingerprint: Fingerprint,
    hardware: Hardware,
    *,
    batch: Batch | None = None,
    precision: str | None = None,
) -> Entry | None:
    """Return the one-device entry against which scaling efficiency is measured, or None.

    The same model on the same kind of device is required. Preferred, in this order: the same precision; the same batch
    per data rank (weak scaling) or the same global batch (strong scaling); the highest throughput; the newest. Whether
    the batches compare is for the caller to say: the entry carries its own.
    """

    def preference(row: Row) -> tuple[bool, bool, float, str]:
        comparable = batch is not None and (
            (row.size_per_data_rank is not None and row.size_per_data_rank == batch.size_per_data_rank)
            or (row.global_size is not None and row.global_size == batch.global_size)
        )
        return row.precision == precision, comparable, row.samples_per_second or 0.0, row.id

    rows = known(entries)
    single = [
        row
        for row in rows
        if row.num_devices == 1 and _same_hardware(row, hardware) and _same_model(row, fingerprint) and row.is_good
    ]
    return _first(rows, sorted(single, key=preference, reverse=True))


def planned_entries(
    entries: Known | Iterable[Entry], hardware: Hardware, *, precision: str, most: int = 8
) -> list[Entry]:
    """Return the newest runs that show what the planner's predictions are worth on just these devices.

    They worked, on the same device (kind and memory), on one node or on several like ``hardware``, at the same
    precision, whatever the model; both a prediction and a measured breakdown are there.
    """
    rows = known(entries)
    alike = [row for row in rows if row.is_good and row.precision == precision and _same_hardware(row, hardware)]
    found = []
    for row in sorted(alike, key=lambda row: (row.time, row.id), reverse=True)[:_READ]:
        entry = rows.load(row)
        if entry is None or entry.planned is None or not entry.result.breakdown:
            continue
        same_memory = entry.hardware.memory_bytes == hardware.memory_bytes
        if same_memory and (entry.hardware.num_nodes > 1) == (hardware.num_nodes > 1):
            found.append(entry)
    return found[:most]


def _first(rows: Known, ranked: list[Row]) -> Entry | None:
    """The first that is still there."""
    return next((entry for row in ranked if (entry := rows.load(row)) is not None), None)


def _layout(row: Row) -> Layout:
    return _layout_of(row.data, row.tensor, row.pipeline, row.replicas)


@lru_cache(maxsize=4096)
def _layout_of(data: int, tensor: int, pipeline: int, replicas: int) -> Layout:
    return Layout(
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        replicate_size=replicas,
    )


def _same_hardware(row: Row, hardware: Hardware) -> bool:
    return row.kind == hardware.kind and row.device == hardware.device


def _same_model(one: Row | Fingerprint, other: Fingerprint) -> bool:
    return one.hash == other.hash and one.num_parameters > 0


def _similar(row: Row, fingerprint: Fingerprint) -> bool:
    if _same_model(row, fingerprint):
        return True
    same_class = row.model_class == fingerprint.model_class
    return same_class and _ratio(row.num_parameters, fingerprint.num_parameters) <= SIMILAR_SIZE


def _ratio(one: int, other: int) -> float:
    """How many times the larger is the smaller: 1 for equal numbers, infinite where one is 0."""
    small, large = sorted((one, other))
    return large / small if small > 0 else math.inf


def _rate(row: Row, by_tokens: bool) -> float:
    return (row.tokens_per_second if by_tokens else row.samples_per_second) or 0.0


def _reason(entry: Entry, degrees: Layout, fingerprint: Fingerprint, *, num_known: int, by_tokens: bool) -> str:
    same = _same_model(entry.model, fingerprint)
    model = "the same model" if same else f"a similar {entry.model.model_class}"
    text = (
        f"starting from archive entry {entry.id}: {model} ({entry.model.num_parameters:,} parameters) ran with"
        f" {entry.degrees} on {entry.hardware.num_devices} x {entry.hardware.kind}"
        f" at {_rate(row_of(entry), by_tokens):,.4g} {'tokens' if by_tokens else 'samples'}/s"
    )
    if degrees != entry.degrees:
        old, new = entry.degrees.data_parallel_size, degrees.data_parallel_size
        text += f", its data axis resized from {old} to {new} for {degrees.world_size} devices"
    return text + (f"; of {num_known} entries known to work it is the nearest and fastest." if num_known > 1 else ".")
