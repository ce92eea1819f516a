"""Between split layers each tensor rank works on its share of the tokens, equal to one process."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid import Hybrid3DStrategy, parallelize
from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from lightning_hybrid.tensor_parallel import collectives, styles
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.test_matrix import assert_all_equal, even_rows, runs
from tests.distributed.zoo import VOCABULARY, Lit, generator
from tests.ranks import run_ranks

WIDTH, LENGTH = 16, 11
ROWS = torch.randint(0, VOCABULARY, (24, LENGTH), generator=generator())
PLAN = {
    **dict.fromkeys(("blocks.*.attention.qkv", "blocks.*.up"), "colwise"),
    **dict.fromkeys(("blocks.*.attention.out", "blocks.*.down"), "rowwise"),
}


class Attention(nn.Module):
    """Of heads of width 4; its shapes come from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.qkv(x).view(batch, length, -1, 4).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Block(nn.Module):
    """Norms, biases and a parameter of its own, each of which sees a rank's tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.scale = Attention(), nn.Parameter(torch.full((WIDTH,), 0.5))
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.scale * self.down(F.gelu(self.up(self.second(x))))


class LitSequence(Lit):
    """Tokens of which 2 ranks have 6 and 5, and 4 ranks 3, 3, 3 and 2."""

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def hidden(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(batch)).flatten(0, 1), batch.flatten())


class LitSkips(LitSequence):
    """Looks at what blocks return in many ways: all of them must see the whole."""

    def hidden(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        skips = []
        for block in self.blocks:
            skips.append(x)
            x = block(x)
            x += skips[-1].mean(1, keepdim=True)  # over all tokens, and in place
            x[:, 0].mul_(0.5)
        return x + torch.stack(skips[1:]).amax(0) + x.flip(1)


class LitReentrant(LitSequence):
    def hidden(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class MixesInTraining(Block):
    """Takes the mean over all tokens away, in training only."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x - x.mean(1, keepdim=True) if self.training else x


class LitMixes(LitSequence):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixesInTraining() for _ in range(4))


class Seen(L.Callback):
    """Shapes that the last block's norm gets."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.shapes: set[tuple[int, ...]] = set()
        hook = lambda part, args: self.shapes.add(tuple(args[0].shape))  # noqa: E731
        self.handle = pl_module.blocks[-1].second.register_forward_pre_hook(hook)


def run(rank: int, degrees: dict[str, Any], make: Any = LitSequence, sabotage: Any = None, **options: Any) -> Trace:
    return trace(rank, make, ROWS, degrees, sabotage=sabotage, **options)


def on(tensor: int, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": tensor, "sequence_parallel": True, "tp_plan": PLAN, **more}


@pytest.mark.parametrize("make", [LitSequence, LitSkips])
def test_uneven_shares_equal_one_process(make: Any) -> None:
    expected = run_ranks(1, run, ONE_PROCESS, make)[0]
    full = {"activation_checkpointing": "full", "loss_parallel": False}
    for num_ranks, many in {2: [on(2), on(2, **full)], 4: [on(4), on(2, data_parallel_size=2)]}.items():
        found = run_ranks(num_ranks, lambda rank, many=many: [run(rank, degrees, make) for degrees in many])
        for traces in zip(*found, strict=True):
            assert_equal(expected, list(traces))


def test_across_pipeline_stages() -> None:
    expected = run_ranks(1, run, ONE_PROCESS)[0]
    many = [on(2, pipeline_parallel_size=2, schedule=schedule) for schedule in ("1F1B", "ZBVZeroBubble")]
    found = run_ranks(4, lambda rank: [run(rank, degrees) for degrees in many])
    for traces in zip(*found, strict=True):
        assert_equal(expected, list(traces))


def test_norms_see_a_share_of_the_tokens() -> None:
    def shapes(rank: int) -> set[tuple[int, ...]]:
        seen = Seen()
        run(rank, on(2), callbacks=[seen])
        return seen.shapes

    assert run_ranks(2, shapes) == [{(8, 6, WIDTH)}, {(8, 5, WIDTH)}]


MODELS = ("bert", "gemma3", "gpt2", "llama", "mixtral", "t5", "transformer_encoder", "vit")


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """By their own plans and by plans found; a router beside experts; a decoder that attends to an encoder."""
    degrees = {"tensor_parallel_size": 2, "sequence_parallel": True}
    expected = run_ranks(1, runs, name, [ONE_PROCESS])[0]
    assert_all_equal(expected, run_ranks(2, runs, name, [degrees]), [degrees])


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_models_in_three_dimensions(name: str) -> None:
    degrees = {
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "sequence_parallel": True,
    }
    rows = even_rows(24)
    expected = run_ranks(1, runs, name, [ONE_PROCESS], rows)[0]
    assert_all_equal(expected, run_ranks(8, runs, name, [degrees], rows, timeout=120), [degrees])


# ---- deliberately wrong ----------------------------------------------------------------------------------------------


def biases_count_once() -> None:
    """The bias of a row-wise layer keeps each rank's part of its gradient."""
    right = styles.enter_split
    styles.enter_split = lambda x, group: x if x.is_leaf else right(x, group)


def norms_count_once() -> None:
    styles.SplitStyle.replicated_with_grad_allreduce = styles.SplitStyle.whole  # type: ignore[method-assign]
    styles._RUN = {**styles._RUN, "replicated_with_grad_allreduce": styles.SplitStyle.whole}


def gradients_of_tokens_stay_apart() -> None:
    """Each rank's part is taken for the sum."""
    right = collectives._sum_and_keep
    collectives._sum_and_keep = lambda x, dim, group: (  # type: ignore[assignment]
        right(x, dim, group) if torch.is_grad_enabled() else collectives._keep(x, dim, group)
    )


@pytest.mark.parametrize("sabotage", [biases_count_once, norms_count_once, gradients_of_tokens_stay_apart])
def test_wrong_variants_are_seen(sabotage: Any) -> None:
    """Also by the check at set-up, which is passed over here."""
    expected = run_ranks(1, run, ONE_PROCESS)[0]
    found = run_ranks(2, run, on(2), LitSequence, functools.partial(after_the_check, sabotage))
    with must_differ():
        assert_equal(expected, found)
    with pytest.raises(ConfigurationError, match="sequence can be split in no block"):
        run_ranks(2, run, on(2), LitSequence, sabotage)


def after_the_check(sabotage: Any) -> None:
    right = parallelize.intercept

    def intercept(*args: Any) -> None:
        sabotage()
        right(*args)

    parallelize.intercept = intercept


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [on(2), {"data_parallel_size": 2, "replicate_size": 2}], ids=["tokens", "replicas"])
def test_reentrant_checkpoints_are_refused(degrees: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        run_ranks(2, run, degrees, LitReentrant)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"in no block of this model .*may mix tokens"):
        run_ranks(2, runs, "nanogpt", [{"tensor_parallel_size": 2, "sequence_parallel": True}])
    with pytest.raises(ConfigurationError, match=r"in no block of this model .*may mix tokens"):
        run_ranks(2, run, on(2), LitMixes)
    with pytest.raises(ConfigurationError, match=r"compile=False"):
        Hybrid3DStrategy(sequence_parallel=True, compile=True)
