"""What fails behind the last block, where only the last stage is, is told on all ranks; nobody waits or breaks off."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.pipeline import step
from tests.distributed.equality import QUIET
from tests.distributed.test_hooks import ROWS, Block, Loops
from tests.ranks import run_ranks


def raise_in(step_name: str, at: int) -> Callable[[Any, str, Tensor], Any]:
    def act(module: Any, name: str, loss: Tensor) -> Any:
        if name == step_name and module.trainer.global_step >= at and module.num_calls[name] % 2:
            raise FloatingPointError(f"{name} is not finite")
        return loss

    return act


def save(module: Any, name: str, loss: Tensor) -> Any:
    module.trainer.save_checkpoint("never.ckpt")
    return loss


def skip(module: Any, name: str, loss: Tensor) -> Any:
    return None if module.trainer.global_step == 1 else loss


#: What is done with the loss, and what every rank says.
FAILURES: dict[str, tuple[Callable[[Any, str, Tensor], Any], str]] = {
    "first step": (raise_in("training_step", 0), "FloatingPointError.*training_step is not finite"),
    "later step": (raise_in("training_step", 2), "FloatingPointError.*training_step is not finite"),
    "validation": (raise_in("validation_step", 2), "FloatingPointError.*validation_step is not finite"),
    "refusal": (save, "UnsupportedError.*save_checkpoint.*needs all ranks"),
    "skipped": (skip, "training_step returned no loss"),
    "no number": (lambda module, name, loss: loss if module.trainer.global_step == 0 else [loss], "returned list"),
}


class Fails(Loops):
    def __init__(self, act: Callable[[Any, str, Tensor], Any]) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(12, 5))
        self.act, self.num_calls = act, {"training_step": 0, "validation_step": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.run("training_step", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.run("validation_step", batch)

    def run(self, name: str, batch: Any) -> Any:
        loss = self.loss(batch)
        self.num_calls[name] += 1
        return self.act(self, name, loss)


def fail(triple: tuple[int, int, int], schedule: str, whole: bool, act: Callable[[Any, str, Tensor], Any]) -> None:
    strategy = Hybrid3DStrategy(*triple, archive=None, schedule=schedule, whole_batch_loss=whole)
    options = {**QUIET, "max_epochs": 2, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    trainer = L.Trainer(devices=math.prod(triple), strategy=strategy, **options)
    trainer.fit(Fails(act), DataLoader(ROWS, batch_size=8), DataLoader(ROWS[:4], batch_size=4))


def fail_all(rank: int, *how: Any) -> dict[str, str]:
    said = {}
    for name, (act, _) in FAILURES.items():
        with pytest.raises(Exception, match=r".") as caught:
            fail(*how, act)
        said[name] = f"{caught.typename}: {caught.value}"
    return said


WAYS = [
    ("1F1B", False, (1, 1, 2)),
    ("GPipe", True, (1, 1, 2)),
    ("ZBVZeroBubble", False, (1, 1, 2)),
    ("1F1B", False, (2, 1, 2)),
]


@pytest.mark.parametrize(("schedule", "whole", "triple"), WAYS, ids=str)
def test_every_rank_says_what_failed(schedule: str, whole: bool, triple: tuple[int, int, int]) -> None:
    for said in run_ranks(math.prod(triple), fail_all, triple, schedule, whole):
        for name, (_, message) in FAILURES.items():
            assert re.search(message, said[name]), (name, said[name])


def test_wrong_variant_who_fails_at_once_leaves_others_waiting() -> None:
    def train(rank: int) -> None:
        patch = pytest.MonkeyPatch()
        patch.setattr(step.PipelineRank, "_failing_later", lambda *_: nullcontext())
        fail((1, 1, 2), "1F1B", False, FAILURES["later step"][0])

    with pytest.raises(FloatingPointError) as caught:
        run_ranks(2, train)
    assert "rank 1 was still running" in str(caught.value.__cause__)
