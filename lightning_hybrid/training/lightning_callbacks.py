"""Lightning's own callbacks that take a rank for a whole process: refused, or told what is different here."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.checkpoint.uploads import upload_directories
from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.layout import Layout
from lightning_hybrid.training.averages import AVERAGING, average_shares
from lightning_hybrid.training.verify import Verify

__all__ = ["adapt_callbacks"]

logger = logging.getLogger(__name__)


def adapt_callbacks(strategy: Any, module: Any) -> None:
    """Tell callbacks what a rank holds and counts. To be called before their ``setup``, each time.

    Raises:
        UnsupportedError: names a callback that cannot do with several ranks what it does with one, the reason and the
            way out; or a logger that would upload nothing. The same on all ranks.
    """
    if strategy.settings.save_distributed_checkpoint:
        upload_directories(module.trainer)
    if strategy.settings.verify and not any(isinstance(callback, Verify) for callback in module.trainer.callbacks):
        module.trainer.callbacks.insert(0, Verify(int(strategy.settings.verify)))  # before one that changes gradients
    for callback in module.trainer.callbacks:
        if strategy.layout.world_size > 1:
            _refuse(callback, module, strategy.layout)
        if isinstance(callback, AVERAGING) and not strategy.settings.replica_sync.is_every_step:
            raise UnsupportedError(
                f"{type(callback).__name__} averages weights over steps, but between exchanges each replica has weights"
                f" of its own (replica_sync={strategy.settings.replica_sync}), so the averages would differ. Leave the"
                " callback out, or use replica_sync=1."
            )
        if isinstance(callback, AVERAGING):
            average_shares(callback, strategy)
        elif isinstance(callback, ModelSummary):
            vars(callback)["on_fit_start"] = partial(_summarize, callback, strategy)
        elif isinstance(callback, OnExceptionCheckpoint):
            vars(callback)["on_exception"] = partial(_save_if_together, callback, strategy)
        elif isinstance(callback, ThroughputMonitor):
            vars(callback)["setup"] = partial(_set_up_throughput, callback, strategy.layout)


def _refuse(callback: Any, module: Any, layout: Layout) -> None:
    if isinstance(callback, BatchSizeFinder):
        raise UnsupportedError(
            "BatchSizeFinder tries batch sizes until one process runs out of memory, and the other ranks would wait for"
            f" it (now: {layout}). Leave it out: the memory table at set-up and lightning_hybrid.describe_rank say what"
            " a batch size needs."
        )
    if isinstance(callback, ModelPruning):
        raise UnsupportedError(
            "ModelPruning replaces parameters by masked copies of them, and compares all weights of one process, while"
            f" ranks hold parts of the model (now: {layout}). Prune in one process: before training, or a checkpoint"
            " afterwards."
        )
    if isinstance(callback, BaseFinetuning) and (layout.tensor_parallel_size > 1 or layout.pipeline_parallel_size > 1):
        raise UnsupportedError(
            f"{type(callback).__name__} adds groups of parameters to optimizers during training, and finds them"
            f" by their values, of which a rank has a part (now: {layout}). Give all parameters to the optimizer in"
            " configure_optimizers, freeze them with requires_grad_(False) in __init__ and unfreeze them with"
            " requires_grad_(True) in on_train_epoch_start; or use data parallelism alone."
        )
    norms = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    if isinstance(callback, StochasticWeightAveraging) and norms:
        raise UnsupportedError(
            f"StochasticWeightAveraging ends with an epoch without backward for the statistics of {norms[0]} (and"
            f" {len(norms) - 1} more), which shards and pipelines cannot run (now: {layout}). Use WeightAveraging,"
            " GroupNorm or LayerNorm, or one process."
        )


def _summarize(callback: ModelSummary, strategy: Any, trainer: Any, pl_module: Any) -> None:
    """The summary of the whole model: parameters of other stages are there without memory.

    A forward of its own (``example_input_array``) would run outside of a step, where weights are shards.
    """
    example = pl_module.example_input_array
    if strategy._part.root is not None or strategy._part.cut is not None:
        pl_module.example_input_array = None
    try:
        with strategy._keys.completed(pl_module):
            type(callback).on_fit_start(callback, trainer, pl_module)
    finally:
        pl_module.example_input_array = example


def _save_if_together(callback: Any, strategy: Any, trainer: Any, *args: Any) -> None:
    """All ranks save together or none does: after a signal they stop together, after an exception they do not."""
    if strategy.watch is None or strategy.watch.own is None:
        type(callback).on_exception(callback, trainer, *args)
    else:
        logger.warning(
            "OnExceptionCheckpoint saves nothing: rank %d has failed in the middle of a step, where the others do not"
            " save with it. The newest checkpoint of ModelCheckpoint (save_last=True) is whole.",
            strategy.watch.rank,
        )


def _set_up_throughput(callback: Any, layout: Layout, *args: Any, **kwargs: Any) -> None:
    type(callback).setup(callback, *args, **kwargs)
    for throughput in callback._throughputs.values():
        vars(throughput)["compute"] = partial(_count_once, throughput, layout.data_parallel_size / layout.world_size)


def _count_once(throughput: Any, share: float) -> dict[str, float]:
    """Rates per device and of all, where a batch is the work of all tensor and pipeline ranks together.

    Lightning takes each rank for one with samples of its own.
    """
    rates = ("_per_sec", "mfu")
    found = type(throughput).compute(throughput).items()
    return {name: value * share if name.endswith(rates) else value for name, value in found}
