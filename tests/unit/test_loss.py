"""The weighted micro-batches' gradient is that of the whole batch, whatever the loss averages over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid.logged_values import merge_outputs
from lightning_hybrid.pipeline.loss import MicrobatchLoss, combine, read_loss

SIZES, LENGTH, CLASSES = (3, 3, 2), 4, 5
Batch = dict[str, Tensor]
Loss = Callable[[Tensor, Batch], Tensor]
TEMPERATURE = torch.tensor(1.7, dtype=torch.float64)
CLASS_WEIGHT = torch.tensor([0.3, 1.0, 2.0, 0.7, 1.5], dtype=torch.float64)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    size = sum(SIZES)
    x = torch.randn(size, LENGTH, 6, generator=generator, dtype=torch.float64)
    y = torch.rand(size, LENGTH, CLASSES, generator=generator, dtype=torch.float64)
    c = torch.randint(0, CLASSES, (size, LENGTH), generator=generator)
    mask = torch.ones(size, LENGTH, dtype=torch.bool)
    mask[0, 1:] = mask[1, 2:] = mask[4, 3:] = mask[7, 1:] = False
    return {"x": x, "y": y, "c": c.masked_fill(~mask, -100), "m": mask}


def ce(h: Tensor, b: Batch, **options: object) -> Tensor:
    return F.cross_entropy(h.flatten(0, 1), b["c"].flatten(), **options)  # type: ignore[arg-type]


def sq(h: Tensor, b: Batch) -> Tensor:
    return (h - b["y"]) ** 2


def probs(b: Batch) -> Tensor:
    return b["y"].softmax(-1).flatten(0, 1)


FUSED: dict[str, Callable[..., Tensor]] = {
    "mse": lambda h, b, r: F.mse_loss(h, b["y"], reduction=r),
    "l1": lambda h, b, r: F.l1_loss(h, b["y"], reduction=r),
    "bce": lambda h, b, r: F.binary_cross_entropy(h.sigmoid(), b["y"], reduction=r),
    "bce_logits": lambda h, b, r: F.binary_cross_entropy_with_logits(h, b["y"], reduction=r),
    "bce_pos": lambda h, b, r: F.binary_cross_entropy_with_logits(h, b["y"], pos_weight=CLASS_WEIGHT, reduction=r),
    "smooth_l1": lambda h, b, r: F.smooth_l1_loss(h, b["y"], reduction=r),
    "huber": lambda h, b, r: F.huber_loss(h, b["y"], delta=0.4, reduction=r),
    "soft_margin": lambda h, b, r: F.soft_margin_loss(h, (b["y"] - 0.5).sign(), reduction=r),
    "gaussian_nll": lambda h, b, r: F.gaussian_nll_loss(h, b["y"], b["y"] + 0.1, reduction=r),
    "poisson_nll": lambda h, b, r: F.poisson_nll_loss(h, b["y"], reduction=r),
    "hinge": lambda h, b, r: F.hinge_embedding_loss(h, (b["y"] - 0.5).sign(), reduction=r),
    "multi_margin": lambda h, b, r: F.multi_margin_loss(h.flatten(0, 1), b["c"].clamp(0).flatten(), reduction=r),
    "multilabel": lambda h, b, r: F.multilabel_soft_margin_loss(h.flatten(0, 1), probs(b), reduction=r),
    "ce": lambda h, b, r: ce(h, b, reduction=r),
    "ce_smooth": lambda h, b, r: ce(h, b, reduction=r, label_smoothing=0.1),
    "ce_weight": lambda h, b, r: ce(h, b, reduction=r, weight=CLASS_WEIGHT),
    "ce_weight_smooth": lambda h, b, r: ce(h, b, reduction=r, weight=CLASS_WEIGHT, label_smoothing=0.1),
    "ce_2d": lambda h, b, r: F.cross_entropy(h.transpose(1, 2), b["c"], reduction=r),
    "ce_probabilities": lambda h, b, r: F.cross_entropy(h.flatten(0, 1), probs(b), reduction=r),
}


def reduced(loss: Callable[..., Tensor], reduction: str) -> Loss:
    return lambda h, b: loss(h, b, reduction)


LOSSES: dict[str, Loss] = {
    **{
        f"{name}-{reduction}": reduced(loss, reduction) for name, loss in FUSED.items() for reduction in ("mean", "sum")
    },
    "kl-mean": lambda h, b: F.kl_div(h.log_softmax(-1), b["y"], reduction="none").mean(),
    "kl-batchmean": lambda h, b: F.kl_div(h.log_softmax(-1), b["y"], reduction="batchmean"),
    "kl-batchmean-flat": lambda h, b: F.kl_div(h.flatten(0, 1).log_softmax(-1), probs(b), reduction="batchmean"),
    "sum-by-samples": lambda h, b: sq(h, b).sum() / len(h),
    "sum-by-tokens": lambda h, b: sq(h, b).sum() / (len(h) * LENGTH),
    "sum-by-samples-by-length": lambda h, b: sq(h, b).sum() / len(h) / LENGTH,
    "half-a-sum": lambda h, b: 0.5 * sq(h, b).sum(),
    "mse-sum-by-samples": lambda h, b: F.mse_loss(h, b["y"], reduction="sum") / len(h),
    "ce-sum-by-tokens": lambda h, b: ce(h, b, reduction="sum") / (len(h) * LENGTH),
    "ce-sum-by-item": lambda h, b: ce(h, b, reduction="sum") / b["m"].sum().item(),
    "ce-smooth-sum-by-item": lambda h, b: ce(h, b, reduction="sum", label_smoothing=0.1) / b["m"].sum().item(),
    "masked-by-tensor": lambda h, b: (sq(h, b).sum(-1) * b["m"]).sum() / b["m"].sum(),
    "masked-by-item": lambda h, b: (sq(h, b).sum(-1) * b["m"]).sum() / b["m"].sum().item(),
    "masked-by-clamped": lambda h, b: (ce(h, b, reduction="none")).sum() / b["m"].sum().clamp(min=1) / 2,
    "selected-mean": lambda h, b: sq(h, b)[b["m"]].mean(),
    "selected-mean-of-means": lambda h, b: sq(h, b)[b["m"]].mean(-1).mean(),
    "selected-fused": lambda h, b: F.binary_cross_entropy_with_logits(h[b["m"]], b["y"][b["m"]]),
    "selected-sum-by-item": lambda h, b: sq(h, b)[b["m"]].sum(-1).sum() / b["m"].sum().item(),
    "per-sample-mean": lambda h, b: ((sq(h, b).sum(-1) * b["m"]).sum(1) / b["m"].sum(1)).mean(),
    "temperature": lambda h, b: ce(h, b) / TEMPERATURE,
    "mean-temperature": lambda h, b: sq(h, b).mean() / TEMPERATURE * 3,
    "unreduced-mean": lambda h, b: ce(h, b, reduction="none").mean(),
    "one-element": lambda h, b: (2 * ce(h, b)).reshape(1),
    "squeezed": lambda h, b: -(-sq(h, b).mean().reshape(1, 1)).squeeze(0).squeeze(),
    "float32-copy": lambda h, b: ce(h, b).float().double(),
    "mean-over-samples-then-sum": lambda h, b: sq(h, b).mean(0).sum(),
    "mean-over-samples-then-mean": lambda h, b: sq(h, b).mean((0, 1)).mean(),
    "mean-of-means": lambda h, b: sq(h, b).mean(-1).mean(1).mean(0),
    "mean-over-classes-then-sum": lambda h, b: sq(h, b).mean(-1).sum(),
    "sum-over-samples-then-mean": lambda h, b: sq(h, b).sum(0).mean(),
    "heads": lambda h, b: torch.stack([sq(h, b).mean(), h.abs().mean()]).mean(),
    "heads-sum": lambda h, b: torch.stack([ce(h, b), ce(2 * h, b)]).sum(),
    "sample-by-sample": lambda h, b: torch.stack([e[m].mean() for e, m in zip(sq(h, b), b["m"], strict=True)]).mean(),
    "two-terms": lambda h, b: ce(h, b) + 0.1 * ce(-h, b),
    "constant": lambda h, b: sq(h, b).sum() / 1000,
}


def parts(batch: Batch) -> list[Batch]:
    cut = {name: value.split(SIZES) for name, value in batch.items()}
    return [{name: values[i] for name, values in cut.items()} for i in range(len(SIZES))]


def gradients(loss: Loss, change: Callable[[MicrobatchLoss], MicrobatchLoss]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and gradient of the whole batch, and those combined from its micro-batches."""
    torch.manual_seed(1)
    layer, batch = torch.nn.Linear(6, CLASSES, dtype=torch.float64), make_batch()
    whole = loss(layer(batch["x"]), batch)
    (expected,) = torch.autograd.grad(whole.sum(), [layer.weight])
    losses = [change(read_loss(loss(layer(part["x"]), part), len(part["x"]))) for part in parts(batch)]
    values = [torch.autograd.grad(each.value.sum(), [layer.weight])[0] for each in losses]
    by_sum = losses[0].rule == "sum"
    total = 1.0 if by_sum else sum(each.weight for each in losses)
    gradient = torch.stack([value * each.weight / total for value, each in zip(values, losses, strict=True)]).sum(0)
    return whole.detach(), expected, combine([each.value for each in losses], losses), gradient


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:reduction")
def test_micro_batches_equal_the_batch(name: str) -> None:
    tolerance = 1e-6 if name == "float32-copy" else 1e-10
    whole, expected, combined, gradient = gradients(LOSSES[name], lambda loss: loss)
    torch.testing.assert_close(combined, whole.squeeze(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["ce-mean", "selected-mean", "kl-batchmean", "masked-by-item", "temperature"])
def test_a_wrong_weight_shows(name: str) -> None:
    _, expected, _, gradient = gradients(LOSSES[name], lambda loss: replace(loss, weight=1.0))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


def read(loss: Loss) -> MicrobatchLoss:
    batch = parts(make_batch())[0]
    return read_loss(loss(torch.ones(3, LENGTH, CLASSES, dtype=torch.float64, requires_grad=True), batch), 3)


def test_an_unknown_divisor_is_doubted() -> None:
    loss = read(LOSSES["constant"])
    assert loss.rule == "sum"
    assert "divided by 1000" in loss.doubt and "loss_weight" in loss.doubt
    assert not read(LOSSES["mse-sum"]).doubt
    assert "multiplied with 1/3" in read(lambda h, b: sq(h, b).sum() * (1 / len(h))).doubt


def test_terms_with_different_counts_are_mixed() -> None:
    loss = read(lambda h, b: ce(h, b) + h.pow(2).mean())
    assert (loss.rule, loss.weight) == ("mixed", 3.0)
    assert "different counts" in loss.doubt
    assert read(LOSSES["ce-mean"]).rule == "targets"


def test_the_count_is_exact_under_autocast() -> None:
    layer, targets = torch.nn.Linear(4, CLASSES), torch.zeros(601, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(layer(torch.ones(601, 4)), targets, label_smoothing=0.1)
    assert (read_loss(loss, 601).rule, read_loss(loss, 601).weight) == ("targets", 601.0)


def test_the_user_says_the_weight() -> None:
    value = torch.ones((), requires_grad=True) * 2
    assert read_loss({"loss": value, "loss_weight": 7}, 3).weight == 7.0
    with pytest.raises(ValueError, match="scalar loss"):
        read_loss(torch.ones(2), 3)


def test_what_a_step_returns_beside_the_loss_is_that_of_the_batch_or_nothing() -> None:
    sizes = (2, 1)
    losses = [MicrobatchLoss(value=torch.ones(()), weight=float(size), rule="samples") for size in sizes]
    outputs = [
        {
            "acc": torch.tensor(float(size)),
            "rows": torch.full((size, 3), float(size)),
            "names": ["a"] * size,
            "tag": "same",
            "n": size,
            "constant": 3,
            "count": torch.tensor(size),
            "by_class": torch.zeros(5),
            "epoch": [1],
            "pair": (torch.zeros(size), None),
        }
        for size in sizes
    ]
    merged = merge_outputs(outputs, losses, sizes)
    assert float(merged.pop("acc")) == pytest.approx(5 / 3)
    assert merged.pop("rows")[:, 0].tolist() == [2.0, 2.0, 1.0] and len(merged.pop("pair")[0]) == 3
    assert merged.pop("names") == ["a"] * 3 and merged.pop("tag") == "same"
    assert set(merged.values()) == {None}, merged


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": torch.zeros(2)}, {"b": torch.zeros(1)}),
        ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(1, 4)}),
        ({"a": torch.tensor(1.0)}, {"a": torch.zeros(1)}),
        ({"a": (torch.zeros(2), 1)}, {"a": (torch.zeros(1),)}),
        ({"a": [1, 2]}, {"a": torch.zeros(1)}),
    ],
    ids=["keys", "shapes", "dimensions", "lengths", "types"],
)
def test_what_differs_between_microbatches_is_none(first: Any, second: Any) -> None:
    losses = [MicrobatchLoss(value=torch.ones(()), weight=weight, rule="samples") for weight in (2.0, 1.0)]
    assert set(merge_outputs([first, second], losses, (2, 1)).values()) == {None}
