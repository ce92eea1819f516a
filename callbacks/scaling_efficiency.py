"""Throughput, each sample counted once, and what the devices bring against a baseline."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from lightning_hybrid.archive import Archive, Entry, Fingerprint, detect_hardware, find_baseline
from lightning_hybrid.batches.microbatches import batch_size_of
from lightning_hybrid.batches.structure import leaves_of, open_node
from lightning_hybrid.callbacks.loggers import show
from lightning_hybrid.callbacks.measurement import Measurement
from lightning_hybrid.callbacks.utilization import Utilization
from lightning_hybrid.choosing.run_facts import known_fingerprint
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import Layout
from lightning_hybrid.measuring.recorder import RecordedStep
from lightning_hybrid.metrics.scaling import Reference, Scaling, compare
from lightning_hybrid.metrics.throughput import Throughput, count_once
from lightning_hybrid.report import chart_page
from lightning_hybrid.report.archive import points_of
from lightning_hybrid.report.charts import Point, devices_chart
from lightning_hybrid.report.groups import group_around, reference_of

__all__ = ["ScalingEfficiency"]

_log = logging.getLogger(__name__)

Baseline = float | Mapping[str, Any] | Reference | Entry | str | os.PathLike[str]


class ScalingEfficiency(Measurement):
    """Logs throughput and, given a baseline, scaling efficiency. Works under any strategy.

    Each sample counts once, however many ranks of a tensor or pipeline group work on it. Warm-up, validation,
    checkpointing and steps in which callbacks measure do not count. Values are over the steps since the last ones.

    ==========================================  ===============================================================
    key                                         value
    ==========================================  ===============================================================
    ``throughput/samples_per_s``                samples per second of the whole job
    ``throughput/samples_per_s_per_device``     the same by device
    ``throughput/tokens_per_s``                 tokens per second of the whole job, if batches have tokens
    ``throughput/tokens_per_s_per_device``      the same by device
    ``throughput/step_s``                       seconds of an optimizer step
    ``throughput/batch_size``                   samples in an optimizer step of the whole job
    ``throughput/mfu``                          model FLOPs utilization: share of the devices' peak, from 0 to 1
    ``throughput/tflops_per_device``            10^12 operations per second of the model itself, by device
    ``scaling/efficiency``                      ``speedup`` over the growth in devices; 1 is ideal
    ``scaling/speedup``                         throughput over the baseline's
    ``scaling/per_doubling``                    mean gain of each doubling of devices; 2 is ideal
    ``scaling/num_devices``                     devices of the job
    ==========================================  ===============================================================

    Where the baseline does not compare (another model, precision, device, or a batch that is equal neither by device,
    nor by data rank, nor in all) there are no ``scaling/*`` values but a warning with the reasons; whether it was weak
    or strong scaling is said once in the log and kept in :attr:`scaling`.

    With a baseline of an archive, this run is drawn at the end of training among those that compare, beside the line of
    ideal scaling: ``devices.png`` in the loggers' folder, ``scaling/devices`` in W&B (with hover as
    ``scaling/devices_chart``), TensorBoard and MLflow.

    Args:
        baseline: samples per second on one device; or the fields of a
            :class:`~lightning_hybrid.metrics.scaling.Reference` (``dict(num_devices=1, tokens_per_second=30.0,
            global_batch_size=16)``); or an archive entry; or the folder or URL of an archive, whose best run of the
            same model on one device is taken.
        tokens: how many tokens a batch has: a number for each sample, a function of the batch, or ``"auto"``: the size
            of its first integer tensor of two dimensions (``input_ids``, where there is that name).
        flops_per_sample: floating point operations that training on a sample needs; ``"auto"`` counts matrix products,
            convolutions and attention of the first batch's forward and takes three times as many. Nothing recomputed or
            computed twice counts (:mod:`lightning_hybrid.metrics.utilization`).
        peak_flops: FLOP/s of one device at the run's precision; ``"auto"`` takes its maker's data sheet. Where this or
            the operations are not known for certain, there is no MFU, and the reason is said once.
        every_n_steps: see :class:`~lightning_hybrid.callbacks.measurement.Measurement`.
        num_warmup_steps: likewise.
        prog_bar: likewise; the main figure is ``throughput/tokens_per_s``, or samples without tokens.
    """

    in_prog_bar = ("throughput/tokens_per_s", "throughput/samples_per_s")
    in_history = ("throughput/samples_per_s", "throughput/tokens_per_s", "scaling/efficiency")

    def __init__(
        self,
        baseline: Baseline | None = None,
        *,
        tokens: int | Callable[[Any], int] | str = "auto",
        flops_per_sample: float | str = "auto",
        peak_flops: float | str = "auto",
        every_n_steps: int | None = None,
        num_warmup_steps: int = 2,
        prog_bar: bool = False,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, num_warmup_steps=num_warmup_steps, prog_bar=prog_bar)
        if not callable(tokens) and tokens != "auto" and not (type(tokens) is int and tokens > 0):
            raise ConfigurationError(
                f'tokens={tokens!r} must be "auto", a positive number for each sample, or a function.'
            )
        for name, value in (("flops_per_sample", flops_per_sample), ("peak_flops", peak_flops)):
            if value != "auto" and (isinstance(value, str) or value <= 0):
                raise ConfigurationError(f'{name}={value!r} must be "auto" or a positive number.')
        self.baseline = baseline
        self._url = baseline if isinstance(baseline, (str, os.PathLike)) else None
        self.tokens = tokens
        self.flops_per_sample, self.peak_flops = flops_per_sample, peak_flops
        self._utilization = Utilization(flops_per_sample, peak_flops)
        self.throughput: Throughput | None = None
        """All that was counted so far in this run."""
        self.scaling: Scaling | None = None
        """The latest comparison, on global rank 0."""
        self._fingerprint: Fingerprint | None = None
        self._module: weakref.ref[LightningModule] | None = None
        self._pending: tuple[int, int] = (0, 0)
        self._windows: dict[bool, tuple[float, int, int, int]] = {}
        """Seconds, steps, samples and tokens since the last measurement, of ordinary steps and of others."""
        self._said = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._module is None or self._module() is not pl_module:  # once: it is whole only before it is cut
            known = next(pl_module.parameters(), None) is not None
            self._fingerprint = known_fingerprint(pl_module) if known else None
            self._module = weakref.ref(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.throughput, self.scaling, self._said = None, None, False
        self._pending, self._windows = (0, 0), {}
        if self._url is not None:
            self.baseline = self._url  # another run's may be another entry
        self._utilization = Utilization(self.flops_per_sample, self.peak_flops)
        if trainer.is_global_zero:
            self._utilization.start(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and self._utilization.is_open:
            samples = count_samples(batch)
            self._utilization.count(trainer, pl_module, samples, count_tokens(batch, samples, self.tokens))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        samples, tokens = self._pending
        here = count_samples(batch)
        self._pending = samples + here, tokens + count_tokens(batch, here, self.tokens)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_step(self, trainer: Trainer, step: RecordedStep) -> None:
        if step.index > self._first_step + self.num_warmup_steps:
            seconds, num_steps, samples, tokens = self._windows.get(step.ordinary, _EMPTY)
            more_samples, more_tokens = self._pending
            window = (seconds + step.seconds, num_steps + 1, samples + more_samples, tokens + more_tokens)
            self._windows[step.ordinary] = window
        self._pending = (0, 0)
        if self.is_due(trainer, step.index):
            with self.measuring(trainer, step):
                self._measure(trainer, any_steps=True)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measure(trainer, any_steps=False)
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero and self._folder is not None and isinstance(self.baseline, Entry):
            self._draw(trainer, self._folder, self.baseline)

    def _draw(self, trainer: Trainer, folder: Path, baseline: Entry) -> None:
        """Show this run among those of the archive that compare with the baseline."""
        from lightning_hybrid.report.figures import draw_devices

        if self.throughput is None or self.scaling is None or self.scaling.efficiency is None:
            return
        group = group_around(baseline, [] if self._url is None else Archive(self._url).list())
        points, first, _ = points_of(group)
        rate = self.throughput.tokens_per_second if group.by_tokens else self.throughput.samples_per_second
        if not rate:
            return
        tip = f"this run, {layout_of(trainer)}\n{rate:,.4g} {group.unit}"
        points.append(Point(num_devices=layout_of(trainer).world_size, value=rate, kind="this run", tip=tip))
        title = f"Throughput against devices, {baseline.model.model_class} on {baseline.hardware.kind}"
        points = [dataclasses.replace(point, link=None) for point in points]  # there is nothing to lead to
        first = dataclasses.replace(first, link=None)
        figure, chart = draw_devices(points, first, group.unit, title=title), devices_chart(points, first, group.unit)
        if figure is not None and chart is not None:
            now = self.recorder(trainer).num_steps
            show(trainer.loggers, folder, "scaling/devices", figure, chart_page(title, chart), now)

    def _measure(self, trainer: Trainer, *, any_steps: bool) -> None:
        """Add up what all ranks counted since the last time, and log it. A collective over the world.

        ``any_steps`` takes, where all steps since then were measured, these; what measuring took is no part of them.
        """
        window = self._windows.get(True) or (self._windows.get(False) if any_steps else None)
        if window is None:
            return
        self._windows = {}
        layout = layout_of(trainer)
        windows = gather(trainer, window)
        recent = Throughput(
            num_devices=layout.world_size,
            seconds=max(window[0] for window in windows),  # all ranks time the same steps
            num_steps=windows[0][1],
            samples=count_once([window[2] for window in windows], layout),
            tokens=count_once([window[3] for window in windows], layout) or None,
        )
        self.throughput = recent if self.throughput is None else self.throughput + recent
        values = throughput_values(recent) | self._utilization.values(recent)
        if self.baseline is not None and trainer.is_global_zero:
            values |= self._compare(trainer, recent, layout)
        self.publish(trainer, values)

    def _compare(self, trainer: Trainer, recent: Throughput, layout: Layout) -> dict[str, float]:
        run = Reference(
            num_devices=layout.world_size,
            samples_per_second=recent.samples_per_second,
            tokens_per_second=recent.tokens_per_second,
            global_batch_size=recent.batch_size,
            num_data_ranks=layout.data_parallel_size,
            model=None if self._fingerprint is None else self._fingerprint.hash,
            precision=str(trainer.precision),
            hardware=_hardware(trainer, layout).kind,
        )
        reference = self._reference(trainer, layout)
        if reference is None:
            return {}
        self.scaling = compare(run, reference)
        self._say(self.scaling, reference)
        return scaling_values(self.scaling, layout.world_size)

    def _reference(self, trainer: Trainer, layout: Layout) -> Reference | None:
        baseline = self.baseline
        if isinstance(baseline, (str, os.PathLike)):
            baseline = self._from_archive(trainer, layout, baseline)
            self.baseline = baseline  # looked up once
        return None if baseline is None else as_reference(baseline)

    def _from_archive(self, trainer: Trainer, layout: Layout, url: str | os.PathLike[str]) -> Entry | None:
        entry = None
        if self._fingerprint is not None:
            hardware = _hardware(trainer, layout)
            entry = find_baseline(Archive(url).known(), self._fingerprint, hardware, precision=str(trainer.precision))
        if entry is None:
            _log.warning(
                "The archive %s has no run of this model on one device of this kind, so there is no scaling efficiency."
                " Run the same script once with devices=1 and ConfigArchive.",
                url,
            )
        return entry

    def _say(self, scaling: Scaling, reference: Reference) -> None:
        if self._said:
            return
        self._said = True
        if scaling.efficiency is None:
            _log.warning("No scaling efficiency: the baseline does not compare (%s).", "; ".join(scaling.reasons))
        else:
            _log.info(
                "Scaling efficiency is %s scaling against %d device(s)%s.",
                scaling.kind,
                reference.num_devices,
                "".join(f"; {reason}" for reason in scaling.reasons),
            )


#: Seconds, steps, samples, tokens.
_EMPTY = (0.0, 0, 0, 0)


def as_reference(baseline: float | Mapping[str, Any] | Reference | Entry) -> Reference:
    """Return what a baseline says, whatever its form.

    Raises:
        ConfigurationError: if a mapping has fields that a Reference has not.
    """
    if isinstance(baseline, Reference):
        return baseline
    if isinstance(baseline, Entry):
        return reference_of(baseline)
    if isinstance(baseline, Mapping):
        try:
            return Reference(**{"num_devices": 1, **baseline})
        except TypeError as error:
            names = ", ".join(Reference.__dataclass_fields__)
            raise ConfigurationError(f"baseline={dict(baseline)!r}: {error}; its fields are {names}.") from error
    return Reference(num_devices=1, samples_per_second=float(baseline))


def layout_of(trainer: Trainer) -> Layout:
    """Return the degrees of a run; under other strategies than ours every rank is a data rank."""
    layout = getattr(trainer.strategy, "layout", None)
    return layout if isinstance(layout, Layout) else Layout(data_parallel_size=trainer.world_size)


def gather(trainer: Trainer, value: Any) -> list[Any]:
    """Gather an object from all ranks."""
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(values, value)
    return values


def count_samples(batch: Any) -> int:
    """Return a batch's samples, as a pipeline would cut it; of a packed one its sequences, of no batch 0.

    A batch that does not show them (an object of a class of its own) counts as one sample, which is said once.
    """
    if batch is None:  # a loader may leave a batch out
        return 0
    leaves = (leaf for leaf in leaves_of(batch) if isinstance(leaf, (PackedSequence, Tensor)))
    first = next((leaf for leaf in leaves if isinstance(leaf, PackedSequence) or leaf.ndim), None)
    if isinstance(first, PackedSequence):
        return int(first.batch_sizes[0])
    try:
        return first.size(0) if isinstance(first, Tensor) and first.is_nested else batch_size_of(batch)
    except ConfigurationError:
        num_texts = _count_texts(batch)
    if not num_texts:
        rank_zero_warn(
            f"lightning_hybrid: a batch ({type(batch).__name__}) has no tensor that shows how many samples it holds, so"
            " it counts as one. Make it a dict, a list, a tuple or a dataclass of tensors."
        )
    return num_texts or 1


def _count_texts(node: Any) -> int:
    """Return the length of the first list of strings; 0 if there is none."""
    if isinstance(node, (list, tuple)) and node and all(isinstance(entry, str) for entry in node):
        return len(node)
    opened = open_node(node)
    return 0 if opened is None else next(filter(None, map(_count_texts, opened[1])), 0)


def count_tokens(batch: Any, num_samples: int, tokens: int | Callable[[Any], int] | str) -> int:
    """Return the tokens of a batch; 0 if it has none."""
    if isinstance(tokens, int):
        return tokens * num_samples
    if callable(tokens):
        return int(tokens(batch))
    first = [batch["input_ids"]] if isinstance(batch, Mapping) and "input_ids" in batch else []
    integers = (torch.uint8, torch.int16, torch.int32, torch.int64)
    found = (x for x in [*first, *leaves_of(batch)] if isinstance(x, Tensor) and x.ndim == 2 and x.dtype in integers)
    return next((tensor.numel() for tensor in found), 0)


def throughput_values(throughput: Throughput) -> dict[str, float]:
    """Return the ``throughput/*`` values."""
    rates = {"samples_per_s": throughput.samples_per_second, "tokens_per_s": throughput.tokens_per_second}
    values = {"throughput/step_s": throughput.step_seconds, "throughput/batch_size": throughput.batch_size}
    for name, rate in rates.items():
        if rate is not None:
            values[f"throughput/{name}"] = rate
            values[f"throughput/{name}_per_device"] = rate / throughput.num_devices
    return values


def scaling_values(scaling: Scaling, num_devices: int) -> dict[str, float]:
    """Return the ``scaling/*`` values; none if the baseline does not compare."""
    values = {
        "scaling/efficiency": scaling.efficiency,
        "scaling/speedup": scaling.speedup,
        "scaling/per_doubling": scaling.per_doubling,
        "scaling/num_devices": None if scaling.efficiency is None else float(num_devices),
    }
    return {name: value for name, value in values.items() if value is not None}


def _hardware(trainer: Trainer, layout: Layout) -> Any:
    return detect_hardware(trainer.strategy.root_device.type, num_devices=layout.world_size)
