"""Runs a user's step for what it shows about itself, so that nothing of it remains: no logs, no counts, no draws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_hybrid.batches.randomness import random_state, restore_random_state
from lightning_hybrid.errors import HybridError

__all__ = ["quiet_step", "run_with_optimizers"]

T = TypeVar("T")


@contextmanager
def quiet_step(module: Any, trainer: Any, untouched: set[nn.Module]) -> Iterator[None]:
    """Within the ``with`` block ``module``'s steps leave no trace.

    Args:
        module: The LightningModule.
        trainer: Its Trainer; its loggers are replaced by one that takes everything and keeps nothing.
        untouched: Modules that do not run in the block, so that their state need not be kept.
    """
    kept = [(part, _state_of(part)) for part in module.modules() if part not in untouched]
    loggers, rng = trainer.loggers, random_state()
    module.__dict__["log"] = lambda *args, **kwargs: None
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        module.__dict__.pop("log", None)
        trainer.loggers = loggers
        for part, (attributes, buffers) in kept:
            part.__dict__.update(attributes)
            part._buffers.update(buffers)
        restore_random_state(rng)


def run_with_optimizers(module: Any, strategy: Any, run: Callable[[], T]) -> T:
    """Run something of a step before there are optimizers, and give it those that it asks for.

    With manual optimization it has them at once. Other steps may want a rate to log; those that fail without run again.
    """
    if module.automatic_optimization:
        try:
            return run()
        except HybridError:
            raise
        except Exception:
            if strategy.optimizers or not _can_make_optimizers(module):
                raise
    with _stand_in_optimizers(module, strategy):
        return run()


def _can_make_optimizers(module: Any) -> bool:
    try:
        _init_optimizers_and_lr_schedulers(module)
    except Exception:  # not yet: what the step raised says more
        return False
    return True


@contextmanager
def _stand_in_optimizers(module: Any, strategy: Any) -> Iterator[None]:
    """Within the ``with`` block a step finds optimizers, which do nothing.

    They are made by ``configure_optimizers`` before there are any, and forgotten afterwards.
    """
    frozen = {parameter: parameter.requires_grad for parameter in module.parameters()}
    strategy.optimizers, strategy.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module)
    for owner, name in ((module, "manual_backward"), (module, "clip_gradients"), (strategy, "optimizer_step")):
        owner.__dict__[name] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for owner, name in ((module, "manual_backward"), (module, "clip_gradients"), (strategy, "optimizer_step")):
            del owner.__dict__[name]
        strategy._reset_optimizers_and_schedulers()
        for parameter, requires_grad in frozen.items():  # toggle_optimizer changes it
            parameter.requires_grad_(requires_grad)


def _state_of(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain attributes and buffers of one module (torchmetrics keep their states in both)."""
    registries = {name for name in part.__dict__ if name in ("_parameters", "_buffers", "_modules") or "hooks" in name}
    attributes = {
        name: _copy(value)
        for name, value in part.__dict__.items()
        if name not in registries and not _lists_weights(value)
    }
    return attributes, {name: _copy(buffer) for name, buffer in part._buffers.items()}


def _lists_weights(value: Any) -> bool:
    """Whether a list follows the weights (an LSTM's): whoever gathers them within the block puts others there."""
    return isinstance(value, list) and any(isinstance(entry, nn.Parameter) for entry in value)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if not value.requires_grad and 0 not in value.stride() else value
    return copy.copy(value) if type(value) in (list, dict, set) else value
