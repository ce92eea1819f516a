"""The command ``lightning-hybrid``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, Literal

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_hybrid.archive import Archive, Entry, best_entry, failed_degrees
from lightning_hybrid.archive.document import to_plain
from lightning_hybrid.cli_plan import plan_command
from lightning_hybrid.cli_probe import doctor_command, probe_command
from lightning_hybrid.cli_report import report_command
from lightning_hybrid.cli_schedule import schedule_command
from lightning_hybrid.errors import HybridError

__all__ = ["best_command", "convert_command", "list_command", "main", "show_command"]

_ARCHIVE = "What earlier runs left in an archive of configurations."
_CONVERT = "A checkpoint in another form: a plain .ckpt file, a directory, or safetensors."
_DOCTOR = "What makes training fail or slow on this machine, and what to do; nothing is changed."
_PROBE = "Measures devices and links; writes a cluster profile for the planner."
_PLAN = "Which degrees would train a model fastest, and what a step would take; nothing runs."
_WIDTH_OF_TABLE = 120
_WIDTH_OF_FILES = 200
_STYLES = {"ok": "green", "interrupted": "yellow", "running": "blue", "oom": "red", "failed": "red"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 1 with one sentence on stderr (2 for unknown arguments).

    ``doctor`` has codes of its own, see :func:`~lightning_hybrid.cli_probe.doctor_command`.
    """
    chosen = _build_parser().parse_args(None if arguments is None else list(arguments))
    group = chosen[chosen.subcommand]
    try:
        if chosen.subcommand == "archive":
            _ARCHIVE_COMMANDS[group.subcommand](**vars(group[group.subcommand]))
        elif chosen.subcommand == "doctor":
            return doctor_command(**vars(group))
        else:
            _COMMANDS[chosen.subcommand](**vars(group))
    except HybridError as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}:[/red] {error}", highlight=False, soft_wrap=True)
        return 1
    return 0


def _build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lightning-hybrid", description="Hybrid 3D parallelism for Lightning.")
    archive, convert = ArgumentParser(description=_ARCHIVE), ArgumentParser(description=_CONVERT)
    groups = parser.add_subcommands(required=True)
    groups.add_subcommand("archive", archive, help=_ARCHIVE)
    groups.add_subcommand("convert", convert, help=_CONVERT)
    flags = ("weights_only", "trusted")
    convert.add_function_arguments(convert_command, as_group=False, as_positional=True, skip=set(flags))
    convert.add_argument("--weights_only", action="store_true", help="Leave out everything but the weights.")
    convert.add_argument("--trusted", action="store_true", help="Read objects of any class; that can run code.")
    groups.add_subcommand("plan", _plan_parser(), help=_PLAN)
    groups.add_subcommand(
        "probe", _flags_parser(_PROBE, probe_command, quick="Fewer sizes and repetitions."), help=_PROBE
    )
    groups.add_subcommand("doctor", _flags_parser(_DOCTOR, doctor_command, strict="Warnings count."), help=_DOCTOR)
    for name, function, positional in (("report", report_command, "source"), ("schedule", schedule_command, "name")):
        text = (function.__doc__ or "").partition("\n")[0]
        groups.add_subcommand(name, _drawing_parser(function, positional, text), help=text)
    commands = archive.add_subcommands(required=True)
    for name, function in _ARCHIVE_COMMANDS.items():
        title = (function.__doc__ or "").partition("\n")[0]
        command = ArgumentParser(description=title)
        command.add_function_arguments(function, as_group=False, as_positional=True, skip={"json"})
        if "json" in signature(function).parameters:
            command.add_argument("--json", action="store_true", help="Print JSON for programs.")
        commands.add_subcommand(name, command, help=title)
    return parser


def _flags_parser(title: str, command: Callable[..., object], **flags: str) -> ArgumentParser:
    """A parser of a command's arguments, of which ``flags`` and ``json`` take no value."""
    parser, flags = ArgumentParser(description=title), flags | {"json": "Print JSON for programs."}
    parser.add_function_arguments(command, as_group=False, skip=set(flags))
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser


def _drawing_parser(function: Callable[..., None], positional: str, text: str) -> ArgumentParser:
    """A command with one positional argument, and the file to write as ``-o``."""
    parser = ArgumentParser(description=text)
    default = signature(function).parameters[positional].default
    about = _ARGUMENTS[positional]
    if default is Parameter.empty:
        parser.add_argument(positional, type=str, help=about)
    else:
        parser.add_argument(positional, type=str, nargs="?", default=default, help=about)
    parser.add_argument("-o", "--output", type=str | None, default=signature(function).parameters["output"].default)
    parser.add_function_arguments(function, as_group=False, skip={positional, "output"})
    return parser


def _plan_parser() -> ArgumentParser:
    parser = ArgumentParser(description=_PLAN)
    flags = {
        "compile": "Blocks are compiled.",
        "gated_mlp": "The MLP has three matrices (without a model).",
        "json": "Print JSON for programs.",
    }
    parser.add_argument("model", nargs="?", help="A Hugging Face config, or package.module:Name; sizes if left out.")
    parser.add_function_arguments(plan_command, as_group=False, skip={"model", *flags})
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser


def list_command(
    url: str = "archive",
    model: str | None = None,
    status: str | None = None,
    last: int | None = None,
    json: bool = False,
) -> None:
    """List the entries of an archive, oldest first.

    Args:
        url: The archive: a folder or any fsspec URL.
        model: Only entries of this model class.
        status: Only entries with this status: ok, interrupted, running, oom or failed.
        last: Only the newest so many.
        json: Print JSON for programs.
    """
    archive = Archive(url)
    entries = [
        entry
        for entry in archive.list()
        if model in (None, entry.model.model_class) and status in (None, entry.result.status)
    ]
    entries = entries[-last:] if last else entries
    if json:
        _print_json([to_plain(entry) for entry in entries])
    elif entries:
        terminal = Console()
        console = terminal if terminal.is_terminal else Console(width=_WIDTH_OF_FILES)  # a file has no edge to fit
        console.print(_table(entries, narrow=console.width < _WIDTH_OF_TABLE))
    else:
        Console().print(f"No such entries in {archive}.", highlight=False)


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
    archive, console = Archive(url), Console()
    entries = archive.list()
    wanted = archive.get(like) if like else entries[-1] if entries else None
    if wanted is None:
        match, failed = None, {}
    else:
        count = num_devices or wanted.hardware.num_devices
        match = best_entry(entries, wanted.model, wanted.hardware, count)
        failed = failed_degrees(entries, wanted.model, wanted.hardware)
    if json:
        found = match and {"id": match.entry.id, "degrees": to_plain(match.degrees), "reason": match.reason}
        _print_json(found)
        return
    console.print(match.reason if match else f"No entry of {archive} fits.", highlight=False, soft_wrap=True)
    for degrees, entry in failed.items():
        what = "ran out of memory" if entry.result.status == "oom" else "failed"
        console.print(f"Not tried again: {degrees} {what} in {entry.id}.", highlight=False, soft_wrap=True)


def convert_command(
    source: str,
    destination: str,
    to: Literal["file", "directory", "safetensors"] | None = None,
    weights_only: bool = False,
    prefix: str = "",
    config: str | None = None,
    max_shard_size: str = "5GB",
    trusted: bool = False,
) -> None:
    """Convert a checkpoint, without a GPU and in the memory of a few tensors.

    Args:
        source: A .ckpt file, a checkpoint directory, or a folder of safetensors.
        destination: Must not exist.
        to: By default a file for names that end with .ckpt.
        weights_only: Leave out everything but the weights; needed with safetensors on either side.
        prefix: Name of the model in the LightningModule, with a dot (model.), which safetensors do not have.
        config: Folder whose config.json is put beside safetensors.
        max_shard_size: Of a safetensors file.
        trusted: Read objects of any class, which can run code.
    """
    from lightning_hybrid.checkpoint.convert import convert  # torch and Lightning take a while

    done = convert(
        source,
        destination,
        to,
        weights_only=weights_only,
        prefix=prefix,
        config=config,
        max_shard_size=max_shard_size,
        trusted=trusted,
    )
    Console().print(str(done), highlight=False, soft_wrap=True)


_ARCHIVE_COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_command,
    "show": show_command,
    "best": best_command,
}


_COMMANDS: dict[str, Callable[..., object]] = {
    "convert": convert_command,
    "plan": plan_command,
    "probe": probe_command,
    "report": report_command,
    "schedule": schedule_command,
}
_ARGUMENTS = {
    "source": "An archive (folder or fsspec URL), an entry's file, or an entry's id; by default the folder archive.",
    "name": "A schedule, such as 1F1B or ZBVZeroBubble, or a table of your own (*.csv).",
}


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False) + "\n")


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
    return {
        "id": entry.id,
        "status": f"[{style}]{result.status}[/{style}]",
        "d x t x p": " x ".join(map(str, sizes)),
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


if __name__ == "__main__":
    main()
