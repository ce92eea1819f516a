"""What a run is set to: arguments checked; degrees that nobody gave from the archive's best entry, else planned."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.archive import (
    Archive,
    Entry,
    Match,
    choose_degrees,
    detect_hardware,
    failed_degrees,
    fingerprint_module,
)
from lightning_hybrid.archive.match import rescale
from lightning_hybrid.building.per_block import check_split_backward
from lightning_hybrid.choosing.logged import advice_to_record
from lightning_hybrid.choosing.plan import PlanChoice, choose_by_plan
from lightning_hybrid.choosing.run_facts import whole_model
from lightning_hybrid.errors import ArchiveError, ConfigurationError, HybridError, UnsupportedError
from lightning_hybrid.layout import Layout
from lightning_hybrid.pipeline.blocks import list_blocks
from lightning_hybrid.pipeline.schedule import ScheduleSpec, find_schedule
from lightning_hybrid.pipeline.schedule_file import parse_schedule
from lightning_hybrid.planner.setup import describe
from lightning_hybrid.settings import Settings, with_options
from lightning_hybrid.tensor_parallel.plan import build_tp_plan

if TYPE_CHECKING:
    from lightning_hybrid.choosing.run_choice import RunChoice

__all__ = [
    "ArchiveChoice",
    "archived_schedule",
    "can_run",
    "check_counts",
    "check_run",
    "choose_layout",
    "choose_stages_per_rank",
    "without_effect",
]

logger = logging.getLogger(__name__)

#: Chosen degrees that may turn out to be refused before the run is.
_MOST_REFUSED = 8


@dataclass(frozen=True, kw_only=True)
class ArchiveChoice:
    """Degrees and settings to start from."""

    layout: Layout
    entry_id: str
    settings: dict[str, Any]
    reason: str


def choose_layout(strategy: Any) -> Layout:
    """Return the degrees of a strategy's run, chosen if the user gave none, and checked. A collective.

    One rank decides, the others get its word. It is said, by one rank, in a few lines. Chosen degrees that turn out to
    be refused (all ranks find the same) are said, and the next best ones taken: nothing is built yet.

    Raises:
        ConfigurationError: if the degrees do not make as many devices as there are.
        HybridError: if the run is refused as it is.
    """
    choice, num_devices = strategy.choice, strategy.num_nodes * strategy.num_processes
    refused = set[Layout]()
    open_choice = dict(vars(choice))
    while choice.is_open:
        found = _decide(strategy, num_devices, refused) if strategy.global_rank == 0 else None
        _take(strategy, strategy.broadcast(found))
        try:
            check_run(choice, strategy.lightning_module, strategy.precision_plugin)
        except HybridError as error:
            if choice.layout in refused or len(refused) == _MOST_REFUSED:
                raise
            rank_zero_info(f"lightning_hybrid: {describe(choice.layout)} cannot run, so others are taken: {error}")
            refused.add(choice.layout)
            vars(choice).clear()
            vars(choice).update(open_choice)
        else:
            assert choice.layout is not None
            return choice.layout  # type: ignore[no-any-return]
    if choice.layout is not None and choice.layout.world_size != num_devices:  # an entry's, given by the user
        choice.layout = _resized(choice.layout, num_devices)
    choice.layout = choice.resolve(num_devices)
    check_run(choice, strategy.lightning_module, strategy.precision_plugin)
    return choice.layout  # type: ignore[no-any-return]


def _take(strategy: Any, found: ArchiveChoice | PlanChoice) -> None:
    choice = strategy.choice
    if isinstance(found, ArchiveChoice):
        choice.take_entry(found)
        rank_zero_info(f"lightning_hybrid: {found.reason}")
    else:
        choice.take_plan(found)
        for line in found.lines:
            rank_zero_info(f"lightning_hybrid: {line}")
    strategy.settings = choice.settings
    if (
        choice.source
        and choice.settings.archive is not None
        and (advice := advice_to_record(strategy.lightning_module))
    ):
        rank_zero_info(f"lightning_hybrid:   {advice}")


def _resized(layout: Layout, num_devices: int) -> Layout:
    resized = rescale(layout, num_devices)
    if resized is None:
        rest = layout.tensor_parallel_size * layout.pipeline_parallel_size
        raise ConfigurationError(
            f"The archive entry's degrees ({layout}) cannot be resized to {num_devices} devices: tensor x pipeline is"
            f" {rest}, which does not divide it. Use a multiple of {rest} devices, another entry, or give the degrees."
        )
    return resized


def _decide(strategy: Any, num_devices: int, refused: set[Layout]) -> ArchiveChoice | PlanChoice:
    """The nearest known-good entry, else the planner's best. Whatever goes wrong here must not stop the others."""
    module, choice = strategy.lightning_module, strategy.choice
    if choice.tuned is not None and choice.tuned.layout not in refused:
        return choice.tuned  # type: ignore[no-any-return]
    match, failed = None, dict[Layout, Entry]()
    if choice.settings.archive is not None and num_devices > 1:
        try:
            match, failed = _ask_archive(strategy, module, num_devices, refused)
        except ArchiveError as error:
            logger.warning("The archive is not used: %s", error)
        except Exception as error:  # a configure_model that wants its ranks
            logger.warning("The archive is not used, as this model cannot be known yet: %s", error)
    not_again = {*failed, *choice.tuned_failures, *refused}
    if match is None:
        return choose_by_plan(strategy, module, num_devices, failed=not_again)
    reason = match.reason + _second_opinion(strategy, module, num_devices, match, not_again)
    return ArchiveChoice(
        layout=match.degrees, entry_id=match.entry.id, settings=vars(match.entry.settings), reason=reason
    )


def _second_opinion(strategy: Any, module: Any, num_devices: int, match: Match, failed: set[Layout]) -> str:
    """What the planner would take in place of degrees that were never measured on so many devices."""
    if match.entry.hardware.num_devices == num_devices:
        return ""
    planned = choose_by_plan(strategy, module, num_devices, failed=failed)
    if planned.planned is None or planned.layout == match.degrees:
        return ""
    other = describe(planned.layout)
    return f" That was not measured on {num_devices} devices, and the planner would take {other}: give them to compare."


def _ask_archive(
    strategy: Any, module: Any, num_devices: int, refused: set[Layout]
) -> tuple[Match | None, dict[Layout, Entry]]:
    choice = strategy.choice
    hardware = detect_hardware(strategy.root_device.type, num_devices=num_devices, num_nodes=strategy.num_nodes)
    whole = whole_model(module)
    fingerprint, known = fingerprint_module(whole), Archive(os.fspath(choice.settings.archive)).known()
    match = choose_degrees(
        known,
        fingerprint,
        hardware,
        num_devices,
        accept=lambda layout, entry: layout not in refused and can_run(layout, entry, whole, choice),
    )
    return match, failed_degrees(known, fingerprint, hardware)


def archived_schedule(settings: Mapping[str, Any]) -> tuple[ScheduleSpec, int]:
    """Return the schedule that an entry's settings name, and the stages of each rank.

    A user's own schedule is made from the table that the entry keeps.
    """
    name, text = settings["schedule"], settings["options"].get("schedule_table")
    spec = find_schedule(name) if text is None else parse_schedule(name, text)
    return spec, settings["options"].get("stages_per_rank", spec.stages_per_rank)


def can_run(layout: Layout, entry: Entry, module: Any, choice: RunChoice) -> bool:
    """Whether the module allows an entry's degrees, as far as that is known before anything is tried."""
    try:
        with_options(choice.settings, entry.settings.options)  # of another version they may mean nothing
        return _can_be_split(layout, entry, module, choice.settings) and _can_be_cut(layout, entry, module, choice)
    except ConfigurationError:
        return False


def _can_be_split(layout: Layout, entry: Entry, module: Any, settings: Settings) -> bool:
    """What no plan splits is split by trying: known to work where the entry had no plan of its user's either."""
    plan = build_tp_plan(module, settings.tp_plan, layout.tensor_parallel_size)
    if layout.tensor_parallel_size == 1:
        return True
    if settings.loss_parallel and "colwise_gather_output" not in plan.styles.values():
        return False
    return bool(plan.split) or entry.settings.tp_plan is None


def _can_be_cut(layout: Layout, entry: Entry, module: Any, choice: RunChoice) -> bool:
    if layout.pipeline_parallel_size == 1:
        return True
    spec, per_rank = choice.spec, choice.stages_per_rank
    if choice.chooses_schedule:
        spec, per_rank = archived_schedule(vars(entry.settings))
    num_blocks = len(list_blocks(module, choice.settings.blocks))
    return bool(module.automatic_optimization) and num_blocks >= spec.num_stages(
        layout.pipeline_parallel_size, per_rank
    )


def check_counts(counts: Mapping[str, Any]) -> None:
    """Refuse anything but positive integers and ``"auto"``."""
    for name, value in counts.items():
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigurationError(f'{name}={value!r} must be "auto" or an integer of at least 1.')


def choose_stages_per_rank(spec: ScheduleSpec, stages_per_rank: Any) -> int:
    """Return the number of (virtual) stages of each pipeline rank."""
    if stages_per_rank == "auto":
        return spec.stages_per_rank
    if spec.sizes is not None:
        raise ConfigurationError(
            f'stages_per_rank={stages_per_rank}: the table of schedule="{spec.name}" says which stages each rank runs;'
            ' use stages_per_rank="auto".'
        )
    if stages_per_rank != spec.stages_per_rank and not spec.multiple_stages:
        raise ConfigurationError(
            f'stages_per_rank={stages_per_rank}: schedule="{spec.name}" has {spec.stages_per_rank};'
            ' use schedule="Interleaved1F1B" for virtual stages.'
        )
    return int(stages_per_rank)


def without_effect(choice: RunChoice, layout: Layout) -> list[str]:
    """Return the arguments that were given and change nothing with these degrees."""
    settings, num_microbatches = choice.settings, choice.num_microbatches
    found: dict[str, Any] = {}
    if layout.tensor_parallel_size == 1:
        found |= {name: getattr(settings, name) for name in ("tp_plan", "loss_parallel", "sequence_parallel")}
    if layout.pipeline_parallel_size == 1:
        schedule = None if choice.chooses_schedule or settings.whole_batch_loss else choice.spec.name
        found |= {"schedule": schedule, "num_microbatches": num_microbatches if num_microbatches != "auto" else None}
        found |= {"whole_batch_loss": settings.whole_batch_loss}
    if layout.data_parallel_size == layout.replicate_size and not settings.cpu_offload:  # nothing is sharded
        found |= {"reshard_after_forward": settings.reshard_after_forward}
    return [f"{name}={value!r}" for name, value in found.items() if value]


def check_run(choice: RunChoice, module: Any, precision: Any) -> None:
    """Refuse combinations that cannot be equal to one process, before anything is built."""
    layout, spec, num_microbatches = choice.layout, choice.spec, choice.num_microbatches
    assert layout is not None
    if idle := without_effect(choice, layout):
        rank_zero_info(f"lightning_hybrid: without effect at {layout}: {', '.join(idle)}")
    if not choice.settings.replica_sync.is_every_step and layout.replicate_size == 1:
        raise ConfigurationError(
            f"replica_sync={choice.settings.replica_sync} says how replicas exchange, but replicate_size=1 makes one of"
            f" them (now: {layout}). Give replicate_size, the number of replicas, or leave replica_sync out."
        )
    pipeline = layout.pipeline_parallel_size
    if spec.sizes is not None and num_microbatches == "auto":
        num_microbatches = spec.sizes.num_microbatches
    if num_microbatches != "auto" and (pipeline > 1 or spec.sizes is not None):
        spec.table(pipeline, num_microbatches, choice.stages_per_rank)
    if pipeline > 1:
        if spec.splits_backward:
            check_split_backward(spec.name, **choice.settings.per_block)
        if module is not None and not module.automatic_optimization:
            raise UnsupportedError(
                "Manual optimization calls backward inside of training_step, which a pipeline schedule cannot cut."
                " Use automatic optimization, or pipeline_parallel_size=1 (data and tensor parallelism work)."
            )
        by_frequency = (n for n, part in module.named_modules() if getattr(part, "scale_grad_by_freq", False))
        if module is not None and (name := next(by_frequency, None)) is not None:
            raise UnsupportedError(
                f"{name} has scale_grad_by_freq=True, which counts words in the whole batch, but a pipeline runs"
                " micro-batches. Leave it out, or use pipeline_parallel_size=1."
            )
        batch_norms = [n for n, part in module.named_modules() if isinstance(part, _BatchNorm)] if module else []
        if batch_norms:
            logger.warning(
                "%s (and %d more) takes statistics over each micro-batch, not over the whole batch: the run differs"
                " from one process. Use GroupNorm or LayerNorm, num_microbatches=1, or pipeline_parallel_size=1.",
                batch_norms[0],
                len(batch_norms) - 1,
            )
    if layout.world_size > 1 and getattr(precision, "scaler", None) is not None:
        raise UnsupportedError(
            'precision="16-mixed" needs one loss scale for all ranks, which is not supported; use "bf16-mixed" or'
            ' "32-true".'
        )
