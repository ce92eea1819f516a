"""``module.state_dict()`` outside of checkpoints: what a rank gives there is its part of the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["state_of_part", "warn_of_partial_states"]

_asks_for_part = False


@contextmanager
def state_of_part() -> Iterator[None]:
    """Around states that are put together afterwards."""
    global _asks_for_part
    _asks_for_part, before = True, _asks_for_part
    try:
        yield
    finally:
        _asks_for_part = before


def warn_of_partial_states(module: nn.Module) -> None:
    """Have ``module``, and the modules in it, warn whoever asks for their state."""
    for part in module.modules():
        part.register_state_dict_pre_hook(_warn)


def _warn(module: nn.Module, prefix: str, _: bool) -> None:
    if not _asks_for_part and not prefix and any(True for _ in module.parameters()):
        warnings.warn(
            f"{type(module).__name__}.state_dict() has this rank's part of the weights only (shards, or one pipeline"
            " stage). For all of them call trainer.save_checkpoint(path) on all ranks, or"
            " trainer.strategy.lightning_module_state_dict(), which is whole on global rank 0.",
            stacklevel=4,
        )
