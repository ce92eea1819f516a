"""Steps without gradients, and data ranks that have different numbers of batches.

[Note: ranks that have run out]
Sharded parameters are gathered in every step by all data ranks, so a rank that has no batch left would let the others
wait for ever. Lightning's sampler for ``predict`` does not repeat samples, so the numbers differ as a rule; other
loaders may be uneven for their own reasons. So a rank that has run its last batch takes part in what the others still
have to do: it runs that batch again, without a trace. That happens inside of its last step, before any hook at the end
that might have collectives of its own. How often is known beforehand where loaders have a length. Where one has none,
all ranks tell each other before every step that they go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_hybrid.checkpoint.hooks import CheckpointHooks
from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from lightning_hybrid.failures.early_end import unexpected_end
from lightning_hybrid.mesh import axis_group
from lightning_hybrid.training.quiet import quiet_step

__all__ = [
    "EvaluationHooks",
    "EvenSteps",
    "EvenTraining",
    "evaluate_by_no_grad",
    "gather_objects",
    "refuse_too_few_samples",
]


class EvenSteps:
    """Makes the data ranks run equally many steps of one evaluation."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_batches: int | None) -> None:
        """``num_batches`` of this rank, ``None`` if nobody knows. A collective over ``group``.

        Raises:
            ConfigurationError: on every rank, if some have no batch and so cannot take part in anything.
        """
        self._group, self._device = group, device
        found = gather_objects(num_batches, group)
        if 0 in found and set(found) != {0}:
            raise ConfigurationError(
                f"{found.count(0)} of {len(found)} data ranks have no batch at all ({found} by data rank, None where no"
                " length is known), and each must have one. Use fewer data ranks, or split the data set evenly."
            )
        lengths = [number for number in found if number is not None]
        self._asks = len(lengths) < len(found)
        self._missing = 0 if num_batches is None or self._asks else max(lengths) - num_batches

    def before(self) -> None:
        """To be called before each step."""
        if self._asks:
            self._num_going_on(True)

    def after_last(self, idle: Callable[[], None]) -> None:
        """To be called after this rank's last step: run ``idle`` as long as others have batches."""
        if self._asks:
            while self._num_going_on(False):
                idle()
        for _ in range(self._missing):
            idle()

    def _num_going_on(self, goes_on: bool) -> int:
        """Return the number of ranks that go on. A collective."""
        total = torch.tensor(int(goes_on), device=self._device)
        dist.all_reduce(total, group=self._group)
        return int(total)


class EvenTraining:
    """Refuses to train on if some data ranks have fewer batches than others."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, length: int | None, *, all_data: dist.ProcessGroup
    ) -> None:
        """``length`` of this rank's epoch, ``None`` if nobody knows. A collective over ``all_data``.

        Where nobody knows, the ranks of ``group`` ask each other before each batch.
        """
        self._group, self._device = group, device
        found = gather_objects(length, all_data)
        self._asks = None in found
        if not self._asks and len(set(found)) > 1:
            raise ConfigurationError(f"Data ranks have {found} training batches (by data rank). {_TRAINING_REMEDY}")

    def before(self, batch_idx: int, is_last: bool) -> None:
        """To be called before each step, which the ranks must agree is their last one or not.

        Raises:
            ConfigurationError: on every rank of the group.
        """
        if not self._asks:
            return
        ending = torch.tensor(int(is_last), device=self._device)
        dist.all_reduce(ending, group=self._group)
        if 0 < (number := int(ending)) < dist.get_world_size(self._group):
            ranks = [rank for rank, last in enumerate(gather_objects(is_last, self._group)) if last]
            raise ConfigurationError(
                f"{number} of {dist.get_world_size(self._group)} data ranks ({ranks}) have {batch_idx + 1} training"
                f" batches in this epoch, and the others have more. {_TRAINING_REMEDY}"
            )


_TRAINING_REMEDY = (
    "Give all the same number: limit_train_batches, a DistributedSampler, or a data set that is split evenly."
)


def refuse_too_few_samples(source: Any, data_parallel_size: int) -> None:
    """Have the predict loop's ``source`` of loaders refuse fewer samples than data ranks, which each must have a batch.

    It is asked once, later: the loaders may be those of a hook, which must not be called twice.

    Raises:
        ConfigurationError: then, on every rank, where the loaders can be looked at beforehand.
    """

    def asked() -> Any:
        del source.dataloader
        for loader in tree_leaves(loaders := source.dataloader()):
            size = sized_len(loader.dataset) if isinstance(loader, DataLoader) else None
            if size is not None and size < data_parallel_size:
                raise ConfigurationError(
                    f"predict has {size} samples for data_parallel_size={data_parallel_size}, and each data rank must"
                    f" have at least one. Use data_parallel_size={max(size, 1)} or less."
                )
        return loaders

    source.dataloader = asked


def evaluate_by_no_grad(trainer: Any, root: Any) -> None:
    """Where weights are sharded, below ``root``, have all loops evaluate under ``no_grad``, as they do on gloo.

    Weights that are gathered under ``inference_mode`` (its default on NCCL) cannot be gathered in training any more.
    """
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in loops if root is not None else ():
        loop.inference_mode = False


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather a picklable object from all ranks of a group, or of the world. A collective."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


class EvaluationHooks(CheckpointHooks):
    """``validation_step``, ``test_step`` and ``predict_step``, equally often on all data ranks."""

    _even: EvenSteps | None = None
    _even_training: EvenTraining | None = None
    _even_epoch = -1

    def _run_step(self, name: str, *args: Any, quiet: bool = False, **kwargs: Any) -> Any:
        """Run a step of the module without gradients; ``quiet``: log nothing."""
        raise NotImplementedError

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluated("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluated("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction for this data rank's batch, on all of its pipeline and tensor ranks."""
        with self.precision_plugin.predict_step_context():
            return self._evaluated("predict_step", *args, **kwargs)

    def _evaluated(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._evaluate(name, *args, **kwargs)
        except unexpected_end(self._evaluation_loop._data_fetcher):  # Lightning's loop would end, on this rank alone
            raise RuntimeError(f"{name} raised StopIteration. Catch it there, as by next(iterator, None).") from None

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        if module.trainer.state.fn == TrainerFn.FITTING:
            self._part.buffers.before_step(trains=False)
        if self._even is None:
            return self._run_step(name, *args, **kwargs)
        self._even.before()
        output = self._run_step(name, *args, **kwargs)
        if self._evaluation_loop.batch_progress.is_last_batch:
            self._even.after_last(lambda: self._run_idle(name, *args, **kwargs))
        return output

    def _run_idle(self, name: str, *args: Any, **kwargs: Any) -> None:
        module: Any = self.lightning_module
        with quiet_step(module, module.trainer, set()):
            self._run_step(name, *args, quiet=True, **kwargs)

    @property
    def _evaluation_loop(self) -> Any:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            return trainer.fit_loop.epoch_loop.val_loop
        return trainer.predict_loop if trainer.state.fn == TrainerFn.PREDICTING else trainer._evaluation_loop

    def _start_even(self) -> None:
        if self._part is not None and self._part.root is not None:
            module: Any = self.lightning_module
            for owner in (module, module.trainer.datamodule):
                if getattr(owner, "allow_zero_length_dataloader_with_multiple_devices", False):
                    raise UnsupportedError(
                        "allow_zero_length_dataloader_with_multiple_devices=True: with sharded parameters each data"
                        " rank must have at least one batch. Set it to False, or use data_parallel_size=1."
                    )
            group = axis_group(self.device_mesh, self.settings.step_axis)
            fetcher = self._evaluation_loop._data_fetcher
            if not isinstance(fetcher, _DataLoaderIterDataFetcher):  # a step that fetches by itself is on its own
                self._even = EvenSteps(group, self.root_device, 0 if fetcher.done else fetcher.length)

    def _end_even(self) -> None:
        self._even = None

    def _not_skipped(self, output: Any) -> Any:
        """Return what a training step returned.

        Raises:
            UnsupportedError: if that skips the batch, which other data ranks need not do: they would wait.
        """
        module: Any = self.lightning_module
        number = self.layout.data_parallel_size
        if output is None and module.automatic_optimization and number > 1:
            raise UnsupportedError(
                f"training_step returned None on rank {self.global_rank}, which skips the batch, but all {number} data"
                " ranks average their gradients. Return the loss times 0, leave such samples out in the dataset, or use"
                " data_parallel_size=1."
            )
        return output

    def _before_training_step(self) -> None:
        """Have the data ranks agree that all have a batch, and begin with the same buffers."""
        assert self.lightning_module is not None
        loop: Any = self.lightning_module.trainer.fit_loop
        self._check_even_training(loop)
        accumulates = self.lightning_module.automatic_optimization and loop._should_accumulate()
        self._part.buffers.before_step(trains=not accumulates)

    def _check_even_training(self, loop: Any) -> None:
        is_whole = self._part.root is None and self.settings.step_axis == "data_parallel"
        if is_whole or isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            return
        progress = loop.epoch_loop.batch_progress
        if self._even_training is None or self._even_epoch != loop.epoch_progress.current.ready:
            group, everyone = (axis_group(self.device_mesh, a) for a in (self.settings.step_axis, "data_parallel"))
            length = loop._data_fetcher.length
            self._even_training = EvenTraining(group, self.root_device, length, all_data=everyone)
            self._even_epoch = loop.epoch_progress.current.ready
        self._even_training.before(progress.current.ready - 1, progress.is_last_batch)

    on_validation_start = on_test_start = on_predict_start = _start_even
    on_validation_end = on_test_end = on_predict_end = _end_even
