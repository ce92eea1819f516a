"""One Lightning step, run through the pipeline: micro-batches in, one loss and one set of logged values out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_hybrid.batches.microbatches import BatchSplitter
from lightning_hybrid.batches.structure import outline_of, run_on
from lightning_hybrid.data import checksum
from lightning_hybrid.errors import HybridError, PipelineError, UnsupportedError
from lightning_hybrid.failures.failure import Failure, PeerFailedError
from lightning_hybrid.logged_values import LogRecorder, MetricMirror, merge_outputs, without_large_tensors
from lightning_hybrid.pipeline.activations import look_of
from lightning_hybrid.pipeline.contract import Rehearsal, rehearsed_sizes
from lightning_hybrid.pipeline.loss import MicrobatchLoss, combine, read_loss
from lightning_hybrid.pipeline.probe import StepFacts
from lightning_hybrid.pipeline.schedule import Action, ScheduleSpec
from lightning_hybrid.pipeline.step import PipelineRank, StepInputs
from lightning_hybrid.sharding import ShardedRoot, reduce_gradients, set_gradient_sync
from lightning_hybrid.tensor_parallel.joined_late import joined
from lightning_hybrid.training.gradients import GradientLedger
from lightning_hybrid.training.kept_values import KeptValues
from lightning_hybrid.training.log_rules import LogRules

__all__ = ["PipelinedStep"]

logger = logging.getLogger(__name__)


class PipelinedStep:
    """Runs ``training_step`` and its siblings of one LightningModule on this rank's stages."""

    def __init__(
        self,
        *,
        module: Any,
        root: ShardedRoot | None,
        rank: PipelineRank,
        spec: ScheduleSpec,
        num_microbatches: int,
        splitter: BatchSplitter,
        start_microbatch: Callable[..., None],
        stages_per_rank: int,
        device: torch.device,
        probe: Callable[[str, Any, tuple[Any, ...]], StepFacts],
        sync_tied: Callable[[], None],
        quiet: Callable[[], AbstractContextManager[None]],
        apart: Callable[[], AbstractContextManager[None]],
        gather: Callable[[Any], list[Any]],
        talks: Callable[[], bool],
        regathers: bool,
        whole_batch_loss: bool,
    ) -> None:
        """``probe(name, microbatch, rest)`` learns the facts of a kind of step the first time it runs.

        Within ``quiet()`` the module's steps leave no trace, within ``apart()`` they have no collectives with other
        stages; ``gather`` returns what every rank of the world gives.
        ``talks()``: steps have collectives of their own over the data axis.
        ``regathers``: sharded weights are freed after each forward.
        """
        self._module, self._root, self._rank, self._spec = module, root, rank, spec
        self.num_microbatches, self._stages_per_rank = num_microbatches, stages_per_rank
        self._splitter, self._start_microbatch = splitter, start_microbatch
        self._num_steps = 0
        self._device, self._probe, self._sync_tied = device, probe, sync_tied
        self.facts: dict[Any, StepFacts] = {}
        self._ledger = GradientLedger(module.parameters())
        self._metrics, self._kept, self._log_rules = MetricMirror(module), KeptValues(module), LogRules()
        self._last_rank = spec.rank_of_stage(rank.num_stages - 1, rank.num_ranks)
        self._is_last = self._last_rank == rank.rank
        self._quiet, self._apart, self._gather, self._whole_batch_loss = quiet, apart, gather, whole_batch_loss
        self._regathers, self._talks, self._talks_in_steps = regathers, False, talks
        self._said, self._checkable, self._num_trained = False, True, 0
        self._checksum: tuple[Any, ...] = ()

    def train(self, batch: Any, *rest: Any) -> Any:
        """Run forwards and backwards of one batch. Returns what ``training_step`` returns for the whole batch.

        On other stages than the last it returns the same without tensors that have a batch dimension. The loss is a
        node whose backward adds the gradients (see :mod:`lightning_hybrid.training.gradients`).
        """
        self._checksum = checksum(batch)
        parts, sizes = zip(*self._splitter.split(batch, self.num_microbatches), strict=True)
        recorder = LogRecorder(self._log_rules, sizes)
        facts = self._facts("training_step", batch if self._whole_batch_loss else parts[0], rest)
        self._check_even(len(parts))
        self._check_contract(facts, batch, sizes, rest)

        def step(i: int) -> Any:
            notes = LogRecorder() if self._whole_batch_loss else recorder
            with nullcontext() if len(parts) == 1 else self._metrics.refusing_compute():
                return self._one("training_step", notes, i, parts[i], rest)

        def whole_step() -> Any:
            return self._one("training_step", recorder, 0, batch, rest)

        inputs = StepInputs(
            num_microbatches=len(parts),
            looks=[("training_step", look_of(part)) for part in parts],
            facts=facts,
            step=step,
            read_loss=lambda i, output: read_loss(output, sizes[i]),
            whole_step=whole_step if self._whole_batch_loss else None,
            on_outputs=lambda outputs, losses: self._report(recorder, outputs, losses, sizes),
            on_failure=self._report_failure,
        )
        self._num_steps += 1
        self._ledger.open()
        set_gradient_sync(self._root, False)
        self._metrics.before()
        self._kept.before()
        self._message: dict[str, Any] | None = None
        with self._apart():  # a backward may talk to other ranks too
            self._rank.run(self._actions(len(parts)), inputs)
        message = self._received()
        with self._rank.clock.mark("REDUCE"):
            reduce_gradients(self._module, self._root, message["scale"])
            self._sync_tied()
        self._rank.flush()
        self._ledger.close()
        self._replay(message)
        return self._with_loss(message["output"], self._ledger.loss(message["loss"]))

    def evaluate(self, name: str, batch: Any, *rest: Any, quiet: bool = False) -> Any:
        """Run ``validation_step``, ``test_step`` or ``predict_step`` forward only.

        The batch goes through in one piece: without gradients its memory is small, and whatever the step computes over
        the batch is then exactly what one process computes. Every stage returns what the step returns; tensors with a
        dimension only on the last stage, except for predictions. ``quiet``: what it logs is dropped.
        """
        self._checksum = checksum(batch)
        recorder = LogRecorder()
        inputs = StepInputs(
            num_microbatches=1,
            looks=[(name, look_of(batch))],
            facts=self._facts(name, batch, rest),
            step=lambda i: self._one(name, recorder, i, batch, rest),
            on_outputs=lambda outputs, _: self._report(recorder, outputs, [_WHOLE], (), full=name == "predict_step"),
            on_failure=self._report_failure,
        )
        self._num_steps += 1
        self._metrics.before()
        self._kept.before()
        self._message = None
        table = self._spec.forward_only(self._rank.num_ranks, 1, self._stages_per_rank)
        self._rank.run(table[self._rank.rank], inputs)
        message = self._received()
        self._rank.flush()
        if name != "predict_step" and not quiet:
            self._replay(message)
        return message["output"]

    def _facts(self, name: str, part: Any, rest: tuple[Any, ...]) -> StepFacts:
        kind = name, outline_of(part)  # an argument that is not there in every batch makes another kind of step
        if kind not in self.facts:
            self.facts[kind] = self._probe(name, part, rest)
        return self.facts[kind]

    def _check_even(self, num_parts: int) -> None:
        """Where each micro-batch has collectives over the data axis, all of its ranks must have equally many."""
        if self._num_trained == 0:
            self._talks = self._talks_in_steps()  # it has been tried out, on all ranks alike
        if (self._regathers or self._talks) and len(found := set(self._gather(num_parts))) > 1:
            what = "with reshard_after_forward=True each of them gathers sharded weights from all data ranks"
            remedy = "leave reshard_after_forward out"
            if not self._regathers:
                what = "training_step has collectives of its own, which each of them takes part in"
                remedy = "use a hook for them, such as on_train_batch_end"
            raise UnsupportedError(
                f"Batches of data ranks are cut into {sorted(found)} micro-batches, but {what}. Give all data ranks the"
                f" same batch size (drop_last=True), or {remedy}."
            )

    def _check_contract(self, facts: StepFacts, batch: Any, sizes: Sequence[int], rest: tuple[Any, ...]) -> None:
        """Before step 0, 1, 2, 4, 8, ...: see :mod:`lightning_hybrid.pipeline.contract`."""
        done, self._num_trained = self._num_trained, self._num_trained + 1
        if done & (done - 1) or not self._checkable or min(self._gather(len(sizes))) == 1:
            return
        part_sizes = rehearsed_sizes(sizes)
        (whole, _), *_ = self._splitter.cut(batch, [sum(part_sizes)])
        parts = [part for part, _ in self._splitter.cut(batch, part_sizes)]
        rehearsal = Rehearsal(
            rank=self._rank,
            facts=facts,
            step=lambda piece, notes, i: self._noting("training_step", notes, i, piece, rest),
            log_rules=self._log_rules,
            whole=whole,
            parts=parts,
            sizes=part_sizes,
            joins=self._whole_batch_loss,
            forward_only=lambda n: self._spec.forward_only(self._rank.num_ranks, n, self._stages_per_rank)[
                self._rank.rank
            ],
            device=self._device,
            gather=self._gather,
        )
        devices = [self._device] if self._device.type == "cuda" else []
        with self._quiet(), self._rank.clock.unseen(), torch.random.fork_rng(devices=devices):
            refusal, self._checkable = rehearsal.find(read_loss)
        if refusal:
            raise UnsupportedError(refusal)

    def _actions(self, num_microbatches: int) -> Sequence[Action]:
        ranks, stages = self._rank.num_ranks, self._stages_per_rank
        if self._spec.problem(ranks, num_microbatches, stages):  # a short batch: an order that any number can run
            return self._spec.all_forward_then_backward(ranks, num_microbatches, stages)[self._rank.rank]
        return self._spec.table(ranks, num_microbatches, stages)[self._rank.rank]

    def _one(self, name: str, recorder: LogRecorder, index: int, part: Any, rest: tuple[Any, ...]) -> Any:
        self._start_microbatch(self._num_steps, index)
        return self._noting(name, recorder, index, part, rest)

    def _noting(self, name: str, recorder: LogRecorder, index: int, part: Any, rest: tuple[Any, ...]) -> Any:
        with recorder.recording(self._module, index), self._apart():
            return joined(run_on(getattr(self._module, name), part, *rest))

    def _report(
        self,
        recorder: LogRecorder,
        outputs: list[Any],
        losses: list[MicrobatchLoss],
        sizes: Sequence[int],
        *,
        full: bool = False,
    ) -> None:
        """On the last stage, when all micro-batches are through: tell the other stages what came out."""
        merged = merge_outputs(outputs, losses, sizes) if len(outputs) > 1 else outputs[0]
        merged = tree_map_only(Tensor, Tensor.detach, merged)
        total = sum(loss.weight for loss in losses)
        reference = self._rank.reference
        by_sum = losses[0].rule == "sum"
        logged = [(n, self._named(v, o), o) for n, v, o in recorder.combined(losses)]
        message = {
            "batch": self._checksum,
            "output": merged,
            "loss": combine([loss.value for loss in losses], losses),
            "scale": reference if by_sum else reference / total if total else 1.0,
            "logged": logged,
            "metrics": self._metrics.changes(),
            "kept": self._kept.changes(rows=losses[0].rule == "batch"),
        }
        self._say(losses)
        self._message = message
        self._rank.channels.report(
            message if full else {**message, "output": without_large_tensors(merged)}, self._device
        )

    def _report_failure(self, error: Exception) -> None:
        """On the last stage, which all other stages wait for: tell them what failed."""
        self._message = {"error": error}
        told = error
        if not isinstance(error, HybridError):
            at = self._module.trainer.strategy.coordinate
            place = f"data {at.data}, tensor {at.tensor}, pipeline {at.pipeline}"
            told = PeerFailedError(
                Failure.of(error, rank=self._module.global_rank, place=place, action="behind the last block")
            )
        self._rank.channels.report({"error": told}, self._device)

    def _named(self, value: Any, options: dict[str, Any]) -> Any:
        """A metric by its name, with the whole batch's value where that is logged."""
        if not isinstance(value, Metric):
            return value
        if options.get("on_step") is not False:
            value._forward_cache = self._metrics.value_of_batch(value)
        return self._metrics.name_of(value)

    def _received(self) -> dict[str, Any]:
        if self._message is None:
            self._message = self._rank.channels.receive_report(self._last_rank, self._device)
        if "error" in self._message:
            self._rank.flush()
            raise self._message["error"]
        if not self._is_last:
            self._metrics.apply(self._message["metrics"])
            self._kept.apply(self._message["kept"])
            if repr(self._message["batch"]) != repr(self._checksum):
                raise PipelineError(
                    f"Stages of one pipeline read different batches: this rank has {self._checksum[:2]}, the last stage"
                    f" has {self._message['batch'][:2]}. Shuffle and augment by seeds that all ranks share"
                    " (seed_everything), and draw random numbers in callbacks on all ranks or on none."
                )
        return self._message

    def _replay(self, message: dict[str, Any]) -> None:
        for name, value, options in message["logged"]:
            self._module.log(name, self._metrics.get(value) if isinstance(value, str) else value, **options)

    def _with_loss(self, output: Any, loss: Tensor) -> Any:
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def _say(self, losses: list[MicrobatchLoss]) -> None:
        """Say once how micro-batches are weighted, and what is not certain about it."""
        if self._said or losses[0].rule == "batch":
            return
        self._said = True
        doubt = next((loss.doubt for loss in losses if loss.doubt), "")
        if len({loss.rule == "sum" for loss in losses}) > 1:
            doubt = "Some micro-batches return a sum and others a mean; return loss_weight to say how they are added."
        if doubt:
            logger.warning("Weights of micro-batches: %s", doubt)
        else:
            logger.info("Micro-batch losses are weighted by the rule %r.", losses[0].rule)


#: The weight of a batch that was not cut.
_WHOLE = MicrobatchLoss(value=torch.zeros(()), weight=1.0, rule="batch")
