"""Degrees, schedule and micro-batches of one run: given, read from a file, measured by earlier runs, or left over."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from lightning_hybrid.archive import Planned
from lightning_hybrid.building.alike import check_same_settings
from lightning_hybrid.building.per_block import can_split_backward
from lightning_hybrid.choosing.choose import ArchiveChoice, archived_schedule, check_counts, choose_stages_per_rank
from lightning_hybrid.choosing.plan import PlanChoice
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import Coordinate, Layout, resolve_layout
from lightning_hybrid.pipeline.schedule import ScheduleSpec, Table, find_schedule
from lightning_hybrid.settings import Settings, with_options

__all__ = ["RunChoice"]


class RunChoice:
    """What this run is set to. Complete once the processes run, the same on all of them."""

    layout: Layout | None = None
    """The degrees, once they are known."""
    started_from: str | None = None
    """Id of the archive entry that something was taken from."""
    source: str = ""
    """Who chose the degrees, if nobody gave them: ``"archive entry ..."``, ``"planner"``, ``"simple rule"``, ..."""
    tuned: PlanChoice | None = None
    """What trials have shown to be fastest."""
    tuned_failures: frozenset[Layout] | set[Layout] = frozenset()
    """Degrees that failed in trials."""
    planned: Planned | None = None
    """What the planner predicted, where it chose the degrees."""

    def __init__(
        self,
        settings: Settings,
        degrees: dict[str, Any],
        num_microbatches: Any,
        schedule: str | os.PathLike[str],
        stages_per_rank: Any,
    ) -> None:
        """Take what the user gave; ``"auto"`` leaves a choice."""
        check_counts({**degrees, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank})
        self.settings, self.degrees, self.num_microbatches = settings, dict(degrees), num_microbatches
        if settings.whole_batch_loss and schedule == "auto":
            schedule = "GPipe"
        self.chooses_schedule = schedule == "auto"
        self.spec = find_schedule("1F1B" if schedule == "auto" else schedule)
        self.stages_per_rank = choose_stages_per_rank(self.spec, stages_per_rank)
        if self.spec.sizes is not None and degrees["pipeline_parallel_size"] == "auto":
            self.degrees["pipeline_parallel_size"] = self.spec.sizes.num_ranks
        if settings.whole_batch_loss and not self.spec.forwards_first:
            raise ConfigurationError(
                f'whole_batch_loss=True needs all forwards before the first backward, but schedule="{self.spec.name}"'
                ' mixes them; use schedule="GPipe" or "LoopedBFS".'
            )

    @property
    def is_open(self) -> bool:
        """Whether the archive may choose the degrees: none was given."""
        given = [name for name, value in self.degrees.items() if value != "auto" and name != "replicate_size"]
        return not given and self.layout is None and self.settings.replica_sync.is_every_step

    @property
    def splits_backward(self) -> bool:
        """Whether a schedule may run the gradients of inputs and of weights apart."""
        return can_split_backward(**self.settings.per_block)

    def resolve(self, num_devices: int) -> Layout:
        """Return the degrees for so many devices."""
        return self.layout or resolve_layout(num_devices, **self.degrees)

    def share(self, strategy: Any) -> None:
        """Have all ranks run the table that global rank 0 read from its file; all else must be equal. A collective."""
        check_same_settings(strategy)
        if self.spec.sizes is not None:
            table = self.spec, self.stages_per_rank, self.degrees
            self.spec, self.stages_per_rank, self.degrees = strategy.broadcast(table)

    def take_entry(self, choice: ArchiveChoice) -> None:
        """Start from an archive entry: its degrees, and what else nobody gave."""
        self.layout, self.started_from = choice.layout, choice.entry_id
        self.source = f"archive entry {choice.entry_id}"
        self.settings = with_options(self.settings, choice.settings["options"])
        if choice.layout.pipeline_parallel_size == 1:
            return
        num_microbatches = choice.settings["num_microbatches"]
        if self.chooses_schedule and self.num_microbatches in ("auto", num_microbatches):
            spec, per_rank = archived_schedule(choice.settings)
            if self.splits_backward or not spec.splits_backward:
                self.spec, self.stages_per_rank, self.chooses_schedule = spec, per_rank, False
        if self.num_microbatches == "auto":
            self.num_microbatches = num_microbatches

    def take_plan(self, plan: PlanChoice) -> None:
        """Run what was planned: the degrees, and what saves memory where nobody said anything of it."""
        self.layout, self.planned = plan.layout, plan.planned
        self.source = plan.source
        changed: dict[str, Any] = {}
        if plan.reshard is not None and self.settings.reshard_after_forward is None:
            changed["reshard_after_forward"] = plan.reshard
        if plan.recompute != "none" and self.settings.activation_checkpointing == "none":
            changed["activation_checkpointing"] = plan.recompute
        self.settings = replace(self.settings, **changed)

    def take_schedule(self, spec: ScheduleSpec, stages_per_rank: int, entry_id: str | None) -> None:
        """Run this schedule, which an archive entry may have measured; called before anything is cut."""
        self.spec, self.stages_per_rank = spec, stages_per_rank
        self.started_from = self.started_from or entry_id

    # ---- the schedule, at these degrees -----------------------------------------------------------------------------

    def num_stages(self, layout: Layout) -> int:
        """Number of pipeline stages, virtual ones included."""
        pipeline = layout.pipeline_parallel_size
        return self.spec.num_stages(pipeline, self.stages_per_rank) if pipeline > 1 else 1

    def schedule_rank(self, layout: Layout, coordinate: Coordinate) -> int:
        """A rank's place in the schedule. Global rank 0 has the last stage, where the loss and the logging are."""
        return self.spec.rank_at(coordinate.pipeline, layout.pipeline_parallel_size, self.stages_per_rank)

    def table(self, layout: Layout, num_microbatches: int) -> Table:
        """The order of actions of every schedule rank."""
        return self.spec.table(layout.pipeline_parallel_size, num_microbatches, self.stages_per_rank)
