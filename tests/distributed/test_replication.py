"""Data ranks that each hold all of the model: averaged gradients, whatever is frozen, unused or used on some ranks."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_hybrid.data_parallel.replication import Replication
from lightning_hybrid.errors import UnsupportedError
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.test_sharding_options import ROWS, LitUneven
from tests.ranks import run_ranks

REPLICAS = {"data_parallel_size": 2, "replicate_size": 2}
SHARDS = {"data_parallel_size": 2}


class LitByRank(LitUneven):
    """Data rank 0 meets even first tokens, and only these use ``spare``."""

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        even = batch[:, 0] % 2 == 0
        if even.any():
            loss = loss + self.spare(self.embedding(batch[even, 0])).square().sum() / len(batch)
        return loss


class LitManual(LitUneven):
    """Two optimizers take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        head = list(self.head.parameters())
        others = [p for name, p in self.named_parameters() if not name.startswith("head.")]
        return torch.optim.SGD(head, lr=0.1), torch.optim.SGD(others, lr=0.1)


class LitFrozen(LitUneven):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


class LitMuon(LitUneven):
    """An optimizer that looks at whole matrices."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.blocks.parameters() if p.dim() == 2]
        return torch.optim.Muon(matrices, lr=0.01)


class Unfreeze(L.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.blocks[0].requires_grad_(trainer.current_epoch > 0)


def sorted_rows() -> Tensor:
    """Every batch of 8 has rows with even first tokens at even places only: data rank 0's."""
    rows = ROWS.clone()
    rows[0::2, 0] -= rows[0::2, 0] % 2
    rows[1::2, 0] += 1 - rows[1::2, 0] % 2
    return rows


def run(rank: int, degrees: dict[str, Any], make: Any, sabotage: Any, options: dict[str, Any]) -> Trace:
    options = {"callbacks": [Unfreeze()], **options} if options.get("max_epochs") else options
    return trace(rank, make, sorted_rows(), degrees, sabotage=sabotage, **options)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (LitUneven, {}),
    "accumulated": (LitUneven, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "unfrozen later": (LitFrozen, {"max_epochs": 2}),
    "by rank": (LitByRank, {}),
    "manual": (LitManual, {}),
    "whole matrices": (LitMuon, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_replicas_equal_one_process(name: str) -> None:
    make, options = CASES[name]
    expected = run_ranks(1, run, ONE_PROCESS, make, None, options)[0]
    assert_equal(expected, run_ranks(2, run, REPLICAS, make, None, options))


def test_what_no_rank_uses_has_no_gradient_and_nothing_is_a_shard() -> None:
    def look(rank: int) -> tuple[bool, bool]:
        module = LitUneven()
        trace(rank, lambda: module, ROWS, REPLICAS)
        return module.spare.weight.grad is None, any(isinstance(p, DTensor) for p in module.parameters())

    assert run_ranks(2, look) == [(True, False)] * 2


class LitBackward(LitManual):
    """Its backward is torch's own, of which nobody hears."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class LitSkips(LitUneven):
    """One data rank skips a batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if self.global_rank == 1 else super().training_step(batch, batch_idx)


class LitLBFGS(LitUneven):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class LitTwoBackwards(LitManual):
    """Shards are let go in the first one, and gathered again."""

    keeps_graph = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=self.keeps_graph)
        self.manual_backward(loss if self.keeps_graph else self.loss(batch))
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach()}


class LitTwiceThroughOneGraph(LitTwoBackwards):
    keeps_graph = True


REFUSED = {
    LitTwiceThroughOneGraph: "second one through the same graph .* or keep whole replicas",
    LitBackward: "SGD would step without a self.manual_backward",
    LitSkips: "returned None on rank 1, which skips .* all 2 data ranks",
    LitLBFGS: "LBFGS .* or one device",
}


ON_SHARDS = (LitSkips, LitLBFGS, LitTwiceThroughOneGraph)


@pytest.mark.parametrize(
    ("make", "degrees"),
    [*((make, REPLICAS) for make in (LitBackward, LitSkips, LitLBFGS)), *((make, SHARDS) for make in ON_SHARDS)],
)
def test_what_ranks_would_do_each_in_its_own_way_is_refused(make: Any, degrees: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=REFUSED[make]):
        run_ranks(2, run, degrees, make, None, {})


@pytest.mark.parametrize(
    ("make", "degrees"), [(LitTwoBackwards, REPLICAS), (LitTwiceThroughOneGraph, REPLICAS), (LitTwoBackwards, SHARDS)]
)
def test_several_backwards_in_a_step_equal_one_process(make: Any, degrees: dict[str, Any]) -> None:
    expected = run_ranks(1, run, ONE_PROCESS, make, None, {})[0]
    assert_equal(expected, run_ranks(2, run, degrees, make, None, {}))


def test_wrong_variant_replicas_that_nobody_averages_go_apart() -> None:
    def unchecked() -> None:
        Replication.check = lambda self, optimizer: None  # type: ignore[method-assign]

    with must_differ():
        expected = run_ranks(1, run, ONE_PROCESS, LitManual, None, {})[0]
        assert_equal(expected, run_ranks(2, run, REPLICAS, LitBackward, unchecked, {}))


def never_prepared() -> None:
    def only_counted(self: Replication, loss: Tensor) -> None:
        self._num_backwards += 1

    Replication.prepare = only_counted  # type: ignore[method-assign]


def unfrozen_unseen() -> None:
    right = Replication._learn

    def once(self: Replication) -> None:
        if not self._known:
            right(self)

    Replication._learn = once  # type: ignore[method-assign]


@pytest.mark.parametrize(("sabotage", "name"), [(never_prepared, "plain"), (unfrozen_unseen, "unfrozen later")])
def test_wrong_variants_are_seen(sabotage: Any, name: str) -> None:
    make, options = CASES[name]
    expected = run_ranks(1, run, ONE_PROCESS, make, None, options)[0]
    found = run_ranks(2, run, REPLICAS, make, sabotage, options)
    with must_differ():
        assert_equal(expected, found)
