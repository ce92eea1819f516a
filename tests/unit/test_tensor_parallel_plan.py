"""Where a plan comes from, and what is refused, with the numbers and the way out."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from examples.gpt.model import GPT
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel.infer import check_not_empty
from lightning_hybrid.tensor_parallel.plan import build_tp_plan

PLAN = {"attention.q": "colwise", "attention.k": "colwise", "attention.v": "colwise", "attention.o": "rowwise"}
MLP = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}

needs_transformers = pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")


class Holder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def gpt(*, width: int = 32, num_heads: int = 4) -> Holder:
    return Holder(GPT(num_blocks=2, width=width, num_heads=num_heads, context_length=16))


def huggingface(kind: str, **options: Any) -> Holder:
    import transformers as hf

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(hf, f"{kind}Config")(**{**sizes, "vocab_size": 64, **options})
    return Holder(hf.AutoModelForCausalLM.from_config(config))


def refused(module: nn.Module, plan: Any, size: int) -> str:
    with pytest.raises(ConfigurationError) as error:
        build_tp_plan(module, plan, size)
    return str(error.value)


def test_patterns_match_from_any_component_on() -> None:
    for pattern in ("attention.q", "blocks.*.attention.q", "model.blocks.*.attention.q"):
        plan = build_tp_plan(gpt(), {pattern: "colwise"}, 2)
        assert [entry.name for entry in plan.split] == [f"model.blocks.{i}.attention.q" for i in range(2)]
        assert {entry.source for entry in plan.split} == {"user"}


def test_a_star_is_one_component_and_a_name_is_never_cut() -> None:
    assert "matches no module" in refused(gpt(), {"model.*.q": "colwise"}, 2)
    assert "matches no module" in refused(gpt(), {"ention.q": "colwise"}, 2)


def test_a_full_name_goes_before_a_pattern() -> None:
    plan = build_tp_plan(gpt(), {"model.blocks.1.mlp.up": "whole", **MLP}, 2)
    assert plan.styles["model.blocks.0.mlp.up"] == "colwise"
    assert plan.styles["model.blocks.1.mlp.up"] == "whole"


def test_two_patterns_that_disagree_are_refused() -> None:
    message = refused(gpt(), {"mlp.up": "colwise", "blocks.*.mlp.up": "whole"}, 2)
    assert "'mlp.up' and 'blocks.*.mlp.up'" in message
    assert "full name 'model.blocks.0.mlp.up'" in message


def test_every_module_with_parameters_is_in_the_plan_with_a_reason() -> None:
    plan = build_tp_plan(gpt(), PLAN, 2)
    rows = {row.pattern: row for row in plan.rows()}
    assert rows["model.blocks.*.attention.q"].num_modules == 2
    assert rows["model.blocks.*.attention.q"].num_parameters == 2 * (32 * 32 + 32)
    assert rows["model.blocks.*.mlp.up"].note == 'named by no plan; "colwise_gather_output" in tp_plan splits it'
    assert rows["model.norm"].note == "small: computed alike on every rank"
    assert sum(row.num_parameters for row in rows.values()) == sum(p.numel() for p in gpt().parameters())
    assert "model.blocks.*.attention.o " in str(plan)


def test_a_pattern_that_matches_nothing_names_what_is_near() -> None:
    message = refused(gpt(), {"blocks.*.attn.q": "colwise"}, 2)
    assert "'blocks.*.attn.q' matches no module" in message
    assert "model.blocks.*.attention.q" in message


def test_heads_that_the_degree_does_not_divide() -> None:
    message = refused(gpt(width=18, num_heads=3), PLAN, 2)
    assert "tensor_parallel_size=2 does not divide out_features/head_dim=3 of 'model.blocks.0.attention'" in message
    assert "Use tensor_parallel_size=1" in message


def test_features_that_the_degree_does_not_divide() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    message = refused(module, {"0": "colwise", "1": "rowwise"}, 4)
    assert "tensor_parallel_size=4 does not divide out_features=6 of '0'" in message
    assert "tensor_parallel_size=1, 2, 3" in message


def test_joined_outputs_may_have_uneven_shares_but_none_that_is_empty() -> None:
    module = nn.Sequential(nn.Linear(8, 17), nn.Linear(8, 5))
    plan = build_tp_plan(module, {"0": "colwise_gather_output", "1": "colwise_gather_output"}, 4)
    assert plan.styles == {"0": "colwise_gather_output", "1": "whole"}
    assert plan.entries[1].note == "out_features=5 would leave rank 3 of 4 without any"


def test_styles_that_do_not_fit_their_module() -> None:
    assert "unknown style 'columnwise'; did you mean 'colwise'" in refused(gpt(), {"mlp.up": "columnwise"}, 2)
    assert "is a LayerNorm" in refused(gpt(), {"mlp_norm": "colwise"}, 2)
    assert "is a Linear" in refused(gpt(), {"mlp.up": "embedding_rowwise"}, 2)
    message = refused(gpt(), {"blocks.*.attention": "colwise"}, 2)
    assert "is a Attention without parameters of its own" in message
    assert "model.blocks.0.attention.q" in message
    assert "max_norm=1.0" in refused(Holder(nn.Embedding(8, 8, max_norm=1.0)), {"model": "embedding_rowwise"}, 2)


def test_nothing_to_split_is_refused_unless_there_is_one_rank() -> None:
    with pytest.raises(ConfigurationError, match="tensor_parallel_size=2, but nothing can be split") as error:
        check_not_empty(gpt(), build_tp_plan(gpt(), None, 2))
    assert "model.blocks.*.mlp.up (named by no plan" in str(error.value)
    check_not_empty(gpt(), build_tp_plan(gpt(), None, 1))
    check_not_empty(gpt(), build_tp_plan(gpt(), MLP, 2))


def test_torch_styles_are_taken_as_they_are() -> None:
    plan = build_tp_plan(gpt(), {"mlp.up": ColwiseParallel()}, 2)
    assert plan.styles["model.blocks.0.mlp.up"] == "ColwiseParallel"


def tied(plan: dict[str, str]) -> Any:
    module = nn.ModuleDict({"embedding": nn.Embedding(64, 8), "head": nn.Linear(8, 64, bias=False)})
    module["head"].weight = module["embedding"].weight
    return build_tp_plan(module, plan, 2)


def test_tied_weights_are_split_alike() -> None:
    plan = tied({"head": "colwise_gather_output"})
    assert plan.styles == {"embedding": "embedding_rowwise", "head": "colwise_gather_output"}
    assert plan.entries[0].source == "tied"
    assert plan.entries[0].note == "shares its weight with head"
    with pytest.raises(ConfigurationError, match=r"embedding: embedding_colwise, head: colwise_gather_output"):
        tied({"head": "colwise_gather_output", "embedding": "embedding_colwise"})
    with pytest.raises(ConfigurationError, match=r"embedding: whole, head: colwise_gather_output"):
        tied({"head": "colwise_gather_output", "embedding": "whole"})


@needs_transformers
def test_huggingface_plan_with_prefixes_and_the_users_word_before_it() -> None:
    plan = build_tp_plan(huggingface("Qwen3", head_dim=8, num_key_value_heads=2), {"lm_head": "whole"}, 2)
    expected = {
        "model.model.embed_tokens": "embedding_rowwise",
        "model.model.layers.0.self_attn.q_proj": "colwise",
        "model.model.layers.1.self_attn.o_proj": "rowwise",
        "model.model.layers.1.self_attn.k_norm": "replicated_with_grad_allreduce",
        "model.model.layers.0.input_layernorm": "whole",
        "model.lm_head": "whole",
    }
    assert {name: plan.styles[name] for name in expected} == expected
    sources = {entry.name: entry.source for entry in plan.entries}
    assert sources["model.model.layers.0.self_attn.q_proj"] == "huggingface"
    assert sources["model.lm_head"] == "user"


@needs_transformers
def test_huggingface_heads_that_the_degree_does_not_divide() -> None:
    heads = {"num_attention_heads": 6, "hidden_size": 48, "num_key_value_heads": 3}
    message = refused(huggingface("Llama", **heads), None, 2)
    assert "tensor_parallel_size=2 does not divide num_key_value_heads=3 of 'model.model.layers.0.self_attn'" in message
    assert "Use tensor_parallel_size=1" in message
    # 3 x 2 heads in one fused projection: features and their quotient divide, the heads do not.
    message = refused(huggingface("GPTNeoX", num_attention_heads=2, hidden_size=48, intermediate_size=48), None, 3)
    assert "tensor_parallel_size=3 does not divide num_attention_heads=2" in message


@needs_transformers
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_key_heads_than_ranks_are_shared(kv_heads: int) -> None:
    plan = build_tp_plan(huggingface("Llama", num_key_value_heads=kv_heads), None, 4)
    entries = {entry.name.removeprefix("model.model.layers.0.self_attn"): entry for entry in plan.entries}
    assert entries[".q_proj"].style == "colwise"
    assert {entries[f".{name}_proj"].style for name in "kv"} == {"colwise_shared"}
    assert entries[".k_proj"].parts == (8,) * kv_heads
    assert entries[""].numbers == (("num_key_value_groups", 1),)


@needs_transformers
def test_huggingface_tied_weights_follow_their_head() -> None:
    plan = build_tp_plan(huggingface("Llama", tie_word_embeddings=True), {"embed_tokens": "embedding_rowwise"}, 2)
    assert plan.styles["model.lm_head"] == "colwise_gather_output"


@needs_transformers
def test_huggingface_experts_are_planned_by_parameter() -> None:
    plan = build_tp_plan(huggingface("Mixtral", num_key_value_heads=2, num_local_experts=4), None, 2)
    experts = {entry.name.rpartition("mlp.")[2]: entry for entry in plan.split if "layers.0.mlp.experts" in entry.name}
    assert {name: entry.style for name, entry in experts.items()} == {
        "experts.gate_up_proj": "packed_colwise",
        "experts.down_proj": "rowwise",
        "experts": "moe_tp_experts",
    }
    assert sum(row.num_parameters for row in plan.rows()) == sum(
        p.numel() for p in huggingface("Mixtral", num_key_value_heads=2, num_local_experts=4).parameters()
    )
