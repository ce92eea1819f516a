"""``lightning-hybrid archive``: what earlier runs left, for people and for programs."""

from __future__ import annotations

import json as json_module
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_hybrid.archive import Archive, Entry, Match, best_entry, failed_degrees
from lightning_hybrid.archive.document import to_plain
from lightning_hybrid.archive.share import Filter, differences, entries_of_folder, read_entries, take, to_lines
from lightning_hybrid.archive.store import no_collection
from lightning_hybrid.errors import ArchiveError
from lightning_hybrid.layout import Layout
from lightning_hybrid.planner.setup import describe

__all__ = ["ARCHIVE_COMMANDS"]

_WIDTH_OF_TABLE = 120
_WIDTH_OF_FILES = 200
_STYLES = {"ok": "green", "interrupted": "yellow", "running": "blue", "oom": "red", "failed": "red", "error": "red"}
_WANDB = "wandb:"


def list_command(
    url: str = "archive",
    model: str | None = None,
    status: str | None = None,
    device: str | None = None,
    num_devices: int | None = None,
    precision: str | None = None,
    since: str | None = None,
    until: str | None = None,
    last: int = 0,
    json: bool = False,
) -> None:
    """List the entries of an archive, oldest first.

    Args:
        url: The archive: a folder or any fsspec URL.
        model: Only entries of this model class.
        status: Only entries with this status: ok, interrupted, running, oom, failed or error.
        device: Only entries whose device's name contains this.
        num_devices: Only entries of so many devices.
        precision: Only entries with this precision, as Lightning calls it.
        since: Only runs that began then or later: a time or its beginning, such as 2026-07.
        until: Only runs that began then or earlier.
        last: Only the newest so many; 0 is all.
        json: Print JSON for programs.
    """
    meant = Filter(
        model=model,
        status=status,
        device=device,
        num_devices=num_devices,
        precision=precision,
        since=since,
        until=until,
    )
    archive = Archive(url)
    entries = meant.entries(archive.known(), last=last)
    if json:
        _print_json([to_plain(entry) for entry in entries])
    elif entries:
        console = _console()
        console.print(_table(entries, narrow=console.width < _WIDTH_OF_TABLE))
    else:
        Console().print(f"No such entries in {archive}.", highlight=False, markup=False)


def show_command(entry: str, url: str = "archive") -> None:
    """Print one entry as JSON.

    Args:
        entry: Its id, or a beginning of it that no other entry has.
        url: The archive: a folder or any fsspec URL.
    """
    sys.stdout.write(Archive(url).get(entry).to_json())


def best_command(
    like: str | None = None, num_devices: int | None = None, url: str = "archive", json: bool = False
) -> None:
    """Say which entry a run without degrees would start from.

    Args:
        like: Entry (id or its beginning) with the model and kind of device to choose for; by default the newest.
        num_devices: Devices of the new run; by default as many as that entry's.
        url: The archive: a folder or any fsspec URL.
        json: Print JSON for programs.
    """
    if num_devices is not None and num_devices < 1:
        raise ArchiveError(f"num_devices={num_devices} must be at least 1")
    console, archive = Console(), Archive(url)
    with no_collection():
        match, failed = _best(archive, like, num_devices)
    if json:
        found = match and {"id": match.entry.id, "degrees": to_plain(match.degrees), "reason": match.reason}
        _print_json(found)
        return
    reason = match.reason if match else f"No entry of {archive} fits."
    console.print(reason, highlight=False, markup=False, soft_wrap=True)
    for degrees, entry in failed.items():
        what = "ran out of memory" if entry.result.status == "oom" else "failed"
        text = f"Not tried again: {describe(degrees)} {what} in {entry.id}."
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _best(archive: Archive, like: str | None, num_devices: int | None) -> tuple[Match | None, dict[Layout, Entry]]:
    """The entry to start from, and the degrees that failed."""
    known = archive.known()
    newest = max(known, key=lambda row: (row.time, row.id), default=None)
    wanted = archive.get(like) if like else known.load(newest) if newest is not None else None
    if wanted is None:
        return None, {}
    match = best_entry(known, wanted.model, wanted.hardware, num_devices or wanted.hardware.num_devices)
    return match, failed_degrees(known, wanted.model, wanted.hardware)


def diff_command(one: str, other: str, url: str = "archive", json: bool = False) -> None:
    """Say in what two entries differ.

    Args:
        one: Id of an entry, or its beginning.
        other: Id of another one.
        url: The archive: a folder or any fsspec URL.
        json: Print JSON for programs.
    """
    archive = Archive(url)
    found = differences(archive.get(one), archive.get(other))
    if json:
        _print_json({path: list(values) for path, values in found.items()})
        return
    table = Table(box=None, header_style="bold")
    for column in ("field", "one", "other", "other / one"):
        table.add_column(column, justify="right" if column == "other / one" else "left", overflow="fold")
    for path, (left, right) in found.items():
        table.add_row(path, _shown(left), _shown(right), _ratio(left, right))
    _console().print(table)


def export_command(
    destination: str,
    url: str = "archive",
    model: str | None = None,
    status: str | None = None,
    device: str | None = None,
    num_devices: int | None = None,
    since: str | None = None,
    until: str | None = None,
) -> None:
    """Write entries into one file of JSON lines, to hand on.

    Args:
        destination: A path or fsspec URL that ends with .jsonl; - is the standard output.
        url: The archive: a folder or any fsspec URL.
        model: Only entries of this model class.
        status: Only entries with this status.
        device: Only entries whose device's name contains this.
        num_devices: Only entries of so many devices.
        since: Only runs that began then or later.
        until: Only runs that began then or earlier.
    """
    if destination != "-" and not destination.endswith(".jsonl"):
        raise ArchiveError(f"{destination} must end with .jsonl, so that it is read again as what it is.")
    meant = Filter(model=model, status=status, device=device, num_devices=num_devices, since=since, until=until)
    entries = meant.entries(Archive(url).known())
    if destination == "-":
        sys.stdout.writelines(to_lines(entries))
        return
    try:
        with fsspec.open(destination, "w", encoding="utf-8") as file:
            file.writelines(to_lines(entries))
    except Exception as error:  # file systems are plug-ins and raise what they like
        raise ArchiveError(f"cannot write {destination}: {type(error).__name__}: {error}") from error
    Console().print(f"{len(entries)} entries of {Archive(url)} are in {destination}.", highlight=False, soft_wrap=True)


def import_command(source: str, url: str = "archive") -> None:
    """Take entries over that the archive has not, or has in an older state.

    Args:
        source: What export wrote (.jsonl), an entry's document (.json), another archive (folder or URL), or an artifact
            of W&B as wandb:ENTITY/PROJECT/NAME:VERSION.
        url: The archive that gets them.
    """
    archive = Archive(url)
    taken = take(_entries_of(source), archive)
    for reason in taken.skipped:
        Console(stderr=True).print(f"[yellow]skipped[/yellow] {escape(reason)}", highlight=False, soft_wrap=True)
    counts = f"{taken.new} new, {taken.updated} updated, {taken.known} known already, {len(taken.skipped)} skipped"
    Console().print(f"{archive}: {counts}.", highlight=False, soft_wrap=True)


def _entries_of(source: str) -> Iterator[Entry | str]:
    if source.startswith(_WANDB):
        with tempfile.TemporaryDirectory() as folder:
            yield from entries_of_folder(_download(source.removeprefix(_WANDB), folder))
    elif source.endswith((".json", ".jsonl")):
        yield from read_entries(source)
    else:
        entries = Archive(source).list()
        if not entries:
            raise ArchiveError(f"{source} has no entries: it is no archive, or an empty one")
        yield from entries


def _download(name: str, folder: str) -> Path:
    """Return where the files of a W&B artifact are."""
    try:
        import wandb  # dear to import

        return Path(wandb.Api().artifact(name).download(root=folder))
    except Exception as error:  # of the network, the account, or the name
        raise ArchiveError(f"cannot read W&B's artifact {name}: {type(error).__name__}: {error}") from error


ARCHIVE_COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_command,
    "show": show_command,
    "best": best_command,
    "diff": diff_command,
    "export": export_command,
    "import": import_command,
}


def _console() -> Console:
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=_WIDTH_OF_FILES)  # a file has no edge to fit


def _print_json(value: Any) -> None:
    sys.stdout.write(json_module.dumps(value, sort_keys=True, indent=2, ensure_ascii=False) + "\n")


def _shown(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
    return escape(text if len(text) <= 60 else f"{text[:57]}...")


def _ratio(one: Any, other: Any) -> str:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))
    return f"{other / one:.2f}" if numbers and one else ""


def _table(entries: Sequence[Entry], *, narrow: bool) -> Table:
    rows = [_row(entry) for entry in entries]
    columns = list(rows[0])[: 4 if narrow else None]
    table = Table(box=None, header_style="bold")
    for column in columns:
        numeric = column in ("samples/s", "step", "bubble", "efficiency", "parameters")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _row(entry: Entry) -> dict[str, str]:
    """What the table says of an entry, the most important first."""
    result, degrees = entry.result, entry.degrees
    schedule, style = entry.settings.schedule, _STYLES[result.status]
    sizes = (degrees.data_parallel_size, degrees.tensor_parallel_size, degrees.pipeline_parallel_size)
    replicas = f", {degrees.replicate_size} replicas" if degrees.replicate_size > 1 else ""
    return {
        "id": entry.id,
        "status": f"[{style}]{result.status}[/{style}]",
        "d x t x p": " x ".join(map(str, sizes)) + replicas,
        "samples/s": _number(result.samples_per_second, "{:,.4g}"),
        "step": _number(result.step_time, "{:.3g} s"),
        "bubble": _number(result.bubble.get("bubble/measured"), "{:.0%}"),
        "efficiency": _number(result.scaling.get("scaling/efficiency"), "{:.0%}"),
        "parameters": _short(entry.model.num_parameters),
        "schedule": "" if schedule == "none" else f"{schedule} / {entry.settings.num_microbatches}",
        "devices": f"{entry.hardware.num_devices} x {escape(entry.hardware.kind)}",
    }


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _short(count: int) -> str:
    """A number of parameters as people say it: ``1.2B``."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
