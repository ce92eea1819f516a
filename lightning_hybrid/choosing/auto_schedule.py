"""``schedule="auto"``: by what the archive measured, else by what is predicted from times taken on this device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_hybrid.archive import Archive, Entry, detect_hardware, fastest_schedule, fingerprint_module
from lightning_hybrid.building.per_block import apply_per_block, check_split_backward
from lightning_hybrid.choosing.choose import archived_schedule
from lightning_hybrid.errors import ArchiveError, ConfigurationError, UnsupportedError
from lightning_hybrid.pipeline.predict import average, chain_of, fastest, predict
from lightning_hybrid.pipeline.probe import StepFacts
from lightning_hybrid.pipeline.schedule import ScheduleSpec, find_schedule
from lightning_hybrid.pipeline.stage import Cut
from lightning_hybrid.pipeline.timing import time_block, time_transfer

__all__ = ["ScheduleChoice", "choose_schedule"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """A schedule, and why this one."""

    spec: ScheduleSpec
    stages_per_rank: int
    reason: str
    """Begins with the schedule's name."""
    entry_id: str | None = None
    """The archive entry that measured it."""


def choose_schedule(
    strategy: Any,
    cut: Cut,
    facts: StepFacts,
    step: Callable[[], Any],
    *,
    num_microbatches: int,
    size_per_data_rank: int | None,
) -> ScheduleChoice:
    """Return the schedule to run, the same on all ranks. A collective over the world.

    Args:
        strategy: the strategy, its mesh built.
        cut: of the whole module, probed.
        facts: of ``training_step``.
        step: runs it on one micro-batch, without a trace.
        num_microbatches: of a batch.
        size_per_data_rank: samples of a batch.
    """
    entry = _fastest_entry(strategy, num_microbatches, size_per_data_rank)
    if entry is not None:
        try:
            spec, per_rank = archived_schedule(vars(entry.settings))
            spec.table(strategy.layout.pipeline_parallel_size, num_microbatches, per_rank)
            if spec.splits_backward:
                check_split_backward(spec.name, **strategy.settings.per_block)
            rate = entry.result.samples_per_second
            reason = f"{spec.name}: the fastest measured with these degrees, {rate:.4g} samples/s (entry {entry.id})"
            return ScheduleChoice(spec=spec, stages_per_rank=per_rank, reason=reason, entry_id=entry.id)
        except (ConfigurationError, UnsupportedError) as error:  # of another version, or this run splits no backward
            logger.warning("The schedule of archive entry %s is not used: %s", entry.id, error)
    spec, reason = _predicted(strategy, cut, facts, step, num_microbatches)
    return ScheduleChoice(spec=spec, stages_per_rank=spec.stages_per_rank, reason=f"{spec.name}: {reason}")


def _fastest_entry(strategy: Any, num_microbatches: int, size_per_data_rank: int | None) -> Entry | None:
    """What global rank 0 finds; an archive that cannot be read is passed over."""
    entry: Entry | None = None
    if strategy.global_rank == 0 and strategy.settings.archive is not None:
        layout = strategy.layout
        hardware = detect_hardware(
            strategy.root_device.type, num_devices=layout.world_size, num_nodes=strategy.num_nodes
        )
        try:
            entry = fastest_schedule(
                Archive(strategy.settings.archive).known(),
                fingerprint_module(strategy.lightning_module),
                hardware,
                layout,
                precision=str(strategy.precision_plugin.precision),
                num_microbatches=num_microbatches,
                size_per_data_rank=size_per_data_rank,
            )
        except ArchiveError as error:
            logger.warning("The archive is not used: %s", error)
    found: Entry | None = strategy.broadcast(entry)
    return found


def _predicted(
    strategy: Any, cut: Cut, facts: StepFacts, step: Callable[[], Any], num_microbatches: int
) -> tuple[ScheduleSpec, str]:
    spec, num_ranks = find_schedule("1F1B"), strategy.layout.pipeline_parallel_size
    unknown = None
    if len(facts.blocks) < 2 * num_ranks:
        unknown = f"{len(facts.blocks)} blocks are too few for two stages on each of {num_ranks} ranks"
    elif strategy.settings.compile is not False:
        unknown = "no prediction for compiled blocks"
    elif strategy.layout.tensor_parallel_size > 1:
        unknown = "no prediction for blocks that tensor parallelism splits"
    elif not all(facts.flops):
        unknown = "no prediction, since the operations of some blocks cannot be counted"
    if unknown is not None:
        return spec, unknown
    device, group = strategy.root_device, strategy.device_mesh["pipeline_parallel"].get_group()
    found: Any
    try:
        found = time_block(
            cut,
            facts,
            step,
            device,
            precision=strategy.precision_plugin.train_step_context,
            prepare=lambda block: apply_per_block([block], **strategy.settings.per_block),
            splits=strategy.choice.splits_backward,
        )
    except Exception as error:  # a block that does not run alone
        found = f"{type(error).__name__}: {error}"
    everywhere = strategy.all_gather_object(found)
    if failed := [each for each in everywhere if isinstance(each, str)]:
        return spec, f"no prediction, since blocks cannot be timed one by one, which steps do not need ({failed[0]})"
    transfers = strategy.all_gather_object(time_transfer(everywhere[0][1], group, device))
    times = average(times for times, _ in everywhere)
    forecasts = predict(
        chain_of(facts), times, max(transfers), num_ranks, num_microbatches, splits=strategy.choice.splits_backward
    )
    chosen = fastest(forecasts)
    others = "".join(f", {f.spec.name} {1e3 * f.seconds:.4g} ms" for f in forecasts if f is not chosen)
    return chosen.spec, f"{1e3 * chosen.seconds:.4g} ms predicted for a step's forwards and backwards{others}"
