"""A gradient that is no number on one rank: all ranks stop with its name, or all pass over the step."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import FiniteGradients
from lightning_hybrid.errors import NonFiniteError
from tests.distributed.equality import QUIET
from tests.distributed.test_equality import ROWS, SGDGPT
from tests.ranks import run_ranks

TRIPLES = [(2, 1, 1), (1, 1, 2), (1, 2, 1)]


class Spoilt(SGDGPT):
    """On one rank a gradient of the first block becomes NaN before the second optimizer step."""

    victim = 1

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1 and self.global_rank == self.victim:
            next(p for n, p in self.named_parameters() if p.grad is not None and n.endswith("weight")).grad.mul_(
                math.nan
            )  # type: ignore[union-attr]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        local = [p.to_local() if hasattr(p, "to_local") else p for p in self.parameters()]
        self.seen.append(float(torch.stack([p.detach().norm() for p in local if p.numel()]).sum()))


def train(rank: int, triple: tuple[int, int, int], action: Any) -> Any:
    module: Any = Spoilt(num_blocks=4, width=16, num_heads=4, context_length=16)
    module.seen = []
    callback = FiniteGradients(action)
    strategy = Hybrid3DStrategy(*triple, archive=None)
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=4, callbacks=[callback], **QUIET)
    try:
        trainer.fit(module, DataLoader(ROWS, batch_size=8))
    except NonFiniteError as error:
        return str(error)
    return module.seen, callback.num_skipped


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_all_ranks_stop_with_the_name(triple: tuple[int, int, int]) -> None:
    first, second = run_ranks(2, train, triple, "stop")
    assert first == second
    assert "optimizer step 2" in first and "rank 1 (data" in first and ".weight on rank" in first


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_all_ranks_pass_over_the_step(triple: tuple[int, int, int]) -> None:
    for seen, skipped in run_ranks(2, train, triple, "skip"):
        assert skipped == 1
        assert seen[1] == seen[0]  # as they were
        assert seen[2] != seen[1] and math.isfinite(seen[3])


def test_wrong_variant_each_rank_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hybrid.callbacks.finite_gradients.dist.all_reduce", lambda *_: None)
    monkeypatch.setattr("lightning_hybrid.callbacks.finite_gradients.dist.all_gather_object", lambda *_: None)
    with pytest.raises(Exception, match=r".|\n"):
        agree()


def agree() -> None:
    first, second = run_ranks(2, train, (1, 1, 2), "stop", timeout=30)
    assert first == second
