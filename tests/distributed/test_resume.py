"""Case CKPT-3: resumed in the middle of an epoch, at its end, and where max_steps fell on it, batches, steps and rates
are those of one process; loaders that keep a state go on where each data rank's stood, at other data ranks too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.checkpoint.loader_states import take_loader_states
from lightning_hybrid.layout import Layout
from tests.distributed.test_checkpoint import LAYOUTS, LENGTH, VOCABULARY, LitLM, build_trainer
from tests.ranks import run_ranks

NUM_BATCHES, GLOBAL_BATCH = 10, 8
STARTS = {"plain": ("step=3",), "stateful": ("step=3", "step=5", "epoch")}
"""Checkpoints from which to resume, by kind of loader: in the middle of the epoch, where max_steps fell on its end, and
at its end."""

#: Global step, epoch, index of the batch, learning rate, and the rows of the batch.
Moment = tuple[int, int, int, float, list[list[int]]]


class Stateful:
    """A loader that goes on where its saved state says, as torchdata's do."""

    def __init__(self, batches: list[Tensor]) -> None:
        self._batches, self.position = batches, 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        while self.position < len(self._batches):
            self.position += 1
            yield [self._batches[self.position - 1]]
        self.position = 0

    def __len__(self) -> int:
        return len(self._batches)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Moments(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Moment] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((trainer.global_step, trainer.current_epoch, batch_idx, rate, batch[0].tolist()))


def make_loader(rank: int, name: str, kind: str) -> Any:
    tokens = torch.randint(VOCABULARY, (NUM_BATCHES * GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    layout = LAYOUTS[name]
    mine = tokens[layout.coordinate(rank).data :: layout.data_parallel_size]
    size = GLOBAL_BATCH // layout.data_parallel_size
    return Stateful(list(mine.split(size))) if kind == "stateful" else DataLoader(TensorDataset(mine), batch_size=size)


def fit(
    rank: int, name: str, kind: str, folder: Path, max_steps: int, start: Path | None, **options: Any
) -> list[Moment]:
    moments, options = Moments(), {"form": True, "limit_val_batches": 0, "accumulate_grad_batches": 2, **options}
    callbacks = [moments, *options.pop("callbacks", [])]
    trainer = build_trainer(name, folder, max_epochs=3, max_steps=max_steps, callbacks=callbacks, **options)
    trainer.fit(LitLM(), make_loader(rank, name, kind), ckpt_path=start)
    return moments.seen


def save(rank: int, name: str, kind: str, folder: Path) -> None:
    """To the end of the first epoch, which is the fifth step."""
    keep = [ModelCheckpoint(folder, "{step}", every_n_train_steps=steps) for steps in (3, 5)]
    keep.append(ModelCheckpoint(folder, "epoch", every_n_epochs=1))
    fit(rank, name, kind, folder, 5, None, callbacks=keep, enable_checkpointing=True)


def resume(rank: int, name: str, kind: str, folder: Path) -> dict[str, list[Moment]]:
    return {start: fit(rank, name, kind, folder, 8, folder / f"{start}.ckpt") for start in STARTS[kind]}


def save_and_resume(rank: int, name: str, folder: Path) -> dict[str, dict[str, list[Moment]]]:
    found = {}
    for kind in ("plain", "stateful"):
        save(rank, name, kind, folder / kind)
        found[kind] = resume(rank, name, kind, folder / kind)
    return found


def joined(ranks: list[list[Moment]]) -> list[Moment]:
    """What the data ranks saw together, each row once."""
    moments = []
    for together in zip(*ranks, strict=True):
        facts = {moment[:4] for moment in together}
        assert len(facts) == 1, "ranks disagree"
        rows = sorted({tuple(row) for moment in together for row in moment[4]})
        moments.append((*facts.pop(), [list(row) for row in rows]))
    return moments


def test_resumed_as_in_one_process(tmp_path: Path) -> None:
    (expected,) = run_ranks(1, save_and_resume, "plain", tmp_path / "one")
    ranks = run_ranks(4, save_and_resume, "dp2-pp2", tmp_path / "four", timeout=120)
    for kind in ("plain", "stateful"):
        for start in STARTS[kind]:
            right = joined([expected[kind][start]])
            assert joined([found[kind][start] for found in ranks]) == right, (kind, start)
            assert right[0][0] == (3 if start == "step=3" else 5)
    assert expected["stateful"]["step=3"][0][2] == 6, "it goes on behind what was seen"
    start = tmp_path / "four" / "stateful" / "step=3.ckpt"
    fewer = joined(run_ranks(2, fit, "pp2", "stateful", tmp_path, 8, start, timeout=60))
    assert fewer == joined([expected["stateful"]["step=3"]])
    assert fewer != joined([expected["plain"]["step=3"]]), "without its state a loader begins anew"


def state(*positions: int) -> dict[str, Any]:
    """A checkpoint by as many data ranks, with one loader each."""
    fit_loop = {"state_dict": {"combined_loader": [{"position": positions[0]}]}}
    states = [[{"position": position}] for position in positions]
    return {"loops": {"fit_loop": fit_loop}, "lightning_hybrid": {"loader_states": states}}


def test_states_that_differ_are_given_to_their_own_ranks_only() -> None:
    two, four = Layout(data_parallel_size=2), Layout(data_parallel_size=4)
    checkpoint = state(3, 5)
    take_loader_states(checkpoint, two, two.coordinate(1))
    assert checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"position": 5}]
    checkpoint = state(3, 5)
    with pytest.warns(UserWarning, match="Resume with data_parallel_size=2, or from the end of an epoch"):
        take_loader_states(checkpoint, four, four.coordinate(1))
    assert "combined_loader" not in checkpoint["loops"]["fit_loop"]["state_dict"]
    checkpoint = state(3, 3)
    with pytest.warns(UserWarning, match="2/4 of the size before"):
        take_loader_states(checkpoint, four, four.coordinate(3))
    assert checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"position": 3}]
