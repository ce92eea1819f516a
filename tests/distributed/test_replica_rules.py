"""The rules of docs/replicas.md: what an exchange does with optimizers, statistics, frozen weights, windows, faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, WeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.callbacks import ScalingEfficiency
from lightning_hybrid.errors import ConfigurationError, HybridError
from lightning_hybrid.replicas.exchange import Averager
from tests.distributed.replica_cases import ROWS, LitAdaptive, LitReplica, Seen, train
from tests.ranks import run_ranks


class LitManual(LitReplica):
    """Two optimizers, one of which steps at every other batch; both belong to one step of the window."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            if number == 0 or batch_idx % 2 == 0:
                self.toggle_optimizer(optimizer)
                loss = self.loss(batch)
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), lr=0.1), torch.optim.SGD(self.embedding.parameters(), lr=0.1)


class LitNormed(LitReplica):
    """Running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = nn.BatchNorm1d(6)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.normal(batch.float()).square().mean()


class LitUnfrozen(LitReplica):
    """A block that is trained from the third step on, another one until then, and a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(3, 3).requires_grad_(False)
        self.blocks[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            self.blocks[0].requires_grad_(True)
            self.blocks[1].requires_grad_(False)
        self.teacher.weight.data.mul_(1 + 0.1 * float(batch[0].float().mean()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [p for n, p in self.named_parameters() if n.split(".")[0] in ("blocks", "final")], lr=0.1
        )


MODULES = {"two optimizers": LitManual, "statistics": LitNormed, "frozen for a while": LitUnfrozen}


def exchanged_and_not(rank: int) -> dict[str, tuple[Seen, Seen]]:
    """Of 3 steps each: with an exchange after the third, and without any."""
    never, options = {"interval": 100, "close_before": []}, {"limit_train_batches": 3, "max_steps": -1}
    return {n: (train(m, {}, 3, **options), train(m, {}, never, **options)) for n, m in MODULES.items()}


def test_an_exchange_is_the_mean_of_runs_that_know_nothing_of_each_other() -> None:
    ranks = run_ranks(2, exchanged_and_not)
    for case in MODULES:
        (together, alone), (other, other_alone) = (rank[case] for rank in ranks)
        for name, value in together.steps[-1].items():
            mine, theirs = alone.steps[-1][name], other_alone.steps[-1][name]
            wanted = (mine + theirs) / 2 if value.is_floating_point() else mine
            assert torch.allclose(value, wanted, rtol=1e-6, atol=1e-6), f"{case}: {name}"
            assert torch.equal(value, other.steps[-1][name]), f"{case}: {name}"
        moved = [
            name for name in alone.steps[-1] if not torch.equal(alone.steps[-1][name], other_alone.steps[-1][name])
        ]
        assert len(moved) > 5, case
        assert ("teacher.weight" in moved) == (case == "frozen for a while")


class SeeValidation(L.Callback):
    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights.append(pl_module.final.weight.detach().clone())


class LitValidated(LitReplica):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        return DataLoader(ROWS[:8], batch_size=4)  # type: ignore[arg-type]


def validated(rank: int, closes: list[str]) -> list[Tensor]:
    see, sync = SeeValidation(), {"interval": 4, "close_before": closes}
    options = {"max_steps": 3, "val_check_interval": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    train(LitValidated, {}, sync, callbacks=[see], **options)
    return see.weights


@pytest.mark.parametrize("closes", [["validation"], []])
def test_validation_is_of_common_weights_unless_told_otherwise(closes: list[str]) -> None:
    one, other = run_ranks(2, validated, closes)
    assert len(one) == len(other) == 1
    assert torch.equal(one[0], other[0]) == bool(closes)


class Uneven(IterableDataset[Tensor]):
    """No length is known, and replica 1 has one batch less."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Tensor]:
        yield from ROWS[: 4 * (6 - self.rank)]


@pytest.mark.parametrize("measures", [False, True])
def test_a_replica_that_runs_out_of_batches_is_refused_on_all(measures: bool) -> None:
    class LitStream(LitReplica):
        def train_dataloader(self) -> Any:
            return DataLoader(Uneven(self.global_rank), batch_size=4)

    def run(rank: int) -> str:
        with pytest.raises(ConfigurationError) as caught:
            train(LitStream, {}, 4, loaders=False, callbacks=callbacks)
        return str(caught.value)

    callbacks = [ScalingEfficiency(every_n_steps=1, num_warmup_steps=0)] if measures else []
    there = "a measurement" if measures else "the last batch"  # a measurement is an exchange of all ranks, too
    for text in run_ranks(2, run):
        assert f"different places: replica 0: {there} ({5 if measures else 6}), replica 1: the last batch (5)" in text


def test_replicas_that_train_different_weights_are_refused_on_all() -> None:
    class LitPartly(LitUnfrozen):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            self.blocks[0].requires_grad_(batch_idx > 1 and self.global_rank == 1)

    def run(rank: int) -> str:
        with pytest.raises(ConfigurationError) as caught:
            train(LitPartly, {}, 4)
        return str(caught.value)

    for text in run_ranks(2, run):
        assert "train different weights: blocks.0.down.bias only replica 1 (and 5 more)" in text


class SaveAtEnd(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


class SaveFirst(SaveAtEnd):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            super().on_train_epoch_end(trainer, pl_module)


def test_fewer_replicas_go_on_from_the_first_ones(tmp_path: Path) -> None:
    """Saved in the middle of a window, where the weights differ, by three; resumed by two."""
    sync = {"interval": 4, "method": "diloco", "close_before": []}
    options = {"limit_train_batches": 3, "max_steps": -1}
    path = tmp_path / "a.ckpt"

    def save(rank: int) -> Seen:
        return train(LitAdaptive, {}, sync, number=3, callbacks=[SaveAtEnd(path)], **options)

    def resume(rank: int) -> Seen:
        return train(LitAdaptive, {}, sync, ckpt_path=path, max_epochs=2, **options)

    before, after = run_ranks(3, save), run_ranks(2, resume)
    for rank in range(2):
        for name, tensor in after[rank].before.items():
            assert torch.equal(tensor, before[rank].after[name]), name
    assert not torch.equal(after[0].before["final.weight"], after[1].before["final.weight"])
    assert torch.equal(after[0].steps[0]["final.weight"], after[1].steps[0]["final.weight"])  # the fourth step
    assert torch.equal(torch.load(path)["state_dict"]["final.weight"], before[0].after["final.weight"])


class LitInTurn(LitReplica):
    """One block is trained until the fifth step, the other one from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.blocks[0].requires_grad_(self.trainer.global_step < 5)
        self.blocks[1].requires_grad_(self.trainer.global_step >= 5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), lr=0.1)


def test_outer_momentum_does_not_move_what_is_frozen(tmp_path: Path) -> None:
    """From the window on in which it was never trained; resumed in the middle of one too."""

    def run(rank: int) -> list[Seen]:
        sync = {"interval": 4, "method": "diloco", "close_before": ["end"]}
        options = {"limit_train_batches": 6, "max_epochs": 2, "max_steps": -1}
        whole = train(LitInTurn, {}, sync, callbacks=[SaveFirst(tmp_path / "a.ckpt")], **options)
        return [whole, train(LitInTurn, {}, sync, ckpt_path=tmp_path / "a.ckpt", **options)]

    for whole, again in run_ranks(2, run):
        blocks = [[state[f"blocks.{i}.up.weight"] for state in whole.steps] for i in (0, 1)]
        assert torch.equal(blocks[0][7], blocks[0][11]) and not torch.equal(blocks[0][5], blocks[0][7])
        assert not torch.equal(blocks[1][7], blocks[1][11])
        for name in ("blocks.0.up.weight", "blocks.1.up.weight"):
            assert torch.allclose(again.after[name], whole.after[name], rtol=1e-6, atol=1e-6)


def test_auto_takes_what_the_first_exchange_shows() -> None:
    def run(rank: int) -> tuple[Any, Any]:
        right = Averager.start
        Averager.start = lambda *args: time.sleep(1.0) or right(*args)  # type: ignore[func-returns-value]
        chosen = []

        class Look(L.Callback):
            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                chosen.append(trainer.strategy.replicas.options)

        seen = train(LitReplica, {}, "auto", callbacks=[Look()])
        return chosen[0], seen.after

    (mine, weights), (other, other_weights) = run_ranks(2, run)
    assert mine == other and mine.method == "diloco" and mine.interval > 32
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights if name not in ("mean", "count"))


class Signal(L.Callback):
    """Replica 1 gets a signal in the third step; replica 0 is faster."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02 + 0.03 * trainer.global_rank)
        if batch_idx == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("is_watched", "steps"), [(True, range(3, 9)), (False, range(8, 9))])
def test_a_signal_ends_all_replicas_between_two_exchanges(is_watched: bool, steps: range) -> None:
    """Before one batch, at which the faster one waits; or after the next exchange, where there is no watch."""

    class Unwatched(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.watch = trainer.strategy.watch if is_watched else None

    def run(rank: int) -> int:
        stops: list[Any] = []
        note = LambdaCallback(on_exception=lambda *args: stops.append(args))
        with pytest.raises(SIGTERMException):
            train(LitReplica, {}, 8, callbacks=[Unwatched(), Signal(), note])
        return int(stops[0][0].global_step)

    one, other = run_ranks(2, run)
    assert one == other and one in steps


class LitOwn(LitReplica):
    def configure_model(self) -> None:
        if not isinstance(self.final.weight, DTensor):
            torch.distributed.fsdp.fully_shard(self, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "one replica": (LitReplica, 4, {"replicate_size": 1}, "replicate_size=1 makes one"),
    "own sharding": (LitOwn, 4, {}, "configure_model has already split or sharded parameters"),
    "averages": (LitReplica, 4, {"callbacks": [WeightAveraging()]}, "WeightAveraging averages weights over steps"),
    "16 bits": (LitReplica, {"interval": 4, "method": "diloco"}, {"precision": "bf16-true"}, "outer weights in fp32"),
    "fragments": (LitReplica, {"interval": 4, "num_fragments": 3}, {}, "has 2 blocks to deal out"),
}


def test_what_cannot_work_is_refused_by_name() -> None:
    def run(rank: int) -> dict[str, str]:
        found = {}
        for name, (make, sync, options, _) in REFUSED.items():
            with pytest.raises(HybridError) as caught:
                train(make, {}, sync, **options)
            found[name] = str(caught.value)
        return found

    for found in run_ranks(2, run):
        for name, (*_, words) in REFUSED.items():
            assert words in found[name], f"{name}: {found[name]}"
