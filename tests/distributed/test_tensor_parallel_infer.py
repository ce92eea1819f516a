"""Tensor parallelism without a plan: what is found by trying equals one process, and what cannot be split is whole."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_hybrid.checkpoint.consolidate as consolidate
import lightning_hybrid.tensor_parallel.check as check
import lightning_hybrid.tensor_parallel.collectives as collectives
from lightning_hybrid import Hybrid3DStrategy, parallelize
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel.apply import apply_tensor_parallel
from lightning_hybrid.tensor_parallel.plan import PlanEntry, TensorParallelPlan
from tests.distributed.equality import ONE_PROCESS, QUIET, Trace, assert_equal, must_differ, trace
from tests.distributed.tensor_parallel_cases import full, randomised, relative, start
from tests.distributed.zoo import Lit
from tests.ranks import run_ranks

VOCABULARY, WIDTH, LENGTH = 17, 16, 6
LAYOUTS = ("separate", "chunk", "split", "three first", "heads first", "grouped")


class Attention(nn.Module):
    """Causal attention with its heads in one of the layouts that people use; sizes from the global width."""

    def __init__(self, layout: str, num_heads: int, width: int) -> None:
        super().__init__()
        self.layout, self.n_head, self.n_embd = layout, num_heads, width
        self.kv_heads = num_heads // 2 if layout == "grouped" else num_heads
        self.head_dim = width // num_heads
        if layout == "separate":
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        else:
            self.c_attn = nn.Linear(width, (num_heads + 2 * self.kv_heads) * self.head_dim)
        self.c_proj = nn.Linear(width, width)

    def project(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        size = width // self.n_head
        if self.layout == "separate":
            return (f(x).view(batch, length, self.n_head, size) for f in (self.q, self.k, self.v))
        joined = self.c_attn(x)
        if self.layout == "three first":
            return joined.view(batch, length, 3, self.n_head, size).unbind(2)
        if self.layout == "heads first":
            return joined.view(batch, length, self.n_head, 3, size).unbind(3)
        if self.layout == "grouped":
            kv = self.kv_heads * self.head_dim
            q, k, v = joined.split([self.n_head * self.head_dim, kv, kv], dim=-1)
            k, v = (t.unflatten(-1, (-1, self.head_dim)).repeat_interleave(2, dim=2) for t in (k, v))
            return q.unflatten(-1, (-1, self.head_dim)), k, v
        parts = joined.chunk(3, dim=-1) if self.layout == "chunk" else joined.split(self.n_embd, dim=2)
        return (part.view(batch, length, self.n_head, size) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.project(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        out: Tensor = self.c_proj(y.contiguous().view(x.shape) if self.layout != "grouped" else y.flatten(2))
        return out


class Gated(nn.Module):
    """Gate and up in one linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    def __init__(self, layout: str, num_heads: int, width: int, hidden: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(layout, num_heads, width), Gated(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class Model(nn.Module):
    """One block of each layout; a head that may share the embedding's weight."""

    def __init__(
        self,
        layouts: tuple[str, ...] = LAYOUTS,
        *,
        num_heads: int = 4,
        width: int = WIDTH,
        vocabulary: int = VOCABULARY,
        hidden: int = 32,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(layout, num_heads, width, hidden) for layout in layouts)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class LitModel(Lit):
    def loss(self, batch: Any) -> Tensor:
        logits = self.model(batch["ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def make(**options: Any) -> Callable[[], LitModel]:
    return lambda: LitModel(Model(**options))


Run = tuple[dict[str, Any], dict[str, Any]]
"""Options of the model, and degrees."""


@dataclass(frozen=True)
class Split:
    """What a run's plan splits, and why it leaves the rest whole; names without the leading ``model``."""

    split: set[str]
    whole: dict[str, str]


class Notes(L.Callback):
    """Reads the plan."""

    def __init__(self) -> None:
        self.found = Split(set(), {})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for entry in trainer.strategy._part.plan.entries if hasattr(trainer.strategy, "_part") else ():
            name = entry.name.removeprefix("model.")
            if entry.is_split:
                self.found.split.add(name)
            else:
                self.found.whole[name] = entry.note


def vocabulary_rows(size: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, size, (16, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, 2] = size - 1
    return [{"ids": row, "labels": torch.where(torch.arange(LENGTH) % 3 == 0, -100, row.roll(-1))} for row in ids]


ROWS = vocabulary_rows(VOCABULARY)


def train(
    rank: int,
    runs: list[Run],
    sabotage: Callable[[], None] | None = None,
    rows: dict[int, list[dict[str, Tensor]]] | None = None,
) -> list[tuple[Trace, Split]]:
    found = []
    if sabotage is not None:
        sabotage()
    for model, degrees in runs:
        notes = Notes()
        data = ROWS if rows is None else rows[model["vocabulary"]]
        found.append((trace(rank, make(**model), data, degrees, callbacks=[notes]), notes.found))
    return found


def compare(models: list[dict[str, Any]], degrees: dict[str, Any], num_ranks: int, *sabotage: Any) -> list[Split]:
    """Train each model in one process and at these degrees; they must be equal. What was split is returned."""
    expected = run_ranks(1, train, [(model, ONE_PROCESS) for model in models])[0]
    found = run_ranks(num_ranks, train, [(model, degrees) for model in models], *sabotage, timeout=200)
    for index, (right, _) in enumerate(expected):
        assert_equal(right, [run[index][0] for run in found])
    return [split for _, split in found[0]]


ATTENTION = {f"blocks.{i}.attn{name}" for i in range(1, 6) for name in ("", ".c_attn", ".c_proj")}
ATTENTION |= {f"blocks.0.attn{name}" for name in ("", ".q", ".k", ".v", ".c_proj")}


@pytest.mark.parametrize("degrees", [{}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}], ids=str)
def test_every_layout_over_two_ranks(degrees: dict[str, int]) -> None:
    num_ranks = 4 if degrees else 2
    odd = [{"layouts": ("chunk",), "hidden": 33}, {"layouts": ("separate", "chunk"), "num_heads": 3, "width": 18}]
    notes, *of_odd = compare([{}, *([] if degrees else odd)], {"tensor_parallel_size": 2, **degrees}, num_ranks)
    assert not {name for name in of_odd[0].split if ".mlp." in name} if of_odd else True
    assert not {name for name in of_odd[1].split if ".attn" in name} if of_odd else True
    # 'heads first' and 'grouped' need no more than what is divided by itself
    assert ATTENTION - notes.split <= {"blocks.5.attn"}
    assert {f"blocks.{i}.mlp.{name}" for i in range(6) for name in ("gate_up", "down")} <= notes.split


def test_with_recomputation_and_compiled() -> None:
    """Selective recomputation keeps products, which the sum over ranks must not change."""
    ways = [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"compile": {"backend": "aot_eager"}},
    ]
    model = {"layouts": ("chunk", "grouped")}
    right = run_ranks(1, train, [(model, ONE_PROCESS)])[0][0][0]
    found = run_ranks(2, train, [(model, {"tensor_parallel_size": 2, **way}) for way in ways], timeout=200)
    for index, _ in enumerate(ways):
        assert_equal(right, [run[index][0] for run in found])
        assert {"blocks.0.attn.c_attn", "blocks.1.attn.c_attn"} <= found[0][index][1].split
    with must_differ():
        wrong = run_ranks(2, train, [(model, {"tensor_parallel_size": 2, **ways[1]})], sums_in_place)
        assert_equal(right, [run[0][0] for run in wrong])


def sums_in_place() -> None:
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.detach()
        torch.distributed.all_reduce(total, group=group)
        return total

    collectives._LeavePartial.forward = staticmethod(forward)  # type: ignore[method-assign]


def test_four_ranks_and_sizes_that_do_not_divide() -> None:
    odd = {"layouts": ("chunk", "grouped", "three first", "heads first"), "hidden": 33}
    three_heads = {"layouts": ("separate", "chunk"), "num_heads": 3, "width": 18}
    notes = compare([odd, three_heads, {"layouts": ("separate",)}], {"tensor_parallel_size": 4}, 4)
    split = {f"blocks.{i}.attn.{name}" for i in (0, 2, 3) for name in ("c_attn", "c_proj")}
    assert {name for name in notes[0].split if ".attn." in name} == split
    assert {"blocks.0.mlp.gate_up", "blocks.0.attn.q"} <= notes[2].split
    assert (
        notes[0].whole["blocks.0.mlp.gate_up"]
        == "tensor_parallel_size=4 does not divide out_features of mlp.gate_up, 66"
    )
    assert notes[0].whole["blocks.1.attn.c_attn"] == (
        "tensor_parallel_size=4 does not divide kv_heads=2, and a head cannot be cut (1, 2 would do)"
    )
    assert not any(".attn" in name for name in notes[1].split)


VOCABULARIES = {"embedding": "embedding_rowwise", "head": "colwise_gather_output"}


@pytest.mark.parametrize(("sizes", "num_ranks"), [((17,), 2), ((257, 5), 4)], ids=str)
def test_vocabularies_that_do_not_divide(sizes: tuple[int, ...], num_ranks: int) -> None:
    """Labels hold the last id and -100; embedding and head are named by the user, and blocks are tried."""
    models = [{"layouts": ("chunk", "chunk"), "vocabulary": v, "tied": tied} for v in sizes for tied in (False, True)]
    rows = {size: vocabulary_rows(size) for size in sizes}
    expected = run_ranks(1, train, [(model, ONE_PROCESS) for model in models], None, rows)[0]
    degrees = {"tensor_parallel_size": num_ranks, "tp_plan": VOCABULARIES}
    found = run_ranks(num_ranks, train, [(model, degrees) for model in models], None, rows, timeout=200)
    for index, (right, _) in enumerate(expected):
        assert_equal(right, [run[index][0] for run in found])
        assert found[0][index][0].losses[0] == pytest.approx(right.losses[0], rel=1e-6)
        assert found[0][index][0].after["model.embedding.weight"].shape == (models[index]["vocabulary"], WIDTH)
        assert "blocks.0.attn.c_attn" in found[0][index][1].split


# ---- nn.MultiheadAttention ------------------------------------------------------------------------------------------


def attention_calls() -> list[tuple[bool, dict[str, Any]]]:
    """Arguments in all forms, each with whether the batch comes first."""
    generator = torch.Generator().manual_seed(2)
    x, memory = (torch.randn(2, n, 16, generator=generator).double() for n in (5, 7))
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[:, 4:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(5).double()
    by_head = torch.randn(8, 5, 5, generator=generator).double()
    itself = {"query": x, "key": x, "value": x}
    return [
        (True, itself),
        (True, {**itself, "need_weights": False, "attn_mask": causal, "is_causal": True}),
        (True, {**itself, "key_padding_mask": padding, "attn_mask": causal < 0, "average_attn_weights": False}),
        (True, {**itself, "attn_mask": by_head, "need_weights": False}),
        (False, {"query": x.transpose(0, 1), "key": memory.transpose(0, 1), "value": memory.transpose(0, 1)}),
        (True, {"query": x[0], "key": memory[0], "value": memory[0]}),
    ]


def attention_errors(rank: int, sabotage: bool = False) -> list[float]:
    mesh, errors = start((2,), ("tensor",)), []
    for batch_first, call in attention_calls():
        whole = randomised(nn.MultiheadAttention(16, 4, batch_first=batch_first))
        split = randomised(nn.MultiheadAttention(16, 4, batch_first=batch_first))
        inner = PlanEntry(
            name="",
            style="attention",
            source="inferred",
            parts=(16,) * 3,
            parameters=("in_proj_weight", "in_proj_bias"),
        )
        outer = PlanEntry(name="out_proj", style="rowwise", source="inferred", parameters=("out_proj.weight",))
        parts = () if sabotage else inner.parts
        entries = (replace(inner, parts=parts), outer)
        apply_tensor_parallel(
            split, mesh, TensorParallelPlan(tensor_parallel_size=2, entries=entries, num_parameters={})
        )
        (out, weights), (right, right_weights) = split(**call), whole(**call)
        assert (weights is None) == (right_weights is None)
        for one in (out, right):
            (one * torch.arange(one.numel()).view_as(one)).sum().backward()
        errors.append(relative(out, right))
        errors.append(0.0 if weights is None else relative(weights, right_weights))
        errors.append(relative(full(split.out_proj.weight.grad), full(whole.out_proj.weight.grad)))
        assert not batch_first or out.shape == right.shape
    return errors


def test_torch_attention_in_all_its_forms() -> None:
    assert max(run_ranks(2, attention_errors)[0]) < 1e-12
    assert max(run_ranks(2, attention_errors, True)[0]) > 1e-2, "in_proj cut contiguously is not noticed"


def test_torch_encoder_in_validation_is_that_of_one_process() -> None:
    """Nested tensors and fused inference read weights past the modules that hold them."""
    losses = [run_ranks(n, validate, degrees)[0] for n, degrees in ((1, ONE_PROCESS), (2, {"tensor_parallel_size": 2}))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class NestedEncoder(Lit):
    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        super().__init__(nn.ModuleList([nn.Embedding(17, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 17)]))

    def loss(self, batch: Any) -> Tensor:
        embedding, encoder, head = self.model
        logits = head(encoder(embedding(batch["ids"]), src_key_padding_mask=torch.arange(LENGTH) >= batch["length"]))
        labels = torch.where(torch.arange(LENGTH) >= batch["length"], -100, batch["ids"])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def validate(rank: int, degrees: dict[str, Any]) -> float:
    rows = [{"ids": row["ids"], "length": torch.tensor([3 + i % 4])} for i, row in enumerate(ROWS)]
    trainer = L.Trainer(devices=int(degrees.get("tensor_parallel_size", 1)), strategy=strategy_of(degrees), **QUIET)
    return float(trainer.validate(NestedEncoder(), DataLoader(rows, batch_size=8), verbose=False)[0]["val_loss"])


def strategy_of(degrees: dict[str, Any]) -> Any:
    others = {"data_parallel_size": 1, "pipeline_parallel_size": 1}
    return Hybrid3DStrategy(archive=None, **{**others, **degrees}) if degrees else "auto"


# ---- checkpoints ----------------------------------------------------------------------------------------------------


class Adam(LitModel):
    """In fp64: Adam divides small differences by small gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = Model(("chunk", "grouped"))
        if importlib.util.find_spec("transformers"):  # query, key and value joined in a weight [in, out]
            from transformers.pytorch_utils import Conv1D

            attention: Any = model.blocks[0].attn
            attention.c_attn = Conv1D(3 * WIDTH, WIDTH)
        super().__init__(model.double())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    rank: int,
    degrees: dict[str, Any],
    path: str,
    resume: str | None = None,
    sabotage: bool = False,
) -> dict[str, Tensor] | None:
    """One epoch (two with ``resume``); rank 0 returns what the checkpoint holds, weights and Adam's first moments."""
    if sabotage:
        right = consolidate.collect
        consolidate.collect = lambda entries, device, rows: right(entries, device)
    data = degrees.get("data_parallel_size", 1)
    trainer = L.Trainer(
        devices=degrees.get("tensor_parallel_size", 1) * data,
        strategy=strategy_of(degrees),
        max_epochs=2 if resume else 1,
        use_distributed_sampler=False,
        **QUIET,
    )
    mine = ROWS[trainer.strategy.coordinate.data :: data] if degrees else ROWS
    trainer.fit(Adam(), DataLoader(mine, batch_size=8 // data), ckpt_path=resume)
    trainer.save_checkpoint(path)
    if rank:
        return None
    saved = torch.load(path, weights_only=True)
    names = list(saved["state_dict"])
    moments = {f"moment of {names[i]}": s["exp_avg"] for i, s in saved["optimizer_states"][0]["state"].items()}
    return {**saved["state_dict"], **moments}


def worst(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert found.keys() == right.keys()
    return max(relative(found[name], right[name]) for name in right)


def test_checkpoints_have_the_rows_of_one_process(tmp_path: Path) -> None:
    """Saved after an epoch at 2 ranks, resumed by one process and at 2 x 2; and from one process at 2 ranks.

    Embedding and head are split over a vocabulary of 17.
    """
    one: dict[str, Any] = {}
    two = {"tensor_parallel_size": 2, "tp_plan": VOCABULARIES}
    four = {**two, "data_parallel_size": 2}
    files = {name: str(tmp_path / name) for name in ("one", "two", "wrong", "end")}
    right = run_ranks(1, fit, one, files["one"])[0]
    assert worst(run_ranks(2, fit, two, files["two"])[0], right) < 1e-7
    assert worst(run_ranks(2, fit, two, files["wrong"], None, True)[0], right) > 1e-2
    assert worst(run_ranks(4, fit, {**two, "tensor_parallel_size": 4}, files["end"])[0], right) < 1e-7
    end = run_ranks(1, fit, one, files["end"], files["one"])[0]
    assert worst(run_ranks(1, fit, one, files["end"], files["two"])[0], end) < 1e-7
    assert worst(run_ranks(4, fit, four, files["end"], files["two"])[0], end) < 1e-7
    assert worst(run_ranks(2, fit, two, files["end"], files["one"])[0], end) < 1e-7


# ---- what must not go through ---------------------------------------------------------------------------------------


def shapes_that_fit_are_enough() -> None:
    """Query, key and value in one are cut contiguously, if values are not looked at."""
    right = check.check_block
    check.check_block = lambda *call: replace(right(*call), output=0.0, inputs=0.0, gradients={})
    parallelize.check_outside = lambda *args: None


@pytest.mark.parametrize("layout", ["chunk", "three first"])
def test_a_contiguous_cut_is_noticed(layout: str) -> None:
    with must_differ():
        compare([{"layouts": (layout,)}], {"tensor_parallel_size": 2}, 2, shapes_that_fit_are_enough)


def nothing_fits() -> None:
    check._LARGEST = 0


def test_a_block_too_large_to_try_stays_whole() -> None:
    with pytest.raises(ConfigurationError, match=r"nothing can be split.*too large to be run whole for a check; name"):
        run_ranks(2, train, [({}, {"tensor_parallel_size": 2})], nothing_fits)
