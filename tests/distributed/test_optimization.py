"""Several optimizers by hand, toggled, with backwards of their own: equal to one process. LBFGS is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid.errors import UnsupportedError
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.test_optimizers import DEGREES, ROWS, LitTied
from tests.distributed.zoo import Lit as Zoo
from tests.distributed.zoo import labelled_rows
from tests.ranks import run_ranks


class Closure(LitTied):
    """LBFGS calls the step several times for each update."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.05)


class Manual(LitTied):
    """Two optimizers that take turns, with a scheduler, clipping and an accumulation of their own."""

    toggles = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        optimizers: Any = self.optimizers()
        optimizer = optimizers[batch_idx % 2]
        if self.toggles:
            self.toggle_optimizer(optimizer)
        loss = self.loss(batch)
        assert self.blocks[0].up.weight.requires_grad == (not self.toggles or batch_idx % 2 == 0)
        self.manual_backward(loss / 2)
        self.manual_backward(self.loss(batch.flip(1)) / 2)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(optimizer)
        schedulers: Any = self.lr_schedulers()
        schedulers.step()
        self.log("train_loss", loss)
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW([*self.blocks[0].parameters(), self.embedding.weight], lr=0.01, eps=1e-3)
        second = torch.optim.SGD(self.blocks[1].parameters(), lr=0.5, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 2, 0.5)]


class NotToggled(Manual):
    """Wrong on purpose: the other optimizer's gradients stay, and add up until its turn."""

    toggles = False


class Duel(Zoo):
    """Two networks without blocks that are trained against each other, each by a backward of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12)))
        self.judge = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        (makes, judges), real = self.optimizers(), batch["x"]  # type: ignore[misc]
        self.toggle_optimizer(makes)
        loss = F.softplus(-self.judge(self.model(real.flip(1)))).mean()
        self.manual_backward(loss)
        makes.step()
        makes.zero_grad()
        self.untoggle_optimizer(makes)
        self.toggle_optimizer(judges)
        verdict = F.softplus(-self.judge(real)) + F.softplus(self.judge(self.model(real.flip(1)).detach()))
        self.manual_backward(verdict.mean())
        judges.step()
        judges.zero_grad()
        self.untoggle_optimizer(judges)
        return {"loss": (loss + verdict.mean()).detach()}

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.5) for part in (self.model, self.judge)]


def run(rank: int, kind: Any, degrees: dict[str, Any]) -> Trace:
    if kind is Duel:
        return trace(rank, kind, labelled_rows((12,)), degrees, max_epochs=2)
    return trace(rank, kind, ROWS, degrees, max_epochs=2)


@pytest.mark.parametrize(
    ("kind", "place"),
    [(Manual, "dp2"), (Manual, "tp2"), (Duel, "dp2")],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_equals_one_process(kind: Any, place: str) -> None:
    (expected,) = run_ranks(1, run, kind, ONE_PROCESS)
    assert_equal(expected, run_ranks(2, run, kind, DEGREES[place]))


def test_wrong_variant_gradients_of_the_other_optimizer_are_seen() -> None:
    (expected,) = run_ranks(1, run, Manual, ONE_PROCESS)
    with must_differ():
        assert_equal(expected, run_ranks(2, run, NotToggled, DEGREES["dp2"]))


@pytest.mark.parametrize("place", ["dp2", "tp2", "pp2"])
def test_lbfgs_is_refused(place: str) -> None:
    with pytest.raises(UnsupportedError, match=r"LBFGS takes products over all parameters.*one device"):
        run_ranks(2, run, Closure, DEGREES[place])
