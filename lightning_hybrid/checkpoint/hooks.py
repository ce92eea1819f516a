"""The strategy's hooks for optimizers and state: a plain file or a directory, whatever the degrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.building.alike import check_same_optimizers
from lightning_hybrid.building.materialize import on_meta
from lightning_hybrid.checkpoint.background import Background
from lightning_hybrid.checkpoint.consolidate import (
    StateKeys,
    gather_model_state,
    gather_optimizer_state,
    scatter_model_state,
    scatter_optimizer_state,
)
from lightning_hybrid.checkpoint.directory import as_shares, divide, on_first, refuse_shards, write_directory
from lightning_hybrid.checkpoint.files import read_checkpoint, write_file
from lightning_hybrid.checkpoint.loader_states import add_loader_states, take_loader_states
from lightning_hybrid.checkpoint.partial_states import warn_of_partial_states
from lightning_hybrid.checkpoint.stage_parts import join_stages
from lightning_hybrid.checkpoint.whole import absolute, checkpoint_to_load
from lightning_hybrid.errors import CheckpointError, UnsupportedError
from lightning_hybrid.layout import Coordinate, Layout
from lightning_hybrid.optimizer import disable_foreach_on_mixed_tensors
from lightning_hybrid.sharding import reshard_inside
from lightning_hybrid.training.collectives import AxisCollectives
from lightning_hybrid.training.optimizer_scope import refuse_wide_optimizers
from lightning_hybrid.training.torch_clipping import refuse_lightnings_norms, refuse_norms_of

__all__ = ["CheckpointHooks"]


class CheckpointHooks(AxisCollectives):
    """Makes optimizers over a part of the module, and turns parts into whole states and back."""

    _part: Any = None
    """This rank's :class:`~lightning_hybrid.parallelize.Part`, once there is one."""
    _module_of_part: Any = None
    _waiting_state: tuple[Mapping[str, Any], bool] | None = None
    """A checkpoint's, with its ``strict``, for a module that has no memory yet."""
    _group_names: list[list[list[str]]]
    """For each optimizer the parameter names of its groups, as one process has them."""
    _failed = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._background = Background()

    @property
    def layout(self) -> Layout:
        """The degrees of this run."""
        raise NotImplementedError

    @property
    def coordinate(self) -> Coordinate:
        """Where this rank stands on the mesh."""
        raise NotImplementedError

    @override
    def connect(self, model: Any) -> None:
        """Take the module of a run.

        Raises:
            UnsupportedError: if another Trainer has cut, split or sharded it.
        """
        if model is not self._module_of_part and "_part_of_a_run" in vars(model):
            raise UnsupportedError(
                f"This {type(model).__name__} was trained or evaluated before, by another Trainer or before another"
                " module, and this rank has kept its part of the weights only. Use a new module, as from"
                f" {type(model).__name__}.load_from_checkpoint(path), or the same Trainer."
            )
        super().connect(model)

    def _take_part(self, module: Any, part: Any) -> None:
        """Remember which module ``part`` is of, and have the module know that it is one."""
        self._part, self._module_of_part = part, module
        is_split = self.layout.tensor_parallel_size > 1 and bool(part.plan.split)
        if part.cut is not None or part.root is not None or is_split:
            module.__dict__["_part_of_a_run"] = True
            warn_of_partial_states(module)
            refuse_lightnings_norms()
        if part.cut is not None or is_split:
            refuse_norms_of(module)

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        self._reset_optimizers_and_schedulers()
        module: Any = self.lightning_module
        with self._keys.completed(module):  # configure_optimizers sees every parameter, those of other stages on meta
            super().setup_optimizers(trainer)
        self._group_names = [self._keys.release(optimizer, module) for optimizer in self.optimizers]
        check_same_optimizers(self.optimizers, self.lr_scheduler_configs, self._group_names)
        for optimizer in self.optimizers:
            refuse_wide_optimizers(optimizer, self.layout)
            disable_foreach_on_mixed_tensors(optimizer)
            optimizer.register_step_post_hook(lambda *_: reshard_inside(self._part.root))

    @property
    def _keys(self) -> StateKeys:
        assert self._part is not None
        keys: StateKeys = self._part.keys
        return keys

    def close_window(self, event: str) -> None:
        """Have replicas be equal before ``event``, unless the user said otherwise. A collective while training."""

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state, on rank 0; shares of it, on all ranks, for a sharded checkpoint. A collective."""
        return self.whole_state(in_place=self._is_sharded)

    def whole_state(self, *, in_place: bool = False) -> dict[str, Any]:
        """See :func:`~lightning_hybrid.checkpoint.consolidate.gather_model_state`."""
        self.refuse_apart("trainer.save_checkpoint, or the whole module's state,")
        assert self.lightning_module is not None
        if self._is_main_process_only:
            return self.lightning_module.state_dict()
        return gather_model_state(
            self.lightning_module, self._keys, self._mesh, in_place=in_place, holds=self._is_saved
        )

    @property
    def _is_main_process_only(self) -> bool:
        """Whether this process has started others, which have ended, and has been handed the whole weights."""
        return self._part is None and not dist.is_initialized()

    @property
    def _is_saved(self) -> bool:
        """Whether this rank's values are those that a checkpoint's own entries have: not if another replica's are."""
        return True

    @property
    def _is_sharded(self) -> bool:
        """Whether checkpoints are written as directories."""
        return bool(self.settings.save_distributed_checkpoint)

    @property
    def _is_running(self) -> bool:
        """Whether a Trainer will wait for what is saved in the background; after ``fit`` nobody does."""
        module = self.lightning_module
        return module is not None and module.trainer.state.status == TrainerStatus.RUNNING

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        is_whole = self._part is None or self._module_of_part is not module  # setup comes later
        if is_whole and on_meta(module):  # nothing there yet to load into
            self._waiting_state = checkpoint["state_dict"], strict
            return
        keys = StateKeys.of(module, lambda name: True) if is_whole else self._keys
        _say(*scatter_model_state(module, checkpoint["state_dict"], keys, strict))

    def _load_waiting_state(self) -> None:
        """Load what came when the module was on the meta device."""
        if self._waiting_state is not None:
            (state, strict), self._waiting_state = self._waiting_state, None
            assert self.lightning_module is not None
            _say(*scatter_model_state(self.lightning_module, state, self._keys, strict))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file or a directory: each rank its own part only. All ranks read the same one. A collective."""
        self._background.wait()
        path = on_first(lambda: checkpoint_to_load(checkpoint_path), checkpoint_path, doing="loaded")
        checkpoint = read_checkpoint(path, self.checkpoint_io, weights_only)
        take_loader_states(checkpoint, self.layout, self.coordinate)
        return checkpoint

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a directory, or a file from rank 0: aside first, then in its place. A collective.

        Raises:
            CheckpointError: on every rank, with the first cause; what was at the path is as it was.
        """
        path = absolute(self.broadcast(filepath))
        if self._is_main_process_only:
            rank_zero_warn(
                f"{path} has no optimizer states: they were in the processes that fit or validate had started, and"
                " ended with them. ModelCheckpoint saves all, to resume from."
            )
            if self._is_sharded:
                write_directory(as_shares(checkpoint), path)
            else:
                write_file(checkpoint, path, self.checkpoint_io, storage_options)
            return
        refuse_shards(checkpoint)
        if self._is_sharded and (storage_options is not None or type(self.checkpoint_io) is not TorchCheckpointIO):
            raise CheckpointError(
                f"{type(self.checkpoint_io).__name__} and storage_options write one file, and with"
                f" save_distributed_checkpoint={self.settings.save_distributed_checkpoint!r} a checkpoint is a"
                " directory. Leave them out, or use save_distributed_checkpoint=False."
            )
        if self.layout.pipeline_parallel_size > 1:
            gather = partial(self.all_gather_object, axis="pipeline_parallel")
            checkpoint = join_stages(checkpoint, self._keys.canonical, gather)
        add_loader_states(checkpoint, self.layout, self.coordinate)
        if not self._is_sharded:
            on_first(lambda: write_file(checkpoint, path, self.checkpoint_io, storage_options), path)
        elif self.settings.save_distributed_checkpoint == "async" and self._is_running:
            module: Any = self.lightning_module
            waits = partial(module.trainer.profiler.profile, "save_checkpoint")  # so that they are no part of a step
            self._background.save(divide(checkpoint, path), path, waits)
        else:
            write_directory(checkpoint, path)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or a directory, once the one that replaces it is whole."""
        if self.is_global_zero:
            self.when_saved(lambda: self.checkpoint_io.remove_checkpoint(filepath))

    def when_saved(self, function: Callable[[], Any]) -> None:
        """Call a function when the checkpoint that is being written in the background, if there is one, is whole."""
        self._background.afterwards(function)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        self._background.finish_if_possible()

    @override
    def teardown(self) -> None:
        self._background.wait()
        super().teardown()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state as one process would have it, on rank 0; a collective."""
        plain = getattr(optimizer, "optimizer", optimizer)  # a LightningOptimizer holds the user's
        order = self._group_names[self.optimizers.index(plain)]
        assert self.lightning_module is not None
        return gather_optimizer_state(
            plain,
            self.lightning_module,
            self._keys,
            self._mesh,
            order,
            in_place=self._is_sharded,
            holds=self._is_saved,
        )

    def _own_states(self, checkpoint: Mapping[str, Any]) -> list[Any]:
        """The states of the optimizers that are this rank's to load."""
        states: list[Any] = checkpoint["optimizer_states"]
        return states

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        states = self._own_states(checkpoint)
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint has {len(states)} optimizers, this run has {len(self.optimizers)}. Resume with the"
                " configure_optimizers that wrote it, or load the weights only."
            )
        for optimizer, state, order in zip(self.optimizers, states, self._group_names, strict=True):
            scatter_optimizer_state(optimizer, state, self.lightning_module, self._keys, self._mesh, order)


def _say(missing: list[str], unexpected: list[str]) -> None:
    """List what was passed over, which happens where the user wants it (``strict_loading = False``) only."""
    if missing or unexpected:
        rank_zero_warn(
            "The checkpoint's weights were loaded as far as they fit (strict=False)."
            f" Left as they were, being missing: {missing}. Not used, being unexpected: {unexpected}."
        )
