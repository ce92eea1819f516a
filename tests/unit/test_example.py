"""The demo's model, module and data on their own, without the strategy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from examples.gpt.data import ByteWindows, PythonTopics, read_text, split_text
from examples.gpt.model import GPT
from examples.gpt.module import LitGPT
from examples.gpt.train import degrees_to_give
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.archive import (
    Archive,
    Result,
    choose_degrees,
    detect_hardware,
    failed_degrees,
    fingerprint_module,
)
from lightning_hybrid.choosing.plan import choose_by_plan
from tests.unit.archive_entries import make_entry

SHAPE = {"num_blocks": 2, "width": 16, "num_heads": 2, "context_length": 16}


def build_trainer(max_steps: int) -> L.Trainer:
    return L.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def test_the_text_is_long_enough_and_english() -> None:
    text = read_text()
    assert len(text) > 300_000
    assert b"The following" in text


def test_held_out_text_is_disjoint_from_the_training_text() -> None:
    text = read_text()
    train, held_out = split_text(text)
    assert train + held_out == text
    assert 0.08 < len(held_out) / len(text) < 0.12


def test_windows_cover_the_text_once_and_targets_are_the_next_bytes() -> None:
    windows = ByteWindows(bytes(range(10)), context_length=3)
    assert [window.tolist() for window in (windows[0], windows[1], windows[2])] == [
        [0, 1, 2, 3],
        [3, 4, 5, 6],
        [6, 7, 8, 9],
    ]
    assert len(windows) == 3
    with pytest.raises(IndexError, match="window 3 of 3"):
        windows[3]


def test_data_repeat_with_the_same_seed_and_differ_with_another() -> None:
    def first_batch(seed: int) -> torch.Tensor:
        L.seed_everything(seed, verbose=False)
        data = PythonTopics(batch_size=4, context_length=16)
        data.setup("fit")
        batch: torch.Tensor = next(iter(data.train_dataloader()))
        return batch

    assert torch.equal(first_batch(0), first_batch(0))
    assert not torch.equal(first_batch(0), first_batch(1))


def test_held_out_windows_are_spread_and_limited() -> None:
    data = PythonTopics(batch_size=4, context_length=16, num_held_out=8)
    data.setup("validate")
    assert len(data.held_out_windows) == 8
    assert not torch.equal(data.held_out_windows[0], data.held_out_windows[7])


def test_a_byte_does_not_see_the_bytes_after_it() -> None:
    model = GPT(**SHAPE).eval()
    tokens = torch.randint(0, 256, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_heads_that_do_not_divide_the_width_are_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match="num_heads=3 does not divide width=16"):
        GPT(**{**SHAPE, "num_heads": 3})


def test_an_untrained_model_is_as_good_as_guessing_and_training_improves_it() -> None:
    L.seed_everything(0, verbose=False)
    module, data = LitGPT(**SHAPE), PythonTopics(batch_size=16, context_length=16, num_held_out=32)
    trainer = build_trainer(max_steps=30)
    before = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    trainer.fit(module, data)
    after = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    assert before == pytest.approx(5.545, abs=0.1)
    assert after < before - 1.0


def test_one_step_changes_every_parameter() -> None:
    module, data = LitGPT(**SHAPE), PythonTopics(batch_size=4, context_length=16, num_held_out=4)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    build_trainer(max_steps=1).fit(module, data)
    assert [name for name, p in module.named_parameters() if torch.equal(p, before[name])] == []


def test_the_demo_s_degrees_are_taken_from_the_archive_unless_they_failed_there(tmp_path: Path) -> None:
    """``make demo`` twice: the second run gives none and so starts from the first's; out of memory, it takes others."""
    module, hardware = LitGPT(), detect_hardware("cpu", num_devices=8)
    given = {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert degrees_to_give(module, 8, str(tmp_path)) == given
    entry = make_entry("first", (2, 2, 2), model=fingerprint_module(module), hardware=hardware)
    Archive(tmp_path).write(entry)
    assert degrees_to_give(module, 8, str(tmp_path)) == {}
    known = Archive(tmp_path).known()
    assert choose_degrees(known, fingerprint_module(module), hardware, 8) is not None
    oom = dataclasses.replace(entry, result=Result(status="oom"), updated="2026-08-01T00:00:00Z")
    Archive(tmp_path).write(oom)
    assert degrees_to_give(module, 8, str(tmp_path)) == {}  # and there is no entry to start from either
    known = Archive(tmp_path).known()
    assert choose_degrees(known, fingerprint_module(module), hardware, 8) is None
    strategy = SimpleNamespace(
        choice=Hybrid3DStrategy(archive=None).choice,
        root_device=torch.device("cpu"),
        num_nodes=1,
        precision_plugin=SimpleNamespace(precision="32-true"),
    )
    failed = failed_degrees(known, fingerprint_module(module), hardware)
    assert choose_by_plan(strategy, module, 8, failed=failed).layout not in failed
