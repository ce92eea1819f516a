"""What a model asks of the devices: counted parameters and activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.planner import ModelProfile

GPT3 = {"num_layers": 96, "hidden_size": 12288, "num_heads": 96, "vocab_size": 51200, "seq_length": 2048}
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def test_parameters_of_known_models():
    assert ModelProfile.from_sizes(**GPT3, tied_embeddings=True).num_parameters == pytest.approx(174.6e9, rel=1e-3)
    assert ModelProfile.from_config(LLAMA_70B).num_parameters == pytest.approx(70.55e9, rel=1e-3)
    mixtral = LLAMA_70B | {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 32000}
    mixtral |= {"intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "model_type": "mixtral"}
    profile = ModelProfile.from_config(mixtral)
    assert profile.num_parameters == pytest.approx(46.7e9, rel=1e-2)
    active = profile.flops_per_sample / 6 / profile.seq_length - 2 * profile.seq_length * 4096 * 32
    assert active == pytest.approx(12.8e9, rel=2e-2)


def test_floating_point_operations_are_those_of_the_literature():
    """96 layers of 72 B s h^2 (1 + s/6h), and 6 B s h V (Narayanan et al. 2021, without what is computed again)."""
    layers, hidden, length, words = 96, 12288, 2048, 51200
    expected = 72 * layers * length * hidden**2 * (1 + length / 6 / hidden + words / 12 / layers / hidden)
    assert ModelProfile.from_sizes(**GPT3).flops_per_sample == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("tensor", "parallel", "recompute", "flash", "expected"),
    [  # Korthikanti et al. 2022, table 2: bytes of a layer, over s b h
        (1, False, "none", False, 34 + 5 * 96 * 2048 / 12288),
        (8, False, "none", False, 10 + 24 / 8 + 5 * 96 * 2048 / 12288 / 8),
        (8, True, "none", False, (34 + 5 * 96 * 2048 / 12288) / 8),
        (8, True, "selective", False, 34 / 8),
        (8, True, "none", True, 34 / 8),
        (8, False, "full", False, 2),
    ],
)
def test_activations_are_those_of_the_literature(tensor, parallel, recompute, flash, expected):
    profile = ModelProfile.from_sizes(**GPT3)
    found = profile.activation_bytes(tensor, recompute=recompute, sequence_parallel=parallel, flash=flash)
    assert found / 12288 == pytest.approx(expected)


def test_configs_that_lack_a_size_are_refused_by_its_name():
    with pytest.raises(ConfigurationError, match=r"num_heads.*n_head"):
        ModelProfile.from_config({"n_layer": 2, "n_embd": 8, "n_positions": 4})
    with pytest.raises(ConfigurationError, match="does not divide num_heads=8"):
        ModelProfile.from_sizes(num_layers=1, hidden_size=8, num_heads=8, num_kv_heads=3, seq_length=4)
    with pytest.raises(ConfigurationError, match="num_layers=0"):
        ModelProfile.from_sizes(num_layers=0, hidden_size=8, num_heads=8, seq_length=4)


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(hidden, 4)
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 3 * hidden), nn.Linear(3 * hidden, hidden)


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 100, bias=False)
        if tied:
            self.head.weight = self.words.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_module_is_read_from_its_layers(tied: bool):
    with torch.device("meta"):
        model = Model(tied)
    profile = ModelProfile.from_module(model, seq_length=16)
    assert profile.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (profile.num_layers, profile.hidden_size, profile.num_heads, profile.vocab_size) == (3, 32, 4, 100)
    assert profile.tied_embeddings is tied
    assert sorted(m.split for m in profile.matmuls) == ["columns", "columns", "rows", "rows"]


def test_a_module_without_linear_layers_is_refused():
    with pytest.raises(ConfigurationError, match="no linear layers"):
        ModelProfile.from_module(nn.Sequential(*(nn.Conv1d(2, 2, 1) for _ in range(3))), seq_length=4)


def test_a_hugging_face_model_is_read_by_its_config():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, intermediate_size=96, vocab_size=50, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    profile = ModelProfile.from_module(model, seq_length=16)
    assert profile.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert profile.gated_mlp and profile.num_kv_heads == 2 and not profile.tied_embeddings
    by_config = ModelProfile.from_config(config, seq_length=16)
    assert by_config.num_parameters == pytest.approx(profile.num_parameters, rel=1e-2)


@pytest.mark.parametrize(
    ("kind", "made", "values"),
    [
        ("gemma", "GemmaForCausalLM", {"head_dim": 16}),  # tied by default, which its config.json leaves out
        ("t5", "T5ForConditionalGeneration", {"d_kv": 32, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 4}),
        ("falcon", "FalconForCausalLM", {"multi_query": True, "new_decoder_architecture": False}),
        ("qwen2_moe", "Qwen2MoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}),
    ],
)
def test_a_config_is_read_as_the_model_that_it_makes(kind: str, made: str, values: dict[str, Any]):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50, "d_model": 64}
    sizes |= {"num_key_value_heads": 2}
    document = {"model_type": kind, **sizes, "intermediate_size": 256, "d_ff": 256, **values}
    config = transformers.CONFIG_MAPPING[kind].from_dict(document)
    with torch.device("meta"):
        model = getattr(transformers, made)(config)
    profile = ModelProfile.from_config(document, seq_length=16)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert profile.num_parameters == pytest.approx(whole, rel=1e-5)  # a mean over blocks is rounded
    if kind == "t5":  # two of three blocks have a second attention
        weights = {name: p for name, p in model.named_parameters() if "block" in name and p.ndim == 2}
        linears = sum(weight.numel() for name, weight in weights.items() if "bias" not in name)
        assert 6 * sum(matmul.parameters for matmul in profile.matmuls) == pytest.approx(linears, rel=1e-4)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.top_k = 8, 2, 2
        self.query, self.router = nn.Linear(32, 32, bias=False), nn.Linear(32, 8, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(8))


def test_experts_work_on_the_tokens_that_choose_them():
    model = nn.Sequential(Sparse(), Sparse(), Sparse())
    profile = ModelProfile.from_module(model, seq_length=1)
    assert profile.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    active = 32 * 32 + 32 * 8 + 2 * (2 * 32 * 64)
    assert profile.layer_flops - profile.attention_flops == 2 * active
    assert (profile.num_heads, profile.num_kv_heads) == (8, 2)
