"""A plan as a page: what each stage needs of a device's memory, where the steps of the best plans go, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_hybrid.planner.rules import MEMORY_SHARE
from lightning_hybrid.planner.search import Plan, Planning
from lightning_hybrid.planner.setup import describe
from lightning_hybrid.planner.stage_memory import StageMemory
from lightning_hybrid.report.html import Html, tag
from lightning_hybrid.report.numbers import count, number, seconds, share
from lightning_hybrid.report.page import build_page

__all__ = ["plan_page"]

_GIB = 2**30
#: Stages that are drawn; of more, the fullest ones.
_MOST_STAGES = 32
#: Part of a step -> class of its colour in ``report.css``.
_STEP = {  # in the order of drawing
    "compute": "p-compute",
    "recompute": "k-PROLOGUE",
    "tensor": "p-communication-tensor",
    "context": "p-communication-world",
    "data": "p-communication-data-shard",
    "pipeline": "p-communication-pipeline",
    "optimizer": "p-optimizer",
    "host": "p-other",
    "bubble": "p-bubble",
}
_MEMORY = {
    "parameters": "p-compute",
    "gradients": "k-B",
    "optimizer": "p-optimizer",
    "gathered": "p-communication-data-shard",
    "activations": "p-data-wait",
    "logits": "p-communication-pipeline",
    "reserve": "p-other",
}


def plan_page(planning: Planning, *, memory_share: float = MEMORY_SHARE) -> str:
    """Return the page of a search that has a plan.

    Args:
        planning: The outcome.
        memory_share: Share of a device's memory that an estimate may reach, which is drawn as a line.

    Raises:
        ConfigurationError: if no plan fits; the message says what the nearest would need.
    """
    best, profile = planning.best, planning.profile
    title = tag("h1", profile.name, " ", tag("small", f"{count(profile.num_parameters)} parameters"))
    about = f"{planning.cluster}; {planning.global_batch} samples of {profile.seq_length} tokens a step"
    note = "Estimates; nothing has run." if not best.measured else "Measured step times where a run was."
    header = tag("header", title, tag("p", about, tag("br"), tag("span", note, class_="dim")))
    sections = [
        _tiles(planning),
        _section("Memory of each stage's devices", _memory(planning, memory_share)),
        _section("Where a step goes", _steps(planning.plans)),
        _section("Remarks on the first", _remarks(best)),
        _section("Rejected", _rejected(planning)),
    ]
    return build_page(f"Plan of {profile.name}", header, sections, footer="lightning-hybrid plan")


def _section(title: str, content: Any) -> Html:
    return tag("section", tag("h2", title), content)


def _tiles(planning: Planning) -> Html:
    best, found = planning.best, planning.best.estimate
    tiles = [
        ("First plan", _degrees(best), "data × tensor × pipeline"),
        ("Step", seconds(best.seconds), f"{number(found.tokens_per_second)} tokens/s"),
        ("MFU", share(found.mfu), f"{best.setup.num_devices} devices"),
        (
            "Memory",
            f"{found.peak_memory / _GIB:.1f} GiB",
            f"of {planning.cluster.gpu.memory:g} GiB, the fullest device",
        ),
    ]
    return tag(
        "dl",
        [tag("div", tag("dt", a), tag("dd", b), tag("dd", c, class_="dim")) for a, b, c in tiles],
        class_="tiles",
    )


def _degrees(made: Plan) -> str:
    layout = made.setup.layout
    return f"{layout.data_parallel_size} × {layout.tensor_parallel_size} × {layout.pipeline_parallel_size}"


def _bar(parts: Mapping[str, float], classes: Mapping[str, str], whole: float, write: Any, mark: float | None) -> Html:
    """Parts as stretches of a bar that is ``whole`` long, with a line at ``mark``."""
    pieces = [
        tag(
            "span",
            class_=classes[name],
            style=f"width:{100 * value / whole:.2f}%;flex:none",
            data_tip=f"{name}\n{write(value)}",
        )
        for name in classes
        if (value := parts[name]) > 0
    ]
    line = None if mark is None else tag("i", class_="limit", style=f"left:{100 * mark / whole:.2f}%")
    return tag("div", tag("div", pieces, class_="bar open" if mark is None else "bar"), line, class_="limited")


def _legend(names: Iterable[str], classes: Mapping[str, str], *more: Html) -> Html:
    found = [tag("span", tag("i", class_=f"swatch {classes[name]}"), name) for name in names]
    return tag("div", found, more, class_="legend")


def _memory(planning: Planning, memory_share: float) -> list[Html]:
    stages = list(enumerate(planning.best.estimate.memory))
    device = planning.cluster.gpu.memory * _GIB
    whole = max(device, *(stage.total for _, stage in stages))
    shown = sorted(sorted(stages, key=lambda item: -item[1].total)[:_MOST_STAGES])
    split = {index: _of_stage(stage) for index, stage in shown}
    rows = [
        tag(
            "tr",
            tag("td", f"stage {index}"),
            tag("td", f"{planning.best.estimate.layers[index]} blocks"),
            tag("td", _bar(split[index], _MEMORY, whole, _gib, memory_share * device), class_="wide"),
            tag("td", _gib(stage.total), class_="num"),
        )
        for index, stage in shown
    ]
    used = [name for name in _MEMORY if any(parts[name] > 0 for parts in split.values())]
    line = tag(
        "span", tag("i", class_="swatch dash"), f"{memory_share:.0%} of the device, the most an estimate may reach"
    )
    text = f"A bar's full width is a device's {_gib(device)}."
    if len(shown) < len(stages):
        text += f" The fullest {len(shown)} of {len(stages)} stages."
    text += " The reserve is for the allocator's gaps, driver, kernels and communicators."
    table = tag("table", tag("tbody", rows), class_="compositions")
    return [_legend(used, _MEMORY, line), tag("div", table, class_="scroll"), tag("p", text, class_="dim")]


def _of_stage(stage: StageMemory) -> dict[str, float]:
    parts = {name: float(getattr(stage, name)) for name in _MEMORY if name != "reserve"}
    return {**parts, "reserve": stage.total - sum(parts.values())}


def _gib(value: float) -> str:
    return f"{value / _GIB:.1f} GiB"


def _steps(plans: Sequence[Plan]) -> list[Html]:
    slowest = max(plan.estimate.seconds for plan in plans)
    rows = [
        tag(
            "tr",
            tag("td", str(place)),
            tag("td", describe(made.setup.layout), tag("br"), tag("span", _settings(made), class_="dim")),
            tag("td", _bar(made.estimate.parts, _STEP, slowest, seconds, None), class_="wide"),
            tag("td", seconds(made.seconds), class_="num"),
            tag("td", f"{made.estimate.mfu:.1%}", class_="num"),
            tag("td", made.behind or "the first"),
        )
        for place, made in enumerate(plans, start=1)
    ]
    used = [name for name in _STEP if any(made.estimate.parts[name] > 0 for made in plans)]
    head = ("", "plan", "", "step", "MFU", "why not first")
    names = [tag("th", name, class_="num" if name in ("step", "MFU") else None) for name in head]
    table = tag("table", tag("thead", tag("tr", names)), tag("tbody", rows), class_="compositions")
    return [_legend(used, _STEP), tag("div", table, class_="scroll")]


def _settings(made: Plan) -> str:
    setup = made.setup
    text = f"{setup.num_microbatches} micro-batches of {setup.micro_batch}"
    if setup.layout.pipeline_parallel_size > 1:
        text += f", {setup.schedule}" + (f" with {setup.stages_per_rank} stages" if setup.stages_per_rank > 1 else "")
    return text + (f", recompute {setup.recompute}" if setup.recompute != "none" else "")


def _remarks(best: Plan) -> Html:
    placed = best.placed.reasons if best.placed else ()
    remarks = [*best.remarks, *placed]
    if not remarks:
        return tag("p", "None: it keeps all of the practitioners' rules.", class_="dim")
    return tag("ul", [tag("li", remark) for remark in remarks])


def _rejected(planning: Planning) -> Html:
    if not planning.rejected:
        return tag("p", "All degrees have a plan.", class_="dim")
    rows = [tag("tr", tag("td", found.what), tag("td", found.reason)) for found in planning.rejected]
    table = tag("table", tag("tbody", rows))
    return tag("details", tag("summary", f"{len(rows)} degrees, with the reasons"), tag("div", table, class_="scroll"))
