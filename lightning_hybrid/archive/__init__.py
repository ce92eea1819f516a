"""The archive of configurations: each run leaves an entry, the next run of a similar model starts from a good one.

Read in this order: :mod:`entry <lightning_hybrid.archive.entry>` (the schema), :mod:`store
<lightning_hybrid.archive.store>` (the folder), :mod:`match <lightning_hybrid.archive.match>` (the choice).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from lightning_hybrid.archive.entry import (
    Batch,
    Entry,
    Fingerprint,
    Hardware,
    Planned,
    Result,
    Settings,
    Training,
    fingerprint_module,
    fingerprint_parameters,
)
from lightning_hybrid.archive.match import (
    Match,
    best_entry,
    failed_degrees,
    fastest_schedule,
    find_baseline,
    planned_entries,
)
from lightning_hybrid.archive.row import Known, Row
from lightning_hybrid.archive.store import Archive
from lightning_hybrid.archive.surroundings import detect_hardware, detect_software
from lightning_hybrid.layout import Layout

__all__ = [
    "Archive",
    "Batch",
    "Entry",
    "Fingerprint",
    "Hardware",
    "Known",
    "Match",
    "Planned",
    "Result",
    "Row",
    "Settings",
    "Training",
    "best_entry",
    "choose_degrees",
    "detect_hardware",
    "detect_software",
    "failed_degrees",
    "fastest_schedule",
    "find_baseline",
    "fingerprint_module",
    "fingerprint_parameters",
    "planned_entries",
]

log = logging.getLogger(__name__)


def choose_degrees(
    archive: str | os.PathLike[str] | Known,
    fingerprint: Fingerprint,
    hardware: Hardware,
    num_devices: int,
    *,
    accept: Callable[[Layout, Entry], bool] = lambda degrees, entry: True,
) -> Match | None:
    """Return the archive entry that a run of this model on these devices should start from, or None.

    Reads files only; makes no folder and needs no process group. Other runs may write between two reads, so ranks that
    read by themselves can come to different choices: read on one rank and broadcast the match (it pickles).
    Degrees for as many devices that failed before are named in a warning.

    Args:
        archive: its folder (one that does not exist is an empty archive), or what :meth:`Archive.known` returned.
        fingerprint: of the whole model, from :func:`fingerprint_module`.
        hardware: from :func:`detect_hardware`.
        num_devices: devices to use.
        accept: see :func:`best_entry`.

    Raises:
        ArchiveError: if the URL cannot be opened or its folder cannot be listed.
    """
    entries = archive if isinstance(archive, Known) else Archive(archive).known()
    for degrees, entry in failed_degrees(entries, fingerprint, hardware).items():
        if degrees.world_size == num_devices:
            what = "ran out of memory" if entry.result.status == "oom" else "failed"
            log.warning(
                "%s %s in archive entry %s and will not be chosen; give these degrees to try them again.",
                degrees,
                what,
                entry.id,
            )
    return best_entry(entries, fingerprint, hardware, num_devices, accept=accept)
