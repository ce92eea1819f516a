"""Leaves an entry of the run in the archive of configurations."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import weakref
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from lightning_hybrid.archive import Archive, Entry, Fingerprint, fingerprint_module
from lightning_hybrid.archive.entry import new_id, now
from lightning_hybrid.archive.surroundings import redact
from lightning_hybrid.callbacks.adviser import Adviser
from lightning_hybrid.callbacks.measurement import Measurement
from lightning_hybrid.callbacks.run_entry import (
    build_batch,
    build_entry,
    estimated_memory,
    judge,
    latest_values,
    rates,
)
from lightning_hybrid.callbacks.scaling_efficiency import count_samples, count_tokens, gather, layout_of
from lightning_hybrid.choosing.run_facts import known_fingerprint
from lightning_hybrid.errors import ArchiveError
from lightning_hybrid.failures.failure import Failure, PeerFailedError, is_consequence
from lightning_hybrid.measuring.recorder import RecordedStep
from lightning_hybrid.metrics.advice import BatchAndRate, Figures
from lightning_hybrid.metrics.throughput import Throughput, count_once

__all__ = ["ConfigArchive"]

_log = logging.getLogger(__name__)


class ConfigArchive(Measurement):
    """Writes one entry per ``fit`` into the archive, from which ``strategy="hybrid3d"`` without degrees starts.

    Works under any strategy; a run on one device leaves the baseline for scaling efficiency. Only global rank 0 writes,
    and the document is always whole (see :mod:`lightning_hybrid.archive.store`). When:

    ====================================  ===========================================================================
    when                                  ``result.status``
    ====================================  ===========================================================================
    before the model is set up            ``"running"``: degrees, model, hardware, software
    at the start, at intervals            ``"running"``: with batch, learning rate, throughput so far
    when ``fit`` has ended                ``"ok"``: with what the other callbacks measured last
    on Ctrl-C, SIGTERM, a rank's kill     ``"interrupted"``
    on an exception on any rank           ``"oom"``, ``"failed"``, or ``"error"`` for one of the module's own code, the
                                          data or a disk, which is not put down to the degrees; with the first lines of
                                          its message. Here the rank on which it happened writes, as rank 0 may be
                                          killed without hearing of it
    ====================================  ===========================================================================

    For a process that is killed, global rank 0 writes (or the next one, if it is rank 0 that is killed). If all are
    killed at once, nobody does: such an entry stays ``"running"``, and is not started from. What the entry
    says of the step, the bubble and the scaling are the ``latest`` values of :class:`StepBreakdown`,
    :class:`BubbleRatio` and :class:`ScalingEfficiency`, where the Trainer has them. ``first_loss`` and ``last_loss``
    are those of global rank 0's batches.

    A W&B logger gets the entry's id as ``archive_entry`` in the run's config and summary, and, when ``fit`` has ended,
    the entry itself as an artifact of type ``"archive-entry"``.

    A global batch that differs from that of the entry the run started from (else of the newest good run of the same
    model), with the learning rate unchanged, is said once, with the usual ways to change both.

    An archive that cannot be written costs one warning, and training goes on. ``fast_dev_run`` leaves no entry.

    Args:
        url: the archive: a folder or any fsspec URL.
        every_n_steps: optimizer steps between writes; 0 writes at the start and the end only.
        num_warmup_steps: first optimizer steps that the throughput leaves out.

    Raises:
        ArchiveError: if fsspec does not know the URL's protocol.
    """

    def __init__(
        self, url: str | os.PathLike[str] = "archive", *, every_n_steps: int = 100, num_warmup_steps: int = 2
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, num_warmup_steps=num_warmup_steps)
        self.archive = Archive(url)
        self.entry: Entry | None = None
        """The entry as it was last written, on global rank 0; with its id on all ranks."""
        self._fingerprint: Fingerprint | None = None
        self._module: weakref.ref[LightningModule] | None = None
        self._first_batch: tuple[int, int] | None = None
        self._pending = (0, 0)
        self._counts = (0.0, 0, 0, 0)
        self._losses: tuple[tuple[Any, int] | None, tuple[Any, int] | None] = (None, None)
        """The first and the latest loss, each with the batches that it was divided by."""
        self._memory: dict[str, float] | None = None
        self._warned = False
        self._adviser: Adviser | None = None

    @property
    def path(self) -> str | None:
        """Where the entry of this run is, without the protocol of the URL; ``None`` before there is one."""
        return None if self.entry is None else self.archive.file_of(self.entry.id)

    # ---- when ----------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.entry = None
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self._fingerprint is None or self._module is None or self._module() is not pl_module:
            # Once for each module: it is whole only before its first strategy has cut it.
            self._fingerprint, self._module = known_fingerprint(pl_module), weakref.ref(pl_module)
        self._first_batch, self._losses = None, (None, None)
        self._pending, self._counts = (0, 0), (0.0, 0, 0, 0)
        self._memory, self._adviser = None, None
        time = now()
        entry_id = trainer.strategy.broadcast(new_id(self._fingerprint, time))
        self.entry = build_entry(trainer, self._fingerprint, entry_id, time)
        self._write(trainer)
        if (watch := getattr(trainer.strategy, "watch", None)) is not None:
            watch.last_wishes.append(partial(self._write_failure, trainer))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.entry is None:
            return
        assert self._fingerprint is not None
        if not self._fingerprint.num_parameters and layout_of(trainer).pipeline_parallel_size == 1:
            self._fingerprint = fingerprint_module(pl_module)  # it was built in configure_model
        # The strategy has decided the rest of its settings, and the optimizers exist, only now.
        self.entry = build_entry(trainer, self._fingerprint, self.entry.id, self.entry.time)
        self._write(trainer)
        for run in wandb_runs(trainer):
            run.config.update({"archive_entry": self.entry.id}, allow_val_change=True)
            run.summary["archive_entry"] = self.entry.id

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        samples = count_samples(batch)
        tokens = count_tokens(batch, samples, "auto")
        self._first_batch = self._first_batch or (samples, tokens)
        self._pending = self._pending[0] + samples, self._pending[1] + tokens
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:  # tensors are kept as they are: to read them here would wait for the device
            latest = loss, trainer.accumulate_grad_batches  # Lightning has divided by it, and a callback may change it
            self._losses = (self._losses[0] or latest, latest)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_step(self, trainer: Trainer, step: RecordedStep) -> None:
        if step.ordinary and step.index > self._first_step + self.num_warmup_steps:
            seconds, num_steps, samples, tokens = self._counts
            more_samples, more_tokens = self._pending
            self._counts = (seconds + step.seconds, num_steps + 1, samples + more_samples, tokens + more_tokens)
        self._pending = (0, 0)
        if self.entry is not None and self.is_due(trainer, step.index):
            with self.measuring(trainer, step):
                self._measure(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self.entry is not None:
            self._measure(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.entry is None or not trainer.is_global_zero:
            return
        result = dataclasses.replace(self.entry.result, status="ok", **latest_values(trainer))
        self.entry = dataclasses.replace(self.entry, result=result)
        self._write(trainer)
        for run in wandb_runs(trainer):
            log_artifact(run, self.entry)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if self.entry is None:
            return
        watch = getattr(trainer.strategy, "watch", None)
        if isinstance(exception, PeerFailedError):
            failure = exception.failure
            if trainer.global_rank not in (failure.scribe, failure.rank):
                return
        else:
            status, cause = judge(exception)
            failure = Failure(rank=trainer.global_rank, place="", action="", cause=cause, status=status)
            if watch is not None and watch.own is not None:
                failure = dataclasses.replace(watch.own, cause=cause)
            elif status == "interrupted" and not trainer.is_global_zero:  # all ranks together
                return
        if is_consequence(exception) and watch is None:
            time.sleep(1.0)  # another rank has failed, and is about to write why; this rank is often ended meanwhile
        lost = is_consequence(exception) and not isinstance(exception, PeerFailedError)
        self._write_failure(trainer, failure, lost=lost)

    def _write_failure(self, trainer: Trainer, failure: Failure, *, lost: bool = False) -> None:
        """Write what ended the run. May be called by a thread, while the main one waits in vain."""
        if self.entry is None:
            return
        there = self._read_entry()
        written = None if there is None else there.result
        is_final = written is not None and written.status not in ("running", "ok")
        if is_final and not trainer.is_global_zero and failure.status != "oom":
            return
        status: Any = failure.status
        message = redact(failure.headline)
        # What was measured, and of which batch, only global rank 0 knows.
        entry = self.entry if trainer.is_global_zero or there is None else there
        if written is not None and written.status != "running" and (status != "oom" or written.status == "oom"):
            status, message = written.status, written.message or message  # the first cause stands
        elif lost:  # no rank has said why: one was killed
            status, message = "interrupted", f"another rank was killed or lost; {message}"
        result = dataclasses.replace(entry.result, status=status, message=message, num_steps=self._num_steps(trainer))
        self.entry = dataclasses.replace(entry, result=result)
        self._write(trainer, any_rank=True)

    # ---- what ----------------------------------------------------------------------------------------------------

    def _measure(self, trainer: Trainer) -> None:
        """Add up what all ranks counted and write it. A collective over the world."""
        device = trainer.strategy.root_device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        if self._memory is None:
            self._memory = estimated_memory(trainer)
        ranks = gather(trainer, (*self._counts, peak, self._memory))
        if not trainer.is_global_zero or self.entry is None:
            return
        layout = layout_of(trainer)
        throughput = Throughput(
            num_devices=layout.world_size,
            seconds=max(rank[0] for rank in ranks),  # all ranks time the same steps
            num_steps=self._counts[1],
            samples=count_once([rank[2] for rank in ranks], layout),
            tokens=count_once([rank[3] for rank in ranks], layout) or None,
        )
        result = dataclasses.replace(
            self.entry.result,
            num_steps=self._num_steps(trainer),
            peak_memory_bytes=max(rank[4] for rank in ranks) or None,
            memory=max((rank[5] for rank in ranks), key=lambda parts: sum(parts.values())),
            first_loss=self._loss(0),
            last_loss=self._loss(1),
            **rates(throughput),
            **latest_values(trainer),
        )
        self.entry = dataclasses.replace(self.entry, batch=build_batch(trainer, self._first_batch), result=result)
        self._write(trainer)
        if self._adviser is None:  # the batch is known by now; once is enough
            self._adviser = Adviser()
            self._adviser.consider(Figures(here=batch_and_rate(self.entry), before=self._entry_before(self.entry)))

    def _entry_before(self, entry: Entry) -> BatchAndRate | None:
        """What the entry that a run started from says, else the newest good one of the same model."""
        try:
            if entry.parent is not None:
                return batch_and_rate(self.archive.get(entry.parent))
            same = [e for e in self.archive.list() if e.result.is_good and e.model.hash == entry.model.hash]
        except ArchiveError:
            return None
        return batch_and_rate(max(same, key=lambda other: (other.time, other.id))) if same else None

    def _num_steps(self, trainer: Trainer) -> int:
        return max(0, self.recorder(trainer).num_steps - self._first_step)

    def _loss(self, which: int) -> float | None:
        kept = self._losses[which]
        return None if kept is None else float(kept[0]) * kept[1]

    def _read_entry(self) -> Entry | None:
        try:
            return None if self.entry is None else self.archive.get(self.entry.id)
        except ArchiveError:
            return None

    def _write(self, trainer: Trainer, *, any_rank: bool = False) -> None:
        assert self.entry is not None
        if not (trainer.is_global_zero or any_rank):
            return
        self.entry = dataclasses.replace(self.entry, updated=now())
        try:
            self.archive.write(self.entry)
        except ArchiveError as error:
            if not self._warned:
                self._warned = True
                _log.warning("This run leaves no entry in the archive, and training goes on: %s", error)


def batch_and_rate(entry: Entry) -> BatchAndRate | None:
    """Return what an entry says of its batch and learning rate; ``None`` if that is not both."""
    batch, rate = entry.batch.global_size, entry.training.learning_rate
    if batch is None or rate is None:
        return None
    return BatchAndRate(
        global_batch_size=batch, learning_rate=rate, optimizer=entry.training.optimizer or "", entry=entry.id
    )


def wandb_runs(trainer: Trainer) -> list[Any]:
    """Return the W&B runs of this Trainer, on global rank 0; none elsewhere."""
    if not trainer.is_global_zero:
        return []
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, WandbLogger)]


def log_artifact(run: Any, entry: Entry) -> None:
    """Log the entry as an artifact of a W&B run; offline it is kept for the next ``wandb sync``."""
    import wandb  # dear to import, and only users of its logger need it

    artifact = wandb.Artifact(f"archive-entry-{run.id}", type="archive-entry", metadata={"id": entry.id})
    with artifact.new_file(f"{entry.id}.json", mode="w") as file:
        file.write(entry.to_json())
    run.log_artifact(artifact)
