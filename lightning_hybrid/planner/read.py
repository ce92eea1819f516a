"""Sizes of a model from a Hugging Face config or from a module's layers. Pure: nothing runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.pipeline.blocks import list_blocks
from lightning_hybrid.planner.profile import Matmul, ModelProfile

__all__ = ["profile_of_module", "sizes_of_config"]

#: Names under which configs keep a size, the usual ones first.
_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "vocab_size": ("vocab_size",),
    "seq_length": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "num_active_experts": ("num_experts_per_tok", "moe_top_k", "top_k_experts"),
}
_NEEDED = ("num_layers", "hidden_size", "num_heads", "seq_length")
_GATED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen",
    "gemma",
    "olmo",
    "phi3",
    "deepseek",
    "yi",
    "granite",
    "cohere",
    "smollm",
)
_BOTH_WAYS = ("bert", "electra", "vit", "deit", "beit", "dinov2")
#: Endings of names of layers whose inputs are divided among tensor ranks where the shape does not tell.
_ROWS = ("o_proj", "out_proj", "c_proj", "wo", "dense", "fc2", "down_proj", "w2", "proj")


def sizes_of_config(config: Any, seq_length: int | None = None) -> dict[str, Any]:
    """Return the arguments of :meth:`ModelProfile.from_sizes`.

    Raises:
        ConfigurationError: if a size is missing, or ``config`` is none.
    """
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise ConfigurationError(f"A config is an object with sizes by name, not {type(config).__name__}.")
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    if isinstance(values.get("text_config"), Mapping):
        values = {**values, **values["text_config"]}
    found: dict[str, Any] = {}
    for size, names in _NAMES.items():
        value = next((values[name] for name in names if isinstance(values.get(name), int)), None)
        if value is not None:
            found[size] = value
    if seq_length is not None:
        found["seq_length"] = seq_length
    missing = [size for size in _NEEDED if size not in found]
    if missing == ["seq_length"]:
        raise ConfigurationError("The config does not say how long its samples are: give seq_length (--seq_length).")
    if missing:
        raise ConfigurationError(
            f"The config says nothing of {', '.join(missing)} (looked for"
            f" {', '.join(name for size in missing for name in _NAMES[size])}); use ModelProfile.from_sizes."
        )
    kind = str(values.get("model_type", "")).lower()
    gated = kind.startswith(_GATED) or values.get("hidden_act") in ("silu", "swiglu")
    if found.get("num_experts", 1) > 1 and isinstance(values.get("moe_intermediate_size"), int):
        found["ffn_size"] = values["moe_intermediate_size"]
    if values.get("multi_query") and "num_kv_heads" not in found:
        found["num_kv_heads"] = 1
    return {
        **found,
        "name": str(values.get("_name_or_path") or kind or "model"),
        "gated_mlp": gated,
        "tied_embeddings": bool(values.get("tie_word_embeddings", not gated)),
        "learned_positions": "n_positions" in values or kind in ("opt", "bert"),
        "causal": not any(kind.startswith(name) for name in _BOTH_WAYS),
    }


def profile_of_module(module: nn.Module, seq_length: int, blocks: Any) -> ModelProfile:
    """See :meth:`ModelProfile.from_module`."""
    chain = [module.get_submodule(name) for name in list_blocks(module, blocks, whole=True)]
    inside = {id(parameter) for block in chain for parameter in block.parameters()}
    outside = {id(p): p for p in module.parameters() if id(p) not in inside}
    tables = _tables(module, chain)
    carried = _config(module)
    if carried is not None:
        profile = replace(ModelProfile.from_config(carried, seq_length=seq_length), num_layers=len(chain))
    else:
        profile = _from_layers(chain, tables, seq_length)
    parameters = round(
        fmean(sum(p.numel() for p in {id(p): p for p in block.parameters()}.values()) for block in chain)
    )
    has_head = len(tables) > 1  # else the embedding counts with what lies outside of the blocks
    distinct = {id(table): table.numel() for table in tables} if has_head else {}
    return replace(
        profile,
        name=type(module).__name__,
        vocab_size=profile.vocab_size if has_head else 0,
        tied_embeddings=len(distinct) == 1,
        other_parameters=max(0, parameters - sum(matmul.parameters for matmul in profile.matmuls)),
        outside_parameters=max(0, sum(p.numel() for p in outside.values()) - sum(distinct.values())),
    )


def _config(module: nn.Module) -> Any:
    """The config that the module or a part of it carries, if it says enough."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if hasattr(config, "to_dict"):
            try:
                sizes_of_config(config, 1)
            except ConfigurationError:
                continue
            return config
    return None


def _tables(module: nn.Module, chain: Iterable[nn.Module]) -> list[Tensor]:
    """The weights of the largest embedding outside of the blocks, and of the head that has as many outputs."""
    inside = {id(part) for block in chain for part in block.modules()}
    parts = [part for part in module.modules() if id(part) not in inside]
    embeddings = [part for part in parts if isinstance(part, nn.Embedding)]
    if not embeddings:
        return []
    largest = max(embeddings, key=lambda part: part.num_embeddings)
    heads = [p.weight for p in parts if isinstance(p, nn.Linear) and p.out_features == largest.num_embeddings]
    return [largest.weight, *heads[:1]]


def _from_layers(chain: list[nn.Module], tables: list[Tensor], seq_length: int) -> ModelProfile:
    """Sizes as the blocks' layers show them; the block in the middle stands for all."""
    block = chain[len(chain) // 2]
    shapes = list(_linears(block))
    if not shapes:
        raise ConfigurationError(
            f"{type(block).__name__} has no linear layers, by which work is counted; use ModelProfile.from_sizes."
        )
    hidden = tables[0].shape[1] if tables else Counter(inputs for _, inputs, _ in shapes).most_common(1)[0][0]
    heads = _heads(block) or max(1, hidden // 64)
    widest = max(outputs for _, inputs, outputs in shapes if inputs == hidden) if shapes else 0
    matmuls = tuple(
        Matmul(inputs=inputs, outputs=outputs, split="rows" if _is_rows(name, inputs, outputs, hidden) else "columns")
        for name, inputs, outputs in shapes
    )
    return ModelProfile(
        num_layers=len(chain),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(1, hidden // heads),
        ffn_size=widest,
        vocab_size=tables[0].shape[0] if tables else 0,
        seq_length=seq_length,
        matmuls=matmuls,
    )


def _linears(block: nn.Module) -> Iterable[tuple[str, int, int]]:
    """(name, inputs, outputs) of every linear layer; also of attention's joint projection and Hugging Face's Conv1D."""
    for name, part in block.named_modules():
        if isinstance(part, nn.Linear):
            yield name, part.in_features, part.out_features
        elif isinstance(part, nn.MultiheadAttention) and part.in_proj_weight is not None:
            yield f"{name}.in_proj", part.embed_dim, 3 * part.embed_dim
        elif type(part).__name__ == "Conv1D" and getattr(part, "weight", None) is not None:
            yield name, part.weight.shape[0], part.weight.shape[1]


def _is_rows(name: str, inputs: int, outputs: int, hidden: int) -> bool:
    if inputs == outputs:
        return name.rpartition(".")[2] in _ROWS
    return outputs == hidden


def _heads(block: nn.Module) -> int | None:
    """What the attention calls its number of heads."""
    for part in block.modules():
        for name in (*_NAMES["num_heads"], "nhead", "heads"):
            value = getattr(part, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
