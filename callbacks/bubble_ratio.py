"""The pipeline's bubble as measured, beside the schedule's own, and a picture of the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_hybrid.callbacks.loggers import show
from lightning_hybrid.callbacks.measurement import Measurement, has_marks
from lightning_hybrid.measuring.recorder import RecordedStep, gather_timelines
from lightning_hybrid.metrics.bubble import Bubble, measure_bubble
from lightning_hybrid.pipeline.timeline import COMPUTE, Timeline, ideal_of, table_of
from lightning_hybrid.report import timeline_page

__all__ = ["BubbleRatio"]


class BubbleRatio(Measurement):
    """Logs which share of a step the pipeline's ranks stand idle, and why.

    Between the first and the last action of a step over all stages, the bubble is the share of ``ranks x time`` in
    which no action runs; the mean over all pipelines (data and tensor ranks) and the latest ordinary steps counts.

    ==========================  ==============================================================================
    key                         value
    ==========================  ==============================================================================
    ``bubble/measured``         idle share as measured = ``schedule`` + ``imbalance`` + ``overhead``
    ``bubble/ideal``            idle share of the same schedule at the same action times, without delays
    ``bubble/schedule``         idle share of the schedule with equally fast stages: its own price
    ``bubble/imbalance``        ``ideal`` - ``schedule``: what unequal stages add
    ``bubble/overhead``         ``measured`` - ``ideal``: messages, jitter, the runtime between actions
    ``bubble/worst``            ``measured`` of the worst pipeline
    ``bubble/slowest_stage``    stage with the most work for a micro-batch
    ``bubble/slowest_rank``     global rank that runs it (the lowest of several data and tensor ranks)
    ``bubble/slowdown``         its work over the mean of all stages; 1 when balanced
    ==========================  ==============================================================================

    A picture of one measured step above its ideal is written as ``timeline.png`` below the log directory at the first
    measurement and anew at the end of training, and shown as ``bubble/timeline`` in W&B, TensorBoard and MLflow; W&B
    also has it with hover, as ``bubble/timeline_chart``.

    With ``pipeline_parallel_size=1`` there is no pipeline to stand idle: measured and ideal are logged as 0, and there
    is no picture.

    Args:
        every_n_steps: see :class:`~lightning_hybrid.callbacks.measurement.Measurement`.
        num_warmup_steps: likewise.
        prog_bar: likewise; the main figure is ``bubble/measured``.
        picture: whether to draw.
    """

    in_prog_bar = ("bubble/measured",)
    in_history = ("bubble/measured", "bubble/ideal")

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        num_warmup_steps: int = 2,
        prog_bar: bool = False,
        picture: bool = True,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, num_warmup_steps=num_warmup_steps, prog_bar=prog_bar)
        self.picture = picture
        self.picture_path: Path | None = None
        """Where the picture lies, on global rank 0."""
        self.timeline: Timeline | None = None
        """The marks of rank 0's pipeline in the latest measured step, on global rank 0; ``None`` before that."""
        self._timeline_step = 0

    @override
    def is_active(self, trainer: Trainer) -> bool:
        return has_marks(trainer, self)

    @override
    def on_step(self, trainer: Trainer, step: RecordedStep) -> None:
        if self.is_due(trainer, step.index):
            with self.measuring(trainer, step):
                self._measure(trainer, step)

    def _measure(self, trainer: Trainer, step: RecordedStep) -> None:
        strategy: Any = trainer.strategy
        if strategy.layout.pipeline_parallel_size == 1:
            self.publish(trainer, {"bubble/measured": 0.0, "bubble/ideal": 0.0})
            return
        steps = self.ordinary_steps(trainer) or [step]
        timelines = [timeline for runs in gather_timelines(strategy, steps) for timeline in runs]
        bubbles = [measure_bubble(timeline, table_of(timeline)) for timeline in timelines]
        own_stages = {mark.stage for mark in timelines[-1][strategy.schedule_rank] if mark.kind in COMPUTE}
        everyone: list[tuple[list[Bubble], set[int]]] = strategy.all_gather_object((bubbles, own_stages))
        self._measured = step.index
        self.publish(trainer, summarize([found for found, _ in everyone], [stages for _, stages in everyone]))
        if trainer.is_global_zero:
            first = self.timeline is None
            self.timeline, self._timeline_step = timelines[-1], steps[-1].index
            if first and self.picture:
                self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        from lightning_hybrid.pipeline.picture import draw_timeline  # matplotlib takes a second to import

        assert self.timeline is not None
        strategy: Any = trainer.strategy
        title = f"{strategy.schedule}, {strategy.layout}, step {self._timeline_step}"
        ideal = ideal_of(self.timeline)
        figure, page = draw_timeline(self.timeline, ideal, title=title), timeline_page(title, self.timeline, ideal)
        folder = self._folder or Path(trainer.default_root_dir)
        now = self.recorder(trainer).num_steps
        self.picture_path = show(trainer.loggers, folder, "bubble/timeline", figure, page, now)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.timeline = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self.timeline is not None and self.picture and trainer.is_global_zero:
            self._draw(trainer)


def summarize(pipelines: list[list[Bubble]], stages: list[set[int]]) -> dict[str, float]:
    """Return the values to log from the bubbles that each rank saw, step by step, and the stages that it runs."""
    bubbles = [bubble for rank in pipelines for bubble in rank]

    def mean(name: str) -> float:
        values: list[float] = [getattr(bubble, name) for bubble in bubbles]
        return sum(values) / len(values)

    names = ("measured", "ideal", "schedule", "imbalance", "overhead", "slowdown")
    values = {f"bubble/{name}": mean(name) for name in names}
    slowest = [bubble.slowest_stage for bubble in bubbles]
    values["bubble/worst"] = max(sum(b.measured for b in rank) / len(rank) for rank in pipelines)
    stage = max(set(slowest), key=slowest.count)
    rank = next(rank for rank, own in enumerate(stages) if stage in own)
    return values | {"bubble/slowest_stage": float(stage), "bubble/slowest_rank": float(rank)}
