"""When each action of a step ran: marks, and what an ideal run of the same schedule would look like. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_hybrid.errors import PipelineError
from lightning_hybrid.pipeline.schedule import Action, Kind, Table

__all__ = [
    "ACTIONS",
    "COMPUTE",
    "Mark",
    "Timeline",
    "ideal_of",
    "mean_durations",
    "simulate",
    "split_runs",
    "table_of",
    "window",
]

#: Kinds of marks that are actions of the schedule.
ACTIONS = frozenset(kind.value for kind in Kind)
#: Kinds of marks during which a rank works for the model.
COMPUTE = ACTIONS | {"PROLOGUE"}


@dataclass(frozen=True, slots=True)
class Mark:
    """One span of one rank's step. ``start`` and ``end`` are seconds on a clock that all ranks of a host share."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.end - self.start


#: Schedule rank -> its marks, in order of time.
Timeline = dict[int, list[Mark]]

#: (kind, stage, micro-batch) of an action; "B" there stands for a full backward and for its input half "I" alike.
_Key = tuple[str, int, int]


def window(timeline: Mapping[int, Iterable[Mark]]) -> tuple[float, float]:
    """Return when the first action of any rank started and when the last one ended; ``(0, 0)`` without actions."""
    actions = [mark for marks in timeline.values() for mark in marks if mark.kind in COMPUTE]
    if not actions:
        return 0.0, 0.0
    return min(mark.start for mark in actions), max(mark.end for mark in actions)


def mean_durations(marks: Iterable[Mark]) -> dict[tuple[str, int], float]:
    """Return the mean seconds of each (kind, stage) among the computing marks."""
    totals: dict[tuple[str, int], list[float]] = {}
    for mark in marks:
        if mark.kind in COMPUTE:
            totals.setdefault((mark.kind, mark.stage), []).append(mark.end - mark.start)
    return {key: sum(values) / len(values) for key, values in totals.items()}


def split_runs(marks: Iterable[Mark]) -> list[list[Mark]]:
    """Split one rank's marks of a step, in order of time, into runs of the schedule: one for each accumulated batch.

    An action that was there before begins another run. Marks without a micro-batch stay with the run before them.
    """
    runs: list[list[Mark]] = [[]]
    seen: set[tuple[str, int, int]] = set()
    for mark in marks:
        key = (mark.kind, mark.stage, mark.microbatch)
        if mark.microbatch >= 0:
            if key in seen:
                runs.append([])
                seen.clear()
            seen.add(key)
        runs[-1].append(mark)
    return runs


def table_of(timeline: Mapping[int, Iterable[Mark]]) -> Table:
    """Return the order in which the ranks ran their actions."""
    return {
        rank: [Action(Kind(mark.kind), mark.stage, mark.microbatch) for mark in marks if mark.kind in ACTIONS]
        for rank, marks in timeline.items()
    }


def simulate(table: Table, durations: Mapping[tuple[str, int], float], *, transfer: float = 0.0) -> Timeline:
    """Run a schedule's table in an ideal world: one action at a time on each rank, in the table's order, none late.

    A forward waits for the forward of the stage before it, a backward (``B`` or ``I``) for its own forward and for the
    backward of the stage after it, a weight gradient (``W``) for its own ``I``; all of the same micro-batch.

    Args:
        table: the actions of each schedule rank.
        durations: seconds by (kind, stage), the kind as in :class:`Mark`. A ``("PROLOGUE", stage)`` entry is work
            before each forward of that stage that does not wait for the stage before it.
        transfer: seconds that a tensor needs from one rank to another; nobody works on it meanwhile.

    Returns:
        The marks of each rank, the first action starting at 0. Cost: a few microseconds for each action.

    Raises:
        PipelineError: if an action has no duration, or the table waits for itself.
    """
    remaining = {rank: deque(_plan(actions, durations)) for rank, actions in table.items()}
    rank_of = {action.stage: rank for rank, actions in table.items() for action in actions}
    last_stage = max(rank_of, default=0)
    timeline: Timeline = {rank: [] for rank in table}
    ended: dict[_Key, float] = {}
    waiting: dict[_Key, int] = {}  # what stands still -> the rank that does
    ready = deque(table)
    while ready:
        rank = ready.popleft()
        marks, queue = timeline[rank], remaining[rank]
        now = marks[-1].end if marks else 0.0
        while queue:
            kind, stage, microbatch, prologue, seconds = queue[0]
            start = now + prologue
            need = _need(kind, stage, microbatch, last_stage)
            if need is not None:
                if need not in ended:
                    waiting[need] = rank
                    break
                start = max(start, ended[need] + (transfer if rank_of[need[1]] != rank else 0.0))
            if prologue:
                marks.append(Mark("PROLOGUE", stage, microbatch, now, now + prologue))
            now = start + seconds
            marks.append(Mark(kind, stage, microbatch, start, now))
            queue.popleft()
            done = ("B" if kind == "I" else kind, stage, microbatch)
            ended[done] = now
            if done in waiting:
                ready.append(waiting.pop(done))
    if stuck := {rank: queue[0] for rank, queue in remaining.items() if queue}:
        text = ", ".join(f"rank {rank} at {stage}{kind}{mb}" for rank, (kind, stage, mb, *_) in stuck.items())
        raise PipelineError(f"The schedule's table waits for itself: {text}. Change the order of the actions.")
    return timeline


def ideal_of(timeline: Mapping[int, Sequence[Mark]]) -> Timeline:
    """Return an ideal run of what a timeline ran, in its order and with its mean action times.

    Raises:
        PipelineError: if the order waits for itself, as no measured one does.
    """
    return simulate(table_of(timeline), mean_durations(mark for marks in timeline.values() for mark in marks))


def _need(kind: str, stage: int, microbatch: int, last_stage: int) -> _Key | None:
    """Return what must have ended before an action, beside what precedes it on its own rank."""
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage else None
    if kind == "W":
        return ("B", stage, microbatch)
    return ("F", stage, microbatch) if stage == last_stage else ("B", stage + 1, microbatch)


def _plan(
    actions: list[Action], durations: Mapping[tuple[str, int], float]
) -> Iterable[tuple[str, int, int, float, float]]:
    """Yield (kind, stage, micro-batch, seconds of prologue, seconds) of each action."""
    names = {kind: kind.value for kind in Kind}  # the property is slow
    for action in actions:
        kind = names[action.kind]
        seconds = durations.get((kind, action.stage))
        if seconds is None:
            raise PipelineError(
                f'No duration is given for "{kind}" of stage {action.stage};'
                " durations need every (kind, stage) of the table."
            )
        prologue = durations.get(("PROLOGUE", action.stage), 0.0) if kind == "F" else 0.0
        yield kind, action.stage, action.microbatch, prologue, seconds
