"""Dropout masks: alike where ranks hold the same values, different elsewhere, repeated when they are recomputed."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.batches.randomness import SHARES, ShareStream, StepRandomness
from lightning_hybrid.errors import ConfigurationError
from tests.distributed.equality import Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import SMALL, VOCABULARY, Lit, generator, hugging_face, text_rows
from tests.ranks import run_ranks

WIDTH, LENGTH = 16, 12
ROWS = torch.randint(0, VOCABULARY, (24, LENGTH), generator=generator())
PLAN = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")}
PLAN |= {f"blocks.*.{name}": "rowwise" for name in ("o", "down")}
SPLIT, WHOLE = ("attention_drop", "hidden_drop"), ("residual_drop", "embedding_drop")
PROBABILITY = {"attention_drop": 0.2, "hidden_drop": 0.3, "residual_drop": 0.1, "embedding_drop": 0.1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attention_drop, self.residual_drop, self.hidden_drop = nn.Dropout(0.2), nn.Dropout(0.1), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = self.attention_drop((q @ k.mT).softmax(-1))
        x = x + self.residual_drop(self.o((weights @ v).transpose(1, 2).flatten(2)))
        return x + self.down(self.hidden_drop(F.gelu(self.up(x))))


class LitDropout(Lit):
    checkpoints = False

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.embedding_drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding_drop(self.embedding(batch))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())


class LitCheckpointed(LitDropout):
    """The user's own checkpoints around calls of blocks."""

    checkpoints = True


class Masks(L.Callback):
    """Keeps which elements each dropout has zeroed, call by call."""

    def __init__(self) -> None:
        self.found: dict[str, list[Tensor]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, part in pl_module.named_modules():
            if isinstance(part, nn.Dropout):
                part.register_forward_hook(functools.partial(self._note, name))

    def _note(self, name: str, part: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        if part.training and args[0].any():  # not the check of the loss, nor what a stage leaves out
            self.found.setdefault(name, []).append((out == 0) & (args[0] != 0))


def run(rank: int, degrees: dict[str, Any], make: Any = LitDropout, sabotage: Any = None) -> Any:
    masks = Masks()
    return trace(rank, make, ROWS, degrees, callbacks=[masks], sabotage=sabotage), masks.found


def differ(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(not torch.equal(x, y) for x, y in zip(a, b, strict=True))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_masks(found: list[dict[str, list[Tensor]]], degrees: dict[str, int]) -> None:
    """``found`` by global rank, the tensor axis innermost."""
    data, tensor = degrees.get("data_parallel_size", 1), degrees.get("tensor_parallel_size", 1)
    for pipeline in range(degrees.get("pipeline_parallel_size", 1)):
        ranks = [found[(pipeline * data + d) * tensor : (pipeline * data + d + 1) * tensor] for d in range(data)]
        for name, kind in [(name, name.rpartition(".")[2]) for name in ranks[0][0]]:
            whole = WHOLE[1:] if degrees.get("sequence_parallel") else WHOLE
            for group in ranks:
                alike = same if kind in whole else differ
                assert all(alike(a[name], b[name]) for a, b in itertools.combinations(group, 2)), name
            assert all(differ(a[0][name], b[0][name]) for a, b in itertools.combinations(ranks, 2)), name
            assert differ(ranks[0][0][name][:-1], ranks[0][0][name][1:]), f"{name}: calls repeat each other"
    blocks: dict[str, list[Tensor]] = {}
    for one in found:
        blocks |= {name: masks for name, masks in one.items() if name.startswith("blocks.")}
    for kind in (*SPLIT, "residual_drop"):
        assert differ(blocks[f"blocks.0.{kind}"], blocks[f"blocks.1.{kind}"])
    for name, masks in [item for one in found for item in one.items()]:
        zeroed, p = torch.cat([mask.flatten() for mask in masks]).float(), PROBABILITY[name.rpartition(".")[2]]
        assert abs(float(zeroed.mean()) - p) < 3 * (p * (1 - p) / zeroed.numel()) ** 0.5 + 0.01, name


DP_TP = {"data_parallel_size": 2, "tensor_parallel_size": 2, "tp_plan": PLAN}
TP_PP = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "1F1B", "tp_plan": PLAN}
SEQUENCE = {**DP_TP, "sequence_parallel": True}
DP_PP = {"data_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "1F1B"}


@pytest.mark.parametrize(
    "degrees", [DP_TP, TP_PP, DP_PP, SEQUENCE], ids=["dp2-tp2", "tp2-pp2", "dp2-pp2", "dp2-tp2-sequence"]
)
def test_masks(degrees: dict[str, Any]) -> None:
    full = {**degrees, "activation_checkpointing": "full"}
    variants = [(degrees, LitDropout), (degrees, LitDropout), (full, LitDropout), (degrees, LitCheckpointed)]
    found = run_ranks(4, lambda rank: [run(rank, *variant) for variant in variants], timeout=120)
    check_masks([first[1] for first, *_ in found], degrees)
    for (first, masks), (_, again), *recomputed in found:
        assert all(same(masks[name], again[name]) for name in masks)
        for other, repeated in recomputed:  # by the strategy, and by the user's own checkpoints around blocks
            for name, calls in masks.items():
                assert len(repeated[name]) == (2 if name.startswith("blocks.") else 1) * len(calls)
            assert_equal(first, [other])


def run_llama(rank: int, degrees: dict[str, Any], **options: Any) -> Trace:
    make = hugging_face("LlamaConfig", **SMALL, attention_dropout=0.2, attn_implementation="eager", **options)
    return trace(rank, lambda: make(2), text_rows(), degrees)


@pytest.mark.parametrize("degrees", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp2", "pp2"])
def test_hugging_faces_checkpointing_repeats_the_masks(degrees: dict[str, Any]) -> None:
    expected = run_ranks(2, run_llama, degrees)
    found = run_ranks(2, lambda rank: run_llama(rank, degrees, gradient_checkpointing=True))
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, [other])


def one_stream_for_all() -> None:
    ShareStream.open = lambda self, rank, device: None  # type: ignore[method-assign]
    skip_the_check()


def shares_stay_open() -> None:
    ShareStream.close = lambda self: None  # type: ignore[method-assign]
    skip_the_check()


def skip_the_check() -> None:
    import lightning_hybrid.tensor_parallel.check as check

    check.wrong_draws = lambda *args, **kwargs: None


@pytest.mark.parametrize(
    ("sabotage", "degrees"),
    [(one_stream_for_all, DP_TP), (shares_stay_open, DP_TP), (one_stream_for_all, SEQUENCE)],
)
def test_wrong_variants_are_seen(sabotage: Any, degrees: dict[str, Any]) -> None:
    found = [masks for _, masks in run_ranks(4, run, degrees, LitDropout, sabotage)]
    with must_differ():
        check_masks(found, degrees)


def parts_draw_on() -> None:
    """Each part goes on where the last one ended, whatever a checkpoint has restored around it."""

    def part(self: StepRandomness) -> Any:
        return self._from(next(seeds))

    seeds = itertools.count()
    StepRandomness.part = part  # type: ignore[method-assign]


def test_wrong_variant_a_recomputation_with_other_masks_is_seen() -> None:
    degrees = {"pipeline_parallel_size": 2, "schedule": "1F1B"}
    plain, own = (run_ranks(2, run, degrees, make, parts_draw_on) for make in (LitDropout, LitCheckpointed))
    with must_differ():
        for (expected, _), (found, _) in zip(plain, own, strict=True):
            assert_equal(expected, [found])


class Between(Block):
    """Drops what all tensor ranks hold between a column-wise and a row-wise layer."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.residual_drop(x) + self.down(hidden)


def run_between(rank: int, degrees: dict[str, Any]) -> None:
    def make() -> LitDropout:
        module = LitDropout()
        module.blocks = nn.ModuleList(Between() for _ in range(2))
        return module

    trace(rank, make, ROWS, degrees)


def test_what_would_be_drawn_wrongly_is_refused() -> None:
    degrees = {"tensor_parallel_size": 2, "tp_plan": PLAN}
    with pytest.raises(ConfigurationError, match=r"must draw alike, but stands between.*dropout to 0"):
        run_ranks(2, run_between, degrees)
    with pytest.raises(ConfigurationError, match=r"compiled code draws the same.*compile=False"):
        run_ranks(2, run, {**degrees, "compile": {"backend": "aot_eager"}})


def test_a_stream_that_is_not_used_leaves_no_trace() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    SHARES.open(0, torch.device("cpu"))
    assert SHARES.is_open and not torch.equal(torch.get_rng_state(), state)
    SHARES.close()
    assert not SHARES.is_open and torch.equal(torch.get_rng_state(), state)
    SHARES.open(0, torch.device("cpu"))
    torch.rand(1)
    SHARES.close()
    assert not torch.equal(torch.get_rng_state(), state)
    SHARES.open(0, torch.device("cpu"))
    torch.set_rng_state(state)  # as a checkpoint does
    assert not SHARES.is_open
    SHARES.close()
    assert torch.equal(torch.get_rng_state(), state)
