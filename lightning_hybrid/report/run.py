"""What a report says of one run. Pure: an entry in, HTML out; what the entry does not have is said to be missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_hybrid.archive import Entry, Planned
from lightning_hybrid.archive.record import read_history, read_timeline
from lightning_hybrid.errors import ArchiveError
from lightning_hybrid.planner.calibration import TERMS
from lightning_hybrid.report.charts import area_chart, line_chart, share_bar
from lightning_hybrid.report.html import Html, tag
from lightning_hybrid.report.numbers import NONE, count, memory, number, rate, seconds, share
from lightning_hybrid.report.parts import communication_of, css_class, label_of, parts_of
from lightning_hybrid.report.timeline import ideal_or_none, timeline_chart

__all__ = ["degrees_text", "heading", "run_sections", "status_pill"]

_WORST = {"compute": "compute", "bubble": "bubble", "data_wait": "data_wait"}


def degrees_text(entry: Entry) -> str:
    """``2 × 2 × 2``: data, tensor, pipeline; and the replicas, if the data axis has several."""
    degrees = entry.degrees
    replicas = f", {degrees.replicate_size} replicas" if degrees.replicate_size > 1 else ""
    sizes = (degrees.data_parallel_size, degrees.tensor_parallel_size, degrees.pipeline_parallel_size)
    return " × ".join(map(str, sizes)) + replicas


def status_pill(entry: Entry) -> Html:
    """The status, coloured."""
    return tag("span", entry.result.status, class_=f"pill {entry.result.status}")


def heading(entry: Entry) -> Html:
    """The title of a run's page."""
    hardware = entry.hardware
    nodes = f" on {hardware.num_nodes} nodes" if hardware.num_nodes > 1 else ""
    title = tag("h1", entry.model.model_class, " ", tag("small", f"{count(entry.model.num_parameters)} parameters"))
    text = f"data × tensor × pipeline = {degrees_text(entry)}, {hardware.num_devices} × {hardware.kind}{nodes}"
    when = tag("span", f"{entry.time.replace('T', ' ').rstrip('Z')} UTC, {entry.id}", class_="dim")
    return tag("header", title, tag("p", status_pill(entry), " ", text, tag("br"), when))


def run_sections(entry: Entry) -> list[Html]:
    """Everything below the heading."""
    pipeline = [_section("One step of the pipeline", _timeline(entry)), _section("Bubble", _bubble(entry))]
    return [
        _message(entry),
        _tiles(entry),
        _section("Where a step goes", _breakdown(entry)),
        *([_section("Predicted and measured", _predicted(entry.planned, entry))] if entry.planned else []),
        _section("Over the run", _course(entry)),
        *(pipeline if entry.degrees.pipeline_parallel_size > 1 else []),
        _section("Memory of a device", _memory(entry)),
        _section("Configuration", _configuration(entry)),
        _section("Versions and devices", _surroundings(entry)),
    ]


def _section(title: str, content: Any) -> Html:
    return tag("section", tag("h2", title), content)


def _missing(text: str) -> Html:
    return tag("p", f"Not recorded: {text}", class_="dim")


def _message(entry: Entry) -> Html:
    return tag("pre", entry.result.message, class_="message") if entry.result.message else Html()


def _tiles(entry: Entry) -> Html:
    result, bubble = entry.result, entry.result.bubble
    tokens = result.tokens_per_second
    per_device = result.tokens_per_second_per_device if tokens else result.samples_per_second_per_device
    ideal = bubble.get("bubble/ideal")
    scaling = result.scaling
    gain = scaling.get("scaling/speedup")
    worst = max(entry.result.memory.values(), default=None)
    found = [
        (
            "Step",
            seconds(result.step_time),
            f"{result.num_steps:,} steps"
            + (f", predicted {seconds(entry.planned.step_time)}" if entry.planned else ""),
        ),
        (
            "Throughput",
            number(tokens or result.samples_per_second),
            f"{'tokens' if tokens else 'samples'}/s, {number(per_device)} per device",
        ),
        ("Bubble", share(bubble.get("bubble/measured")), f"ideal {share(ideal)}" if ideal is not None else ""),
        ("Exposed communication", share(communication_of(result.breakdown)), "of the step"),
        (
            "Scaling efficiency",
            share(scaling.get("scaling/efficiency")),
            f"{number(gain)} × the baseline" if gain is not None else "no baseline",
        ),
        (
            "Peak memory",
            memory(result.peak_memory_bytes),
            f"estimated {memory(sum(result.memory.values()))}" if worst else "",
        ),
        ("Loss", number(result.last_loss), f"first {number(result.first_loss)}"),
    ]
    tiles = [
        tag("div", tag("dt", label), tag("dd", value), tag("dd", note, class_="dim"))
        for label, value, note in found
        if value != NONE
    ]
    return tag("dl", tiles, class_="tiles")


def _breakdown(entry: Entry) -> Html | list[Html]:
    values = entry.result.breakdown
    parts = parts_of(values)
    total = sum(parts.values())
    if not total:
        return _missing("the Trainer had no StepBreakdown callback, or the run ended before its first measurement.")
    rows = [
        [
            tag("td", tag("i", class_=f"swatch {css_class(part)}"), label_of(part)),
            tag("td", seconds(spent), class_="num"),
            tag("td", share(spent / total), class_="num"),
            tag("td", _worst(values, part), class_="num"),
        ]
        for part, spent in parts.items()
    ]
    sums = [tag("td", "step"), tag("td", seconds(total), class_="num"), tag("td", share(1), class_="num"), tag("td")]
    table = _table(["part", "mean over ranks", "share", "slowest rank"], [*rows, sums], class_="parts")
    whole = f" The mean step of the run took {seconds(entry.result.step_time)}." if entry.result.step_time else ""
    intro = tag("p", f"The latest measured steps (at most 8), as the mean over all ranks.{whole}", class_="dim")
    return [intro, share_bar(parts), tag("div", table, class_="scroll")]


def _worst(values: Mapping[str, float], part: str) -> str:
    spent, rank = values.get(f"step_worst/{part}_s"), values.get(f"step_worst/{part}_rank")
    return "" if spent is None or rank is None else f"{seconds(spent)} (rank {rank:.0f})"


def _predicted(planned: Planned, entry: Entry) -> Html | list[Html]:
    """What the planner said when it chose the degrees, beside what came of it."""
    result = entry.result
    rows: list[tuple[str, float, float | None, Callable[[float | None], str]]] = [
        ("samples/s", planned.samples_per_second, result.samples_per_second, number),
        ("tokens/s", planned.tokens_per_second, result.tokens_per_second, number),
        ("memory of the fullest device", planned.memory_bytes, result.peak_memory_bytes, memory),
    ]
    measured = result.breakdown
    for parts, names in TERMS.items():
        spent = sum(planned.parts.get(part, 0.0) for part in parts)
        real = sum(measured.get(f"step/{name}_s", 0.0) for name in names) if measured else None
        if spent or real:
            rows.append((parts[0], spent, real, seconds))
    rows.append(("step", planned.step_time, result.step_time, seconds))
    cells = [
        [tag("td", name)]
        + [tag("td", write(value), class_="num") for value in (predicted, real)]
        + [tag("td", f"{real / predicted:.2f}" if real is not None and predicted > 0 else "", class_="num")]
        for name, predicted, real, write in rows
    ]
    table = _table(["", "predicted", "measured", "measured / predicted"], cells, class_="parts")
    text = "The planner chose these degrees"
    text += f"; runner-up: {planned.runner_up}." if planned.runner_up else "."
    if planned.factors:
        used = [f"{part} × {planned.factors.get(part, 1.0):.2f}" for part, spent in planned.parts.items() if spent]
        text += f" Earlier runs on such devices corrected the prediction: {', '.join(used)}."
    return [tag("p", text, class_="dim"), tag("div", table, class_="scroll")]


def _course(entry: Entry) -> Html | list[Html]:
    try:
        rows = read_history(entry.result.history)
    except ArchiveError as error:
        return tag("p", f"Cannot be shown: {error}", class_="dim")
    tokens = any("throughput/tokens_per_s" in values for _, values in rows)
    key = "throughput/tokens_per_s" if tokens else "throughput/samples_per_s"
    what = "tokens" if tokens else "samples"
    charts = [
        ("Parts of a step", area_chart(rows)),
        ("Throughput", line_chart(rows, {key: f"{what} per second"}, lambda value: rate(value, what))),
        (
            "Bubble",
            line_chart(rows, {"bubble/measured": "measured", "bubble/ideal": "ideal"}, share, factor=100, unit="%"),
        ),
    ]
    found = [tag("div", tag("h3", title), chart, class_="chart") for title, chart in charts if chart is not None]
    if not found:
        return _missing("this takes two measurements or more.")
    return [found[0], tag("div", found[1:], class_="pair")]


def _timeline(entry: Entry) -> Html | list[Html]:
    if not entry.result.timeline:
        return _missing(
            "the Trainer had no BubbleRatio callback, the run ended too early, or a step has too many actions."
        )
    try:
        measured = read_timeline(entry.result.timeline)
    except ArchiveError as error:
        return tag("p", f"Cannot be shown: {error}", class_="dim")
    intro = "The latest measured step of global rank 0's pipeline. Point at a box to see its micro-batch elsewhere."
    return [tag("p", intro, class_="dim"), timeline_chart(measured, ideal_or_none(measured))]


def _bubble(entry: Entry) -> Html | list[Html]:
    values = {key.removeprefix("bubble/"): value for key, value in entry.result.bubble.items()}
    if "measured" not in values:
        return _missing("the Trainer had no BubbleRatio callback, or the run ended before its first measurement.")
    rows = [
        ("schedule", "what the schedule costs with equally fast stages"),
        ("imbalance", "what unequal stages add"),
        ("overhead", "what messages, jitter and the runtime between actions add"),
    ]
    cells = [
        [tag("td", name), tag("td", share(values.get(name)), class_="num"), tag("td", text)] for name, text in rows
    ]
    cells.append([tag("td", "measured"), tag("td", share(values["measured"]), class_="num"), tag("td", "idle share")])
    slow = values.get("slowest_stage")
    note = None
    if slow is not None and "slowdown" in values:
        rank = values.get("slowest_rank")
        where = "" if rank is None else f" (global rank {rank:.0f})"
        note = tag(
            "p", f"Stage {slow:.0f}{where} has the most work: {values['slowdown']:.2f} times the mean.", class_="dim"
        )
    return [
        tag("div", _table(["share of ranks × time", "", ""], cells, class_="parts"), class_="scroll"),
        note or Html(),
    ]


def _memory(entry: Entry) -> Html | list[Html]:
    peak, estimate = entry.result.peak_memory_bytes, {k: v for k, v in entry.result.memory.items() if v > 0}
    if not peak and not estimate:
        return _missing("devices of this kind do not count it, or the run ended before its first measurement.")
    found: list[Html] = []
    if estimate:
        cells = [
            [tag("td", name), tag("td", memory(value), class_="num")]
            for name, value in sorted(estimate.items(), key=lambda item: -item[1])
        ]
        cells.append(
            [tag("td", "together, if all comes at once"), tag("td", memory(sum(estimate.values())), class_="num")]
        )
        found.append(tag("div", _table(["estimate for the fullest rank", ""], cells, class_="parts"), class_="scroll"))
    whole = f" of {memory(entry.hardware.memory_bytes)}" if entry.hardware.memory_bytes else ""
    text = (
        f"Measured peak: {memory(peak)}{whole}." if peak else "The peak was not measured: this device does not count."
    )
    return [*found, tag("p", text, class_="dim")]


def _configuration(entry: Entry) -> Html:
    degrees, settings, batch, training = entry.degrees, entry.settings, entry.batch, entry.training
    facts: list[tuple[str, Any]] = [
        ("data parallel", degrees.data_parallel_size),
        ("of these replicas", degrees.replicate_size if degrees.replicate_size > 1 else None),
        ("tensor parallel", degrees.tensor_parallel_size),
        ("pipeline parallel", degrees.pipeline_parallel_size),
        ("schedule", None if settings.schedule == "none" else settings.schedule),
        ("micro-batches", settings.num_microbatches if degrees.pipeline_parallel_size > 1 else None),
        ("precision", settings.precision),
        ("global batch", batch.global_size),
        ("batch of a data rank", batch.size_per_data_rank),
        ("accumulated batches", batch.accumulate_grad_batches),
        ("tokens of a sample", batch.tokens_per_sample),
        ("optimizer", training.optimizer),
        ("learning rate", training.learning_rate),
        ("seed", training.seed),
        ("started from", entry.parent),
        *settings.options.items(),
        *((f"tp_plan {name}", style) for name, style in (settings.tp_plan or {}).items()),
    ]
    return _facts(facts)


def _surroundings(entry: Entry) -> Html:
    hardware = entry.hardware
    facts: list[tuple[str, Any]] = [
        ("devices", f"{hardware.num_devices} × {hardware.kind}"),
        ("nodes", hardware.num_nodes),
        ("memory of a device", memory(hardware.memory_bytes) if hardware.memory_bytes else None),
        *((f"link {axis}", f"{number(speed / 1e9)} GB/s") for axis, speed in hardware.links.items()),
        *entry.software.items(),
        ("model fingerprint", entry.model.hash),
    ]
    return _facts(facts)


def _facts(facts: Iterable[tuple[str, Any]]) -> Html:
    pairs = [
        tag("div", tag("dt", name), tag("dd", f"{value:,.10g}" if isinstance(value, float) else value))
        for name, value in facts
        if value is not None and value != ""
    ]
    return tag("dl", pairs, class_="facts")


def _table(head: Iterable[str], rows: Iterable[Any], class_: str) -> Html:
    names = [tag("th", name, class_="num" if i else None) for i, name in enumerate(head)]
    return tag("table", tag("thead", tag("tr", names)), tag("tbody", [tag("tr", row) for row in rows]), class_=class_)
