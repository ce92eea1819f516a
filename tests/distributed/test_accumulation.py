"""While gradients accumulate, backwards send nothing; the last one of a window does (``block_backward_sync``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from tests.distributed.equality import QUIET
from tests.distributed.test_hooks import ROWS, Loops
from tests.ranks import run_ranks


class Messages(L.Callback):
    """The number of gloo's operations within each backward."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_before_backward(self, *_: Any) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU]).__enter__()

    def on_after_backward(self, *_: Any) -> None:
        self.profile.__exit__(None, None, None)
        self.found.append(sum(event.name.startswith("gloo:") for event in self.profile.events()))


def count(rank: int, options: dict[str, Any], block: Callable[[], Any] | None = None) -> list[int]:
    messages = Messages()
    strategy = Hybrid3DStrategy(2, 1, 1, archive=None, **options)
    if block is not None:
        strategy.block_backward_sync = block  # type: ignore[method-assign]
    trainer = L.Trainer(
        devices=2, strategy=strategy, max_epochs=2, accumulate_grad_batches=2, callbacks=[messages], **QUIET
    )
    trainer.fit(Loops(2), DataLoader(ROWS, batch_size=2), DataLoader(ROWS[:4], batch_size=2))
    return messages.found


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"replicate_size": 2}], ids=str)
def test_nothing_is_sent_while_gradients_accumulate(options: dict[str, Any]) -> None:
    for found in run_ranks(2, count, options):
        assert len(found) == 8
        assert found[::2] == [0] * 4 and min(found[1::2]) > 0


def test_wrong_variant_reductions_in_every_backward_are_seen() -> None:
    for found in run_ranks(2, count, {"reshard_after_forward": False}, nullcontext):
        assert min(found) > 0
