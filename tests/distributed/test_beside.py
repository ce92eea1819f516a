"""What code outside of a block sees beside its result is that of one process, or the plan is not taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from lightning_hybrid.tensor_parallel import check
from tests.distributed.equality import ONE_PROCESS, Trace, assert_equal, must_differ, trace
from tests.distributed.test_sequence_parallel import ROWS, WIDTH, Block, LitSequence, on
from tests.ranks import run_ranks

WHOLE_SEQUENCE = on(2, sequence_parallel=False)
FOUND = {"tensor_parallel_size": 2}


class KeepsLoss(Block):
    """An auxiliary loss, of what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept = out.square().mean()
        return out


class KeepsHidden(Block):
    """An auxiliary loss in a list, of features that are split."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        hidden = F.gelu(self.up(self.second(x)))
        self.kept = [hidden.square().mean()]
        return x + self.scale * self.down(hidden)


class Counts(Block):
    """Counts tokens in a buffer, and in a number that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen.add_(x.shape[1])
        return out * (1 + self.seen / 100)


class ReturnsCount(Block):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out, (out > 0).sum()


class Averages(Block):
    """Its statistics are over all tokens in training, and only then."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


class LitBeside(LitSequence):
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def hidden(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            out = block(x)
            x = out if isinstance(out, Tensor) else out[0] * (1 + out[1] / 1000)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        for block in self.blocks:
            kept = getattr(block, "kept", ())
            loss = loss + (sum(kept) if isinstance(kept, (list, tuple)) else kept)
        return loss


class LitHooks(LitBeside):
    """Collects what one kind of layer returns."""

    at = "second"

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Tensor] = []
        for block in self.blocks:
            block.get_submodule(self.at).register_forward_hook(lambda part, args, out: self.shown.append(out))

    def loss(self, batch: Tensor) -> Tensor:
        self.shown.clear()
        loss = super().loss(batch)
        return loss + sum(x.square().mean() for x in self.shown)


class LitHooksOnSplit(LitHooks):
    at = "up"


class LitHooksOnBlocks(LitHooks):
    at = ""


def lit(kind: type[Block]) -> Any:
    return type("LitBeside", (LitBeside,), {"block": kind})


def run(rank: int, make: Any, degrees: dict[str, Any], sabotage: Any = None) -> Trace:
    return trace(rank, make, ROWS, degrees, sabotage=sabotage)


EQUAL = {
    "loss": (lit(KeepsLoss), WHOLE_SEQUENCE),
    "loss of split features": (lit(KeepsHidden), FOUND),
    "count": (lit(ReturnsCount), WHOLE_SEQUENCE),
    "batch norm": (lit(Averages), WHOLE_SEQUENCE),
    "hooks on norms": (LitHooks, WHOLE_SEQUENCE),
    "hooks on split layers": (LitHooksOnSplit, FOUND),
    "hooks on blocks": (LitHooksOnBlocks, WHOLE_SEQUENCE),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_seen_beside_equals_one_process(name: str) -> None:
    make, degrees = EQUAL[name]
    assert_equal(run_ranks(1, run, make, ONE_PROCESS)[0], run_ranks(2, run, make, degrees))


BESIDE = "what it keeps in attributes or buffers, or shows to hooks"
REFUSED = {
    "loss": (lit(KeepsLoss), on(2), BESIDE),
    "loss of split features": (lit(KeepsHidden), WHOLE_SEQUENCE, BESIDE),
    "buffer": (lit(Counts), on(2), "differs when split"),
    "count": (lit(ReturnsCount), on(2), "its output"),
    "batch norm": (lit(Averages), on(2), "its output"),
    "hooks on norms": (LitHooks, on(2), BESIDE),
    "hooks on split layers": (LitHooksOnSplit, WHOLE_SEQUENCE, BESIDE),
    "hooks on blocks": (LitHooksOnBlocks, on(2), "A hook on a block .* or use sequence_parallel=False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_a_share_is_refused(name: str) -> None:
    make, degrees, message = REFUSED[name]
    with pytest.raises((ConfigurationError, UnsupportedError), match=message):
        run_ranks(2, run, make, degrees)


def test_one_token_shows_nothing() -> None:
    def one_token(rank: int) -> None:
        trace(rank, LitBeside, ROWS[:, :1], on(2), batch_size=1)

    with pytest.raises(ConfigurationError, match=r"first batch has one token \(hidden states of \[1, 1, 16\]\)"):
        run_ranks(2, one_token)


# ---- deliberately wrong ----------------------------------------------------------------------------------------------


def look_at_results_only() -> None:
    right = check.run_with_beside
    check.run_with_beside = lambda block, run: (right(block, run)[0], [])


def never_in_training() -> None:
    check._without_draws = lambda block, call, dtype: block.eval()


@pytest.mark.parametrize(
    ("name", "sabotage"), [("loss of split features", look_at_results_only), ("batch norm", never_in_training)]
)
def test_wrong_variants_are_seen(name: str, sabotage: Any) -> None:
    make, degrees, _ = REFUSED[name]
    with must_differ():
        assert_equal(run_ranks(1, run, make, ONE_PROCESS)[0], run_ranks(2, run, make, degrees, sabotage))
