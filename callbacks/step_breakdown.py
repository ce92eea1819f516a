"""Where each step goes: compute, exposed communication by axis, bubble and the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_hybrid.callbacks.adviser import Adviser
from lightning_hybrid.callbacks.loggers import show
from lightning_hybrid.callbacks.measurement import Measurement, has_marks
from lightning_hybrid.callbacks.step_trace import write_trace
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import Layout
from lightning_hybrid.measuring.recorder import RecordedStep, gather_timelines
from lightning_hybrid.measuring.sampling import StepSample
from lightning_hybrid.metrics.advice import Figures, links_of
from lightning_hybrid.metrics.breakdown import (
    PARTS,
    Breakdown,
    Span,
    break_down,
    mean,
    message_seconds,
    overlap,
    spans_of_marks,
)
from lightning_hybrid.pipeline.timeline import Timeline
from lightning_hybrid.report import chart_page
from lightning_hybrid.report.charts import area_chart

__all__ = ["StepBreakdown"]

#: Parts inside of which communication may hide from the marks.
_OPAQUE = ("compute", "optimizer", "communication_data_shard")
_WORST = ("compute", "communication", "bubble", "data_wait")


class StepBreakdown(Measurement):
    """Logs how the time of an optimizer step is spent, for the whole job.

    A step lasts from one optimizer step's end to the next; warm-up, validation and checkpointing do not count. The
    parts add up to it exactly. ``PART`` is one of

    - ``compute``;
    - ``optimizer``;
    - ``communication_tensor``, ``communication_data_shard``, ``communication_data_replicate``,
      ``communication_pipeline``, ``communication_world`` (the global norm), ``communication_unknown``: exposed, that
      is, not covered by computation;
    - ``data_wait``: for the dataloader;
    - ``bubble``: the rank waits because another stage has not computed yet;
    - ``other``: Lightning, Python, other callbacks.

    =============================  =====================================================================
    key                            value
    =============================  =====================================================================
    ``step/time_s``                seconds of a step, mean over ranks
    ``step/PART_s``                seconds in that part, mean over ranks
    ``step/communication_s``       all ``communication_*`` together
    ``step_share/PART``            ``step/PART_s`` / ``step/time_s``
    ``step_worst/PART_s``          most seconds of any rank (compute, communication, bubble, data_wait)
    ``step_worst/PART_rank``       that rank
    =============================  =====================================================================

    At the end of training their course over the run is drawn as ``breakdown.png`` in the loggers' folder, and shown as
    ``step/breakdown`` in W&B (with hover as ``step/breakdown_chart``), TensorBoard and MLflow.

    The times are the mean over the latest ordinary steps (at most 8), taken from marks that the strategy makes at every
    step. What marks cannot see, collectives inside of an action, is measured on one step under torch's profiler, as a
    share of the action, and moved from ``compute`` (or ``optimizer``) to its axis in that proportion. The profiled step
    itself and the one after it (rank 0 writes logs) enter no mean.

    Cost, measured on CPU: 0.1 ms at an ordinary step; at a measurement one exchange of marks in the pipeline and one
    small exchange in the world, a few ms; at a profiled one 15 microseconds for each operator of the step besides.

    When the figures call for it, global rank 0 says once what practitioners would change
    (:mod:`lightning_hybrid.metrics.advice`): communication above 30 % of the step, fewer micro-batches than twice the
    stages, a slow rank, stage or link by name, waiting for data above 10 %.

    Args:
        every_n_steps: see :class:`~lightning_hybrid.callbacks.measurement.Measurement`.
        num_warmup_steps: likewise.
        prog_bar: likewise; the main figure is ``step/time_s``.
        profile_every: measurements from one that profiles to the next; between them the latest shares hold. 0 never
            profiles: collectives inside of actions then count as ``compute``.

        advice: whether to give advice.
        trace: file to which each profiled step is written (the newest stays), for https://ui.perfetto.dev or
            ``chrome://tracing``; ``.json``, or ``.json.gz``. One process for each rank, with its actions and waits, its
            exposed communication and, for the ranks of the first data rank, its longest 4,000 operators.

    Raises:
        ConfigurationError: if a number is negative, or a trace is asked for and no step profiled.
    """

    in_prog_bar = ("step/time_s",)
    in_history = ("step/",)

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        num_warmup_steps: int = 2,
        prog_bar: bool = False,
        profile_every: int = 10,
        advice: bool = True,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, num_warmup_steps=num_warmup_steps, prog_bar=prog_bar)
        if type(profile_every) is not int or profile_every < 0:
            raise ConfigurationError(
                f"profile_every={profile_every!r} must be an integer of at least 0, which never profiles."
            )
        if trace is not None and not profile_every:
            raise ConfigurationError(f"trace={os.fspath(trace)!r} is of a profiled step; give profile_every 1 or more.")
        self.profile_every, self.advice, self.trace = profile_every, advice, trace
        self.adviser = Adviser()
        """Has all the advice that was given, on global rank 0."""
        self.breakdowns: list[Breakdown] = []
        """The latest measurement by global rank, on every rank."""
        self._sample: StepSample | None = None
        self._shares: dict[str, dict[str, float]] = {}
        self._num_measured = 0
        self._said_unsampled = False

    @override
    def is_active(self, trainer: Trainer) -> bool:
        return has_marks(trainer, self)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._shares, self._num_measured, self.adviser, self.breakdowns = {}, 0, Adviser(), []

    @override
    def on_step(self, trainer: Trainer, step: RecordedStep) -> None:
        if self.is_due(trainer, step.index):
            with self.measuring(trainer, step):
                sample, self._sample = self._sample, None
                exposed = None if sample is None else sample.stop()
                self._measure(trainer, step, exposed)
                if sample is not None and self.trace is not None:  # on all ranks: they write it together
                    write_trace(self.trace, trainer.strategy, step, exposed or [], sample.events)
        if self.is_due(trainer, step.index + 1) and self.profile_every and not self._num_measured % self.profile_every:
            with self.recorder(trainer).measuring():
                strategy: Any = trainer.strategy
                self._sample = StepSample(strategy.root_device, sampled_axes(strategy.layout))
                if not self._sample.start():
                    self._say_unsampled()

    def _say_unsampled(self) -> None:
        if not self._said_unsampled:
            self._said_unsampled = True
            rank_zero_warn(
                "StepBreakdown cannot profile a step, because another profiler runs (the Trainer's own?): collectives"
                " inside of actions, such as tensor parallelism's, count as compute, or as they were measured before."
            )

    def _measure(self, trainer: Trainer, step: RecordedStep, exposed: list[Span] | None) -> None:
        """Log the breakdown of the latest steps. ``exposed`` is what the profiler saw in ``step``, if it looked."""
        strategy: Any = trainer.strategy
        steps = self.ordinary_steps(trainer) or [step]
        *timelines, profiled = gather_timelines(strategy, [*steps, step])
        reduce_part = reduce_part_of(strategy.layout)
        spans = [_spans(s, runs, strategy.schedule_rank, reduce_part) for s, runs in zip(steps, timelines, strict=True)]
        own = mean(
            [break_down(p, start=s.start, end=s.end, exclude=s.excluded) for s, p in zip(steps, spans, strict=True)]
        )
        if exposed is not None:
            self._shares = exposed_shares(_spans(step, profiled, strategy.schedule_rank, reduce_part), exposed)
        for part in _OPAQUE:
            own = own.move(part, self._shares.get(part, {}))
        messages = _messages([run for runs in timelines for run in runs], strategy.schedule_rank, len(steps))
        everyone = strategy.all_gather_object((dict(own.seconds), strategy.schedule_rank, messages))
        self.breakdowns = [Breakdown(seconds=seconds) for seconds, *_ in everyone]
        self._measured, self._num_measured = step.index, self._num_measured + 1
        self.publish(trainer, summarize(self.breakdowns))
        if self.advice and trainer.is_global_zero:
            self._advise(strategy, everyone)

    def _advise(self, strategy: Any, everyone: Sequence[tuple[Any, int, dict[int, float]]]) -> None:
        layout: Layout = strategy.layout
        at = [layout.coordinate(rank) for rank in range(layout.world_size)]
        global_rank = {(at[r].data, at[r].tensor, everyone[r][1]): r for r in range(layout.world_size)}
        messages = [
            {(global_rank[at[r].data, at[r].tensor, sender], r): seconds for sender, seconds in waits.items()}
            for r, (_, _, waits) in enumerate(everyone)
        ]
        self.adviser.consider(
            Figures(
                layout=layout,
                breakdowns=self.breakdowns,
                num_microbatches=strategy.num_microbatches,
                share_cores=strategy.root_device.type == "cpu" and layout.world_size > (os.cpu_count() or 1),
                links=links_of(layout, self.breakdowns, messages),
            )
        )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._cancel()
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero and self._folder is not None:
            self._draw(trainer, self._folder)

    def _draw(self, trainer: Trainer, folder: Path) -> None:
        from lightning_hybrid.report.figures import draw_breakdown

        title = "Where a step goes"
        figure, chart = draw_breakdown(self.history.rows, title=title), area_chart(self.history.rows)
        if figure is not None and chart is not None:
            now = self.recorder(trainer).num_steps
            show(trainer.loggers, folder, "step/breakdown", figure, chart_page(title, chart), now)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._cancel()
        super().on_exception(trainer, pl_module, exception)

    def _cancel(self) -> None:
        if self._sample is not None:
            self._sample.cancel()
            self._sample = None


def _spans(step: RecordedStep, runs: Sequence[Timeline], rank: int, reduce_part: str) -> list[Span]:
    """Return all that is known of one rank's step."""
    spans = [Span("data_wait", *wait) for wait in step.data_waits]
    for timeline in runs:
        spans += spans_of_marks(timeline[rank], pipeline=timeline.values(), reduce_part=reduce_part)
    return spans


def _messages(runs: Sequence[Timeline], rank: int, num_steps: int) -> dict[int, float]:
    """Return the seconds a step that a schedule rank waited for messages on their way, by sender."""
    seconds: dict[int, float] = {}
    for timeline in runs:
        for sender, more in message_seconds(timeline, rank).items():
            seconds[sender] = seconds.get(sender, 0.0) + more / num_steps
    return seconds


def exposed_shares(spans: Sequence[Span], exposed: Sequence[Span]) -> dict[str, dict[str, float]]:
    """Return, for each part that may hide communication, which share of it was exposed communication of which part."""
    shares: dict[str, dict[str, float]] = {}
    for part in _OPAQUE:
        windows = [span for span in spans if span.part == part]
        total = sum(span.end - span.start for span in windows)
        if total:
            shares[part] = {other: seconds / total for other, seconds in overlap(exposed, windows).items()}
    if "communication_unknown" in (optimizer := shares.get("optimizer", {})):
        optimizer["communication_world"] = optimizer.pop("communication_unknown")  # the global norm, over all ranks
    return shares


def reduce_part_of(layout: Layout) -> str:
    """Return over which axis a pipeline reduces gradients; without data ranks only tied weights', between stages."""
    if layout.shard_size > 1:
        return "communication_data_shard"
    return "communication_data_replicate" if layout.data_parallel_size > 1 else "communication_pipeline"


def sampled_axes(layout: Layout) -> list[str]:
    """Return the axes of more than one rank whose collectives run inside of actions."""
    sizes = {
        "tensor": layout.tensor_parallel_size,
        "data_shard": layout.shard_size,
        "data_replicate": layout.replicate_size,
    }
    return [axis for axis, size in sizes.items() if size > 1]


def summarize(breakdowns: Sequence[Breakdown]) -> dict[str, float]:
    """Return the values to log from the breakdowns of all ranks."""
    job = mean(breakdowns)
    values = {"step/time_s": job.step, "step/communication_s": job.communication}
    values |= {f"step/{part}_s": job.seconds[part] for part in PARTS}
    values |= {f"step_share/{part}": share for part, share in job.shares.items()}
    for part in _WORST:
        seconds = [_seconds(breakdown, part) for breakdown in breakdowns]
        rank = max(range(len(seconds)), key=seconds.__getitem__)
        values |= {f"step_worst/{part}_s": seconds[rank], f"step_worst/{part}_rank": float(rank)}
    return values


def _seconds(breakdown: Breakdown, part: str) -> float:
    seconds: Mapping[str, float] = breakdown.seconds
    return breakdown.communication if part == "communication" else seconds[part]
