"""``schedule="auto"``: chosen after the probe and before the cut, alike on all ranks, without a trace in the run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_hybrid.choosing.auto_schedule
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.archive import Archive
from lightning_hybrid.callbacks import ConfigArchive
from lightning_hybrid.pipeline.predict import Forecast
from tests.distributed.equality import ONE_PROCESS, QUIET, Trace, assert_equal, trace
from tests.distributed.zoo import ZOO, LitNano, NanoBlock, NanoGPT, text_rows
from tests.ranks import run_ranks

PP2 = {"pipeline_parallel_size": 2}


def prefer(name: str) -> None:
    """Whatever is predicted, this schedule is taken for the fastest."""

    def fastest(forecasts: list[Forecast]) -> Forecast:
        return next(forecast for forecast in forecasts if forecast.spec.name == name)

    lightning_hybrid.choosing.auto_schedule.fastest = fastest  # type: ignore[assignment]


@pytest.mark.parametrize("model", ["llama", "t5", "two_lists"])
def test_whatever_is_chosen_equals_one_process(model: str) -> None:
    names = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]

    def one(rank: int, degrees: dict[str, Any]) -> tuple[Trace, str]:
        torch.manual_seed(0)
        seen = ["none"]
        note = L.pytorch.callbacks.LambdaCallback(
            on_train_start=lambda t, m: seen.append(getattr(t.strategy, "schedule", "none"))
        )
        return trace(rank, ZOO[model].make, ZOO[model].rows(), degrees, callbacks=[note]), seen[-1]

    def run(rank: int, degrees: dict[str, Any]) -> list[tuple[Trace, str]]:
        found = []
        for name in names if degrees else names[:1]:
            prefer(name)
            found.append(one(rank, degrees))
        return found

    expected = run_ranks(1, run, ONE_PROCESS)[0][0][0]
    found = run_ranks(2, run, PP2)
    for name, ranks in zip(names, zip(*found, strict=True), strict=True):
        assert [schedule for _, schedule in ranks] == [name, name]
        assert_equal(expected, [each for each, _ in ranks])


class NoisyBlock(NanoBlock):
    """Draws random numbers, counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(self.drop(x))


def make_noisy() -> LitNano:
    model = NanoGPT()
    model.transformer["h"] = nn.ModuleList(NoisyBlock() for _ in range(4))
    return LitNano(model)


def test_the_timing_leaves_no_trace() -> None:
    """Given and chosen 1F1B draw the same numbers; blocks have run as often as there were micro-batches."""
    calls: list[float] = []

    def run(rank: int) -> list[Trace]:
        prefer("1F1B")
        note = L.pytorch.callbacks.LambdaCallback(
            on_train_end=lambda t, m: calls.append(max(float(b) for n, b in m.named_buffers() if "calls" in n))
        )
        traces = []
        for schedule in ("1F1B", "auto"):
            torch.manual_seed(0)
            traces.append(trace(rank, make_noisy, text_rows(), {**PP2, "schedule": schedule}, callbacks=[note]))
        assert calls == [8.0, 8.0], calls  # 2 batches of 4 micro-batches
        return traces

    for given, chosen in run_ranks(2, run):
        assert given.losses == chosen.losses
        assert all(torch.equal(given.after[name], chosen.after[name]) for name in given.after)


def block_fails_on_the_second_rank() -> None:
    right = lightning_hybrid.choosing.auto_schedule.time_block

    def wrong(*args: Any, **options: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("this block runs in company only")
        return right(*args, **options)

    lightning_hybrid.choosing.auto_schedule.time_block = wrong


@pytest.mark.parametrize(
    ("degrees", "num_blocks", "sabotage", "words"),
    [
        ({}, 8, block_fails_on_the_second_rank, "1F1B: no prediction.*this block runs in company only"),
        ({}, 3, lambda: None, "1F1B: 3 blocks are too few for two stages on each of 2 ranks"),
        ({}, 8, lambda: None, r"(\w+): [\d.]+ ms predicted.*, \w+ [\d.]+ ms, \w+ [\d.]+ ms"),
    ],
)
def test_the_reason_is_said(degrees: dict[str, Any], num_blocks: int, sabotage: Callable[[], None], words: str) -> None:
    def run(rank: int) -> tuple[str, str]:
        said: list[str] = []
        lightning_hybrid.training.setup_pipeline.rank_zero_info = said.append
        sabotage()
        strategy = Hybrid3DStrategy(archive=None, data_parallel_size=1, tensor_parallel_size=1, **PP2)
        trainer = L.Trainer(devices=2, strategy=strategy, max_steps=1, **QUIET)
        trainer.fit(LitNano(NanoGPT(num_blocks)), DataLoader(text_rows(), batch_size=8))
        return strategy.schedule, said[0]

    (first, said), (second, again) = run_ranks(2, run)
    assert first == second
    assert said == again == f"lightning_hybrid: schedule {first}: {said.split(': ', 2)[2]}"
    assert re.search(words, said), said


def fit(rank: int, folder: Path, schedule: str) -> tuple[str, str | None]:
    strategy = Hybrid3DStrategy(
        archive=str(folder), data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=2, schedule=schedule
    )
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=4, callbacks=[ConfigArchive(folder)], **QUIET)
    trainer.fit(LitNano(NanoGPT()), DataLoader(text_rows() * 2, batch_size=8))
    return strategy.schedule, strategy.started_from


def test_a_measured_schedule_comes_first(tmp_path: Path) -> None:
    """A user's own table is kept by the archive: the file may be gone."""
    own = tmp_path / "own.csv"
    own.write_text("0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0\n")
    run_ranks(2, fit, tmp_path / "archive", str(own))
    own.unlink()
    (entry,) = Archive(tmp_path / "archive").list()
    assert (entry.settings.schedule, entry.settings.num_microbatches) == ("own.csv", 4)
    assert run_ranks(2, fit, tmp_path / "archive", "auto") == [("own.csv", entry.id)] * 2
    entries = Archive(tmp_path / "archive").list()
    assert [each.settings.schedule for each in entries] == ["own.csv", "own.csv"]
    assert {each.parent for each in entries} == {None, entry.id}
