"""The set-up check lets right plans pass, mends partial gradients, and refuses wrong plans by name."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_hybrid.tensor_parallel.check as check_module
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel.check import check_plan, record_calls
from lightning_hybrid.tensor_parallel.plan import TensorParallelPlan, build_tp_plan
from tests.distributed.tensor_parallel_cases import GPT_PLAN, build_gpt, build_huggingface, start

Ranks = Callable[..., list[Any]]
BLOCK_PLAN = {"qkv": "colwise", "o": "rowwise"}


class Attention(nn.Module):
    """One linear for query, key and value, in the three layouts people use, or head sizes from the global width."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.qkv = nn.Linear(32, 96)
        self.o = nn.Linear(32, 32)
        nn.init.zeros_(self.o.weight)  # as many models start: hides everything that comes before

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if self.layout == "chunk":
            q, k, v = (part.unflatten(-1, (-1, 8)) for part in qkv.chunk(3, dim=-1))
        elif self.layout == "heads first":
            q, k, v = qkv.unflatten(-1, (-1, 3, 8)).unbind(-2)
        elif self.layout == "three first":
            q, k, v = qkv.unflatten(-1, (3, -1, 8)).unbind(-3)
        else:  # "global width"
            q, k, v = (part.view(*x.shape[:2], 4, x.shape[-1] // 4) for part in qkv.chunk(3, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.o(mixed.transpose(1, 2).flatten(-2))
        return out


def test_calls_are_recorded_once_for_each_kind_without_running_the_rest() -> None:
    wide = [nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), *wide)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(2, 4)
    state = torch.get_rng_state()

    def step() -> None:
        model(x + torch.randn(()))
        raise AssertionError("never reached")

    calls = record_calls(model, ["0", "1", "3", "4", "5"], step)
    assert [(name, tuple(args[0].shape)) for name, (args, _) in calls.items()] == [
        ("0", (2, 4)),
        ("3", (2, 4)),
        ("4", (2, 6)),
    ]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in vars(block) or block._forward_hooks for block in model)


def check(module: nn.Module, plan: dict[str, str] | None, size: int, calls: dict[str, Any]) -> TensorParallelPlan:
    mesh = start((size,), ("tensor",))
    return check_plan(module, mesh, build_tp_plan(module, plan, size), calls)


def hidden(width: int = 32) -> Tensor:
    """As the probe leaves them: zeros that require a gradient."""
    return torch.zeros(2, 6, width, requires_grad=True)


def outcome(run_ranks: Ranks, layout: str, size: int = 2) -> str:
    def rank(rank: int) -> str:
        try:
            check(nn.ModuleList([Attention(layout)]), BLOCK_PLAN, size, {"0": ((hidden(),), {})})
        except ConfigurationError as error:
            return str(error)
        return ""

    results = run_ranks(size, rank)
    assert len(set(results)) == 1
    return results[0]


@pytest.mark.parametrize("size", [2, 4])
def test_heads_first_can_be_cut(run_ranks: Ranks, size: int) -> None:
    assert outcome(run_ranks, "heads first", size) == ""


@pytest.mark.parametrize("layout", ["chunk", "three first"])
@pytest.mark.parametrize("size", [2, 4])
def test_other_fused_layouts_are_refused(run_ranks: Ranks, layout: str, size: int) -> None:
    message = outcome(run_ranks, layout, size)
    assert (
        f"The block '0' computes something else when it is split over {size} ranks: different are its output" in message
    )
    assert "Split are 0.qkv: colwise, 0.o: rowwise" in message


def test_head_sizes_from_the_global_width_are_refused(run_ranks: Ranks) -> None:
    message = outcome(run_ranks, "global width")
    assert "The block '0' fails when it is split over 2 ranks (RuntimeError: shape '[2, 6, 4, 8]' is invalid" in message


def test_a_right_plan_passes_and_the_model_is_left_alone(run_ranks: Ranks) -> None:
    def rank(rank: int) -> None:
        model = build_gpt().float()
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        plan = check(model, GPT_PLAN, 2, {f"blocks.{i}": ((hidden(),), {}) for i in range(2)})
        assert plan == build_tp_plan(model, GPT_PLAN, 2)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name])
            assert parameter.grad is None

    run_ranks(2, rank)


def test_a_block_too_large_to_be_run_is_not_checked(run_ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    """Its plan is taken as it is, with a warning: here a wrong one."""

    def rank(rank: int) -> str:
        check_module._LARGEST = 4 * 32 * 96
        check(nn.ModuleList([Attention("chunk")]), BLOCK_PLAN, 2, {"0": ((hidden(),), {})})
        return caplog.text

    for text in run_ranks(2, rank):
        assert "plan of 0 was not checked: a block of 0.0 GB is too large to be run whole" in text


def test_a_row_wise_layer_left_out_is_refused(run_ranks: Ranks) -> None:
    plan = {pattern: style for pattern, style in GPT_PLAN.items() if pattern != "mlp.down"}

    def rank(rank: int) -> None:
        with pytest.raises(ConfigurationError, match=r"blocks.0' fails .* cannot be multiplied"):
            check(build_gpt().float(), plan, 2, {"blocks.0": ((hidden(),), {})})

    run_ranks(2, rank)


class FailsOnOneRank(nn.Module):
    """Raises on tensor rank 1 only, where its peer goes on to the sum of the row-wise layer."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.qkv, self.o = when, nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.qkv(x))
        if hidden.shape[-1] < 64 and dist.get_rank() == 1:
            if self.when == "forward":
                raise ValueError("odd share")
            if hidden.requires_grad:
                hidden.register_hook(self.fail)
        if self.when == "training" and self.training and dist.get_rank() == 1 and hidden.shape[-1] < 64:
            raise ValueError("odd share")
        out: Tensor = self.o(nn.functional.dropout(hidden, 0.5, self.training))
        return out

    def fail(self, gradient: Tensor) -> None:
        if self.when == "backward":
            raise ValueError("odd share")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_block_that_fails_on_one_rank_is_refused_on_all(run_ranks: Ranks, when: str) -> None:
    def rank(rank: int) -> str:
        with pytest.raises(ConfigurationError) as caught:
            check(nn.ModuleList([FailsOnOneRank(when)]), BLOCK_PLAN, 2, {"0": ((hidden(),), {})})
        return str(caught.value)

    first, second = run_ranks(2, rank)
    assert first == second
    assert "The block '0' fails when it is split over 2 ranks (ValueError: odd share)" in first


def test_a_block_whose_draws_cannot_be_seen_on_one_rank_passes_on_all(run_ranks: Ranks) -> None:
    def rank(rank: int) -> None:
        check(nn.ModuleList([FailsOnOneRank("training")]), BLOCK_PLAN, 2, {"0": ((hidden(),), {})})

    run_ranks(2, rank)


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_partial_gradients_are_found_and_summed(run_ranks: Ranks) -> None:
    """A plan without a word on Qwen3's norms over each head is mended, for all layers."""
    build = functools.partial(build_huggingface, "Qwen3", num_key_value_heads=2, head_dim=8)

    def rank(rank: int) -> dict[str, str]:
        model = build().float()
        rotary = model.model.rotary_emb(torch.zeros(2, 6, 32), torch.arange(6)[None])
        calls = {"model.layers.1": ((hidden(),), {"attention_mask": None, "position_embeddings": rotary})}
        plan = check(model, {"q_norm": "whole", "k_norm": "whole"}, 2, calls)
        return {entry.name: entry.style_name for entry in plan.entries if entry.source == "measured"}

    expected = {
        f"model.layers.{i}.self_attn.{x}_norm": "replicated_with_grad_allreduce" for i in range(2) for x in "qk"
    }
    assert run_ranks(2, rank) == [expected] * 2
