"""What a report says of many runs. Pure: entries in, HTML out; runs are compared only where they compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning_hybrid.archive import Entry
from lightning_hybrid.report.charts import Point, devices_chart, share_bar
from lightning_hybrid.report.groups import Group, group_runs
from lightning_hybrid.report.html import Html, tag
from lightning_hybrid.report.numbers import NONE, count, memory, number, seconds, share
from lightning_hybrid.report.parts import communication_of, css_class, label_of, parts_of
from lightning_hybrid.report.run import degrees_text, heading, run_sections, status_pill

__all__ = ["archive_sections", "num_shown_whole", "points_of"]

#: Runs, the newest, that a page shows whole; of the others it has the row in the table.
num_shown_whole = 24
_KINDS = (
    "Percentages: scaling efficiency of the fastest run at that number of devices. Strong: the baseline's batch in all;"
    " weak: its batch for each device; weak per data rank: its batch for each group of devices that holds the model."
)
_NUMERIC = ("devices", "batch", "tokens/s", "samples/s", "step", "bubble", "exposed comm.", "efficiency", "peak memory")


def archive_sections(entries: Sequence[Entry], where: str) -> list[Html]:
    """Return everything of an archive's page.

    Args:
        entries: oldest first.
        where: what the archive is called.
    """
    groups = group_runs(entries)
    statuses: Counter[str] = Counter(entry.result.status for entry in entries)
    models = len({entry.model.hash for entry in entries})
    text = f"{len(entries)} runs of {models} model{'s' * (models != 1)}: " + ", ".join(
        f"{number_} {status}" for status, number_ in statuses.most_common()
    )
    head = tag("header", tag("h1", "Archive of runs"), tag("p", text, tag("br"), tag("span", where, class_="dim")))
    newest = list(reversed(entries))
    whole = newest[:num_shown_whole]
    details = [_details(entry) for entry in whole]
    left = len(newest) - len(whole)
    note = f"The newest {len(whole)}. For another one: lightning-hybrid report with its id." if left else None
    return [
        head,
        tag("section", tag("h2", "Runs"), _filters(statuses), _runs(newest, groups, {entry.id for entry in whole})),
        *(_group(group) for group in groups),
        tag("section", tag("h2", "Each run"), tag("p", note, class_="dim") if note else None, details),
    ]


def _filters(statuses: Counter[str]) -> Html:
    buttons = [
        tag("button", f"{status} ", tag("small", number_), type="button", data_status=status, aria_pressed="true")
        for status, number_ in statuses.most_common()
    ]
    search = tag(
        "input", id="filter", type="search", placeholder="Filter: model, schedule, device, id …", aria_label="Filter"
    )
    return tag("div", search, buttons, tag("span", "", id="shown", class_="dim"), class_="filters")


def _runs(entries: Sequence[Entry], groups: Sequence[Group], linked: set[str]) -> Html:
    efficiency: dict[str, float] = {}
    for group in groups:
        for id_, scaling in group.scalings.items():
            if scaling.efficiency is not None and scaling.kind != "same size":
                efficiency[id_] = scaling.efficiency
    cells = [_cells(entry, efficiency.get(entry.id), entry.id in linked) for entry in entries]
    columns = _columns(entries, cells)
    rows = [_row(entry, found, columns) for entry, found in zip(entries, cells, strict=True)]
    head = [
        tag("th", tag("button", name, type="button"), class_="num" if name in _NUMERIC else None, scope="col")
        for name in columns
    ]
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", rows), class_="runs", id="runs")
    return tag("div", table, class_="scroll")


def _columns(entries: Sequence[Entry], cells: Sequence[dict[str, tuple[Any, Any]]]) -> list[str]:
    """Return the columns that tell something: not empty, and not the same thing twice."""
    names = [name for name in cells[0] if any(row[name][0] for row in cells)] if cells else []
    if all(entry.result.tokens_per_second or not entry.result.samples_per_second for entry in entries):
        names = [name for name in names if name != "samples/s"]
    if len({entry.hardware.kind for entry in entries}) == 1:
        names = [name for name in names if name != "kind of device"]
    return names


def _row(entry: Entry, cells: dict[str, tuple[Any, Any]], columns: Sequence[str]) -> Html:
    found = ((name, *cells[name]) for name in columns)
    return tag(
        "tr",
        [tag("td", shown, class_="num" if name in _NUMERIC else None, data_v=value) for name, shown, value in found],
        data_status=entry.result.status,
        data_text=f"{entry.id} {entry.hardware.kind}",
    )


def _cells(entry: Entry, efficiency: float | None, linked: bool) -> dict[str, tuple[Any, Any]]:
    """Return (what is shown, what is sorted by) for each column."""
    result, settings = entry.result, entry.settings
    when = entry.time.replace("T", " ")[:16]
    run = tag("a", when, href=f"#run-{entry.id}", title=entry.id) if linked else tag("span", when, title=entry.id)
    schedule = "" if settings.schedule == "none" else f"{settings.schedule} / {settings.num_microbatches}"
    parts = parts_of(result.breakdown)
    bubble, communication = result.bubble.get("bubble/measured"), communication_of(result.breakdown)
    cells: dict[str, tuple[Any, Any]] = {
        "run": (run, entry.time),
        "status": (status_pill(entry), result.status),
        "model": (f"{entry.model.model_class} {count(entry.model.num_parameters)}", entry.model.model_class),
        "devices": (f"{entry.hardware.num_devices}", entry.hardware.num_devices),
        "d × t × p": (degrees_text(entry), None),
        "schedule": (schedule, None),
        "batch": (_known(entry.batch.global_size), entry.batch.global_size),
        "samples/s": (number(result.samples_per_second), result.samples_per_second),
        "tokens/s": (number(result.tokens_per_second), result.tokens_per_second),
        "step": (seconds(result.step_time), result.step_time),
        "parts": (share_bar(parts, small=True) if parts else "", None),
        "exposed comm.": (share(communication), communication),
        "bubble": (share(bubble), bubble),
        "efficiency": (share(efficiency), efficiency),
        "peak memory": (memory(result.peak_memory_bytes), result.peak_memory_bytes),
        "kind of device": (entry.hardware.kind, None),
    }
    return {name: ("" if shown == NONE else shown, value) for name, (shown, value) in cells.items()}


def _known(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _group(group: Group) -> Html:
    model, hardware = group.baseline.model, group.baseline.hardware
    title = f"{model.model_class} {count(model.num_parameters)} on {hardware.kind}, {group.baseline.settings.precision}"
    found: list[Any] = [tag("h2", title)]
    points, baseline, left_out = points_of(group)
    chart = devices_chart(points, baseline, group.unit)
    if chart is None:
        devices = sorted({run.hardware.num_devices for run in group.runs})
        found.append(
            tag(
                "p",
                f"All runs that compare have {devices[0]} device{'s' * (devices[0] != 1)}: nothing scales here.",
                class_="dim",
            )
        )
    else:
        found += [chart, tag("p", _KINDS, class_="dim")]
    if left_out:
        items = [tag("li", f"{id_}: {reason}") for id_, reason in left_out[:12]]
        more = f"and {len(left_out) - 12} more" if len(left_out) > 12 else None
        text = f"{len(left_out)} run{'s do' if len(left_out) != 1 else ' does'} not compare with the baseline"
        found.append(tag("details", tag("summary", text), tag("ul", items, tag("li", more) if more else None)))
    found.append(_compositions(group))
    return tag("section", found)


def points_of(group: Group) -> tuple[list[Point], Point, list[tuple[str, str]]]:
    """Return the runs that compare with the group's baseline, the baseline, and (id, why not) of the others."""
    unit, base = group.unit, group.baseline
    baseline = Point(
        num_devices=base.hardware.num_devices,
        value=group.rate(base),
        kind="baseline",
        tip=f"baseline, {degrees_text(base)}\n{number(group.rate(base))} {unit}",
        link=f"#run-{base.id}",
    )
    points: list[Point] = []
    left_out: list[tuple[str, str]] = []
    for run in group.runs:
        scaling = group.scalings.get(run.id)
        if scaling is None:
            continue
        if scaling.speedup is None or scaling.efficiency is None:
            left_out.append((run.id, "; ".join(scaling.reasons)))
            continue
        doubling = "" if scaling.per_doubling is None else f"\neach doubling gained × {scaling.per_doubling:.2f}"
        points.append(
            Point(
                num_devices=run.hardware.num_devices,
                value=group.rate(run),
                efficiency=scaling.efficiency,
                kind=scaling.kind,
                tip=f"{degrees_text(run)} (data × tensor × pipeline), batch {_known(run.batch.global_size)}"
                f"\n{number(group.rate(run))} {unit}, efficiency {share(scaling.efficiency)}{doubling}\n{run.id}",
                link=f"#run-{run.id}",
            )
        )
    return points, baseline, left_out


def _compositions(group: Group) -> Html | None:
    """Where a step goes, run by run."""
    found = [(run, parts) for run in group.runs if (parts := parts_of(run.result.breakdown))]
    if not found:
        return None
    used = dict.fromkeys(part for _, parts in found for part in parts)
    legend = [tag("span", tag("i", class_=f"swatch {css_class(part)}"), label_of(part)) for part in used]
    rows = [
        tag(
            "tr",
            tag("td", f"{run.hardware.num_devices}", class_="num"),
            tag("td", degrees_text(run)),
            tag("td", "" if run.settings.schedule == "none" else run.settings.schedule),
            tag("td", seconds(sum(parts.values())), class_="num"),
            tag("td", share_bar(parts), class_="wide"),
        )
        for run, parts in found
    ]
    names = [("devices", "num"), ("d × t × p", None), ("schedule", None), ("step", "num"), ("where it goes", None)]
    head = tag("tr", [tag("th", name, class_=class_) for name, class_ in names])
    table = tag("table", tag("thead", head), tag("tbody", rows), class_="compositions")
    which = (
        "The latest measured steps (at most 8) of each run, which may be quicker or slower than its mean step above."
    )
    below = (tag("div", legend, class_="legend"), tag("div", table, class_="scroll"), tag("p", which, class_="dim"))
    return tag("div", tag("h3", "Where a step goes"), below)


def _details(entry: Entry) -> Html:
    title = f"{entry.time.replace('T', ' ')[:16]}  {entry.model.model_class}, {degrees_text(entry)}"
    return tag(
        "details",
        tag("summary", title, " ", status_pill(entry)),
        heading(entry),
        run_sections(entry),
        id=f"run-{entry.id}",
        class_="run",
    )
