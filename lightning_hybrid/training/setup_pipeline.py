"""Where a pipeline meets Lightning: a first batch to cut along, quiet probes, and the pieces put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_unflatten

from lightning_hybrid.batches.microbatches import BatchSplitter, batch_size_of
from lightning_hybrid.batches.structure import map_leaves, outline_of, run_on
from lightning_hybrid.choosing.auto_schedule import choose_schedule
from lightning_hybrid.data import check_same_batch, first_batch_size, peek_first_batch, uses_default_collate
from lightning_hybrid.errors import ConfigurationError, HybridError, PipelineError, UnsupportedError
from lightning_hybrid.measuring.clock import Clock
from lightning_hybrid.measuring.flops import count_flops
from lightning_hybrid.mesh import axis_group, pipeline_subgroup
from lightning_hybrid.parallelize import Part, sync_tied_gradients
from lightning_hybrid.pipeline.channels import Channels, has_tags
from lightning_hybrid.pipeline.probe import StepFacts
from lightning_hybrid.pipeline.stage import Cut
from lightning_hybrid.pipeline.step import PipelineRank
from lightning_hybrid.sharding import call_inside
from lightning_hybrid.tensor_parallel.check import record_calls
from lightning_hybrid.training.pipelined import PipelinedStep
from lightning_hybrid.training.quiet import quiet_step, run_with_optimizers

__all__ = ["PipelineSetup"]

T = TypeVar("T")


class PipelineSetup:
    """Builds the pipelined step of one strategy, and keeps what belongs to it."""

    step: PipelinedStep

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self._module = strategy.lightning_module
        self._cut: Cut | None = None
        self._facts: dict[Any, StepFacts] = {}
        self._tied: dict[tuple[int, ...], list[Parameter]] = {}
        self._tied_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._first: tuple[str, Any, tuple[Any, ...]] | None = None
        self._splitter = BatchSplitter(strategy.settings.unbatched)
        self._num_samples: int | None = None
        self.num_microbatches = 1
        self.forward_flops_per_sample = 0.0

    def record(self, blocks: list[str]) -> dict[str, Any]:
        """Return the arguments of one block of each kind, for the check of a tensor plan."""
        if not blocks:
            return {}
        name, batch, rest = self._first_batch()
        if (size := batch_size_of(batch)) > 2 and self._strategy.layout.pipeline_parallel_size > 1:
            batch, _ = self._splitter.split(batch, -(-size // 2))[0]
        step = lambda: run_on(getattr(self._module, name), batch, *rest)  # noqa: E731
        with self._by_itself():
            return self._with_optimizers(lambda: record_calls(self._module, blocks, step))

    def run(self) -> Any:
        """Run the first step and return its output. Not under autocast, whose rounding would hide what differs."""
        name, batch, rest = self._first_batch()
        with self._by_itself(), torch.autocast(self._strategy.root_device.type, enabled=False):
            return self._with_optimizers(lambda: run_on(getattr(self._module, name), batch, *rest))

    def _with_optimizers(self, run: Callable[[], T]) -> T:
        return run_with_optimizers(self._module, self._strategy, run)

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Around a first step that is run for what it shows: it leaves no trace."""
        forward = self._trainer.precision_plugin.forward_context()
        with quiet_step(self._module, self._trainer, set()), forward:
            yield

    def probe(self, cut: Cut) -> StepFacts:
        """Learn the structure from the first batch of whatever the Trainer is about to run."""
        strategy, self._cut = self._strategy, cut
        name, batch, rest = self._first_batch()
        self.num_microbatches = self._choose_num_microbatches(batch if name == "training_step" else None)
        cuts = name == "training_step" and not self._strategy.settings.whole_batch_loss
        part = self._splitter.split(batch, self.num_microbatches)[0][0] if cuts else batch
        with count_flops() as counter:  # of code outside of modules; these are counted by their holes
            facts = self._agree(self._probe(name, part, rest))
        self._facts[name, outline_of(part)] = facts
        forward = counter.get_total_flops() + sum(facts.flops) + sum(facts.flops_outside)
        self.forward_flops_per_sample = forward / batch_size_of(part)
        if name == "training_step" and strategy.choice.chooses_schedule:
            self._choose_schedule(facts, lambda: run_on(self._module.training_step, part, *rest))
        return facts

    def _agree(self, facts: StepFacts) -> StepFacts:
        """Have all data ranks, whose first batches differ, cut alike. A collective over the data axis.

        Raises:
            PipelineError: on every rank, if they call different blocks.
        """
        group = axis_group(self._strategy.device_mesh, "data_parallel")
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (facts.blocks, facts.uses, facts.flops, facts.flops_outside), group=group)
        if None in found:  # nobody is there
            return facts
        blocks, _, flops, outside = found[0]
        for rank, (others, *_) in enumerate(found):
            if others != blocks:
                different = sorted(set(blocks) ^ set(others)) or others
                raise PipelineError(
                    f"Data ranks 0 and {rank} call different blocks in their first batches ({', '.join(different)}),"
                    " but a pipeline has one chain of blocks. Have every step call all of them, or use"
                    " pipeline_parallel_size=1."
                )
        uses = tuple(frozenset().union(*segment) for segment in zip(*(uses for _, uses, _, _ in found), strict=True))
        return replace(facts, uses=uses, flops=flops, flops_outside=outside)

    def choose_stages(self) -> tuple[list[int], int]:
        """Return for each stage the schedule rank that runs it, and this rank's place in the schedule."""
        strategy = self._strategy
        pipeline, choice = strategy.layout.pipeline_parallel_size, strategy.choice
        return choice.spec.ranks_of_stages(pipeline, choice.stages_per_rank), strategy.schedule_rank

    def _choose_schedule(self, facts: StepFacts, step: Callable[[], Any]) -> None:
        """Give the strategy the schedule that should be fastest. A collective over the world."""
        assert self._cut is not None
        untouched = {inner for block in self._cut.blocks() for inner in block.modules()}
        with quiet_step(self._module, self._trainer, untouched):
            choice = choose_schedule(
                self._strategy,
                self._cut,
                facts,
                step,
                num_microbatches=self.num_microbatches,
                size_per_data_rank=batch_size_of(self._first_batch()[1]),
            )
        self._strategy.choice.take_schedule(choice.spec, choice.stages_per_rank, choice.entry_id)
        rank_zero_info(f"lightning_hybrid: schedule {choice.reason}")

    def finish(self, part: Part, clock: Clock) -> None:
        """Put the pipelined step together. A collective over the world."""
        strategy, stages = self._strategy, part.stages
        assert part.cut is not None and stages is not None
        spec, num_ranks = strategy.choice.spec, strategy.layout.pipeline_parallel_size
        group = strategy.device_mesh["pipeline_parallel"].get_group()
        ranks = dist.get_process_group_ranks(group)
        per_rank = strategy.choice.stages_per_rank
        by_schedule = [ranks[spec.rank_at(rank, num_ranks, per_rank)] for rank in range(num_ranks)]
        placement, here = self.choose_stages()
        rank = PipelineRank(
            cut=part.cut,
            spec=spec,
            rank=here,
            num_ranks=num_ranks,
            stages={stage: stages.ranges[stage] for stage, rank in enumerate(placement) if rank == here},
            num_stages=len(placement),
            channels=Channels(group, by_schedule, len(placement), self._groups_of_boundaries(group, by_schedule)),
            device=strategy.root_device,
            clock=clock,
            inside=lambda function: call_inside(part.root, function),
        )
        self._find_tied(part, group, by_schedule)
        part.cut.inside = strategy._random.part
        self.step = PipelinedStep(
            module=self._module,
            root=part.root,
            rank=rank,
            spec=spec,
            num_microbatches=self.num_microbatches,
            splitter=self._splitter,
            start_microbatch=strategy._random.start_microbatch,
            stages_per_rank=per_rank,
            device=strategy.root_device,
            probe=lambda name, batch, rest: call_inside(part.root, lambda: self._probe(name, batch, rest)),
            sync_tied=self._sync_tied,
            quiet=lambda: quiet_step(self._module, self._trainer, set()),
            apart=strategy.apart,
            gather=strategy.gather_in_step,
            talks=lambda: strategy.talks_in_steps,
            regathers=part.root is not None and bool(strategy.settings.reshard_after_forward),
            whole_batch_loss=strategy.settings.whole_batch_loss,
        )
        self.step.facts.update(self._facts)
        self._first = None

    def copies(self) -> dict[Parameter, int]:
        """Parameters of this rank that live on several pipeline ranks, and on how many."""
        return {parameter: len(ranks) for ranks, found in self._tied.items() for parameter in found}

    def start_training(self) -> None:
        """Look at the training loaders: the run may have been set up along a batch of validation."""
        self._look_at(self._trainer.fit_loop._combined_loader)

    # ---- the first batch ------------------------------------------------------------------------------------------

    def _first_batch(self) -> tuple[str, Any, tuple[Any, ...]]:
        """Return a step's name, its first batch as the step will get it (on the module's device), and the rest."""
        if self._first is None:
            name, batch, rest = self._take_first_batch()
            device = next(self._module.parameters()).device
            with quiet_step(self._module, self._trainer, set(self._module.modules())):
                batch = map_leaves(lambda _, x: x.clone() if isinstance(x, Tensor) else x, batch)  # hooks may change it
                batch = self._module._on_before_batch_transfer(batch, 0)
                batch = self._module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)
                batch = self._trainer.precision_plugin.convert_input(batch)
            for axis, what in (("pipeline_parallel", "pipeline stages"), ("tensor_parallel", "tensor ranks")):
                check_same_batch(batch, self._strategy.device_mesh[axis].get_group(), what)
            if name == "training_step" and self._strategy.layout.pipeline_parallel_size > 1:
                self._splitter.check_first(batch, self._num_samples)
            self._first = name, batch, rest
        return self._first

    def _take_first_batch(self) -> tuple[str, Any, tuple[Any, ...]]:
        trainer = self._trainer
        if trainer.state.fn == TrainerFn.FITTING:
            if is_param_in_hook_signature(self._module.training_step, "dataloader_iter", explicit=True):
                raise UnsupportedError(
                    "training_step(self, dataloader_iter) fetches its own batches, which cannot be looked at"
                    " beforehand; take batch and batch_idx, or use data parallelism only."
                )
            loop, name = trainer.fit_loop, "training_step"
            loop.setup_data()
        else:
            loop = {
                TrainerFn.VALIDATING: trainer.validate_loop,
                TrainerFn.TESTING: trainer.test_loop,
                TrainerFn.PREDICTING: trainer.predict_loop,
            }[trainer.state.fn]
            name = f"{trainer.state.stage.dataloader_prefix.replace('val', 'validation')}_step"
            loop.setup_data()
            _skip_next_setup(loop)
        combined = loop._combined_loader
        if combined is None:
            raise ConfigurationError(
                f"Pipeline and tensor parallelism are set up along a first batch, but there is no data for {name}"
                " (limit_*_batches=0, or the step is not defined). Give at least one batch, or use"
                " pipeline_parallel_size=1 and tensor_parallel_size=1."
            )
        if name == "training_step":
            self._look_at(combined)
            self._num_samples = first_batch_size(combined.flattened[0]) if len(combined.flattened) == 1 else None
            firsts = [peek_first_batch(loader) for loader in combined.flattened]
            self._check_sizes(firsts)
            takes_index = is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2)
            return name, tree_unflatten(firsts, combined._spec), (0,) if takes_index else ()
        rest = (0, 0) if len(combined.flattened) > 1 else (0,)
        takes_index = is_param_in_hook_signature(getattr(self._module, name), "batch_idx", min_args=2)
        return name, peek_first_batch(combined.flattened[0]), rest if takes_index else ()

    def _look_at(self, combined: Any) -> None:
        self._splitter.only_stacks = all(uses_default_collate(loader) for loader in combined.flattened)

    def _check_sizes(self, batches: list[Any]) -> None:
        """Refuse loaders of different batch sizes: only the first one's samples would be cut into micro-batches."""
        if len(batches) == 1 or self._strategy.layout.pipeline_parallel_size == 1:
            return
        sizes = [batch_size_of(batch) for batch in batches if batch is not None]
        if len(set(sizes)) > 1:
            raise UnsupportedError(
                f"The loaders of this step give batches of different sizes {sizes}, which cannot be cut into the same"
                " micro-batches. Give them one batch size, or use pipeline_parallel_size=1."
            )

    def _choose_num_microbatches(self, batch: Any) -> int:
        strategy = self._strategy
        pipeline = strategy.layout.pipeline_parallel_size
        chosen, sizes = strategy.choice.num_microbatches, strategy.choice.spec.sizes
        num: int = chosen if isinstance(chosen, int) else sizes.num_microbatches if sizes else 2 * pipeline
        if batch is not None and (size := batch_size_of(batch)) < num and chosen == "auto":
            num = max(pipeline, size - size % pipeline)
        strategy.choice.table(strategy.layout, num)  # refuses what the schedule cannot run
        return num

    def _probe(self, name: str, part: Any, rest: tuple[Any, ...]) -> StepFacts:
        assert self._cut is not None
        cut, step = self._cut, lambda: run_on(getattr(self._module, name), part, *rest)
        untouched = {inner for block in cut.blocks() for inner in block.modules()}
        forward = self._trainer.precision_plugin.forward_context()
        with quiet_step(self._module, self._trainer, untouched), forward, self._strategy.apart():
            try:
                facts = self._with_optimizers(lambda: cut.probe(step, trains=name == "training_step"))
            except HybridError:
                raise
            except Exception as error:
                raise PipelineError(
                    f"{name} is run once beforehand, without weights, to see where it can be cut, and failed:"
                    f" {type(error).__name__}: {error}. What it needs from hooks must be there after setup() (not made"
                    " in on_fit_start or on_train_start), and what forward hooks collect inside of blocks (router"
                    " logits, hidden states) is not there."
                    f"{self._cut_wrongly(name)} Otherwise use pipeline_parallel_size=1."
                ) from error
        whole = self._strategy.settings.whole_batch_loss and name == "training_step"
        if whole and facts.lingers:
            raise UnsupportedError(
                f"The loss uses what {facts.blocks[-1]} keeps in an attribute, which is that of a micro-batch. With"
                " whole_batch_loss=True have the block return it, or use pipeline_parallel_size=1."
            )
        if whole and facts.redraws:
            raise UnsupportedError(
                "training_step draws random numbers before its last block and uses them after it too (noise that is"
                " input and target). With whole_batch_loss=True these are two runs, which draw different numbers. Draw"
                " them in the dataset or the collate function, or use pipeline_parallel_size=1."
            )
        return facts

    def _cut_wrongly(self, name: str) -> str:
        """What the batch may have to do with a failure."""
        if name != "training_step" or not (names := self._splitter.cut_names):
            return ""
        return (
            f" Of the batch, {', '.join(map(repr, names))} are cut into micro-batches: if one of them has no row per"
            f" sample, say so (unbatched=[{names[-1]!r}])."
        )

    def _groups_of_boundaries(
        self, group: dist.ProcessGroup, by_schedule: list[int]
    ) -> dict[tuple[str, int], dist.ProcessGroup] | None:
        """One group for each boundary and direction where messages have no tags (NCCL). A collective over the world."""
        if has_tags(group):
            return None
        strategy = self._strategy
        groups = {}
        for stage in range(1, strategy.num_stages):
            ends = {by_schedule[strategy.choice.spec.rank_of_stage(s, len(by_schedule))] for s in (stage - 1, stage)}
            for key in [("F", stage), ("B", stage - 1)] if len(ends) == 2 else []:
                if (made := self._subgroup(group, ends)) is not None:
                    groups[key] = made
        return groups

    def _subgroup(self, group: dist.ProcessGroup, ranks: Collection[int]) -> dist.ProcessGroup | None:
        """A group of some of a pipeline's ranks, made in all pipelines alike; ``None`` on ranks outside of it."""
        return pipeline_subgroup(self._strategy.device_mesh, sorted(dist.get_group_rank(group, rank) for rank in ranks))

    # ---- tied weights ---------------------------------------------------------------------------------------------

    def _find_tied(self, part: Part, group: dist.ProcessGroup, by_schedule: list[int]) -> None:
        """Group this rank's tied parameters by the pipeline ranks that hold them. A collective over the world."""
        strategy, stages = self._strategy, part.stages
        assert stages is not None
        spec, num_ranks = strategy.choice.spec, strategy.layout.pipeline_parallel_size
        held = dict(self._module.named_parameters())
        found: dict[tuple[int, ...], list[str]] = {}
        for name, owners in stages.tied.items():
            ranks = tuple(sorted({by_schedule[spec.rank_of_stage(stage, num_ranks)] for stage in owners}))
            if len(ranks) > 1:
                found.setdefault(ranks, []).append(name)
        for ranks, names in sorted(found.items()):
            if (made := self._subgroup(group, ranks)) is not None:
                self._tied_groups[ranks] = made
                self._tied[ranks] = [held[name] for name in names]

    def _sync_tied(self) -> None:
        for ranks, parameters in self._tied.items():
            trained = [p for p in parameters if p.requires_grad]
            sync_tied_gradients(trained, self._tied_groups[ranks], self._strategy.root_device)


def _skip_next_setup(loop: Any) -> None:
    """The loop is about to set its data up once more; let it keep what was looked at."""

    def keep() -> None:
        del loop.setup_data

    loop.setup_data = keep
