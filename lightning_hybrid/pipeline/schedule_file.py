"""A user's own schedule: a table in torch's CSV form, read and checked before anything is built. Pure.

One row for each rank, one cell for each action in the rank's order: the stage, a letter (``F`` forward, ``B`` backward,
or ``I`` and ``W`` for the gradients of inputs and of weights apart) and the micro-batch, such as ``0F0``. Empty cells
are idle time. What torch's ``_dump_csv(..., format="compute_only")`` writes is read as it is: overlapped pairs
``(0F1;1B0)OVERLAP_F_B`` run one after the other, and ``0REDUCE_GRAD`` is left out, since gradients are reduced once at
the end of a step.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from functools import partial

from lightning_hybrid.errors import ConfigurationError, PipelineError
from lightning_hybrid.pipeline.schedule import Action, Kind, ScheduleSpec, Sizes, Table
from lightning_hybrid.pipeline.timeline import simulate

__all__ = ["parse_schedule", "read_schedule"]

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_REDUCTION = re.compile(r"\d+REDUCE_GRAD\d*")


def read_schedule(path: str | os.PathLike[str]) -> ScheduleSpec:
    """Return the schedule in a file. It runs only the numbers of ranks, stages and micro-batches that it names.

    Raises:
        ConfigurationError: if the file cannot be read or its table cannot be run; the message names the place.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f'schedule="{os.fspath(path)}" cannot be read ({error}); use the path of a table in torch\'s CSV form.'
        ) from error
    return parse_schedule(os.path.basename(path), text)


def parse_schedule(name: str, text: str) -> ScheduleSpec:
    """Return the schedule that a CSV table says, under the name ``name``.

    Raises:
        ConfigurationError: as :func:`read_schedule`.
    """
    try:
        table = _parse(text)
        ranks = _placement(table)
        num_microbatches = _check_actions(table, len(ranks))
        simulate(table, {(kind.value, stage): 1.0 for kind in Kind for stage in range(len(ranks))})
    except (ConfigurationError, PipelineError, csv.Error) as error:
        raise ConfigurationError(f'schedule="{name}": {error}') from error
    sizes = Sizes(num_ranks=len(table), num_stages=len(ranks), num_microbatches=num_microbatches)
    return ScheduleSpec(
        name=name,
        build=partial(_as_written, table),
        stages_per_rank=max(Counter(ranks).values()),
        placement=partial(_look_up, ranks),
        splits_backward=any(action.kind is Kind.BACKWARD_INPUT for row in table.values() for action in row),
        forwards_first=all(_forwards_first(actions) for actions in table.values()),
        problem=partial(_other_sizes, sizes),
        sizes=sizes,
        text=text,
    )


def _parse(text: str) -> Table:
    rows = list(csv.reader(text.splitlines()))
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    table: Table = {}
    for rank, row in enumerate(rows):
        place = f"row {rank + 1} (rank {rank})"
        table[rank] = [action for i, cell in enumerate(row) for action in _cell(cell.strip(), f"{place}, cell {i + 1}")]
        if not table[rank]:
            raise ConfigurationError(f"{place} has no action; use one row for each rank, with a stage for each.")
    if not table:
        raise ConfigurationError("there is no action in it; use one row for each rank, with cells such as 0F0.")
    return table


def _cell(cell: str, place: str) -> list[Action]:
    if not cell or _REDUCTION.fullmatch(cell):
        return []
    if pair := _PAIR.fullmatch(cell):
        return [action for part in pair[1].split(";") for action in _cell(part.strip(), place)]
    if not (match := _CELL.fullmatch(cell)):
        raise ConfigurationError(
            f"{place}: {cell!r} is no action; use a stage, one of F, B, I, W and a micro-batch, such as 0F0"
            ' (torch writes sends and receives too unless it is given format="compute_only").'
        )
    return [Action(Kind(match[2]), int(match[1]), int(match[3]))]


def _placement(table: Table) -> tuple[int, ...]:
    """Return the rank of each stage."""
    ranks: dict[int, int] = {}
    for rank, actions in table.items():
        for action in actions:
            if ranks.setdefault(action.stage, rank) != rank:
                raise ConfigurationError(
                    f"stage {action.stage} is on rank {ranks[action.stage]} and, by {action}, on rank {rank}; a stage's"
                    " weights are on one rank: change the table so that one row has all of its actions."
                )
    _refuse_gaps("stage", set(ranks))
    return tuple(ranks[stage] for stage in range(len(ranks)))


def _check_actions(table: Table, num_stages: int) -> int:
    """Refuse actions that are missing, doubled or of two minds; return the number of micro-batches."""
    counts = Counter(action for actions in table.values() for action in actions)
    microbatches = {action.microbatch for action in counts}
    _refuse_gaps("micro-batch", microbatches)
    for action, count in counts.items():
        if count > 1:
            raise ConfigurationError(f"{action} is there {count} times; change the table so that it is there once.")
    for stage in range(num_stages):
        for microbatch in range(len(microbatches)):
            _check_backward(stage, microbatch, {kind for kind in Kind if Action(kind, stage, microbatch) in counts})
    return len(microbatches)


def _check_backward(stage: int, microbatch: int, found: set[Kind]) -> None:
    """A stage runs each micro-batch forward, and backward either whole or in both of its parts."""
    forward, whole = Kind.FORWARD, Kind.BACKWARD
    parts = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    if found in ({forward, whole}, {forward, *parts}):
        return
    if whole in found and found & parts:
        names = ", ".join(str(Action(kind, stage, microbatch)) for kind in Kind if kind in found & {whole, *parts})
        raise ConfigurationError(f"{names} are there together; use either B, or I and W, for a backward.")
    needed = {forward, *parts} if found & parts else {forward, whole}
    names = ", ".join(str(Action(kind, stage, microbatch)) for kind in Kind if kind in needed - found)
    raise ConfigurationError(
        f"{names} is missing; change the table so that each stage has F and either B, or I and W, of each micro-batch."
    )


def _refuse_gaps(what: str, found: set[int]) -> None:
    if missing := sorted(set(range(max(found) + 1)) - found):
        raise ConfigurationError(
            f"there is a {what} {max(found)} but no {what} {missing[0]}; change the numbers so that they are counted"
            f" from 0 without gaps (0 to {len(found) - 1})."
        )


def _forwards_first(actions: list[Action]) -> bool:
    kinds = [action.kind is Kind.FORWARD for action in actions]
    return kinds == sorted(kinds, reverse=True)


def _as_written(table: Table, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Table:
    return {rank: list(actions) for rank, actions in table.items()}


def _look_up(ranks: tuple[int, ...], stage: int, num_ranks: int) -> int:
    return ranks[stage]


def _other_sizes(sizes: Sizes, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    if num_ranks != sizes.num_ranks:
        return (
            f"the table has {sizes.num_ranks} rows, one for each pipeline rank, but pipeline_parallel_size={num_ranks};"
            f" use pipeline_parallel_size={sizes.num_ranks}, or a table with {num_ranks} rows."
        )
    if num_microbatches != sizes.num_microbatches:
        return (
            f"the table has {sizes.num_microbatches} micro-batches, not {num_microbatches}; use num_microbatches="
            f'"auto" with batches of at least {sizes.num_microbatches} samples on each data rank, or another table.'
        )
    return None
