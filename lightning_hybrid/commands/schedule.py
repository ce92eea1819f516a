"""``lightning-hybrid schedule``: what a pipeline schedule does, drawn in the terminal or into a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.metrics.bubble import idle_share
from lightning_hybrid.pipeline.boxes import LOOKS, row_name
from lightning_hybrid.pipeline.schedule import Action, Kind, ScheduleSpec, find_schedule
from lightning_hybrid.pipeline.timeline import Mark, Timeline, simulate, window

__all__ = ["schedule_command"]

_FORMATS = (".html", ".png", ".svg", ".pdf")
_WIDTH_OF_FILES = 200


def schedule_command(
    name: str,
    stages: int = 4,
    microbatches: int = 8,
    stages_per_rank: int | None = None,
    forward: float = 1.0,
    backward: float = 2.0,
    transfer: float = 0.0,
    output: str | None = None,
) -> None:
    """Draw a pipeline schedule's timeline, and say how much of it is idle.

    Args:
        name: Such as 1F1B or ZBVZeroBubble, or a table of your own (*.csv), whose sizes then count.
        stages: Stages over all ranks.
        microbatches: Micro-batches of a step.
        stages_per_rank: Stages that each rank runs (virtual stages); by default what the schedule needs.
        forward: Milliseconds of a stage's forward for one micro-batch.
        backward: Milliseconds of its backward; where that comes in two halves, each takes half.
        transfer: Milliseconds that a tensor needs to another rank.
        output: Write a picture (.png, .svg, .pdf) or an interactive page (.html) instead.

    Raises:
        ConfigurationError: if the schedule cannot run these sizes, or a time is negative.
    """
    spec = find_schedule(name)
    num_ranks, per_rank, microbatches = _sizes(spec, stages, microbatches, stages_per_rank)
    times = {"forward": forward, "backward": backward, "transfer": transfer}
    if wrong := [f"{key}={value:g}" for key, value in times.items() if not 0 <= value < 1e9]:
        raise ConfigurationError(f"{', '.join(wrong)} must be milliseconds, 0 or more.")
    table = spec.table(num_ranks, microbatches, per_rank)
    seconds = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    count = spec.num_stages(num_ranks, per_rank)
    durations = {(kind, stage): time / 1e3 for kind, time in seconds.items() for stage in range(count)}
    timeline = simulate(table, durations, transfer=transfer / 1e3)
    title = f"{spec.name}, {count} stages on {num_ranks} ranks, {microbatches} micro-batches"
    if output is not None:
        _write(output, title, timeline)
        Console().print(f"{output}: {title}", highlight=False, soft_wrap=True)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_FILES)  # a file has no edge to fit
    console.print(title, style="bold", highlight=False)
    for line in timeline_lines(timeline, console.width, colour=console.color_system is not None):
        console.print(line, no_wrap=True, crop=True, highlight=False)
    start, end = window(timeline)
    held = ", ".join(f"rank {rank}: {most_held(actions)}" for rank, actions in sorted(table.items()))
    console.print(f"{1e3 * (end - start):g} ms, {idle_share(timeline):.1%} of it idle (bubble).", highlight=False)
    console.print(f"Micro-batches in flight at most, over a rank's stages: {held}.", highlight=False, soft_wrap=True)


def _sizes(spec: ScheduleSpec, stages: int, microbatches: int, stages_per_rank: int | None) -> tuple[int, int, int]:
    """Return ranks, stages by rank and micro-batches."""
    if spec.sizes is not None:
        return spec.sizes.num_ranks, spec.stages_per_rank, spec.sizes.num_microbatches
    per_rank = spec.stages_per_rank if stages_per_rank is None else stages_per_rank
    if per_rank != spec.stages_per_rank and not spec.multiple_stages:
        raise ConfigurationError(
            f"stages_per_rank={per_rank}, but {spec.name} has {spec.stages_per_rank} on each rank; leave it out."
        )
    if min(stages, microbatches, per_rank) < 1 or stages % per_rank:
        fits = max(1, stages // max(1, per_rank)) * max(1, per_rank)
        raise ConfigurationError(
            f"stages={stages}, microbatches={microbatches} and stages_per_rank={per_rank} must be 1 or more, and"
            f" stages a multiple of stages_per_rank; use stages={fits}."
        )
    return stages // per_rank, per_rank, microbatches


def _write(output: str, title: str, timeline: Timeline) -> None:
    kind = Path(output).suffix.lower()
    if kind not in _FORMATS:
        raise ConfigurationError(f"output={output!r} has an unknown ending; use one of {', '.join(_FORMATS)}.")
    try:
        if kind == ".html":
            from lightning_hybrid.report import timeline_page

            Path(output).write_text(
                timeline_page(title, timeline, captions=(f"{title}, simulated", "")), encoding="utf-8"
            )
        else:
            from lightning_hybrid.pipeline.picture import draw_timeline  # matplotlib takes a second to import

            draw_timeline(timeline, title=title, captions=("as simulated", "")).savefig(output)
    except OSError as error:
        raise ConfigurationError(f"output={output!r} cannot be written ({error}); give a file in a folder.") from error


def timeline_lines(timeline: Timeline, width: int, *, colour: bool) -> list[Text]:
    """Return a line for each rank: ``F0 F1 B0--- B1---``, as wide as the terminal allows.

    Args:
        timeline: marks by schedule rank.
        width: characters of a line.
        colour: with coloured boxes instead of dashes.
    """
    names = {rank: row_name(rank, marks) for rank, marks in timeline.items()}
    indent = max(map(len, names.values()), default=0) + 2
    start, end = window(timeline)
    shortest = min((m.duration for marks in timeline.values() for m in marks if m.duration > 0), default=1.0)
    wanted = round((end - start) / shortest * 4)  # then the shortest box has its name
    columns = max(1, min(wanted, width - indent))
    scale = columns / (end - start) if end > start else 0.0
    if (whole := math.floor(scale * shortest)) > 0:
        scale = whole / shortest  # equal boxes are equally wide
    lines = []
    for rank in sorted(timeline):
        line = Text(f"{names[rank]:<{indent}}")
        place = 0
        for mark in timeline[rank]:
            left, right = round((mark.start - start) * scale), round((mark.end - start) * scale)
            line.append(" " * (left - place))
            line.append(*_box(mark, right - left, colour))
            place = max(right, left)
        lines.append(line)
    return lines


def _box(mark: Mark, width: int, colour: bool) -> tuple[str, str]:
    """Return a box's text and style."""
    inner = max(0, width - 1)  # a gap to the next one
    labels = (f"{mark.kind}{mark.microbatch}", str(mark.microbatch), "")
    label = next(label for label in labels if len(label) <= inner)
    if not colour:
        return (label.ljust(inner, "-") + " " if width else ""), ""
    look = LOOKS[mark.kind]
    return label.ljust(width), f"{look.text} on {look.colour}"


def most_held(actions: Sequence[Action]) -> int:
    """Return how many micro-batches a rank keeps activations of at once, over its stages."""
    held = most = 0
    for action in actions:
        held += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}.get(action.kind, 0)
        most = max(most, held)
    return most
