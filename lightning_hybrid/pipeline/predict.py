"""Which schedule would be fastest? Simulated from measured times of one block; nothing runs here. Pure.

[Note: what a prediction knows]
One block was timed forward, backward, and backward in two halves; so was the work that a stage repeats before its first
block (its prologue). Other blocks and the code around them count by their floating point operations. What every
schedule pays alike (optimizer, reduction of gradients) is left out, and so is what one process's ranks take from each
other, so a prediction is for comparing schedules, and the first measured runs in an archive overrule it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.pipeline.partition import partition_blocks
from lightning_hybrid.pipeline.probe import StepFacts
from lightning_hybrid.pipeline.schedule import SCHEDULES, ScheduleSpec
from lightning_hybrid.pipeline.timeline import simulate, window

__all__ = ["GAIN", "Chain", "Forecast", "Times", "average", "fastest", "predict"]

#: What another schedule must save before it is preferred to 1F1B, which keeps the fewest activations.
GAIN = 0.03
_CANDIDATES = ("1f1b", "eager1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Measured seconds. Those of a block are for the whole forward's work of :class:`Chain`, as if all were blocks."""

    forward: float
    backward: float
    backward_input: float
    backward_weight: float
    prologue: float
    """Of a stage that begins with the second block."""
    prologue_per_block: float
    """More for each block that lies before."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What stages are cut from. Work in any unit, the same for all."""

    blocks: Sequence[float]
    """Work of each block and of the code after it."""
    before: float = 0.0
    """Work before the first block."""
    after: float = 0.0
    """Work after the last block (not in ``blocks``)."""
    num_inputs: Sequence[int]
    """How many tensors travel to each block."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a schedule would take."""

    spec: ScheduleSpec
    seconds: float
    """From the first action of a step to the last one."""


def chain_of(facts: StepFacts) -> Chain:
    """Return the work that a probe counted."""
    before, *outside, after = facts.flops_outside
    blocks = [flops + more for flops, more in zip(facts.flops, [*outside, 0.0], strict=True)]
    return Chain(blocks=blocks, before=before, after=after, num_inputs=[len(found) for found in facts.arguments])


def average(times: Iterable[Times]) -> Times:
    """Return the mean over ranks."""
    found = list(times)
    return Times(**{f.name: sum(getattr(t, f.name) for t in found) / len(found) for f in fields(Times)})


def predict(
    chain: Chain, times: Times, transfer: float, num_ranks: int, num_microbatches: int, *, splits: bool = True
) -> list[Forecast]:
    """Return what each schedule would take that can run these numbers; 1F1B first, then the fastest.

    Schedules that keep all micro-batches' activations (GPipe, LoopedBFS) are not among them. ``transfer`` is the
    seconds that a boundary's tensors take from one rank to the next; ``splits`` allows backwards in two halves.
    """
    found = []
    for name in _CANDIDATES:
        spec = SCHEDULES[name]
        sizes = (num_ranks, num_microbatches, spec.stages_per_rank)
        num_stages = spec.num_stages(num_ranks, spec.stages_per_rank)
        if num_stages <= len(chain.blocks) and not spec.problem(*sizes) and (splits or not spec.splits_backward):
            timeline = simulate(spec.table(*sizes), _durations(spec, chain, times, num_ranks), transfer=transfer)
            start, end = window(timeline)
            found.append(Forecast(spec=spec, seconds=end - start))
    if not found or found[0].spec.name != "1F1B":
        raise ConfigurationError(f"1F1B cannot run {num_microbatches} micro-batches on {num_ranks} ranks; use more.")
    return [found[0], *sorted(found[1:], key=lambda forecast: forecast.seconds)]


def fastest(forecasts: Sequence[Forecast]) -> Forecast:
    """Return the fastest, or the first (1F1B) where that saves less than :data:`GAIN`."""
    best = min(forecasts, key=lambda forecast: forecast.seconds)
    return best if best.seconds < (1 - GAIN) * forecasts[0].seconds else forecasts[0]


def _durations(spec: ScheduleSpec, chain: Chain, times: Times, num_ranks: int) -> dict[tuple[str, int], float]:
    """Seconds of every (kind, stage); the halves of a backward as :mod:`lightning_hybrid.pipeline.step` runs them."""
    durations: dict[tuple[str, int], float] = {}
    total = sum(chain.blocks) + chain.before + chain.after
    placement = spec.ranks_of_stages(num_ranks, spec.stages_per_rank)
    num_stages = len(placement)
    ranges = partition_blocks(chain.blocks, num_stages, before=chain.before, after=chain.after, placement=placement)
    for stage, blocks in enumerate(ranges):
        work = sum(chain.blocks[i] for i in blocks)
        work += chain.before * (stage == 0) + chain.after * (stage == num_stages - 1)
        share, first = work / total, blocks.start
        durations["F", stage], durations["B", stage] = times.forward * share, times.backward * share
        durations["I", stage], durations["W", stage] = times.backward_input * share, times.backward_weight * share
        if stage == 0:  # nothing goes further back: all of it counts as weights
            durations["I", stage], durations["W", stage] = 0.0, times.backward * share
        elif chain.num_inputs[first] > 1:
            durations["I", stage], durations["W", stage] = times.backward * share, 0.0
        if stage > 0:
            durations["PROLOGUE", stage] = times.prologue + times.prologue_per_block * (first - 1)
    return durations
