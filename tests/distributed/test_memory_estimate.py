"""What is said of memory before training, beside what a step then holds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.describing import holdings
from lightning_hybrid.describing.holdings import state_bytes
from lightning_hybrid.describing.memory import Memory, memory_lines, most_in_flight
from lightning_hybrid.pipeline.schedule import Action, Kind, find_schedule
from lightning_hybrid.pipeline.stage import StageRun
from tests.distributed.equality import QUIET, must_differ
from tests.ranks import run_ranks

WIDTH, ROWS_PER_RANK = 64, 64
TOLERANCE = 0.1
DEGREES: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_size": 2, "schedule": "1F1B"},
    "pp2-full": {"pipeline_parallel_size": 2, "schedule": "1F1B", "activation_checkpointing": "full"},
    "pp2-interleaved": {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"},
    "dp2-pp2": {"data_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "1F1B"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Meter(TorchDispatchMode):
    """Knows what memory is alive: what was made while it is active, and what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.known = {key: weakref.ref(storage) for key, storage in storages().items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self.known[leaf.untyped_storage()._cdata] = weakref.ref(leaf.untyped_storage())
        return out

    def bytes(self) -> int:
        return sum(storage.nbytes() for ref in self.known.values() if (storage := ref()) is not None)


def storages() -> dict[int, Any]:
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.device.type != "meta"]
    found = [(t.to_local() if hasattr(t, "to_local") else t).untyped_storage() for t in tensors]
    return {storage._cdata: storage for storage in found}


class Watch(L.Callback):
    """Measures the fourth step, whenever a module has run: no rehearsal of the loss, and the optimizer has states."""

    def __init__(self) -> None:
        self.most = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.meter = Meter()
            self.meter.__enter__()
            for part in pl_module.modules():
                part.register_forward_hook(self._look)

    def _look(self, *_: Any) -> None:
        self.most = max(self.most, self.meter.bytes())

    def on_before_optimizer_step(self, *_: Any) -> None:
        if hasattr(self, "meter"):
            self.meter.__exit__(None, None, None)


def train(rank: int, name: str, sabotage: Any = None) -> tuple[dict[str, Any], int]:
    if sabotage is not None:
        sabotage()
    gc.freeze()
    gc.disable()  # what is let go must go by itself
    degrees = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, **DEGREES[name]}
    strategy, watch = Hybrid3DStrategy(archive=None, num_microbatches=4, **degrees), Watch()
    num_devices = degrees["data_parallel_size"] * degrees["pipeline_parallel_size"]
    trainer = L.Trainer(devices=num_devices, strategy=strategy, max_steps=4, callbacks=[watch], **QUIET)
    rows = torch.randint(16, (4 * ROWS_PER_RANK * degrees["data_parallel_size"], 8))
    trainer.fit(Lit(), DataLoader(rows, batch_size=ROWS_PER_RANK))
    return strategy.describe()["memory"], watch.most - rows.nbytes


def check(found: list[tuple[dict[str, Any], int]]) -> None:
    for said, measured in found:
        known = Memory(**said).known
        assert abs(known - measured) <= TOLERANCE * measured, f"{known} bytes are said, {measured} measured: {said}"


@pytest.mark.parametrize("name", DEGREES)
def test_a_step_needs_what_was_said(name: str) -> None:
    found = run_ranks(4 if name == "dp2-pp2" else 2, train, name)
    assert all(Memory(**said).is_complete for said, _ in found)
    check(found)


def optimizer_states_forgotten() -> None:
    holdings.state_bytes = lambda optimizer: 0


def first_micro_batch_only() -> None:
    holdings.most_in_flight = lambda row, kept, recomputed=None: max(kept.values())


def runs_not_forgotten() -> None:
    StageRun.forget = lambda self: None  # type: ignore[method-assign]


@pytest.mark.parametrize("sabotage", [optimizer_states_forgotten, first_micro_batch_only, runs_not_forgotten])
def test_wrong_variants_are_seen(sabotage: Any) -> None:
    with must_differ():
        check(run_ranks(2, train, "pp2-interleaved", sabotage))


@pytest.mark.parametrize(
    ("cls", "options", "expected"),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 4 * 7),
        (torch.optim.AdamW, {}, 8 * 7 + 4),
        (torch.optim.AdamW, {"amsgrad": True}, 12 * 7 + 4),
        (torch.optim.Adagrad, {}, 4 * 7 + 4),
        (torch.optim.NAdam, {}, 8 * 7 + 8),
        (torch.optim.Adafactor, {}, None),
    ],
)
def test_states_of_an_optimizer_are_counted_by_its_own_step(
    cls: Any, options: dict[str, Any], expected: int | None
) -> None:
    parameter = nn.Parameter(torch.ones(7))
    frozen = [nn.Parameter(values, requires_grad=False) for values in (torch.ones(3), torch.arange(3))]
    optimizer = cls([parameter, *frozen], lr=0.1, **options)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    before = len(optimizer.state)
    assert state_bytes(optimizer) == expected
    assert torch.equal(parameter, torch.ones(7)) and len(optimizer.state) == before and not calls
    if expected is not None:
        parameter.grad = torch.ones(7)
        optimizer.step()
        assert sum(v.nbytes for v in optimizer.state[parameter].values() if isinstance(v, Tensor)) == expected


def test_in_flight_is_the_most_at_any_time() -> None:
    first, last = (find_schedule("1F1B").table(2, 4, 1)[rank] for rank in range(2))
    assert most_in_flight(first, {0: 10}) == 20 and most_in_flight(last, {1: 10}) == 10
    assert most_in_flight(find_schedule("GPipe").table(2, 4, 1)[0], {0: 10}, recomputed={0: 3}) == 43
    split = [Action(Kind(kind), 0, 0) for kind in "FIW"] + [Action(Kind("F"), 0, 1)]
    assert most_in_flight([split[0], split[1], split[3]], {0: 10}) == 20  # the weights' backward is still to come
    assert most_in_flight(split, {0: 10}) == 10


def test_the_table_says_what_is_not_known() -> None:
    memory = Memory(
        parameters=10**7, gradients=10**7, optimizer=None, gathered=0, unreduced=0, activations=None, messages=0
    )
    _, names, row = memory_lines({3: memory}, 80 * 10**9)
    cells = dict(zip(names.split(), row.split(), strict=False))
    assert cells["rank"] == "3" and cells["gradients"] == "10.0" and cells["optimizer"] == "unknown"
    assert row.endswith("> 20.0 of 80,000.0")
