"""Tensor parallelism without a plan for the models people bring: each equals one process, and is really split.

Attention written into the block itself; keys and values with fewer heads than ranks; torch's encoder and decoder
layers; Hugging Face's models with transposed weights (GPT-2) and with a bias for each head (T5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.building import per_block
from lightning_hybrid.tensor_parallel import styles
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.tensor_parallel_cases import Share, unchecked
from tests.distributed.zoo import VOCABULARY, Lit, even_rows, hugging_face
from tests.ranks import run_ranks

WIDTH, HEADS = 16, 4
Make = Callable[[], L.LightningModule]


class InBlock(nn.Module):
    """Attention and MLP in one module, as short code has it; heads by their size, or by their number."""

    def __init__(self, how: str, *, kv_heads: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        self.how, self.n_head, self.n_kv_head, self.head_dim = how, HEADS, kv_heads, WIDTH // HEADS
        self.n_rep = HEADS // kv_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.output = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, kv_heads * self.head_dim, bias=bias) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=bias), nn.Linear(4 * WIDTH, WIDTH, bias=bias)

    def heads(self, x: Tensor, number: int) -> Tensor:
        if self.how == "number":
            return x.view(*x.shape[:2], number, -1).transpose(1, 2)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.how == "enable_gqa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self.how == "number" and self.n_kv_head < self.n_head:
            k, v = (x.repeat_interleave(self.n_head // self.n_kv_head, dim=1) for x in (k, v))
        elif self.n_rep > 1:
            k, v = (x.repeat_interleave(self.n_rep, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_1(x)
        q = self.heads(self.query(normed), self.n_head)
        k, v = (self.heads(part(normed), self.n_kv_head) for part in (self.key, self.value))
        x = x + self.output(self.attend(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class Blocks(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Torch(Blocks):
    """torch's encoder layers, then its decoder layers on their output, with masks."""

    def __init__(self, *, batch_first: bool, **options: Any) -> None:
        options = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": batch_first, **options}
        super().__init__(*(nn.TransformerDecoderLayer(WIDTH, HEADS, **options) for _ in range(2)))
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, **options) for _ in range(2))
        self.batch_first = batch_first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids if self.batch_first else ids.T)
        padding, causal = ids == 3, torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        memory = x
        for block in self.encoder:
            memory = block(memory, src_key_padding_mask=padding)
        for block in self.blocks:
            x = block(x, memory, tgt_mask=causal, memory_key_padding_mask=padding)
        out: Tensor = self.head(x)
        return out if self.batch_first else out.transpose(0, 1)


class Language(Lit):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def blocks(*how: tuple[str, int]) -> Make:
    return lambda: Language(Blocks(*(InBlock(word, kv_heads=heads) for word, heads in how for _ in range(2))))


def gpt2(**options: Any) -> Make:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 16}
    return hugging_face("GPT2Config", **sizes, **no_dropout, bos_token_id=1, eos_token_id=2, **options)


def t5(**options: Any) -> Make:
    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": HEADS}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    sizes |= {"vocab_size": VOCABULARY, **ids, "head": "AutoModelForSeq2SeqLM"}
    return hugging_face("T5Config", **sizes, dropout_rate=0.0, use_cache=False, **options)


EAGER = {"attn_implementation": "eager"}
MODELS: dict[str, tuple[Make, float]] = {
    "in the block": (blocks(("size", HEADS), ("number", HEADS)), 0.9),
    "without bias": (lambda: Language(Blocks(*(InBlock("size", bias=False) for _ in range(2)))), 0.9),
    "two key heads": (blocks(("size", 2), ("number", 2), ("enable_gqa", 2)), 0.85),
    "one key head": (blocks(("size", 1), ("number", 1), ("enable_gqa", 1)), 0.9),
    "torch, batch first": (lambda: Language(Torch(batch_first=True, bias=False)), 0.9),
    "torch, batch second": (lambda: Language(Torch(batch_first=False, norm_first=True, activation="gelu")), 0.9),
    "gpt2": (gpt2(**EAGER), 0.9),
    "t5, gated": (t5(feed_forward_proj="gated-gelu", **EAGER), 0.9),
}
"""By name: how it is made, and which share of its blocks' parameters is split at least."""


def train(
    rank: int, names: list[str], degrees: dict[str, Any], sabotage: Callable[[], None] | None = None
) -> list[tuple[Trace, float, str]]:
    found = []
    for name in names:
        note = Share() if degrees else L.Callback()
        run = trace(rank, MODELS[name][0], even_rows(16), degrees, callbacks=[note], sabotage=sabotage)
        found.append((run, getattr(note, "share", 0.0), getattr(note, "text", "")))
    return found


MORE_RANKS = ("in the block", "two key heads", "one key head", "t5, gated")
"""Those that are run on four ranks, too: with fewer heads of keys than ranks, or something of each head."""
PLAIN = [name for name in MODELS if not name.startswith(("gpt2", "t5"))]
HUGGING_FACE = [name for name in MODELS if name not in PLAIN]


@pytest.mark.parametrize("names", [PLAIN, HUGGING_FACE], ids=["plain", "hugging face"])
def test_without_a_plan_over_two_and_four_ranks(names: list[str]) -> None:
    if names is HUGGING_FACE:
        pytest.importorskip("transformers")
    expected = run_ranks(1, train, names, ONE_PROCESS)[0]
    for size in (2, 4):
        chosen = names if size == 2 else [name for name in names if name in MORE_RANKS]
        found = run_ranks(size, train, chosen, {"tensor_parallel_size": size}, timeout=200)
        for index, name in enumerate(chosen):
            assert_equal(expected[names.index(name)][0], [run[index][0] for run in found])
            _, share, text = found[0][index]
            assert share >= MODELS[name][1], f"{name} at {size}: only {share:.0%} are split\n{text}"


# ---- the same comparisons must fail when something is wrong ---------------------------------------------------------


def shared_heads_not_summed() -> None:
    unchecked()
    right = styles.enter_split
    styles.enter_split = lambda x, group: x if isinstance(x, nn.Parameter) else right(x, group)


def the_first_heads_bias_everywhere() -> None:
    unchecked()
    styles.keep_share = lambda x, group: x[..., : x.shape[-1] // dist.get_world_size(group)]


@pytest.mark.parametrize(
    ("sabotage", "name"),
    [(unchecked, "gpt2"), (shared_heads_not_summed, "one key head"), (the_first_heads_bias_everywhere, "t5, gated")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_split_is_noticed(sabotage: Callable[[], None], name: str) -> None:
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    expected = run_ranks(1, train, [name], ONE_PROCESS)[0][0][0]
    found = run_ranks(2, train, [name], {"tensor_parallel_size": 2}, sabotage, timeout=100)
    with must_differ():
        assert_equal(expected, [run[0][0] for run in found])


# ---- caches of keys and values --------------------------------------------------------------------------------------


def recomputed(rank: int, degrees: dict[str, Any], sabotage: Callable[[], None] | None = None) -> list[Trace]:
    """GPT-2 hands a cache to its blocks, which extend it: a repeated call must not find it extended."""
    ways = ({"activation_checkpointing": way} for way in ("full", "selective"))
    todo = [{**degrees, **way} for way in ways] if degrees else [degrees]
    return [trace(rank, gpt2(**EAGER), even_rows(16), one, sabotage=sabotage) for one in todo]


def caches_as_they_are() -> None:
    per_block.is_cache = lambda x: False


def test_recomputation_sees_a_cache_as_it_was() -> None:
    pytest.importorskip("transformers")
    expected = run_ranks(1, recomputed, ONE_PROCESS)[0][0]
    for degrees in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "schedule": "1F1B"}):
        for run in zip(*run_ranks(2, recomputed, degrees), strict=True):
            assert_equal(expected, list(run))
    with pytest.raises(RuntimeError, match="24"):
        run_ranks(2, recomputed, {"tensor_parallel_size": 2}, caches_as_they_are)
