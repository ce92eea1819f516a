"""The strategy: Lightning's hooks, and nothing else. What they do stands in the modules that they call."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_hybrid.batches.randomness import StepRandomness, derive_seed, same_random_state
from lightning_hybrid.building.per_block import ActivationCheckpointing
from lightning_hybrid.choosing.choose import choose_layout
from lightning_hybrid.choosing.from_archive import FromArchive
from lightning_hybrid.choosing.logged import log_choice
from lightning_hybrid.choosing.run_choice import RunChoice
from lightning_hybrid.data import prepare_loader, restore_loader_states
from lightning_hybrid.describing.describe import describe_run, layout_table, memory_table
from lightning_hybrid.failures.restart import group_options
from lightning_hybrid.failures.stopping import stop_together
from lightning_hybrid.failures.watch import start_watch
from lightning_hybrid.launchers import make_launcher
from lightning_hybrid.layout import Coordinate, Layout
from lightning_hybrid.logged_values import no_advice_to_synchronise
from lightning_hybrid.measuring.clock import Clock
from lightning_hybrid.mesh import axis_group, build_mesh
from lightning_hybrid.optimizer import clip_grad_norm, clip_grad_value, global_grad_norm
from lightning_hybrid.parallelize import parallelize
from lightning_hybrid.pipeline.blocks import Blocks
from lightning_hybrid.pipeline.schedule import Table
from lightning_hybrid.pipeline.timeline import Mark
from lightning_hybrid.replicas.hooks import ReplicaHooks
from lightning_hybrid.replicas.options import ReplicaSync
from lightning_hybrid.settings import Settings
from lightning_hybrid.sharding import ShardedRoot, backward_of, call_inside, reshard, to_device, without_gradient_sync
from lightning_hybrid.tensor_parallel.joined_late import joined
from lightning_hybrid.training.evaluation import evaluate_by_no_grad, refuse_too_few_samples
from lightning_hybrid.training.gradients import zeroes_unseen
from lightning_hybrid.training.lightning_callbacks import adapt_callbacks
from lightning_hybrid.training.setup_pipeline import PipelineSetup

__all__ = ["Hybrid3DStrategy"]

Degree = int | Literal["auto"]


class Hybrid3DStrategy(FromArchive, ReplicaHooks):
    """Data x tensor x pipeline parallelism with FSDP2 sharding for an unmodified LightningModule.

    Args:
        data_parallel_size: Ranks that read different samples. The product of the three degrees is the number of
            devices; ``"auto"`` takes what the others leave over. Without any of the three all are chosen: an archive's
            nearest known-good entry's, else the planner's (:mod:`lightning_hybrid.choosing.plan`).
        tensor_parallel_size: Ranks that split each block's matrices, following ``tp_plan``.
        pipeline_parallel_size: Ranks that split the blocks.
        replicate_size: Replicas along the data axis (HSDP), whose rest shards; ``"auto"`` is 1, or chosen with degrees.
        replica_sync: Optimizer steps from one exchange of the replicas to the next, ``"auto"``, or a
            :class:`~lightning_hybrid.ReplicaSync` or dict of its fields (local SGD, DiLoCo). 1 averages gradients.
        num_microbatches: Pieces into which each rank's batch is cut for the pipeline; ``"auto"`` is twice the number
            of pipeline ranks.
        schedule: torch's name of a pipeline schedule, such as ``"GPipe"``, ``"1F1B"`` or ``"Interleaved1F1B"``;
            ``"auto"`` is the fastest that the archive measured for this model and these degrees, or that is predicted
            (see :mod:`lightning_hybrid.choosing.auto_schedule`). Or the path of a table of your own in torch's CSV form
            (``"my_schedule.csv"``, see :mod:`lightning_hybrid.pipeline.schedule_file`), which also says the number of
            pipeline ranks, stages and micro-batches.
        stages_per_rank: Virtual stages of each pipeline rank, for schedules that have them; ``"auto"`` is 2 for those.
        blocks: FQN(s) of the list(s) of blocks to cut along, if they are not found by themselves; or the name of a
            method or property of the module that returns the blocks, or a function that does so given the module.
        unbatched: Names of tensors of the batch with no row per sample, where shapes do not tell (``microbatches``).
        load_once: Whether one rank (of the last stage) reads, and has the workers, for all that share its batches.
        whole_batch_loss: Whether, in a pipeline, the code after the last block runs once on the whole batch, for losses
            that compare samples with each other. Such a schedule ends all forwards before the first backward:
            ``"GPipe"`` (then the default) or ``"LoopedBFS"``.
        tp_plan: FQN pattern -> style (``{"model.layers.*.self_attn.q_proj": "colwise", ...}``). Models of Hugging Face
            bring their own; for blocks that neither names a way is found by trying.
        loss_parallel: Whether logits of a head that is split over the vocabulary stay split for ``cross_entropy``. What
            else reads them joins them, on all tensor ranks: not under ``if self.global_rank == 0``.
        sequence_parallel: Whether what stands between split layers (norms, dropout, residuals) works on a share of the
            tokens on each tensor rank, where trying shows that a block allows it.
        reshard_after_forward: Whether a block's gathered parameters are freed after its forward; by default without
            a pipeline only.
        cpu_offload: Whether shards of parameters, gradients and optimizer states stay in the host's memory.
        activation_checkpointing: What blocks keep for the backward: ``"none"`` (everything), ``"full"`` (only their
            arguments), ``"selective"`` (results of matrix products and attention too), or a list of operations to keep.
        compile: Whether blocks are compiled one by one; or the arguments of ``torch.compile``.
        save_distributed_checkpoint: Whether a checkpoint is a directory, to which each rank writes its part (with
            ``"async"`` while training goes on); otherwise it is one plain file, which rank 0 writes from its memory.
        archive: Folder or fsspec URL of run entries; a run without any degrees starts from the best one that fits.
        tune: How many of the planner's best degrees a run without any tries for a few steps; the fastest are taken.
        verify: Whether the first optimizer step is compared with one process, as ``Verify`` does; or how many steps.
        start_method: How Lightning starts the processes: ``"popen"`` (the script again), ``"fork"``, ``"spawn"``.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by the device if ``None``.
        timeout: After which a collective without an answer fails.

    Raises:
        ConfigurationError: for arguments that cannot work; most are found here, the others before the first step.
    """

    def __init__(
        self,
        data_parallel_size: Degree = "auto",
        tensor_parallel_size: Degree = "auto",
        pipeline_parallel_size: Degree = "auto",
        replicate_size: Degree = "auto",
        replica_sync: Degree | ReplicaSync | dict[str, Any] = 1,
        num_microbatches: Degree = "auto",
        schedule: str | os.PathLike[str] = "auto",
        stages_per_rank: Degree = "auto",
        blocks: Blocks = None,
        unbatched: list[str] | None = None,
        load_once: bool = False,
        whole_batch_loss: bool = False,
        tp_plan: Mapping[str, Any] | None = None,
        loss_parallel: bool = False,
        sequence_parallel: bool = False,
        reshard_after_forward: bool | None = None,
        cpu_offload: bool = False,
        activation_checkpointing: ActivationCheckpointing = "none",
        compile: bool | Mapping[str, Any] = False,
        save_distributed_checkpoint: bool | Literal["async"] = False,
        archive: str | os.PathLike[str] | None = "archive",
        tune: int = 0,
        verify: bool | int = False,
        start_method: Literal["popen", "fork", "spawn"] = "popen",
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.settings = Settings(
            blocks=blocks,
            unbatched=unbatched,
            load_once=load_once,
            whole_batch_loss=whole_batch_loss,
            tp_plan=tp_plan,
            loss_parallel=loss_parallel,
            sequence_parallel=sequence_parallel,
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            save_distributed_checkpoint=save_distributed_checkpoint,
            archive=archive,
            tune=tune,
            verify=verify,
            start_method=start_method,
            process_group_backend=process_group_backend,
            timeout=timeout,
            replica_sync=ReplicaSync.of(replica_sync),
        )
        degrees = {
            "data_parallel_size": data_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "replicate_size": replicate_size,
        }
        self.choice = RunChoice(self.settings, degrees, num_microbatches, schedule, stages_per_rank)
        self._pipeline: PipelineSetup | None = None
        self._random: StepRandomness | None = None
        self._clock = Clock(torch.device("cpu"))
        self._new_window, self._seed = True, 0
        self.num_nodes = 1

    # ---- what callbacks and users may ask -------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The degrees of this run."""
        return self.choice.resolve(self.num_nodes * self.num_processes)

    @property
    def coordinate(self) -> Coordinate:
        """Where this rank stands on the mesh."""
        return self.layout.coordinate(self.global_rank)

    @property
    def schedule(self) -> str:
        """torch's name of the schedule, or the file's; ``"none"`` without a pipeline."""
        return self.choice.spec.name if self.layout.pipeline_parallel_size > 1 else "none"

    @property
    def tp_plan(self) -> Mapping[str, Any] | None:
        """The user's tensor plan."""
        return self.settings.tp_plan

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, virtual ones included."""
        return self.choice.num_stages(self.layout)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a full batch."""
        if self._pipeline is not None:
            return self._pipeline.num_microbatches
        return self.choice.num_microbatches if isinstance(self.choice.num_microbatches, int) else 1

    @property
    def schedule_rank(self) -> int:
        """This rank's place in the schedule. Global rank 0 has the last stage, where the loss and the logging are."""
        return self.choice.schedule_rank(self.layout, self.coordinate)

    @property
    def marks(self) -> list[Mark]:
        """This rank's marks since the last optimizer step ended, forgotten once :meth:`take_marks` is called."""
        return self._clock.peek()

    def take_marks(self) -> list[Mark]:
        """Return :attr:`marks` and forget them."""
        return self._clock.take()

    def schedule_table(self, num_microbatches: int) -> Table:
        """Return the order of actions of every schedule rank."""
        return self.choice.table(self.layout, num_microbatches)

    def describe(self) -> dict[str, Any]:
        """Return degrees, schedule, what this rank holds, and the bytes that a step needs, as plain values."""
        return describe_run(self, self._part, self._pipeline)

    # ---- identity and wiring -----------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Read by Lightning: logged values may be synchronised (there is a process group even for one device)."""
        return True

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.data_parallel_size, "rank": self.coordinate.data}

    @override
    def _configure_launcher(self) -> None:
        self._launcher = make_launcher(self)

    def set_world_ranks(self) -> None:
        """Tell the environment and Lightning's logging which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010 - its type does not know the attribute

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        backend = self.settings.process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        assert self.cluster_environment is not None
        options = group_options(self.root_device, self.settings.timeout)
        _init_dist_connection(self.cluster_environment, backend, **options)
        self.watch = start_watch(self)
        self.choice.share(self)
        self.choice.layout = choose_layout(self)
        self._mesh = build_mesh(self.layout, self.root_device.type)
        self._clock = Clock(self.root_device)
        assert self.lightning_module is not None
        adapt_callbacks(self, self.lightning_module)
        self.lightning_module._device_mesh = self._mesh  # what a configure_model for ModelParallelStrategy reads

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Around ``configure_model``: on the CPU, since a device may not hold the whole model; or without memory."""
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    # ---- model, data, optimizers ----------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.lightning_module)
        if self.layout.data_parallel_size == 1:  # all ranks read the user's own sampler, in one order
            trainer._accelerator_connector.use_distributed_sampler = False
            no_advice_to_synchronise()
        elif trainer.state.fn == TrainerFn.PREDICTING:
            refuse_too_few_samples(trainer.predict_loop._data_source, self.layout.data_parallel_size)
        self._synchronise_randomness()
        if self._part is None or self._module_of_part is not self.lightning_module:
            self._parallelize(trainer)
        evaluate_by_no_grad(trainer, self._root)
        stop_together(trainer)
        self.model_to_device()
        self._hook_precision()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            rank_zero_info(memory_table(self))
        self.setup_precision_plugin()

    def _parallelize(self, trainer: Any) -> None:
        layout, module = self.layout, self.lightning_module
        assert module is not None
        setup = PipelineSetup(self, trainer)
        part = parallelize(
            module,
            layout=layout,
            mesh=self.device_mesh,
            device=self.root_device,
            settings=self.settings,
            first_step=setup,
            seed=self._seed,
            given=self._waiting_state[0].keys() if self._waiting_state is not None else (),
        )
        self._take_part(module, part)
        self._load_waiting_state()
        for metric in module.modules():
            if isinstance(metric, Metric) and layout.world_size > 1 and metric.process_group is None:
                metric.process_group = axis_group(self.device_mesh, "data_parallel")  # other axes hold the same samples
        self._pipeline = setup if part.cut is not None else None
        if self._pipeline is not None:
            self._pipeline.finish(part, self._clock)
        rows = self.all_gather_object(self.describe()) if layout.world_size > 1 else [self.describe()]
        rank_zero_info(layout_table(layout, self.schedule, rows, part.plan))

    def _synchronise_randomness(self) -> None:
        """See the note in :mod:`lightning_hybrid.batches.randomness`."""
        self._seed = self.broadcast(torch.initial_seed() % 2**62)
        if self.layout.world_size > 1:
            same_random_state(self.device_mesh)
            seed = derive_seed(self._seed, self.coordinate.data)
            self._random = self._random or StepRandomness(seed, self.root_device)

    def _hook_precision(self) -> None:
        """Clipping goes by one norm over all axes, whoever calls it."""
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm, plugin.clip_grad_by_value = self._clip_by_norm, self._clip_by_value

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = self.precision_plugin.main_params(optimizer)
        with self._clock.mark("SYNC"):  # the norm needs all stages: those that are done wait here
            clip_grad_norm(parameters, float(clip_val), copies=self._copies, **self._norm_scope)

    @property
    def _copies(self) -> dict[Parameter, int]:
        return self._pipeline.copies() if self._pipeline is not None else {}

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """See :func:`lightning_hybrid.grad_norm`."""
        module: Any = self.lightning_module
        with self._clock.mark("SYNC"):
            return global_grad_norm(module.parameters(), norm_type=norm_type, copies=self._copies, **self._norm_scope)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value(self.precision_plugin.main_params(optimizer), float(clip_val))

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        to_device(self.lightning_module, self._root, self.root_device, cpu_offload=self.settings.cpu_offload)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return prepare_loader(dataloader, self)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        log_choice(self)
        restore_loader_states(self.lightning_module)
        if self._pipeline is not None:
            self._pipeline.start_training()

    # ---- steps ----------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._new_window:
            self._clock.clear()
            self._new_window = False
            assert self.lightning_module is not None
            if self._pipeline is not None and zeroes_unseen(self.lightning_module.trainer):
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
        with self._training(), self.precision_plugin.train_step_context(), self._step_randomness():
            if self._pipeline is not None:
                return self._pipeline.step.train(*args, **kwargs)
            with self._clock.mark("F", 0, 0):
                return self._not_skipped(self._inside("training_step", *args, **kwargs))

    @override
    def _run_step(self, name: str, *args: Any, quiet: bool = False, **kwargs: Any) -> Any:
        with self._step_randomness():
            if self._pipeline is not None:
                output = self._pipeline.step.evaluate(name, *args, quiet=quiet, **kwargs)
            else:
                output = self._inside(name, *args, **kwargs)
        reshard(self._root)  # no backward comes that would do it
        return output

    def _inside(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return call_inside(self._root, lambda: joined(getattr(self.lightning_module, name)(*args, **kwargs)))

    @property
    def _root(self) -> ShardedRoot | None:
        return self._part.root if self._part is not None else None

    @contextmanager
    def _step_randomness(self) -> Generator[None, None, None]:
        if self._random is None:
            yield
        else:
            with self._random.active() if self._pipeline is None else self._random.pipelined():
                yield

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        mark = self._clock.mark("B", 0, 0) if self._pipeline is None else nullcontext()
        with mark, backward_of(self._root, closure_loss):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._part is not None and self._part.replication is not None:
            self._part.replication.prepare(closure_loss)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        ended: list[Any] = []

        def timed() -> Any:
            result = closure()
            if self._part is not None and self._part.replication is not None:
                self._part.replication.check(optimizer)
            ended[:] = [self._clock.now()]
            return result

        result = super().optimizer_step(optimizer, timed, model, **kwargs)
        if ended:
            self._clock.add("OPTIMIZER", -1, -1, ended[0], self._clock.now())
        self._new_window = True
        return result

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        if self._pipeline is not None:  # the schedule reduces once a batch by itself
            yield
            return
        if self._part is not None and self._part.replication is not None:
            with self._part.replication.paused():
                yield
            return
        with without_gradient_sync(self._root):
            yield

    # ---- end -----------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        if self._failed:  # a half-run step leaves gathered parameters; moving them would bury the first error
            self._leave_watch()
            return
        reshard(self._root)
        module = self._lightning_module
        if self.settings.compile is not False:
            self._lightning_module = None  # compiled code refers to its parameters: they stay where they are
        super().teardown()
        self._lightning_module = module

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        name = "Data x tensor x pipeline parallelism with sharding"
        strategy_registry.register("hybrid3d", cls, description=name)
        strategy_registry.register("hybrid3d_fork", cls, description=f"{name}, started by fork", start_method="fork")
