"""Lightning's hooks: on every rank in the order, and with the trainer's state, that they have on one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from tests.distributed.equality import QUIET
from tests.distributed.zoo import Classifier, labelled_rows
from tests.ranks import run_ranks

ROWS = labelled_rows((12,))
PLAN = {"model.*.up": "colwise", "model.*.down": "rowwise"}
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
OF_MODULE = [
    *(name for hooks in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(hooks) if name[0] != "_"),
    *STEPS,
    *("configure_optimizers", "configure_callbacks", "configure_gradient_clipping", "backward", "optimizer_step"),
    *("optimizer_zero_grad", "lr_scheduler_step"),
]
OF_MODULE.remove("configure_sharded_model")  # configure_model's old name
OF_CALLBACK = [name for name in vars(L.Callback) if name[0] != "_" and "state" not in name]


@dataclass
class Calls:
    """Hooks in the order of their calls, and apart from them those of the look at the first batch."""

    order: list[tuple[Any, ...]] = field(default_factory=list)
    ahead: list[str] = field(default_factory=list)
    looks: bool = False

    def note(self, owner: str, name: str, trainer: Any) -> None:
        if self.looks and name != "configure_optimizers":
            self.ahead.append(name)
            return
        module = trainer.lightning_module
        modes = () if name in STEPS else (module.training, torch.is_grad_enabled())  # a step is looked at in others
        call = (owner, name, trainer.state.stage, trainer.global_step, trainer.current_epoch, *modes)
        if name not in STEPS or self.order[-1] != call:  # a pipelined step is called for each micro-batch
            self.order.append(call)


def recording(base: type, names: list[str], owner: str, calls: Calls) -> type:
    """A class whose hooks note their calls and do what they did."""

    def of(name: str) -> Callable[..., Any]:
        hook = getattr(base, name)

        def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.note(owner, name, args[0] if owner == "callback" else self.trainer)
            return hook(self, *args, **kwargs)

        return noting

    return type("Recording", (base,), {name: of(name) for name in names if hasattr(base, name)})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Loops(Classifier):
    """All loops, with everything that has hooks of its own."""

    def __init__(self, data_parallel_size: int = 1) -> None:
        super().__init__(nn.Sequential(Block(), Block(), nn.Linear(12, 5)))
        self.batch_size = 8 // data_parallel_size

    def train_dataloader(self) -> Any:
        return DataLoader(ROWS, batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.model(batch["x"])
        return out

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def run_all_loops(rank: int, degrees: dict[str, Any], folder: Path, sabotage: bool = False) -> Calls:
    L.seed_everything(0, verbose=False)
    calls, data = Calls(), degrees.get("data_parallel_size", 1)
    strategy: Any = Hybrid3DStrategy(**degrees, archive=None, schedule="1F1B", tp_plan=PLAN) if degrees else "auto"
    if degrees:
        looking = strategy.setup

        def setup(trainer: Any) -> None:
            calls.looks = True
            looking(trainer)
            calls.looks = False

        strategy.setup = setup
    trainer = L.Trainer(
        devices=math.prod(degrees.values()),
        strategy=strategy,
        callbacks=[recording(L.Callback, OF_CALLBACK, "callback", calls)()],
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        max_epochs=2,
        inference_mode=False,
        **{**QUIET, "enable_checkpointing": True, "default_root_dir": folder / "-".join(map(str, degrees.values()))},
    )
    if sabotage:  # what others do whose training_step runs the backward too: no hooks around it
        trainer.strategy.backward = lambda loss, *_: loss.backward()  # type: ignore[method-assign, assignment]
    module = recording(Loops, OF_MODULE, "module", calls)(data)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    trainer.save_checkpoint(path := f"{trainer.default_root_dir}/last.ckpt")
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, ckpt_path=path)
    return calls


AXES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
LOOK = ["train_dataloader", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    return run_ranks(1, run_all_loops, {}, tmp_path_factory.mktemp("one"))[0].order


def without_moved(order: list[tuple[Any, ...]], rank: int, looks: bool) -> list[tuple[Any, ...]]:
    """Data is prepared once on a node, and the first look asks for the loader before there is an optimizer."""
    order = [call for call in order if rank == 0 or call[1] != "prepare_data"]
    loaders = [place for place, call in enumerate(order) if call[1] == "train_dataloader"]
    return [*order[: loaders[0]], *order[loaders[0] + 1 :]] if looks else order


@pytest.mark.parametrize("triple", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)], ids=str)
def test_order(triple: tuple[int, int, int], expected: list[tuple[Any, ...]], tmp_path: Path) -> None:
    """Two differences are by design, see :func:`without_moved`."""
    degrees, looks = dict(zip(AXES, triple, strict=True)), triple[1:] != (1, 1)
    for rank, calls in enumerate(run_ranks(math.prod(triple), run_all_loops, degrees, tmp_path)):
        assert calls.order == without_moved(expected, rank, looks)
        assert calls.ahead[:4] == (LOOK if looks else [])
        assert set(calls.ahead[4:]) <= {"training_step"}


def test_wrong_variant_hooks_left_out_are_seen(expected: list[tuple[Any, ...]], tmp_path: Path) -> None:
    degrees = dict(zip(AXES, (1, 1, 2), strict=True))
    for rank, calls in enumerate(run_ranks(2, run_all_loops, degrees, tmp_path, True)):
        assert calls.order != without_moved(expected, rank, looks=True)
