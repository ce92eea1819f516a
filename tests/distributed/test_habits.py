"""Habits of users' steps: popping from the batch, no_grad around evaluation, averages of the weights, shared layers."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import PipelineError, UnsupportedError
from lightning_hybrid.training.collectives import AxisCollectives
from tests.distributed.equality import ONE_PROCESS, QUIET, Trace, assert_equal, trace
from tests.distributed.zoo import Classifier, Lit, labelled_rows, mlp
from tests.ranks import RankError, run_ranks

PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 4}
ROWS = labelled_rows((12,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Pairs(nn.Module):
    """Layers as lists of an attention and an MLP, say, with the residuals added around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(12, 12), Block(), nn.ReLU()]) for _ in range(2))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for first, second, activation in self.layers:
            x = activation(first(x)) + x
            x = second(x) + x
        out: Tensor = self.head(x)
        return out


class Pops(Lit):
    """As people do with Hugging Face's batches; and logs the rate."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("y")
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return F.cross_entropy(self.model(**batch), labels)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["x"].mul_(3)
        return batch


class Averages(Lit):
    """An average of the weights, which no training step uses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.ema = copy.deepcopy(model).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch["x"]), batch["y"])

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mine, average in zip(self.model.parameters(), self.ema.parameters(), strict=True):
                average.lerp_(mine, 0.5)


def shared_activation() -> nn.Module:
    relu = nn.ReLU()
    layers = [layer for _ in range(4) for layer in (nn.Linear(12, 12), relu)]
    return nn.Sequential(*layers, nn.Linear(12, 5))


MODULES = {
    "pops": lambda: Pops(Pairs()),
    "averages": lambda: Averages(Net()),
    "shared_activation": lambda: Classifier(shared_activation()),
}


def run(rank: int, name: str, degrees: dict[str, Any]) -> Trace:
    return trace(rank, MODULES[name], copy.deepcopy(ROWS), degrees)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("more", [{}, {"schedule": "Interleaved1F1B"}], ids=["", "interleaved"])
def test_equals_one_process(name: str, more: dict[str, Any]) -> None:
    expected = run_ranks(1, run, name, ONE_PROCESS)[0]
    assert_equal(expected, run_ranks(2, run, name, {**PP2, **more}))


class InPlace(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch["x"].mul_(0.5).clone()), batch["y"])


class Skips(Lit):
    """Lightning skips a batch where a step returns nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        return None if batch_idx == 1 else loss


@pytest.mark.parametrize(
    ("kind", "message"), [(InPlace, "changes x in place.*clone it first"), (Skips, "return the loss times 0")]
)
def test_what_cannot_work_says_the_way_out(kind: type[Lit], message: str) -> None:
    def train(rank: int) -> None:
        trace(rank, lambda: kind(Net()), ROWS, PP2)

    with pytest.raises((UnsupportedError, ValueError), match=message):
        run_ranks(2, train)


class Evaluates(Classifier):
    @torch.no_grad()
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    @torch.inference_mode()
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.model(batch["x"])
        return out


def evaluate(rank: int, num_devices: int) -> tuple[float, Tensor]:
    L.seed_everything(0, verbose=False)
    strategy: Any = Hybrid3DStrategy(1, 1, 2, archive=None) if num_devices > 1 else "auto"
    trainer = L.Trainer(devices=num_devices, strategy=strategy, **QUIET)
    module, loader = Evaluates(mlp()), DataLoader(ROWS, batch_size=8)
    (metrics,) = trainer.validate(module, loader, verbose=False)
    return metrics["val_loss"], torch.cat(trainer.predict(module, loader))


def test_evaluation_without_gradients() -> None:
    (expected,) = run_ranks(1, evaluate, 1)
    for loss, predictions in run_ranks(2, evaluate, 2):
        assert loss == pytest.approx(expected[0], rel=1e-5)
        assert torch.allclose(predictions, expected[1], rtol=1e-5)


class TwoLoaders(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labelled, other = batch
        return F.cross_entropy(self.model(labelled["x"]), labelled["y"]) + other["x"].mean() * 0


def train_on_two(rank: int, sizes: tuple[int, int]) -> None:
    loaders = CombinedLoader([DataLoader(ROWS, batch_size=size) for size in sizes], mode="min_size")
    trainer = L.Trainer(devices=2, strategy=Hybrid3DStrategy(1, 1, 2, archive=None), max_epochs=1, **QUIET)
    trainer.fit(TwoLoaders(Net()), loaders)


def test_loaders_of_different_batch_sizes_are_refused() -> None:
    run_ranks(2, train_on_two, (4, 4))
    with pytest.raises(UnsupportedError, match=r"different sizes \[8, 4\]"):
        run_ranks(2, train_on_two, (8, 4))


class Copies(L.Callback):
    """As averages of weights do."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        copy.deepcopy(dict(pl_module.model.named_modules())["blocks.0"].linear.weight)
        copy.deepcopy(pl_module.model.head.weight)


class Stateful(Block):
    """Keeps something in checkpoints that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 1}


def test_weights_of_other_stages_can_be_copied_and_modules_may_have_extra_state() -> None:
    def make() -> Lit:
        module = Classifier(Net())
        module.model.blocks[1] = Stateful()
        return module

    def train(rank: int, degrees: dict[str, Any]) -> Trace:
        return trace(rank, make, ROWS, degrees, callbacks=[Copies()])

    expected = run_ranks(1, train, ONE_PROCESS)[0]
    assert_equal(expected, run_ranks(2, train, PP2))


class Outside(Lit):
    """A weight that the optimizer does not have keeps its gradients, as Lightning leaves them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch["x"]), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for n, p in self.named_parameters() if "head" not in n], lr=0.1)


def test_gradients_that_no_optimizer_erases_add_up() -> None:
    def train(rank: int, degrees: dict[str, Any]) -> Trace:
        return trace(rank, lambda: Outside(Net()), ROWS, degrees)

    expected = run_ranks(1, train, ONE_PROCESS)[0]
    found = run_ranks(2, train, PP2)
    assert_equal(expected, found)
    last = {name: gradient for part in found for name, gradient in part.gradients[-1].items()}
    for name in ("model.head.weight", "model.head.bias"):
        assert torch.allclose(last[name], expected.gradients[-1][name], rtol=1e-4, atol=1e-6), name
        assert not torch.allclose(last[name], expected.gradients[0][name], rtol=1e-2)


class Gathers(Lit):
    """Gathers a value of the last stage in its step: over the data axis, on which all of these ranks are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["x"])
        self.log("mean", self.all_gather(logits.mean()).mean())
        return F.cross_entropy(logits, batch["y"])


@pytest.mark.parametrize("data", [1, 2])
def test_a_gather_in_the_step_does_not_wait_for_other_stages(data: int) -> None:
    def train(rank: int, degrees: dict[str, Any]) -> Trace:
        return trace(rank, lambda: Gathers(Net()), ROWS, degrees)

    expected = run_ranks(1, train, ONE_PROCESS)[0]
    found = run_ranks(2 * data, train, {**PP2, "data_parallel_size": data, "num_microbatches": 2})
    assert_equal(expected, found)
    assert found[0].metrics["mean"] == pytest.approx(expected.metrics["mean"], rel=1e-4)


class Asks(Lit):
    """Collectives that are not meant for the last stage alone, before and after the part that it runs alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        assert self.trainer.log_dir == "somewhere"
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        assert strategy.broadcast(batch_idx) == batch_idx
        strategy.barrier()
        assert strategy.reduce_boolean_decision(True)
        assert not strategy.reduce_boolean_decision(self.global_rank == -1, all=False)
        return loss


class Saves(Asks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.trainer.save_checkpoint("in_step.ckpt")
        return loss


def ask(rank: int, kind: type[Lit], data: int, sabotage: bool = False) -> int:
    if sabotage:
        pytest.MonkeyPatch().setattr(AxisCollectives, "apart", lambda self: nullcontext())
    strategy = Hybrid3DStrategy(data, 1, 2, num_microbatches=2, archive=None, schedule="1F1B")
    options = {**QUIET, "max_epochs": 1, "default_root_dir": "somewhere"}
    trainer = L.Trainer(devices=2 * data, strategy=strategy, **options)
    trainer.fit(kind(Net()), DataLoader(ROWS, batch_size=4))
    return trainer.global_step


def test_collectives_in_a_step_do_not_wait_for_other_stages() -> None:
    assert run_ranks(4, ask, Asks, 2, timeout=60) == [2] * 4
    with pytest.raises(UnsupportedError, match=r"save_checkpoint.*hook, such as on_train_batch_end"):
        run_ranks(2, ask, Saves, 1)


def test_wrong_variant_collectives_over_all_stages_are_seen() -> None:
    with pytest.raises((RankError, RuntimeError, AssertionError)):
        run_ranks(2, ask, Asks, 1, True, timeout=6)


COLLECTED: list[Tensor] = []


class Collecting(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        COLLECTED.append(out.square().mean())
        return out


class Collects(Lit):
    """Auxiliary losses of all blocks, in a list or by hooks."""

    def __init__(self, by_hooks: bool) -> None:
        super().__init__(Net())
        if by_hooks:
            for block in self.model.blocks:
                block.register_forward_hook(lambda module, args, out: COLLECTED.append(out.square().mean()))
        else:
            self.model.blocks = nn.ModuleList(Collecting() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        COLLECTED.clear()
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        return loss + 0.1 * torch.stack(COLLECTED).sum() if COLLECTED else loss


@pytest.mark.parametrize("by_hooks", [False, True], ids=["list", "hooks"])
def test_what_blocks_append_to_a_list_is_refused(by_hooks: bool) -> None:
    def train(rank: int) -> None:
        trace(rank, lambda: Collects(by_hooks), ROWS, PP2)

    with pytest.raises(PipelineError, match="appends to a list"):
        run_ranks(2, train)


def test_data_ranks_of_different_batch_sizes() -> None:
    """One rank has a single sample, which is not cut, and the other has four; both gather sharded weights."""

    class Uneven(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            size = 1 if torch.distributed.get_rank() % 2 else 4  # the data coordinate at 2 x 1 x 2
            for start in (0, 4):
                yield torch.utils.data.default_collate(ROWS[start : start + size])

    def train(rank: int, reshard: bool | None) -> int:
        strategy = Hybrid3DStrategy(2, 1, 2, num_microbatches=2, archive=None, reshard_after_forward=reshard)
        trainer = L.Trainer(devices=4, strategy=strategy, max_epochs=1, **QUIET)
        trainer.fit(Classifier(Net()), DataLoader(Uneven(), batch_size=None))
        return trainer.global_step

    assert run_ranks(4, train, None, timeout=40) == [2] * 4
    with pytest.raises(UnsupportedError, match=r"\[1, 2\] micro-batches"):  # it would wait for ever
        run_ranks(4, train, True, timeout=40)
