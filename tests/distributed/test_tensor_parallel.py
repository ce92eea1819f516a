"""Tensor parallelism equals one process: the loss and every gradient, for plain and Hugging Face models."""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel import styles
from lightning_hybrid.tensor_parallel.apply import apply_tensor_parallel
from lightning_hybrid.tensor_parallel.plan import build_tp_plan
from tests.distributed.tensor_parallel_cases import (
    GPT_PLAN,
    Holder,
    build_gpt,
    build_huggingface,
    compare,
    full,
    randomised,
    relative,
    start,
)

#: Everything runs in fp64, where right is 1e-14 and wrong is wrong.
TOLERANCE = 1e-10

Ranks = Callable[..., list[Any]]

needs_transformers = pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")


def check(
    run_ranks: Ranks, build: Any, plan: Any, tensor: int, data: int = 1, tolerance: float = TOLERANCE, **options: Any
) -> None:
    worst = errors_of(run_ranks, build, plan, tensor, data, **options)
    assert max(worst.values()) < tolerance, {name: error for name, error in worst.items() if error >= tolerance}


def errors_of(run_ranks: Ranks, build: Any, plan: Any, tensor: int, data: int = 1, **options: Any) -> dict[str, float]:
    """The largest error over the ranks, by name."""

    def rank(rank: int) -> dict[str, float]:
        return compare(build, plan, start((data, tensor), ("data", "tensor")), **options)

    results = run_ranks(data * tensor, rank)
    return {name: max(result[name] for result in results) for name in results[0]}


@pytest.mark.parametrize("tensor", [2, 4])
def test_plain_gpt(run_ranks: Ranks, tensor: int) -> None:
    check(run_ranks, build_gpt, GPT_PLAN, tensor, num_steps=2)


def test_plain_gpt_sharded_over_data(run_ranks: Ranks) -> None:
    check(run_ranks, build_gpt, GPT_PLAN, 2, 2, shard=True, num_steps=2)


HUGGINGFACE = [
    ("Llama", {"num_key_value_heads": 2}, 2),
    ("Llama", {"num_key_value_heads": 4}, 4),
    ("Llama", {"num_key_value_heads": 2}, 4),
    ("Qwen3", {"num_key_value_heads": 1, "head_dim": 8}, 4),
    ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 63}, 2),
    ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}, 2),
    ("Qwen3", {"num_key_value_heads": 4, "head_dim": 8}, 4),
    ("GPTNeoX", {}, 4),
    ("Phi3", {"num_key_value_heads": 2, "pad_token_id": 0}, 2),
    ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}, 2),
]


@needs_transformers
@pytest.mark.parametrize(("kind", "options", "tensor"), HUGGINGFACE)
def test_huggingface_models_by_their_own_plans(run_ranks: Ranks, kind: str, options: Any, tensor: int) -> None:
    build = functools.partial(build_huggingface, kind, **options)
    by_rank = options.get("num_key_value_heads", tensor) < tensor
    tolerance = 1e-6 if kind == "Mixtral" or (kind == "Qwen3" and by_rank) else TOLERANCE  # a router, norms are in fp32
    vocabulary = options.get("vocab_size", 64)
    check(run_ranks, build, None, tensor, num_steps=2, vocabulary=vocabulary, tolerance=tolerance)


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "options"),
    [("Llama", {"num_key_value_heads": 2}), ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}), ("GPTNeoX", {})],
)
def test_huggingface_models_sharded_over_data(run_ranks: Ranks, kind: str, options: Any) -> None:
    check(run_ranks, functools.partial(build_huggingface, kind, **options), None, 2, 2, shard=True, num_steps=2)


class Uneven(nn.Module):
    """A vocabulary that the degree does not divide, tied or not."""

    def __init__(self, size: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, 8, padding_idx=0)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, size)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(self.embedding(tokens)))
        return out


UNEVEN_PLAN = {
    "embedding": "embedding_rowwise",
    "inner.0": "colwise",
    "inner.2": "rowwise",
    "head": "colwise_gather_output",
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("size", "tensor", "data"), [(17, 2, 1), (257, 4, 1), (5, 4, 1), (17, 2, 2), (5, 4, 2)])
def test_vocabularies_that_do_not_divide(run_ranks: Ranks, size: int, tensor: int, data: int, tied: bool) -> None:
    build = lambda: randomised(Uneven(size, tied))  # noqa: E731
    check(run_ranks, build, UNEVEN_PLAN, tensor, data, vocabulary=size, shard=data > 1)


def test_what_each_parameter_is(run_ranks: Ranks) -> None:
    def rank(rank: int) -> None:
        mesh = start((2,), ("tensor",))
        model = build_gpt()
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        apply_tensor_parallel(model, mesh, build_tp_plan(model, GPT_PLAN, 2))
        block = model.blocks[0]
        assert block.attention.q.weight.placements == block.attention.q.bias.placements == (Shard(0),)
        assert block.attention.o.weight.placements == (Shard(1),)
        assert not isinstance(block.attention.o.bias, DTensor)
        assert not isinstance(block.attention_norm.weight, DTensor)
        assert block.attention.q.weight.to_local().untyped_storage().nbytes() == 16 * 32 * 8  # the whole one is freed
        for name, parameter in model.named_parameters():
            assert torch.equal(full(parameter), before[name])

    run_ranks(2, rank)


def test_parts_that_this_rank_does_not_hold_are_left_alone(run_ranks: Ranks) -> None:
    def rank(rank: int) -> None:
        mesh = start((2,), ("tensor",))
        model = build_gpt()
        plan = build_tp_plan(model, GPT_PLAN, 2)
        model.blocks[0] = nn.Identity()
        model.head.weight = None
        apply_tensor_parallel(model, mesh, plan, only=lambda name: name != "token_embedding")
        split = {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
        assert split
        assert all(name.startswith("blocks.1.") for name in split)

    run_ranks(2, rank)


def test_a_mesh_of_another_size_is_refused(run_ranks: Ranks) -> None:
    def rank(rank: int) -> None:
        mesh = start((2,), ("tensor",))
        with pytest.raises(ConfigurationError, match=r"tensor_parallel_size=4, but the mesh has shape \(2,\)"):
            apply_tensor_parallel(build_gpt(), mesh, build_tp_plan(build_gpt(), GPT_PLAN, 4))

    run_ranks(2, rank)


def test_replicas_of_shards_of_splits(run_ranks: Ranks) -> None:
    """HSDP: 2 replicas x 2 shards x 2 tensor ranks."""

    def rank(rank: int) -> float:
        mesh = start((2, 2, 2), ("replicate", "shard", "tensor"))
        reference = Holder(build_gpt())
        model = copy.deepcopy(reference)
        apply_tensor_parallel(model, mesh["tensor"], build_tp_plan(model, GPT_PLAN, 2))
        for module in (*model.model.blocks, model):
            fully_shard(module, mesh=mesh["replicate", "shard"])
        tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
        reference(tokens).backward()
        model(tokens.chunk(4)[2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")]).backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        return max(relative(full(p.grad), full(q.grad)) for p, q in pairs)

    assert max(run_ranks(8, rank)) < TOLERANCE


def test_recomputation_repeats_the_exchanges(run_ranks: Ranks) -> None:
    def recompute(model: Holder) -> None:
        for block in model.model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    check(run_ranks, build_gpt, GPT_PLAN, 2, 2, after=recompute, shard=True, num_steps=2)


def test_dtypes_under_autocast_and_without_gradients_are_those_of_one_process(run_ranks: Ranks) -> None:
    def rank(rank: int) -> None:
        mesh = start((2,), ("tensor",))
        whole = build_gpt().float()
        model = copy.deepcopy(whole)
        apply_tensor_parallel(model, mesh, build_tp_plan(model, GPT_PLAN, 2))
        found: dict[str, list[torch.dtype]] = {}
        for part in (whole, model):
            for name, module in part.named_modules():
                module.register_forward_hook(lambda m, _, out, name=name: found.setdefault(name, []).append(out.dtype))
        tokens = torch.randint(64, (2, 8))
        with torch.autocast("cpu", torch.bfloat16):
            whole(tokens), model(tokens)
        assert all(a == b for a, b in found.values()), found
        with torch.inference_mode():
            torch.testing.assert_close(model(tokens), whole(tokens), rtol=1e-4, atol=1e-4)

    run_ranks(2, rank)


def test_outputs_may_be_changed_in_place(run_ranks: Ranks) -> None:
    class InPlace(Holder):
        def loss(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = self.model(tokens[:, :-1])
            logits *= 0.5
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def rank(rank: int) -> float:
        mesh = start((2,), ("tensor",))
        whole = InPlace(randomised(Uneven(17, tied=True)))
        model = copy.deepcopy(whole)
        apply_tensor_parallel(model, mesh, build_tp_plan(model, UNEVEN_PLAN, 2))
        for name in ("inner.2", "embedding"):
            model.model.get_submodule(name).register_forward_hook(lambda m, _, out: out.mul_(1.0))
        tokens = torch.randint(17, (2, 8))
        model.loss(tokens).backward(), whole.loss(tokens).backward()
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        return max(relative(full(p.grad), full(q.grad)) for p, q in pairs)

    assert max(run_ranks(2, rank)) < TOLERANCE


def test_one_sum_for_projections_of_one_tensor(run_ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query, key and value share one exchange in the backward pass: per block 2 forward and 2 backward."""
    sums: list[int] = []
    all_reduce = torch.distributed.all_reduce
    counted = lambda tensor, *args, **kwargs: (sums.append(tensor.numel()), all_reduce(tensor, *args, **kwargs))  # noqa: E731
    monkeypatch.setattr(torch.distributed, "all_reduce", counted)  # ranks are forked: they have it too

    def rank(rank: int) -> list[int]:
        mesh = start((2,), ("tensor",))
        model = build_gpt()
        plan = {**GPT_PLAN, "token_embedding": "whole", "head": "whole"}
        apply_tensor_parallel(model, mesh, build_tp_plan(model, plan, 2))
        model(torch.randint(64, (2, 8))).sum().backward()
        return sums

    assert run_ranks(2, rank) == [[2 * 8 * 32] * (2 * 4)] * 2


# Wrong on purpose: each shows that the tests above can fail.


class FusedQKV(nn.Module):
    """Query, key and value from one linear, cut by chunk: a contiguous split has fitting shapes and wrong values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.qkv = nn.Linear(8, 24)
        self.o = nn.Linear(8, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embedding(tokens)).unflatten(-1, (-1, 4)).chunk(3, dim=-2)
        mixed = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        out: torch.Tensor = self.o(mixed.flatten(-2))
        return out


def test_a_contiguous_split_of_fused_qkv_is_seen(run_ranks: Ranks) -> None:
    build = lambda: randomised(FusedQKV())  # noqa: E731
    assert errors_of(run_ranks, build, {"qkv": "colwise", "o": "rowwise"}, 2)["loss 0"] > 1e-3


def spoil_row_bias(model: Holder) -> None:
    """Add the row-wise bias on every rank, before the sum."""
    for module in model.modules():
        if isinstance(module, styles._Split) and module._tensor_parallel.style == "rowwise":
            module.register_forward_hook(lambda m, _, out: out + m.bias)


def spoil_replicated_norms(model: Holder) -> None:
    """Forget that query and key norms see only this rank's heads."""
    for name, module in model.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            module.__class__ = type(module).__mro__[2]


def test_a_bias_added_on_every_rank_is_seen(run_ranks: Ranks) -> None:
    assert errors_of(run_ranks, build_gpt, GPT_PLAN, 2, after=spoil_row_bias)["loss 0"] > 1e-3


@needs_transformers
def test_partial_gradients_of_head_norms_are_seen(run_ranks: Ranks) -> None:
    build = functools.partial(build_huggingface, "Qwen3", num_key_value_heads=2, head_dim=8)
    errors = errors_of(run_ranks, build, None, 2, after=spoil_replicated_norms)
    wrong = {name for name, error in errors.items() if error > TOLERANCE}
    assert wrong == {name for name in errors if "q_norm" in name or "k_norm" in name}
    assert len(wrong) == 4
