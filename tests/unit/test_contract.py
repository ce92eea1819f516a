"""Every usual loss of micro-batches agrees with its batch; losses that couple samples, or misread weights, do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid.pipeline.contract import disagreement, rehearsed_sizes
from lightning_hybrid.pipeline.loss import MicrobatchLoss, read_loss
from tests.unit.test_loss import CLASSES, LOSSES, Batch, Loss, make_batch, sq


def compare(loss: Loss, dtype: torch.dtype = torch.float64, weight: float | None = None) -> str | None:
    """Whether a loss of eight samples agrees with those of its two parts."""
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in make_batch().items()}
    size = len(batch["x"])
    torch.manual_seed(2)
    layer = torch.nn.Linear(6, CLASSES, dtype=torch.float64).to(dtype)

    def run(first: int, last: int) -> MicrobatchLoss:
        part = {name: value[first:last] for name, value in batch.items()}
        found = read_loss(loss(layer(part["x"]), part), last - first)
        return replace(found, weight=weight) if weight else found

    at = 3
    return disagreement(run(0, size), [run(0, at), run(at, size)])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:reduction")
def test_usual_losses_raise_no_alarm(name: str) -> None:
    assert compare(LOSSES[name]) is None
    if not name.startswith("ce_weight") and name != "temperature":  # their weights are float64
        assert compare(LOSSES[name], torch.float32) is None


def info_nce(h: Tensor, b: Batch) -> Tensor:
    z = F.normalize(h.flatten(1), dim=-1)
    return F.cross_entropy(z @ F.normalize(b["y"].flatten(1), dim=-1).T, torch.arange(len(z)))


COUPLED: dict[str, Loss] = {
    "info_nce": info_nce,
    "variance": lambda h, b: sq(h, b).mean() + 0.1 * F.relu(1 - h.std(0)).mean(),
    "normalised": lambda h, b: (sq(h, b).sum(-1) * b["m"]).sum() / (b["m"].sum() + 1),
    "two-counts": lambda h, b: F.cross_entropy(h.flatten(0, 1), b["c"].flatten()) + h.pow(2).mean(),
    "root": lambda h, b: sq(h, b).mean().sqrt(),
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_samples_show(name: str) -> None:
    for dtype in (torch.float64, torch.float32):
        assert "for two parts of them" in (compare(COUPLED[name], dtype) or ""), dtype


def test_a_misread_weight_shows() -> None:
    assert "weights 1 and 1" in (compare(LOSSES["ce-mean"], weight=1.0) or "")


def test_losses_that_are_not_finite_say_nothing() -> None:
    whole = MicrobatchLoss(value=torch.tensor(torch.nan), weight=2.0, rule="samples")
    assert disagreement(whole, [replace(whole, value=torch.tensor(1.0))] * 2) is None


def test_the_tolerance_follows_the_precision() -> None:
    whole = MicrobatchLoss(value=torch.tensor(1.0), weight=2.0, rule="samples")
    parts = [replace(whole, value=torch.tensor(1.01), weight=1.0)] * 2
    assert disagreement(whole, parts) is not None
    assert disagreement(whole, parts, is_rounded=True) is None
    assert disagreement(whole, [replace(part, value=torch.tensor(1.1)) for part in parts], is_rounded=True) is not None


def test_two_micro_batches_are_rehearsed() -> None:
    assert rehearsed_sizes([4, 4, 4]) == [4, 4]
    assert rehearsed_sizes([3, 2]) == [3, 2]
    assert rehearsed_sizes([1, 1, 1, 1, 1]) == [2, 2]
    assert rehearsed_sizes([1, 1, 1]) == [1, 2]
    assert rehearsed_sizes([1, 1]) == [1, 1]
