"""A search's outcome as tables that a person reads, and as JSON. Pure."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from lightning_hybrid.planner.replicas import propose_for_plan
from lightning_hybrid.planner.search import Plan, Planning
from lightning_hybrid.planner.setup import Setup
from lightning_hybrid.planner.stage_memory import StageMemory
from lightning_hybrid.planner.step import PARTS
from lightning_hybrid.planner.topology import launch_lines

__all__ = ["planning_tables", "planning_to_plain"]

_GIB = 2**30
#: Rejected degrees that are shown; all are in the JSON.
_SHOWN = 8
_BAR = 40


def planning_tables(planning: Planning, *, doubled: Planning | None = None) -> RenderableType:
    """What ``lightning-hybrid plan`` prints: the plans, the best one in detail, and why others were rejected.

    Args:
        planning: The outcome; it must have a plan.
        doubled: The outcome for twice the devices.
    """
    best = planning.best
    lines: list[RenderableType] = [_head(planning), "", _plans(planning.plans), "", _time(best), "", _memory(best), ""]
    lines += [f"[bold]use[/bold] {_call(best)}"]
    lines += _placing(planning)
    lines += [f"[yellow]note[/yellow] {escape(remark)}" for remark in best.remarks]
    if planning.idle:
        idle = f"{planning.idle} of {planning.cluster.num_devices} devices stay idle"
        lines.append(f"[yellow]note[/yellow] {idle}: {_why(planning)}")
    if (proposed := propose_for_plan(planning)) is not None:
        number, how = proposed
        lines.append(
            f"[bold]{number} replicas[/bold] that exchange now and then (replicate_size={number}, not compared above):"
            f' replica_sync={{"interval": {how.interval}, "method": "{how.method}"}}: {escape(how.reason)}'
        )
    if doubled is not None:
        lines.append(_gain(planning, doubled))
    if planning.rejected:
        lines += ["", _rejected(planning)]
    return Group(*lines)


def _placing(planning: Planning) -> list[str]:
    """Which device each rank should have, and what is known of links."""
    placed, cluster = planning.best.placed, planning.cluster
    lines = [f"[bold]place[/bold] {escape(line)}" for line in (placed.reasons if placed else ())]
    if placed and not placed.placement.usual:
        lines += [f"[bold]start[/bold] {escape(line)}" for line in launch_lines(placed.placement, cluster)]
    if cluster.measured is None:
        lines.append("[blue]note[/blue] links are those of data sheets; lightning-hybrid probe measures yours")
    else:
        lines += [f"[yellow]slow[/yellow] {escape(found.text)}" for found in cluster.measured.slow]
    return lines


def _head(planning: Planning) -> str:
    profile = planning.profile
    return (
        f"[bold]{escape(profile.name)}[/bold]: {profile.num_parameters / 1e9:.4g} B parameters, {profile.num_layers}"
        f" blocks, sequences of {profile.seq_length}; batch {planning.global_batch}\n{escape(str(planning.cluster))};"
        f" {planning.num_tried} setups tried"
    )


def _plans(plans: tuple[Plan, ...]) -> Table:
    table = Table(box=None, header_style="bold", title="plans", title_justify="left")
    for column in ("", "d x t x p", "micro-batches", "schedule", "recompute", "step", "MFU", "memory", "why not first"):
        table.add_column(column, justify="right" if column in ("", "step", "MFU", "memory") else "left")
    for place, made in enumerate(plans, start=1):
        found, setup = made.estimate, made.setup
        mark = " measured" if made.measured else ""
        table.add_row(
            str(place),
            _degrees(setup),
            f"{setup.num_microbatches} of {setup.micro_batch}",
            _schedule(setup),
            setup.recompute,
            f"{made.seconds:.3g} s{mark}",
            f"{found.mfu:.1%}",
            f"{found.peak_memory / _GIB:.1f} GiB",
            escape(made.behind),
        )
    return table


def _degrees(setup: Setup) -> str:
    layout = setup.layout
    text = f"{layout.data_parallel_size} x {layout.tensor_parallel_size} x {layout.pipeline_parallel_size}"
    if layout.replicate_size > 1:
        text += f" ({layout.replicate_size} replicas)"
    return text


def _schedule(setup: Setup) -> str:
    if setup.layout.pipeline_parallel_size == 1:
        return ""
    return setup.schedule + (f" / {setup.stages_per_rank}" if setup.stages_per_rank > 1 else "")


def _time(best: Plan) -> Table:
    table = Table(box=None, header_style="bold", title="step time of the first", title_justify="left")
    for column in ("part", "seconds", "share", ""):
        table.add_column(column, justify="left" if column in ("part", "") else "right")
    for name in PARTS:
        seconds = best.estimate.parts[name]
        if seconds > 0:
            share = seconds / best.estimate.seconds
            table.add_row(name, f"{seconds:.4g}", f"{share:.1%}", "█" * round(share * _BAR))
    return table


def _memory(best: Plan) -> Table:
    kinds = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "total")
    table = Table(box=None, header_style="bold", title="memory of the first, GiB on each device", title_justify="left")
    for column in ("stage", "blocks", *kinds):
        table.add_column(column, justify="right")
    last = len(best.estimate.memory) - 1
    middle = max(range(last + 1), key=lambda stage: best.estimate.memory[stage].total)
    for stage in sorted({0, middle, last}):
        memory: StageMemory = best.estimate.memory[stage]
        values = [f"{getattr(memory, kind) / _GIB:.2f}" for kind in kinds]
        table.add_row(str(stage), str(best.estimate.layers[stage]), *values)
    return table


def _call(best: Plan) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in best.arguments().items())
    count = best.setup.num_microbatches
    alone = best.setup.layout.pipeline_parallel_size == 1 and count > 1
    batch = best.setup.micro_batch * (1 if alone else count)
    text = f"Hybrid3DStrategy({arguments}) with batches of {batch} samples on each data rank"
    return escape(text + (f", Trainer(accumulate_grad_batches={count})" if alone else ""))


def _why(planning: Planning) -> str:
    """Why not all devices work."""
    full = planning.cluster.num_devices
    using = [made for made in planning.plans if made.setup.num_devices == full]
    if using:
        return f"with all, a step takes {using[0].seconds:.3g} s"
    return f"no degrees that multiply to {full} suit this model and batch"


def _gain(planning: Planning, doubled: Planning) -> str:
    count = doubled.cluster.num_devices
    if not doubled.plans:
        return f"[bold]twice the devices[/bold] ({count}): no plan for this batch"
    ratio = planning.best.seconds / doubled.best.seconds
    text = f"{ratio:.2f} times as fast ({_degrees(doubled.best.setup)}, {doubled.best.estimate.mfu:.1%} MFU)"
    return f"[bold]twice the devices[/bold] ({count}), the same batch: {text}" + (
        "; they hardly pay" if ratio < 1.3 else ""
    )


def _rejected(planning: Planning) -> Table:
    table = Table(box=None, header_style="bold", title="rejected", title_justify="left")
    table.add_column("degrees", no_wrap=True)
    table.add_column("why")
    for found in planning.rejected[:_SHOWN]:
        table.add_row(escape(found.what), escape(found.reason))
    if len(planning.rejected) > _SHOWN:
        table.add_row("", f"and {len(planning.rejected) - _SHOWN} more (all with --json)")
    return table


def planning_to_plain(planning: Planning) -> dict[str, Any]:
    """The outcome as JSON has it: seconds and bytes."""
    return {
        "model": planning.profile.name,
        "num_parameters": planning.profile.num_parameters,
        "cluster": str(planning.cluster),
        "global_batch": planning.global_batch,
        "num_tried": planning.num_tried,
        "plans": [_plan_to_plain(made) for made in planning.plans],
        "rejected": [{"what": found.what, "reason": found.reason} for found in planning.rejected],
    }


def _plan_to_plain(made: Plan) -> dict[str, Any]:
    return {
        "arguments": made.arguments(),
        "micro_batch": made.setup.micro_batch,
        "num_microbatches": made.setup.num_microbatches,
        "seconds": made.seconds,
        "measured": made.measured,
        "parts": dict(made.estimate.parts),
        "mfu": made.estimate.mfu,
        "tokens_per_second": made.estimate.tokens_per_second,
        "memory": [{**vars(stage), "total": stage.total} for stage in made.estimate.memory],
        "blocks": list(made.estimate.layers),
        "num_devices": made.setup.num_devices,
        "remarks": list(made.remarks),
        "behind": made.behind,
        "order": list(made.placed.placement.order) if made.placed else None,
        "placement": list(made.placed.reasons) if made.placed else [],
    }
