"""Ranks of one data coordinate see the same data and the same noise, and nothing is lost to the look ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid import Hybrid3DStrategy, data
from lightning_hybrid.errors import ConfigurationError
from tests.distributed.equality import QUIET
from tests.ranks import run_ranks


class Identity(nn.Module):
    """A block that changes nothing, at first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Noise(L.LightningModule):
    """Noise is the input and the target. The step takes no batch index, as people may write it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Identity() for _ in range(4))
        self.seen: list[float] = []
        self.draws = False

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.append(float(batch[0, 0]))
        noise = torch.randn_like(batch)
        x = noise
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.0)
        return nn.functional.mse_loss(x, noise)

    def on_train_start(self) -> None:
        if self.draws:  # before the order of the samples is drawn
            self.seen.append(float(torch.rand(())))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def fit(rank: int, loader: Any, num_devices: int, *, seed: int | None = None, tensor: bool = False) -> Any:
    torch.manual_seed(rank)
    if seed is not None:
        L.seed_everything(seed, verbose=False)
    module, losses = Noise(), Losses()
    degrees = (1, num_devices, 1) if tensor else (1, 1, num_devices)
    plan = {"blocks.*.linear": "colwise_gather_output"} if tensor else None
    strategy: Any = Hybrid3DStrategy(*degrees, tp_plan=plan, archive=None) if num_devices > 1 else "auto"
    trainer = L.Trainer(devices=num_devices, strategy=strategy, max_epochs=2, callbacks=[losses], **QUIET)
    trainer.fit(module, loader(rank))
    return losses.losses, module.seen


ROWS = torch.arange(32.0)[:, None].expand(32, 4)


def test_all_stages_draw_the_same_noise() -> None:
    for losses, _ in run_ranks(2, fit, lambda rank: DataLoader(ROWS, batch_size=8), 2):
        assert max(losses) == 0.0


@pytest.mark.parametrize("seed", [None, 3])
def test_shuffled_batches_are_the_same_on_all_stages_and_in_one_process(seed: int | None) -> None:
    def loader(rank: int) -> Any:
        return DataLoader(ROWS, batch_size=8, shuffle=True)

    (_, first), (_, second) = run_ranks(2, lambda rank: fit(rank, loader, 2, seed=seed))
    assert first == second
    if seed is not None:
        [(_, alone)] = run_ranks(1, lambda rank: fit(rank, loader, 1, seed=seed))
        # the first of four micro-batches; later epochs are shuffled from where the step's own draws left one process
        assert first[::4][:4] == alone[:4]


class Noisy(torch.utils.data.Dataset[Tensor]):
    """Augments in the main process."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Tensor:
        return ROWS[index] + torch.rand(())


def draw(rank: int, num_devices: int, load_once: bool = False, sabotage: bool = False) -> tuple[float, list[float]]:
    """Return what is drawn before training, and the first value of each batch of the first epoch."""
    if sabotage:
        pytest.MonkeyPatch().setattr(data, "_can_be_read_again", lambda loader: False)
    L.seed_everything(3, verbose=False)
    module, seen = Noise(), Firsts()
    module.draws = True
    strategy: Any = (
        Hybrid3DStrategy(1, 1, num_devices, archive=None, load_once=load_once) if num_devices > 1 else "auto"
    )
    trainer = L.Trainer(devices=num_devices, strategy=strategy, max_epochs=1, callbacks=[seen], **QUIET)
    trainer.fit(module, DataLoader(Noisy(), batch_size=8, shuffle=True))
    return module.seen[0], seen.firsts


class Firsts(L.Callback):
    def __init__(self) -> None:
        self.firsts: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        self.firsts.append(float(batch[0, 0]))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)  # whatever the step has drawn, which in one process goes on to the next batch


def test_what_the_look_ahead_draws_is_put_back() -> None:
    """The order and the augmentation, of a loader without a seed, follow what a user draws before the first batch."""
    (expected,) = run_ranks(1, draw, 1)
    for load_once in (False, True):
        assert run_ranks(2, draw, 2, load_once) == [expected] * 2
    assert run_ranks(2, draw, 2, False, True)[0] != expected  # a deliberately wrong variant


class Stream(IterableDataset[Tensor]):
    """Goes on where it was: what is read beforehand would be lost."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(24):
            self.position += 1
            yield torch.full((4,), float(self.position))


def test_a_stream_loses_nothing_to_the_look_ahead() -> None:
    def loader(rank: int) -> Any:
        return DataLoader(Stream(), batch_size=8)

    [(_, alone)] = run_ranks(1, fit, loader, 1)
    for _, seen in run_ranks(2, fit, loader, 2):
        assert seen[::4] == alone


@pytest.mark.parametrize("tensor", [False, True])
def test_different_data_in_a_group_is_refused(tensor: bool) -> None:
    def loader(rank: int) -> Any:
        return DataLoader(ROWS[rank * 16 : rank * 16 + 16], batch_size=8)

    with pytest.raises(ConfigurationError, match=r"read different batches: rank 0.*rank 1.*distributed_sampler_kwargs"):
        run_ranks(2, lambda rank: fit(rank, loader, 2, tensor=tensor))
