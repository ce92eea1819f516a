"""What practitioners would say of a run's figures. Pure: figures in, sentences out.

To add one: write a function from :class:`Figures` to an :class:`Advice` or ``None``, and put it into :data:`RULES`. Its
threshold is a constant with its reason, and its sentence states the figures and what to change. A rule that needs a
figure that is not known says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from lightning_hybrid.layout import Layout
from lightning_hybrid.metrics.breakdown import COMMUNICATION, Breakdown
from lightning_hybrid.metrics.breakdown import mean as mean_of

__all__ = ["RULES", "Advice", "BatchAndRate", "Figures", "Link", "give_advice", "links_of"]

#: Share of the step in exposed communication from which a degree should change: practitioners' rule of thumb. At a
#: third, devices that do not wait would do half as much again.
MUCH_COMMUNICATION = 0.30
#: Micro-batches for each pipeline rank: with p ranks and 2 p micro-batches the bubble of GPipe and 1F1B is
#: (p - 1) / (3 p - 1), below a third; with p of them it is near a half.
MICROBATCHES_PER_RANK = 2
#: Share of the step in waiting for the dataloader that is no accident: prefetching workers leave next to nothing.
MUCH_DATA_WAIT = 0.10
#: A rank that needs this much more time than ranks with the same work: devices of one kind differ by a few percent, and
#: the mean of a few steps is uncertain by as much.
SLOW_RANK = 1.15
#: A pipeline rank with this much more work than the mean: whole blocks cannot be cut finer in shallow models.
SLOW_STAGE = 1.25
#: A link that takes this many times what others of its axis take: traffic of others may well cost half as much again.
SLOW_LINK = 2.0
#: Share of the step that a slow rank, stage or link must cost to be worth a sentence.
WORTH_SAYING = 0.05
#: Batches and learning rates count as equal up to this relative difference.
SAME = 0.02


class Advice(NamedTuple):
    """One sentence or two."""

    key: str
    """What it is about; the same advice has the same key, so that it is said once."""
    text: str
    """With the figures, and what to change."""
    is_certain: bool = False
    """Whether it follows from settings alone. Otherwise one measurement may have been disturbed: ask a second one."""


class Link(NamedTuple):
    """Exposed time of messages on one link of an axis."""

    axis: str
    """As in the parts: "tensor", "data_shard", "data_replicate", "pipeline"."""
    ranks: tuple[int, ...]
    """Global ranks at its ends."""
    seconds: float
    """In one step, beside all waiting for a rank that is late."""


@dataclass(frozen=True, kw_only=True)
class BatchAndRate:
    """What must change together."""

    global_batch_size: float
    """Samples in one optimizer step of the whole job."""
    learning_rate: float
    """Base rate of the first parameter group."""
    optimizer: str = ""
    """Its class's name."""
    entry: str = ""
    """Id of the archive entry that these are from."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What is known of a run; what is not keeps its default."""

    layout: Layout = Layout()  # noqa: RUF009 - frozen
    breakdowns: Sequence[Breakdown] = ()
    """Of a step, by global rank."""
    num_microbatches: int | None = None
    """Of one ``training_step``."""
    share_cores: bool = False
    """Whether ranks are processes that wait for each other's cores, so that none is slow by itself."""
    links: Sequence[Link] = ()
    here: BatchAndRate | None = None
    """This run's."""
    before: BatchAndRate | None = None
    """The archive entry's."""


def give_advice(figures: Figures) -> list[Advice]:
    """Return all advice that applies, in the order of :data:`RULES`."""
    return [advice for rule in RULES if (advice := rule(figures)) is not None]


# ---- rules -----------------------------------------------------------------------------------------------------------


def communication(figures: Figures) -> Advice | None:
    """Exposed communication takes too much of the step: which degree to change."""
    if not figures.breakdowns:
        return None
    job = mean_of(figures.breakdowns)
    if not job.step or job.communication / job.step <= MUCH_COMMUNICATION:
        return None
    part = max(COMMUNICATION, key=job.seconds.__getitem__)
    axis = part.removeprefix("communication_")
    return Advice(
        "communication",
        f"Exposed communication is {job.communication / job.step:.0%} of the step (advised: at most"
        f" {MUCH_COMMUNICATION:.0%}), most of it on the {axis} axis ({job.shares[part]:.0%}). {_change(axis, figures)}",
    )


def _change(axis: str, figures: Figures) -> str:
    layout = figures.layout
    data, tensor, pipeline = layout.data_parallel_size, layout.tensor_parallel_size, layout.pipeline_parallel_size
    if axis == "tensor":
        return (
            f"Use tensor_parallel_size={_half(tensor)} instead of {tensor} and"
            f" pipeline_parallel_size={pipeline * tensor // _half(tensor)} instead of {pipeline} (or more data ranks,"
            " if memory allows), and keep tensor ranks inside of a node."
        )
    if axis == "data_shard":
        return (
            f"More samples for each of the {data} data ranks and step (a larger batch, accumulate_grad_batches) make it"
            f" rarer; or use data_parallel_size={_half(data)} instead of {data} and"
            f" pipeline_parallel_size={pipeline * data // _half(data)} instead of {pipeline}; or, if memory allows,"
            f" replicate_size={layout.replicate_size * 2} instead of {layout.replicate_size}, which shards over fewer."
        )
    if axis == "data_replicate":
        return (
            f"More samples for each of the {data} data ranks and step (a larger batch, accumulate_grad_batches) make it"
            f" rarer; or use data_parallel_size={_half(data)} instead of {data} and"
            f" pipeline_parallel_size={pipeline * data // _half(data)} instead of {pipeline}."
        )
    if axis == "pipeline":
        return (
            f"Use pipeline_parallel_size={_half(pipeline)} instead of {pipeline} and"
            f" data_parallel_size={data * pipeline // _half(pipeline)} instead of {data} if memory allows; or a"
            " schedule with fewer stages on each rank (1F1B), which sends less."
        )
    if axis == "world":
        return "It is the global gradient norm, for which all ranks wait for the last one: no degree changes that."
    return "No part of this library made it: look for collectives of your own (sync_dist=True, metrics, all_gather)."


def _half(degree: int) -> int:
    """The next smaller degree, halved where that goes."""
    return degree // 2 if degree % 2 == 0 else 1


def few_microbatches(figures: Figures) -> Advice | None:
    """A pipeline that is hardly ever full."""
    ranks, found = figures.layout.pipeline_parallel_size, figures.num_microbatches
    wanted = MICROBATCHES_PER_RANK * ranks
    if ranks == 1 or found is None or found >= wanted:
        return None
    measured = ""
    if figures.breakdowns:
        measured = f"; the bubble was {mean_of(figures.breakdowns).shares['bubble']:.0%} of the step"
    return Advice(
        "microbatches",
        f"{found} micro-batches are fewer than {MICROBATCHES_PER_RANK} for each of the {ranks} pipeline ranks"
        f"{measured}. Use num_microbatches={wanted} (and a batch of at least {wanted} samples for each data rank): 1F1B"
        f" then stands idle {_bubble(ranks, wanted):.0%} of the time instead of {_bubble(ranks, found):.0%}.",
        is_certain=True,
    )


def _bubble(ranks: int, num_microbatches: int) -> float:
    """Idle share of GPipe and 1F1B with equal stages (Huang et al. 2019; Narayanan et al. 2021)."""
    return (ranks - 1) / (num_microbatches + ranks - 1)


def slow_rank(figures: Figures) -> Advice | None:
    """One rank needs longer than others that have the same work."""
    layout, compute = figures.layout, [breakdown.seconds["compute"] for breakdown in figures.breakdowns]
    worst: tuple[float, int, float] | None = None
    if figures.share_cores:
        return None
    for stage in range(layout.pipeline_parallel_size if compute else 0):
        peers = [rank for rank in range(layout.world_size) if layout.coordinate(rank).pipeline == stage]
        for rank in peers if len(peers) > 1 else ():
            usual = median(compute[other] for other in peers if other != rank)
            if usual and (worst is None or compute[rank] - usual > worst[0]):
                worst = compute[rank] - usual, rank, compute[rank] / usual
    if worst is None or worst[2] < SLOW_RANK or worst[0] < WORTH_SAYING * figures.breakdowns[worst[1]].step:
        return None
    return Advice(
        f"slow rank {worst[1]}",
        f"Rank {worst[1]} ({_place(layout, worst[1])}) computes {worst[2]:.2f} times as long as ranks with the same"
        f" work ({1e3 * worst[0]:.0f} ms more a step), and the others wait for it. Look at that device (other"
        " processes, temperature, clock), or leave it out.",
    )


def slow_stage(figures: Figures) -> Advice | None:
    """One pipeline rank has more work than the others."""
    layout, compute = figures.layout, [breakdown.seconds["compute"] for breakdown in figures.breakdowns]
    num_stages = layout.pipeline_parallel_size
    if num_stages == 1 or not compute:
        return None
    ranks = [[r for r in range(layout.world_size) if layout.coordinate(r).pipeline == p] for p in range(num_stages)]
    work = [sum(compute[rank] for rank in mine) / len(mine) for mine in ranks]
    usual, slowest = sum(work) / num_stages, max(range(num_stages), key=work.__getitem__)
    step = mean_of(figures.breakdowns).step
    if not usual or work[slowest] / usual < SLOW_STAGE or work[slowest] - usual < WORTH_SAYING * step:
        return None
    names = _ranks(ranks[slowest])
    return Advice(
        f"slow stage {slowest}",
        f"Pipeline coordinate {slowest} ({names}) computes {work[slowest] / usual:.2f} times the mean of all"
        f" ({1e3 * work[slowest]:.0f} of {1e3 * usual:.0f} ms a step): the others stand idle meanwhile. If its devices"
        " are as fast, give it fewer blocks (more and smaller blocks can be cut more evenly; schedules with several"
        " stages on each rank too) or fewer pipeline ranks.",
    )


def slow_link(figures: Figures) -> Advice | None:
    """One link takes far longer than others of its axis."""
    if not figures.breakdowns:
        return None
    step, worst = mean_of(figures.breakdowns).step, None
    for number, link in enumerate(figures.links):
        others = [other.seconds for i, other in enumerate(figures.links) if other.axis == link.axis and i != number]
        if others and (worst is None or link.seconds - median(others) > worst[1]):
            worst = link, link.seconds - median(others), median(others)
    if worst is None or worst[1] < WORTH_SAYING * step or worst[0].seconds < SLOW_LINK * worst[2]:
        return None
    link, _, usual = worst
    first, last = link.ranks[0], link.ranks[-1]
    return Advice(
        f"slow link {link.axis} {link.ranks}",
        f"The {link.axis} link of {_ranks(link.ranks)} ({_place(figures.layout, first)} to"
        f" {_place(figures.layout, last)}) takes {1e3 * link.seconds:.0f} ms of a step, others of that axis"
        f" {1e3 * usual:.0f} ms. Look at its cable, switch or fallback (NCCL_DEBUG=INFO says the transport), or place"
        " these ranks in one node.",
    )


def batch_without_rate(figures: Figures) -> Advice | None:
    """The global batch is another than in the archive's entry, the learning rate is the same."""
    here, before = figures.here, figures.before
    if here is None or before is None or not before.global_batch_size or not before.learning_rate:
        return None
    growth = here.global_batch_size / before.global_batch_size
    same_rate = math.isclose(here.learning_rate, before.learning_rate, rel_tol=SAME)
    if math.isclose(growth, 1.0, rel_tol=SAME) or not same_rate or here.optimizer != before.optimizer:
        return None
    return Advice(
        "batch and rate",
        f"The global batch is {here.global_batch_size:g} samples where entry {before.entry} of the archive had"
        f" {before.global_batch_size:g}, and the learning rate still begins at {here.learning_rate:g}: the"
        f" two belong together. Usual is to multiply it, also a schedule's highest, by {math.sqrt(growth):.3g} for Adam"
        f" and its kind (by the square root of the batch) or by {growth:.3g} for SGD (in proportion); or keep the"
        " batch, by the loader's batch_size or accumulate_grad_batches.",
        is_certain=True,
    )


def data_wait(figures: Figures) -> Advice | None:
    """The dataloader does not keep up."""
    if not figures.breakdowns:
        return None
    share = mean_of(figures.breakdowns).shares["data_wait"]
    if share <= MUCH_DATA_WAIT:
        return None
    waits = [breakdown.seconds["data_wait"] for breakdown in figures.breakdowns]
    rank = max(range(len(waits)), key=waits.__getitem__)
    return Advice(
        "data wait",
        f"Waiting for data is {share:.0%} of the step (advised: at most {MUCH_DATA_WAIT:.0%}), most on rank {rank}"
        f" ({1e3 * waits[rank]:.0f} ms). Give the DataLoader more num_workers and persistent_workers=True, prepare data"
        " beforehand, or use load_once=True where ranks of one host read the same samples.",
    )


#: All rules, in the order in which they are said.
RULES: tuple[Callable[[Figures], Advice | None], ...] = (
    communication,
    few_microbatches,
    slow_rank,
    slow_stage,
    slow_link,
    batch_without_rate,
    data_wait,
)

# ---- links -----------------------------------------------------------------------------------------------------------


def links_of(
    layout: Layout, breakdowns: Sequence[Breakdown], messages: Iterable[Mapping[tuple[int, int], float]] = ()
) -> list[Link]:
    """Return the links of a run and what their messages took.

    In a collective all ranks wait for the last one to come, and that one waits for the messages alone: so of each group
    of tensor or data ranks the least exposed time counts. A pipeline's links are those between two ranks.

    Args:
        layout: the degrees.
        breakdowns: by global rank.
        messages: for each rank the seconds of its waits for messages on their way, by (sender, receiver).
    """
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        for axis, size, key in (
            ("tensor", layout.tensor_parallel_size, (at.pipeline, at.data)),
            ("data_shard", layout.shard_size, (at.pipeline, at.replicate, at.tensor)),
            ("data_replicate", layout.replicate_size, (at.pipeline, at.shard, at.tensor)),
        ):
            if size > 1:
                groups.setdefault((axis, key), []).append(rank)
    links = [
        Link(axis, tuple(ranks), min(breakdowns[rank].seconds[f"communication_{axis}"] for rank in ranks))
        for (axis, _), ranks in groups.items()
    ]
    between: dict[tuple[int, ...], float] = {}
    for waits in messages:
        for ends, seconds in waits.items():
            both = tuple(sorted(ends))
            between[both] = between.get(both, 0.0) + seconds
    return links + [Link("pipeline", ends, seconds) for ends, seconds in between.items()]


def _place(layout: Layout, rank: int) -> str:
    at = layout.coordinate(rank)
    return f"pipeline {at.pipeline}, data {at.data}, tensor {at.tensor}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
