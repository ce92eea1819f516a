"""Faults that other pipelines had: scale, tied weights, left-over layers, masks, changing shapes (shared/cases.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_hybrid.training.pipelined
import lightning_hybrid.training.setup_pipeline
from lightning_hybrid.batches.microbatches import BatchSplitter
from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import LENGTH, NUM_ROWS, VOCABULARY, Lit, LitNano, NanoGPT, generator, text_rows
from tests.ranks import run_ranks

PP2, PP4 = {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 4}
IDS = torch.randint(0, VOCABULARY, (40, LENGTH), generator=generator())


def rows_of(lengths: list[int]) -> list[dict[str, Tensor]]:
    """Rows of which so many tokens are valid; the labels of the rest are -100."""
    positions = torch.arange(LENGTH)
    return [
        {"input_ids": ids, "labels": torch.where(positions < n, ids, -100)}
        for ids, n in zip(IDS, lengths, strict=False)
    ]


def compare(
    rows: Any,
    *degrees: dict[str, Any],
    make: Callable[[], Any] = lambda: LitNano(NanoGPT()),
    sabotage: Callable[[], None] | None = None,
    **options: Any,
) -> None:
    def run(rank: int, given: dict[str, Any], sabotage: Callable[[], None] | None = None) -> Trace:
        return trace(rank, make, rows, given, sabotage=sabotage, **options)

    expected = run_ranks(1, run, ONE_PROCESS)[0]
    for given in degrees:
        num_ranks = given.get("pipeline_parallel_size", 1) * given.get("data_parallel_size", 1)
        assert_equal(expected, run_ranks(num_ranks, run, given, sabotage, timeout=100))


# ---- scale ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "options"),
    [
        (48, {"accumulate_grad_batches": 3}),
        (40, {"accumulate_grad_batches": 4, "max_epochs": 2}),  # the last window holds one batch
        (16, {"accumulate_grad_batches": 4, "max_epochs": 3}),  # windows longer than the epoch
    ],
)
def test_scale_1_accumulation(num_rows: int, options: dict[str, Any]) -> None:
    rows = rows_of([LENGTH] * num_rows)
    compare(rows, {**PP2, "num_microbatches": 4}, {**PP2, "data_parallel_size": 2, "num_microbatches": 2}, **options)


UNEVEN = [12, 11, 2, 1, 7, 3, 12, 1] * 3


def unweighted() -> None:
    right = lightning_hybrid.training.pipelined.read_loss
    lightning_hybrid.training.pipelined.read_loss = lambda output, size: right(
        {"loss": output, "loss_weight": 1.0}, size
    )


def unguarded() -> None:
    unweighted()
    lightning_hybrid.training.pipelined.Rehearsal.find = lambda self, read_loss: (None, True)  # type: ignore[method-assign]


@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_scale_3_uneven_targets(num_microbatches: int) -> None:
    degrees = {**PP2, "num_microbatches": num_microbatches}
    compare(rows_of(UNEVEN), degrees)
    compare(rows_of([LENGTH] * 24), degrees, sabotage=unweighted)  # with even targets the weights do not matter
    with must_differ():
        compare(rows_of(UNEVEN), degrees, sabotage=unguarded)
    with pytest.raises(UnsupportedError, match="weight was misread"):
        compare(rows_of(UNEVEN), degrees, sabotage=unweighted)


class OtherLosses(LitNano):
    """The same model under losses that are written in other ways."""

    def __init__(self, kind: str) -> None:
        super().__init__(NanoGPT())
        self.kind = kind

    def loss(self, batch: Any) -> Any:
        logits = self.model(batch["input_ids"])[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        valid = (labels >= 0).float()
        each = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        if self.kind == "masked mean":
            return (each * valid).sum() / valid.sum()
        if self.kind == "sum":
            return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100) / 100
        if self.kind == "times five":
            return 5 * F.cross_entropy(logits, labels, ignore_index=-100)
        if self.kind == "mean of all":
            return each.mean()
        return {"loss": (each * valid).sum() / (valid.sum() + 1), "loss_weight": valid.sum() + 1}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


@pytest.mark.parametrize("kind", ["masked mean", "sum", "times five", "mean of all"])
def test_losses_written_in_other_ways(kind: str) -> None:
    compare(rows_of(UNEVEN), {**PP2, "num_microbatches": 4}, make=lambda: OtherLosses(kind))


def test_scale_5_uneven_microbatches() -> None:
    rows = rows_of([LENGTH] * 26)  # batches of 8, 8, 8 and 2
    compare(rows, {**PP2, "num_microbatches": 3}, {**PP2, "num_microbatches": 4}, {**PP4, "num_microbatches": 4})
    compare(rows_of([LENGTH] * 36), {**PP2, "num_microbatches": 4}, batch_size=9)
    with must_differ():
        compare(rows, {**PP2, "num_microbatches": 3}, sabotage=unguarded)


# ---- tied weights ----------------------------------------------------------------------------------------------------


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def tied_sum_left_out() -> None:
    lightning_hybrid.training.setup_pipeline.sync_tied_gradients = lambda *args: None


def test_tie_1_one_logical_parameter() -> None:
    def make() -> Any:
        return LitNano(TiedHead())

    rows = rows_of([LENGTH] * 24)
    sharded = {**PP2, "data_parallel_size": 2}
    compare(rows, PP2, PP4, sharded, {"data_parallel_size": 2}, make=make, gradient_clip_val=0.1)
    with must_differ():
        compare(rows, PP2, make=make, sabotage=tied_sum_left_out)


class Reused(TiedHead):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]  # layer reuse


class TiedLate(LitNano):
    """Its weights are tied in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__(TiedHead())
        self.model.head.weight = nn.Parameter(self.model.wte.weight.detach().clone())

    def configure_model(self) -> None:
        self.model.head.weight = self.model.wte.weight


@pytest.mark.parametrize("make", [lambda: LitNano(Reused()), TiedLate], ids=["reused", "tied late"])
def test_tie_3_shared_weights_under_sharding(make: Callable[[], Any]) -> None:
    """Names are compared too: there still is one parameter."""
    kept = {"data_parallel_size": 2, "reshard_after_forward": False}
    compare(rows_of([LENGTH] * 24), {"data_parallel_size": 2}, kept, make=make)


# ---- structures ------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Seven layers, held in different ways."""

    def __init__(self, how: str, num_layers: int = 7) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(num_layers)]
        self.head = nn.Linear(12, 5)  # registered before the layers, called after them
        self.how = how
        if how == "dict":
            self.stack: Any = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        else:
            self.stack = nn.Sequential(*layers) if how == "sequential" else nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "sequential":
            x = self.stack(x)
        else:
            for layer in self.stack["layers"] if self.how == "dict" else self.stack:
                x = layer(x)
        out: Tensor = self.head(x)
        return out


class LitLayers(Lit):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch["x"]), batch["y"])


def labelled() -> list[dict[str, Tensor]]:
    x = torch.randn(NUM_ROWS, 12, generator=generator())
    return [{"x": a, "y": b} for a, b in zip(x, torch.arange(NUM_ROWS) % 5, strict=True)]


@pytest.mark.parametrize("how", ["list", "sequential", "dict"])
def test_ppm_1_layers_left_over_by_the_division(how: str) -> None:
    degrees = [{"pipeline_parallel_size": n} for n in (2, 3, 4)]
    compare(labelled(), *degrees, make=lambda: LitLayers(Layers(how)))


def last_layer_dropped() -> None:
    Layers.forward = lambda self, x: self.head(self.stack[:-1](x))  # type: ignore[method-assign]


def test_ppm_1_a_dropped_layer_is_noticed() -> None:
    with must_differ():
        compare(
            labelled(),
            {"data_parallel_size": 2},
            make=lambda: LitLayers(Layers("sequential")),
            sabotage=last_layer_dropped,
        )


class Masked(NanoGPT):
    """All blocks use a mask of each sample, positions, a bias without a batch dimension, a number and a None."""

    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        parts: Any = self.transformer
        x = parts["wte"](batch["input_ids"]) + parts["wpe"](batch["position_ids"])
        for block in parts["h"]:
            x = block(x) * batch["attention_mask"][..., None] * batch["temperature"]
            x = x + (batch["rel_bias"] @ x) * 0.1
        assert batch["nothing"] is None
        out: Tensor = parts["ln_f"](x) @ parts["wte"].weight.T
        return out


class LitMasked(Lit):
    def loss(self, batch: Any) -> Tensor:
        logits = self.model(batch)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def masked_collate(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    batch: dict[str, Any] = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    positions = torch.arange(LENGTH).expand(len(rows), LENGTH)
    starts = torch.arange(len(rows))[:, None] % 4 + 2
    batch["position_ids"] = torch.where(positions >= starts, positions - starts, positions)
    batch["rel_bias"] = torch.randn(LENGTH, LENGTH, generator=generator(3)) / LENGTH
    return {**batch, "temperature": 0.9, "nothing": None}


def first_mask_for_all() -> None:
    right = BatchSplitter.split

    def wrong(self: BatchSplitter, batch: Any, num: int) -> list[Any]:
        parts = right(self, batch, num)
        for part, _ in parts:
            part["attention_mask"] = parts[0][0]["attention_mask"]
        return parts

    BatchSplitter.split = wrong  # type: ignore[method-assign]


def test_ppm_2_masks_of_each_microbatch() -> None:
    def make() -> Any:
        return LitMasked(Masked())

    degrees = [{"pipeline_parallel_size": 3, "num_microbatches": 4}, {**PP4, "num_microbatches": 4}]
    compare(text_rows(), *degrees, make=make, collate=masked_collate)
    with must_differ():
        compare(text_rows(), degrees[1], make=make, collate=masked_collate, sabotage=first_mask_for_all)


def varying_collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Another length for every batch, made from the rows themselves."""
    length = [12, 7, 9, 12, 3][int(rows[0]["index"]) // 8 % 5]
    return {"input_ids": torch.stack([row["input_ids"] for row in rows])[:, :length]}


class LitVarying(LitNano):
    def loss(self, batch: Any) -> Tensor:
        ids = batch["input_ids"]
        return F.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ppm_5_another_length_at_every_step(accumulate: int) -> None:
    rows = [{"input_ids": ids, "index": torch.tensor(i)} for i, ids in enumerate(IDS)]
    degrees = [{**PP2, "num_microbatches": 2}, {**PP4, "num_microbatches": 4}, {**PP2, "schedule": "Interleaved1F1B"}]
    compare(
        rows,
        *degrees,
        make=lambda: LitVarying(NanoGPT()),
        collate=varying_collate,
        accumulate_grad_batches=accumulate,
    )


def square_collate(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Sequences as long as the batch is large: the bias is 8 x 8 as the ids are."""
    batch = masked_collate(rows)
    cut = {key: value[:, :8] for key, value in batch.items() if isinstance(value, Tensor) and key != "rel_bias"}
    return {**batch, **cut, "rel_bias": batch["rel_bias"][:8, :8]}


def test_ppm_2_as_long_as_large_is_refused_until_said() -> None:
    given = {**PP4, "num_microbatches": 4}
    make = lambda: LitMasked(Masked())  # noqa: E731
    with pytest.raises(ConfigurationError, match=r"batch size 8.*rel_bias.*unbatched"):
        compare(text_rows(), given, make=make, collate=square_collate)
    compare(text_rows(), {**given, "unbatched": ["rel_bias"]}, make=make, collate=square_collate)
    with pytest.raises(RuntimeError, match="must match the size"):  # the bias is cut, as was said
        compare(text_rows(), {**given, "unbatched": []}, make=make, collate=square_collate)
