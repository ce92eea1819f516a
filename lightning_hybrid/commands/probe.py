"""``lightning-hybrid probe`` and ``lightning-hybrid doctor``: what a machine can do, and what is wrong with it."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from lightning_hybrid.doctor import Facts, Finding, examine, exit_code
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import resolve_layout
from lightning_hybrid.machine.report import compare_with_nominal, group_in_words
from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.links import Collective, Device, Measured

__all__ = ["doctor_command", "probe_command", "probe_tables"]

_STYLES = {"error": "red", "warning": "yellow", "note": "blue"}
_WIDTH = 160


def probe_command(
    devices: int | None = None,
    output: str = "cluster.json",
    quick: bool = False,
    data_parallel_size: int | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    replicate_size: int = 1,
    timeout: float = 120.0,
    json: bool = False,
) -> None:
    """Measure devices and links; write them to a file that "plan --cluster" reads.

    Under torchrun the job's ranks are measured; else ranks are started on this machine.

    Args:
        devices: Ranks to start; by default all GPUs, or one rank without any.
        output: The cluster profile (JSON).
        quick: Fewer sizes and repetitions.
        data_parallel_size: With any degree given, only the axes of these degrees are measured.
        tensor_parallel_size: See data_parallel_size.
        pipeline_parallel_size: See data_parallel_size.
        replicate_size: Of data_parallel_size: replicas; the rest shards.
        timeout: Seconds after which all ranks end.
        json: Print the profile instead of tables.
    """
    from lightning_hybrid.probe import probe  # process groups, which other commands need not

    given = (data_parallel_size, tensor_parallel_size, pipeline_parallel_size)
    layout = None
    if any(given) or replicate_size != 1:
        count = devices or int(os.environ.get("WORLD_SIZE", "0"))
        if not count:
            raise ConfigurationError("With degrees, say how many ranks there are: --devices N.")
        names = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
        degrees = {name: value or "auto" for name, value in zip(names, given, strict=True)}
        layout = resolve_layout(count, replicate_size=replicate_size, **degrees)
    path = Path(output)
    _check_writable(path)  # before anything is measured
    found = probe(devices, quick=quick, layout=layout, timeout=timeout)
    if int(os.environ.get("RANK", "0")) != 0:
        return
    path.write_text(found.to_json() + "\n", encoding="utf-8")
    if json:
        sys.stdout.write(found.to_json() + "\n")
        return
    console = _console()
    console.print(probe_tables(found), highlight=False)
    console.print(
        f"Written to {path}: lightning-hybrid plan MODEL --cluster {path}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigurationError(f"output={str(path)!r} cannot be written ({error}); give a file.") from error


def probe_tables(cluster: Cluster) -> RenderableType:
    """What a probe found, for people: devices, exchanges, and what is slow."""
    measured = cluster.measured
    assert measured is not None
    lines: list[RenderableType] = [f"[bold]{escape(str(cluster))}[/bold]", ""]
    lines += [_devices(measured), "", _exchanges(cluster, measured), ""]
    slow = [found.text for found in measured.slow] + compare_with_nominal(cluster)
    lines += [f"[yellow]slow[/yellow] {escape(text)}" for text in slow]
    if not slow and measured.pairs:
        lines.append("No link or device is slower than half of the median of its like.")
    about = measured.about
    if (load := about.get("load", 0)) > 1.5 * about.get("cores", load):
        lines.append(
            f"[yellow]note[/yellow] this machine was busy (load {load} on {about['cores']} cores): figures are too low,"
            " probe again when it is quiet"
        )
    if left_out := about.get("left_out"):
        lines.append(f"[yellow]note[/yellow] no time was left for {len(left_out)} kinds of groups: {left_out[0]}, ...")
    return Group(*lines)


def _devices(measured: Measured) -> Table:
    table = Table(box=None, header_style="bold", title="devices", title_justify="left")
    table.add_column("host")
    table.add_column("ranks")
    table.add_column("device")
    for column in ("memory", "matrix products", "memory rate"):
        table.add_column(column, justify="right")
    for host, name in dict.fromkeys((device.host, device.name) for device in measured.devices):
        like = [device for device in measured.devices if (device.host, device.name) == (host, name)]
        rates = ", ".join(_span([d.tflops[dtype] for d in like], f"TFLOP/s {dtype}") for dtype in like[0].tflops)
        table.add_row(
            escape(host),
            _ranks(like),
            escape(name),
            _span([device.memory for device in like], "GiB"),
            rates,
            _span([device.bandwidth for device in like], "GB/s"),
        )
    return table


def _ranks(devices: Sequence[Device]) -> str:
    numbers = [device.rank for device in devices]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def _span(values: Sequence[float], unit: str) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def _exchanges(cluster: Cluster, measured: Measured) -> Table:
    title = "exchanges: latency, rate of the bytes on each link"
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    table.add_column("group")
    names = list(dict.fromkeys(found.op for found in measured.collectives))
    for name in names:
        table.add_column(name, justify="right")
    for size, stride, axis in dict.fromkeys((f.size, f.stride, f.axis) for f in measured.collectives):
        row = [_figures(measured.by_group[name, size, stride]) for name in names]
        table.add_row(escape(axis or group_in_words(size, stride, cluster)), *row)
    return table


def _figures(found: Collective) -> str:
    latency, _ = found.curve.line
    return f"{latency * 1e6:.0f} µs  {found.bus_rate / 1e9:.3g} GB/s"


def doctor_command(
    devices: int | None = None,
    nodes: int | None = None,
    facts: str | None = None,
    nccl_log: str | None = None,
    strict: bool = False,
    json: bool = False,
) -> int:
    """Look for what makes training fail or slow on this machine; nothing is changed.

    The exit code is 0 if nothing is wrong, 1 for warnings with --strict, 2 for errors.

    Args:
        devices: Ranks of this machine; by default those of the job, else one for each GPU.
        nodes: Machines of the job.
        facts: Examine what "doctor --json" printed on another machine instead.
        nccl_log: File with NCCL's output at NCCL_DEBUG=INFO; by default NCCL_DEBUG_FILE.
        strict: Whether warnings count.
        json: Print facts and findings for programs.
    """
    from lightning_hybrid.machine.doctor_facts import gather_facts

    for name, value in (("devices", devices), ("nodes", nodes)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{name}={value} must be at least 1.")
    if nccl_log is not None and not Path(nccl_log).is_file():
        raise ConfigurationError(f"nccl_log={nccl_log!r} is no file; run with NCCL_DEBUG=INFO NCCL_DEBUG_FILE=FILE.")
    known = _read_facts(facts) if facts else gather_facts(ranks=devices, nodes=nodes, nccl_log=nccl_log)
    findings = examine(known)
    if json:
        document = {"facts": asdict(known), "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json_module.dumps(document, indent=2) + "\n")
    else:
        _console().print(_findings(known, findings), highlight=False)
    return exit_code(findings, strict=strict)


def _read_facts(path: str) -> Facts:
    try:
        document = json_module.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}.") from error
    return Facts.from_document(document.get("facts", document) if isinstance(document, dict) else {"": document})


def _findings(facts: Facts, findings: Sequence[Finding]) -> RenderableType:
    versions = ", ".join(f"{name} {facts.versions[name]}" for name in ("torch", "lightning") if name in facts.versions)
    devices = f"{len(facts.gpus)} x {facts.gpus[0]}" if facts.gpus else "no GPU"
    ranks = f"{facts.local_ranks} rank{'s' if facts.local_ranks > 1 else ''}"
    head = f"{versions}; {devices}, {facts.cores} cores, {ranks} on this machine of {facts.num_nodes}"
    lines: list[RenderableType] = [f"[bold]{escape(head)}[/bold]"]
    for found in findings:
        style = _STYLES[found.level]
        lines.append(f"[{style}]{found.level:8}[/{style}][bold]{escape(found.name)}[/bold]: {escape(found.what)}")
        lines.append(f"        -> {escape(found.do)}")
    if not findings:
        lines.append("Nothing is wrong that can be seen from here.")
    return Group(*lines)


def _console() -> Console:
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=_WIDTH)  # a file has no edge to fit
