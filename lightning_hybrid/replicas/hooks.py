"""The strategy's hooks for replicas that exchange now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.failures.early_end import unexpected_end, watched_advance
from lightning_hybrid.measuring.clock import Clock
from lightning_hybrid.mesh import axis_group, replica_group, replica_mesh
from lightning_hybrid.replicas.states import add_replica_states, take_replica_states
from lightning_hybrid.replicas.window import Replicas
from lightning_hybrid.sharding import reshard
from lightning_hybrid.training.evaluation import EvaluationHooks, gather_objects

__all__ = ["ReplicaHooks"]

#: The codes in :meth:`Replicas.meet` of an epoch's last batch and of a measurement.
_LAST_BATCH, _MEASUREMENT = 4, 5


class ReplicaHooks(EvaluationHooks):
    """Counts optimizer steps, and has the replicas exchange after so many of them and where a window is closed."""

    replicas: Replicas | None = None
    """This rank's part of its replica; ``None`` where gradients are averaged at every step."""
    _replica_group: dist.ProcessGroup | None = None
    _clock: Clock
    _stepped = _told = False

    @override
    def _take_part(self, module: Any, part: Any) -> None:
        super()._take_part(module, part)
        options = self.settings.replica_sync
        if options.is_every_step:
            return
        self._replica_group = replica_group(self.device_mesh)
        self.replicas = Replicas(
            module,
            options,
            group=axis_group(self.device_mesh, "data_parallel_replicate"),
            device=self.root_device,
            blocks=part.blocks,
            tied=() if part.stages is None else tuple(part.stages.tied),
            buffers=part.buffers,
            settle=lambda: reshard(part.root),
        )
        rank_zero_info(f"lightning_hybrid: {self.layout.replicate_size} replicas, {self.replicas}")

    @property
    def _norm_scope(self) -> dict[str, Any]:
        """Whose gradients make one norm: those of the world, or of one replica, which differs from the others."""
        if self.replicas is None:
            return {"mesh": self._mesh}
        return {"mesh": replica_mesh(self.device_mesh), "group": self._replica_group}

    def gather_in_step(self, value: Any) -> list[Any]:
        """Gather an object from all ranks that are in the same step: the world, or this replica. A collective."""
        return gather_objects(value, self._replica_group)

    def meet_to_measure(self, step: int) -> None:
        """Before the callbacks of all ranks exchange what they measured of a step: no replica is elsewhere.

        Raises:
            ConfigurationError: on all ranks, if one is.
        """
        if self.replicas is not None:
            self.replicas.meet(_MEASUREMENT, step)

    # ---- training ------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        module: Any = self.lightning_module
        loop = module.trainer.fit_loop
        if self.watch is not None:
            loop.epoch_loop.advance = watched_advance(loop.epoch_loop, self.watch)
        if self.replicas is not None:
            self.replicas.start()
            loop.on_run_end = _closed_first(loop, self)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Around a training step, in which values go over the axis that averages at every step."""
        module: Any = self.lightning_module
        self._before_training_step()
        if self.replicas is not None:
            progress = module.trainer.fit_loop.epoch_loop.batch_progress
            if progress.is_last_batch:
                self.replicas.meet(_LAST_BATCH, progress.current.ready)
            self.replicas.notice_trained()
        self._trains, ends = True, unexpected_end(module.trainer.fit_loop._data_fetcher)
        try:
            yield
        except ends:  # Lightning ends the epoch then, on this rank alone, and the others wait
            raise RuntimeError(
                "training_step raised StopIteration. Catch it there, as by next(iterator, None); to end an epoch early,"
                " return -1 from on_train_batch_start on all ranks."
            ) from None
        finally:
            self._trains = False
        if not module.automatic_optimization:
            self._after_step()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._stepped = True
        if self.lightning_module is not None and self.lightning_module.automatic_optimization:
            self._after_step()
        return result

    def _after_step(self) -> None:
        """Count a step: an optimizer's, or that of all optimizers in one batch with manual optimization."""
        if self.replicas is not None and self._stepped:
            with self._clock.mark("REPLICAS"):
                self.replicas.after_step()
        self._stepped = False

    @override
    def close_window(self, event: str) -> None:
        module: Any = self.lightning_module
        if self.replicas is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self.replicas.close(event)

    # ---- what follows training -----------------------------------------------------------------------------------

    @override
    def on_validation_start(self) -> None:
        module: Any = self.lightning_module
        if self.replicas is not None and not module.trainer.sanity_checking:
            self.close_window("validation")
            self._tell_what_is_validated(module.trainer)
        self._start_even()

    def _tell_what_is_validated(self, trainer: Any) -> None:
        if self.replicas is not None and trainer.state.fn == TrainerFn.FITTING and not self._told:
            whose = (
                "each replica's own, on its own samples" if self.replicas.is_open else "those common to all replicas"
            )
            rank_zero_info(f"lightning_hybrid: the weights that are validated are {whose}")
            self._told = True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.close_window("checkpoint")
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, with what only the other replicas have. A collective."""
        add_replica_states(checkpoint, self)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @property
    @override
    def _is_saved(self) -> bool:
        return self.replicas is None or self.coordinate.replicate == 0

    @override
    def _own_states(self, checkpoint: Mapping[str, Any]) -> list[Any]:
        return take_replica_states(checkpoint, self)


def _closed_first(loop: Any, strategy: ReplicaHooks) -> Callable[[], None]:
    """A fit loop's ``on_run_end``, before which the last window is closed: hooks then see the final weights."""

    def on_run_end() -> None:
        strategy.close_window("end")
        type(loop).on_run_end(loop)

    return on_run_end
