"""The command ``lightning-hybrid``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Literal

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.markup import escape

from lightning_hybrid.commands.archive import ARCHIVE_COMMANDS
from lightning_hybrid.commands.check import check_command
from lightning_hybrid.commands.plan import plan_command
from lightning_hybrid.commands.probe import doctor_command, probe_command
from lightning_hybrid.commands.report import report_command
from lightning_hybrid.commands.schedule import schedule_command
from lightning_hybrid.errors import HybridError
from lightning_hybrid.strategy import Hybrid3DStrategy

__all__ = ["convert_command", "main"]

_ARCHIVE = "What earlier runs left in an archive of configurations."
_CHECK = "Compares a module's first steps on several processes with one process."
_CONVERT = "A checkpoint in another form: a plain .ckpt file, a directory, or safetensors."
_DOCTOR = "What makes training fail or slow on this machine, and what to do; nothing is changed."
_PROBE = "Measures devices and links; writes a cluster profile for the planner."
_PLAN = "Which degrees would train a model fastest, and what a step would take; nothing runs."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 1 with one sentence on stderr (2 for unknown arguments).

    ``doctor`` has codes of its own, see :func:`~lightning_hybrid.commands.probe.doctor_command`.
    """
    chosen = _build_parser().parse_args(None if arguments is None else list(arguments))
    group = chosen[chosen.subcommand]
    try:
        if chosen.subcommand == "archive":
            ARCHIVE_COMMANDS[group.subcommand](**vars(group[group.subcommand]))
        elif chosen.subcommand == "doctor":
            return doctor_command(**vars(group))
        else:
            _COMMANDS[chosen.subcommand](**vars(group))
    except HybridError as error:
        text = f"[red]{type(error).__name__}:[/red] {escape(str(error))}"  # [hf] in it is no style
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
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
    groups.add_subcommand("check", _check_parser(), help=_CHECK)
    groups.add_subcommand("plan", _plan_parser(), help=_PLAN)
    groups.add_subcommand(
        "probe", _flags_parser(_PROBE, probe_command, quick="Fewer sizes and repetitions."), help=_PROBE
    )
    groups.add_subcommand("doctor", _flags_parser(_DOCTOR, doctor_command, strict="Warnings count."), help=_DOCTOR)
    for name, function, positional in (("report", report_command, "source"), ("schedule", schedule_command, "name")):
        text = (function.__doc__ or "").partition("\n")[0]
        groups.add_subcommand(name, _drawing_parser(function, positional, text), help=text)
    commands = archive.add_subcommands(required=True)
    for name, function in ARCHIVE_COMMANDS.items():
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


def _check_parser() -> ArgumentParser:
    parser = ArgumentParser(description=_CHECK)
    parser.add_function_arguments(check_command, as_group=False, as_positional=True)
    parser.add_class_arguments(Hybrid3DStrategy, skip=_NOT_CHECKED)
    return parser


def _plan_parser() -> ArgumentParser:
    parser = ArgumentParser(description=_PLAN)
    flags = {
        "compile": "Blocks are compiled.",
        "gated_mlp": "The MLP has three matrices (without a model).",
        "json": "Print JSON for programs.",
    }
    about = "A Hugging Face config, a LightningCLI config (.yaml), or package.module:Name; sizes if left out."
    parser.add_argument("model", nargs="?", help=about)
    parser.add_argument("-o", "--output", type=str | None, help="Write a page with pictures (.html) instead.")
    parser.add_function_arguments(plan_command, as_group=False, skip={"model", "output", *flags})
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser


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


_COMMANDS: dict[str, Callable[..., object]] = {
    "check": check_command,
    "convert": convert_command,
    "plan": plan_command,
    "probe": probe_command,
    "report": report_command,
    "schedule": schedule_command,
}
#: What says nothing of whether a step is right, or takes objects.
_NOT_CHECKED = {
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("archive", "tune", "verify", "save_distributed_checkpoint", "start_method", "process_group_backend", "timeout"),
}
_ARGUMENTS = {
    "source": "An archive (folder or fsspec URL), an entry's file, or an entry's id; by default the folder archive.",
    "name": "A schedule, such as 1F1B or ZBVZeroBubble, or a table of your own (*.csv).",
}


if __name__ == "__main__":
    main()
