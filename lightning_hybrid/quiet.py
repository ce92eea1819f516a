"""Runs a user's step for what it shows about itself, so that nothing of it remains: no logs, no counts, no draws."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_hybrid.randomness import random_state, restore_random_state

__all__ = ["quiet_step"]


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


def _state_of(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain attributes and buffers of one module (torchmetrics keep their states in both)."""
    registries = {name for name in part.__dict__ if name in ("_parameters", "_buffers", "_modules") or "hooks" in name}
    attributes = {name: _copy(value) for name, value in part.__dict__.items() if name not in registries}
    return attributes, {name: _copy(buffer) for name, buffer in part._buffers.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if not value.requires_grad and 0 not in value.stride() else value
    return copy.copy(value) if type(value) in (list, dict, set) else value
