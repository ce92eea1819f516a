"""Which entry should a new run start from? Pure: entries in, one choice with its reason out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_hybrid.archive.entry import Batch, Entry, Fingerprint, Hardware
from lightning_hybrid.layout import Layout

__all__ = ["SIMILAR_SIZE", "Match", "best_entry", "failed_degrees", "fastest_schedule", "find_baseline", "rescale"]

#: Two models of one class are similar while neither has more than this many times the other's parameters.
SIMILAR_SIZE = 2.0


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
    entries: Iterable[Entry],
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
        entries: in any order.
        fingerprint: of the model about to run.
        hardware: of this run; its ``num_devices`` is not looked at.
        num_devices: devices to use.
        accept: a last word on degrees and the entry they are from, such as the strategy's own check of divisibility.
    """
    entries = list(entries)
    failed = failed_degrees(entries, fingerprint, hardware)
    max_stages = math.inf if fingerprint.num_blocks is None else fingerprint.num_blocks
    candidates: list[tuple[Entry, Layout]] = []
    for entry in entries:
        if not entry.result.is_good or not _same_hardware(entry.hardware, hardware):
            continue
        degrees = rescale(entry.degrees, num_devices) if _similar(entry.model, fingerprint) else None
        if degrees is None or degrees in failed or degrees.pipeline_parallel_size > max_stages:
            continue
        if accept(degrees, entry):
            candidates.append((entry, degrees))
    if not candidates:
        return None
    by_tokens = all(entry.result.tokens_per_second for entry, _ in candidates)

    def nearness(candidate: tuple[Entry, Layout]) -> tuple[bool, float, float, float, str, str]:
        entry, _ = candidate
        return (
            _same_model(entry.model, fingerprint),
            -_ratio(entry.hardware.num_devices, num_devices),
            -_ratio(entry.model.num_parameters, fingerprint.num_parameters),
            _rate(entry, by_tokens) / entry.hardware.num_devices,
            entry.time,
            entry.id,
        )

    entry, degrees = max(candidates, key=nearness)
    reason = _reason(entry, degrees, fingerprint, num_known=len(candidates), by_tokens=by_tokens)
    return Match(entry=entry, degrees=degrees, reason=reason)


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


def failed_degrees(entries: Iterable[Entry], fingerprint: Fingerprint, hardware: Hardware) -> dict[Layout, Entry]:
    """Return the degrees whose latest outcome, for this model on this kind of device, was a failure, with its entry.

    The latest outcome counts so that a repaired cause (a bug, a smaller batch) can be shown by one run with these
    degrees given explicitly.
    """
    latest: dict[Layout, Entry] = {}
    for entry in sorted(entries, key=lambda entry: (entry.updated, entry.id)):
        known = entry.result.is_good or entry.result.is_failure
        if known and _same_model(entry.model, fingerprint) and _same_hardware(entry.hardware, hardware):
            latest[entry.degrees] = entry
    return {degrees: entry for degrees, entry in latest.items() if entry.result.is_failure}


def fastest_schedule(
    entries: Iterable[Entry],
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
    alike = [
        entry
        for entry in entries
        if entry.result.is_good
        and _same_model(entry.model, fingerprint)
        and _same_hardware(entry.hardware, hardware)
        and entry.degrees == degrees
        and (entry.settings.precision, entry.settings.num_microbatches) == (precision, num_microbatches)
        and entry.settings.schedule != "none"
        and entry.batch.size_per_data_rank in (None, size_per_data_rank)
    ]
    return max(alike, key=lambda entry: (entry.result.samples_per_second or 0.0, entry.id), default=None)


def find_baseline(
    entries: Iterable[Entry],
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

    def preference(entry: Entry) -> tuple[bool, bool, float, str]:
        comparable = batch is not None and (
            (entry.batch.size_per_data_rank is not None and entry.batch.size_per_data_rank == batch.size_per_data_rank)
            or (entry.batch.global_size is not None and entry.batch.global_size == batch.global_size)
        )
        return entry.settings.precision == precision, comparable, entry.result.samples_per_second or 0.0, entry.id

    single = [
        entry
        for entry in entries
        if entry.result.is_good
        and entry.hardware.num_devices == 1
        and _same_model(entry.model, fingerprint)
        and _same_hardware(entry.hardware, hardware)
    ]
    return max(single, key=preference, default=None)


def _same_hardware(one: Hardware, other: Hardware) -> bool:
    return (one.device, one.kind) == (other.device, other.kind)


def _same_model(one: Fingerprint, other: Fingerprint) -> bool:
    return one.hash == other.hash and one.num_parameters > 0


def _similar(one: Fingerprint, other: Fingerprint) -> bool:
    if _same_model(one, other):
        return True
    return one.model_class == other.model_class and _ratio(one.num_parameters, other.num_parameters) <= SIMILAR_SIZE


def _ratio(one: int, other: int) -> float:
    """How many times the larger is the smaller: 1 for equal numbers, infinite where one is 0."""
    small, large = sorted((one, other))
    return large / small if small > 0 else math.inf


def _rate(entry: Entry, by_tokens: bool) -> float:
    return (entry.result.tokens_per_second if by_tokens else entry.result.samples_per_second) or 0.0


def _reason(entry: Entry, degrees: Layout, fingerprint: Fingerprint, *, num_known: int, by_tokens: bool) -> str:
    same = _same_model(entry.model, fingerprint)
    model = "the same model" if same else f"a similar {entry.model.model_class}"
    text = (
        f"starting from archive entry {entry.id}: {model} ({entry.model.num_parameters:,} parameters) ran with"
        f" {entry.degrees} on {entry.hardware.num_devices} x {entry.hardware.kind}"
        f" at {_rate(entry, by_tokens):,.4g} {'tokens' if by_tokens else 'samples'}/s"
    )
    if degrees != entry.degrees:
        old, new = entry.degrees.data_parallel_size, degrees.data_parallel_size
        text += f", its data axis resized from {old} to {new} for {degrees.world_size} devices"
    return text + (f"; of {num_known} entries known to work it is the nearest and fastest." if num_known > 1 else ".")
