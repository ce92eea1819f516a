"""Batches that use other parameters on other data ranks: experts, blocks, outputs. Equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid.data_parallel.lockstep import Lockstep, merged_orders
from lightning_hybrid.errors import PipelineError, UnsupportedError
from tests.distributed.equality import Trace, assert_equal, must_differ, trace
from tests.distributed.zoo import Lit, generator
from tests.ranks import RankError, run_ranks

VOCABULARY, WIDTH = 29, 6
#: The first token of a row says which way it takes. Data rank 0 reads even rows. Nobody takes way 2 in the first step.
WAYS = torch.tensor([[0, 1, 0, 1, 0, 1, 0, 1], [1, 2, 1, 2, 1, 0, 1, 2], [0, 0, 2, 0, 0, 0, 2, 0], [2, 1] * 4])
ROWS = torch.cat(
    [WAYS.flatten()[:, None], torch.randint(3, VOCABULARY, (WAYS.numel(), 5), generator=generator())], dim=1
)
DEGREES: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel_size": 2},
    "dp4": {"data_parallel_size": 4},
    "hsdp": {"data_parallel_size": 4, "replicate_size": 2},
}
PIPELINED = {"data_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}


class Experts(nn.Module):
    """Each row goes through the expert of its way; one expert is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.experts[1].bias.requires_grad_(False)

    def forward(self, x: Tensor, ways: Tensor) -> Tensor:
        y = self.norm(x)
        for way, expert in enumerate(self.experts):
            if (rows := (ways == way).nonzero()[:, 0]).numel():
                x = x.index_add(0, rows, torch.tanh(expert(y[rows])))
        return x


class LitExperts(Lit):
    """All blocks are called; what they use differs. Expert 3 is in no step."""

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x, batch[:, 0])
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, eps=1e-3, weight_decay=0.1)


class LitDetours(LitExperts):
    """Blocks of one shape that a rank leaves out, calls in another order than they stand in, or whose output it drops.

    The embedding is frozen: arguments of the block that is called first need no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.blocks = nn.ModuleList(Experts() for _ in range(6))

    def loss(self, batch: Tensor) -> Tensor:
        x, ways = self.embedding(batch), batch[:, 0]
        for number, taken_by in [(4, (1, 2)), (0, (0, 1)), (1, (0,)), (2, (1,)), (3, (2,))]:
            rows = torch.isin(ways, torch.tensor(taken_by)).nonzero()[:, 0]
            if rows.numel():
                x = x.index_copy(0, rows, self.blocks[number](x[rows], ways[rows]))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())
        dropped = self.blocks[5](x, torch.ones_like(ways))
        return loss + dropped[ways == 1].square().sum() / len(batch) if (ways == 1).any() else loss


class LitValidated(LitDetours):
    """Validates before, between and after training steps, each data rank on rows of its own."""

    def val_dataloader(self) -> Any:
        layout, here = (
            getattr(self.trainer.strategy, "layout", None),
            getattr(self.trainer.strategy, "coordinate", None),
        )
        mine = slice(None) if layout is None else slice(here.data, None, layout.data_parallel_size)
        return DataLoader(ROWS[mine], batch_size=8 if layout is None else 8 // layout.data_parallel_size)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validated", self.loss(batch), sync_dist=True)


#: Model, arguments of the strategy, those of the Trainer.
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "experts": (LitExperts, {}, {}),
    "detours": (LitDetours, {}, {}),
    "experts, accumulated": (LitExperts, {}, {"accumulate_grad_batches": 2}),
    "detours, accumulated": (LitDetours, {}, {"accumulate_grad_batches": 2}),
    "recomputed": (LitDetours, {"activation_checkpointing": "full"}, {}),
    "validated": (LitValidated, {}, {"val_check_interval": 2, "num_sanity_val_steps": 2}),
    "bf16": (LitExperts, {}, {"accumulate_grad_batches": 2, "precision": "bf16-true"}),
}
ALL, SOME = list(KINDS), ["experts", "detours"]


def run(rank: int, names: list[str], kinds: list[str], sabotage: Any = None) -> dict[str, list[Trace]]:
    """For each kind what this rank saw, weights freed after the forward or kept; without degrees of one process."""
    found: dict[str, list[Trace]] = {}
    runs = [{**DEGREES[name], "reshard_after_forward": free} for name in names for free in (True, False)] or [{}]
    for kind in kinds:
        model, arguments, options = KINDS[kind]
        for degrees in runs:
            own = {**degrees, **arguments} if degrees else {}
            found.setdefault(kind, []).append(trace(rank, model, ROWS, own, sabotage=sabotage, **options))
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Trace]]:
    traces = run_ranks(1, run, [], ALL)[0]
    first = traces["detours"][0].gradients[0]
    assert "blocks.4.norm.weight" in first and not any(key.startswith("blocks.3") or ".3." in key for key in first)
    assert "validated" in traces["validated"][0].metrics
    return traces


@pytest.mark.parametrize(("names", "kinds"), [(["dp2"], ALL), (["dp4", "hsdp"], SOME)])
def test_ranks_that_use_other_parameters_equal_one_process(
    expected: dict[str, list[Trace]], names: list[str], kinds: list[str]
) -> None:
    ranks = run_ranks(2 if names == ["dp2"] else 4, run, names, kinds)
    for kind in kinds:
        (right,) = expected[kind]
        for traces in zip(*(rank[kind] for rank in ranks), strict=True):
            assert_equal(right, list(traces), tolerance=3e-2 if kind == "bf16" else 1e-5)
            value, truth = (found.metrics.get("validated", 0.0) for found in (traces[0], right))
            assert value == pytest.approx(truth, rel=1e-5)


class FourBlocks(LitExperts):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(4))


class LitShortcut(LitExperts):
    """The second of six blocks is called if the batch has rows of way 1."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(6))

    def loss(self, batch: Tensor) -> Tensor:
        x, ways = self.embedding(batch), batch[:, 0]
        for number, block in enumerate(self.blocks):
            x = block(x, ways) if number != 1 or (ways == 1).any() else x
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())


FREED = {**PIPELINED, "schedule": "1F1B", "reshard_after_forward": True}


def run_pipelined(rank: int) -> list[Trace]:
    kept = {**PIPELINED, "schedule": "Interleaved1F1B"}
    return [trace(rank, LitExperts, ROWS, FREED), trace(rank, FourBlocks, ROWS, kept)]


def run_one(rank: int) -> list[Trace]:
    return [trace(rank, model, ROWS, {}) for model in (LitExperts, FourBlocks)]


def test_stages_that_use_other_parameters_equal_one_process() -> None:
    for right, *traces in zip(*run_ranks(1, run_one), *run_ranks(4, run_pipelined), strict=True):
        assert_equal(right, traces)


def test_data_ranks_that_call_other_blocks_at_first_are_refused_with_a_pipeline() -> None:
    words = r"Data ranks 0 and 1 call different blocks in their first batches \(blocks.1\).*pipeline_parallel_size=1"
    with pytest.raises(PipelineError, match=words):
        run_ranks(4, trace, LitShortcut, ROWS, FREED, timeout=60)


def test_blocks_left_out_later_are_refused_where_each_call_gathers() -> None:
    rows = torch.cat([ROWS[1:8:2]] * 2 + [ROWS])  # all of the first batch take way 1
    with pytest.raises(UnsupportedError, match=r"A pipeline stage called . blocks .* Leave reshard_after_forward out"):
        run_ranks(4, trace, LitShortcut, rows, FREED, timeout=60)


def unused_stay_zeros() -> None:
    Lockstep._settle = lambda self: None  # type: ignore[method-assign]


def test_wrong_variant_zeros_in_the_place_of_none_are_seen(expected: dict[str, list[Trace]]) -> None:
    found = run_ranks(2, run, ["dp2"], ["experts"], unused_stay_zeros)
    with must_differ():
        assert_equal(expected["experts"][0], [rank["experts"][0] for rank in found])


def detours_unseen() -> None:
    Lockstep._call_emptily = Lockstep._differentiate_emptily = lambda self, i: None  # type: ignore[method-assign]


def test_wrong_variant_ranks_out_of_step_are_seen(expected: dict[str, list[Trace]]) -> None:
    try:
        found = run_ranks(2, run, ["dp2"], ["detours"], detours_unseen, timeout=10)
    except RankError:
        return  # collectives of different sizes met, or ranks waited for each other
    with must_differ():
        assert_equal(expected["detours"][0], [rank["detours"][0] for rank in found])


def test_orders_are_merged() -> None:
    assert merged_orders([[0, 1, 2], [0, 2]], 3) == [0, 1, 2]
    assert merged_orders([[0, 1, 5], [4, 0, 2, 5]], 6) == [4, 0, 1, 2, 3, 5]
    assert merged_orders([[0, 0, 1], [0, 1]], 2) == [0, 0, 1]
    assert sorted(merged_orders([[0, 1], [1, 0]], 3)) == [0, 1, 2]
