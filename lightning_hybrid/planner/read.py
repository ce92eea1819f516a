"""Sizes of a model from a Hugging Face config or from a module's layers. Pure: nothing runs.

[Note: a config alone]
A ``config.json`` leaves out what is its class's default (Gemma's tied weights), and gives sizes names of its class's
(BLOOM's ``n_embed``). Nor does it say what a block is made of (shared experts, a decoder's second attention, blocks
that differ). So where transformers has that kind of model, the model itself is made on the meta device, which takes a
tenth of a second whatever its size, and read as any module. Else the sizes are taken by their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.pipeline.blocks import list_blocks
from lightning_hybrid.planner.profile import Matmul, ModelProfile

__all__ = ["profile_of_config", "profile_of_module", "sizes_of_config"]

#: Names under which configs keep a size, the usual ones first.
_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": (
        "num_key_value_heads",
        "n_kv_heads",
        "num_kv_heads",
        "n_head_kv",
        "kv_n_heads",
        "multi_query_group_num",
    ),
    "head_dim": ("head_dim", "d_kv", "kv_channels"),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "seq_length": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
    ),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "num_active_experts": ("num_experts_per_tok", "moe_top_k", "top_k_experts"),
}
#: Sizes of heads where keys and values come from a joint latent (DeepSeek).
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
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
    "dbrx",
    "chatglm",
)
#: Parts of the names of kinds whose tokens see all others (roberta, distilbert, hubert, ... are bert too).
_BOTH_WAYS = ("bert", "electra", "vit", "deit", "beit", "dinov2", "mpnet", "esm", "wav2vec2", "longformer", "siglip")
#: transformers' tables of model classes by kind, in the order in which they are looked through.
_CLASSES = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "")
#: A config explains a block if its matrices are this share of the block's parameters, and no more than all of them.
_EXPLAINED = 0.95
#: Endings of names of layers whose inputs are divided among tensor ranks where the shape does not tell.
_ROWS = ("o_proj", "out_proj", "c_proj", "wo", "dense", "fc2", "down_proj", "w2", "proj")


def profile_of_config(config: Any, seq_length: int | None) -> ModelProfile:
    """See :meth:`ModelProfile.from_config`, and the note above."""
    known = _known_config(config)
    sizes = sizes_of_config(known, seq_length)
    model = _on_meta(known)
    if model is not None:
        profile = profile_of_module(model, sizes["seq_length"], None)
        return replace(profile, name=sizes["name"], causal=sizes["causal"])
    if _values(known).get("is_encoder_decoder"):
        raise ConfigurationError(
            f"{sizes['name']} has an encoder and a decoder, whose blocks a config alone does not show. Give the module"
            " (ModelProfile.from_module), or install transformers."
        )
    return ModelProfile.from_sizes(**sizes)


def _known_config(config: Any) -> Any:
    """The config as transformers' own, of the text where there are several; as it is where transformers has none."""
    if isinstance(config, Mapping) and (kind := config.get("model_type")):
        try:
            config = import_module("transformers").CONFIG_MAPPING[kind].from_dict(dict(config))
        except Exception:  # no transformers, no such kind, or a config of another version
            return config
    text = getattr(config, "text_config", None)
    return text if hasattr(text, "to_dict") else config


def _on_meta(config: Any) -> nn.Module | None:
    """The model of a config of transformers', without weights; ``None`` where there is none. No other code is run."""
    kind = getattr(config, "model_type", None)
    if not kind or not type(config).__module__.startswith("transformers."):
        return None
    try:
        library = import_module("transformers")
        tables = import_module("transformers.models.auto.modeling_auto")
        two = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
        has_encoder, sees_all = getattr(config, "is_encoder_decoder", False), _sees_all(kind)
        order: tuple[str, ...] = ("MASKED_LM", "") if sees_all else (*two, *_CLASSES) if has_encoder else _CLASSES
        tasks = (f"MODEL_{f'FOR_{task}_' if task else ''}MAPPING_NAMES" for task in order)
        names = [*(getattr(config, "architectures", None) or ()), *(getattr(tables, t, {}).get(kind) for t in tasks)]
        given = [getattr(library, str(name), None) for name in names]
        made = next(one for one in given if isinstance(one, type) and issubclass(one, library.PreTrainedModel))
        with torch.device("meta"):
            return made(config)  # type: ignore[no-any-return]
    except Exception:  # of another library, with whatever versions it needs
        return None


def _values(config: Any) -> Mapping[str, Any]:
    """A config's entries; those of parts of it that are not other models too."""
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise ConfigurationError(f"A config is an object with sizes by name, not {type(config).__name__}.")
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    if not isinstance(config, Mapping):  # its class may give them other names
        wanted = [name for names in _NAMES.values() for name in names if name not in values]
        values = {**values, **{name: value for name in wanted if (value := getattr(config, name, None)) is not None}}
    for part in ("attn_config", "ffn_config"):
        if isinstance(values.get(part), Mapping):
            values = {**values[part], **values}
    return {**values, **values["text_config"]} if isinstance(values.get("text_config"), Mapping) else values


def _sees_all(kind: str) -> bool:
    return any(name in kind for name in _BOTH_WAYS)


def sizes_of_config(config: Any, seq_length: int | None = None) -> dict[str, Any]:
    """Return the arguments of :meth:`ModelProfile.from_sizes`.

    Raises:
        ConfigurationError: if a size is missing, or ``config`` is none.
    """
    values = _values(config)
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
    gated = gated or bool(values.get("is_gated_act"))
    if found.get("num_experts", 1) > 1 and isinstance(values.get("moe_intermediate_size"), int):
        found["ffn_size"] = values["moe_intermediate_size"]
    if values.get("multi_query") and not values.get("new_decoder_architecture"):  # Falcon's new one has groups
        found["num_kv_heads"] = 1
    if all(isinstance(values.get(name), int) for name in _LATENT):  # scores and values have heads of two sizes
        found["head_dim"] = sum(values[name] for name in _LATENT) // 2
    return {
        **found,
        "name": str(values.get("_name_or_path") or kind or "model"),
        "gated_mlp": gated,
        "tied_embeddings": bool(values.get("tie_word_embeddings", not gated)),
        "learned_positions": "n_positions" in values or kind in ("opt", "bert"),
        "causal": bool(values.get("is_decoder")) or not _sees_all(kind),
    }


def profile_of_module(module: nn.Module, seq_length: int, blocks: Any) -> ModelProfile:
    """See :meth:`ModelProfile.from_module`."""
    chain = [module.get_submodule(name) for name in list_blocks(module, blocks, whole=True)]
    inside = {id(parameter) for block in chain for parameter in block.parameters()}
    outside = {id(p): p for p in module.parameters() if id(p) not in inside}
    tables = _tables(module, chain)
    parameters = round(
        fmean(sum(p.numel() for p in {id(p): p for p in block.parameters()}.values()) for block in chain)
    )
    carried = _config(module)
    profile = None if carried is None else ModelProfile.from_sizes(**sizes_of_config(carried, seq_length))
    layers = _layers(chain, profile)
    if profile is None:
        profile = _from_layers(chain, layers, tables, seq_length)
    elif layers and not _EXPLAINED <= sum(matmul.parameters for matmul in profile.matmuls) / parameters <= 1:
        profile = replace(profile, matmuls=layers)
    has_head = len(tables) > 1  # else the embedding counts with what lies outside of the blocks
    distinct = {id(table): table.numel() for table in tables} if has_head else {}
    return replace(
        profile,
        num_layers=len(chain),
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


def _from_layers(
    chain: list[nn.Module], matmuls: tuple[Matmul, ...], tables: list[Tensor], seq_length: int
) -> ModelProfile:
    """Sizes as the blocks' layers show them."""
    if not matmuls:
        raise ConfigurationError(
            f"{type(chain[0]).__name__} has no linear layers, by which work is counted; use ModelProfile.from_sizes."
        )
    hidden = tables[0].shape[1] if tables else Counter(matmul.inputs for matmul in matmuls).most_common(1)[0][0]
    block = chain[len(chain) // 2]
    heads = _number(block, (*_NAMES["num_heads"], "nhead", "heads")) or max(1, hidden // 64)
    fewer = _number(block, _NAMES["num_kv_heads"]) or heads
    return ModelProfile(
        num_layers=len(chain),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads if heads % fewer else fewer,
        head_dim=_number(block, ("head_dim",)) or max(1, hidden // heads),
        ffn_size=max((matmul.outputs for matmul in matmuls if matmul.inputs == hidden), default=0),
        vocab_size=tables[0].shape[0] if tables else 0,
        seq_length=seq_length,
        matmuls=matmuls,
    )


def _layers(chain: list[nn.Module], sizes: ModelProfile | None) -> tuple[Matmul, ...]:
    """The linear layers of a block, on the average of all blocks: one that half of them have counts half."""
    hidden = sizes.hidden_size if sizes is not None else _width(chain)
    known = sizes.num_active_experts / sizes.num_experts if sizes is not None and sizes.num_experts > 1 else None
    count: Counter[tuple[str, int, int, int, float]] = Counter()
    for block in chain:
        shares = dict(_experts(block))
        for name, inputs, outputs, copies in _linears(block, hidden):
            share = next((part for container, part in shares.items() if name.startswith(f"{container}.")), None)
            count[name, inputs, outputs, copies, 1.0 if share is None else known or share] += 1
    return tuple(
        Matmul(
            inputs=inputs,
            outputs=outputs,
            split="rows" if _is_rows(name, inputs, outputs, hidden) else "columns",
            share=share,
            copies=copies if number == len(chain) else copies * number / len(chain),
        )
        for (name, inputs, outputs, copies, share), number in count.items()
    )


def _width(chain: list[nn.Module]) -> int:
    """Features of a token between blocks: what most linear layers take."""
    inputs = Counter(entering for block in chain for _, entering, _, _ in _linears(block, 0))
    return inputs.most_common(1)[0][0] if inputs else 0


def _experts(block: nn.Module) -> Iterable[tuple[str, float]]:
    """(name, share of the tokens that each passes) of what holds experts."""
    for name, part in block.named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        owner = block.get_submodule(name.rpartition(".")[0])
        stacked = (weight.shape[0] for weight in part.parameters(recurse=False) if weight.ndim == 3)
        number = len(part) if isinstance(part, (nn.ModuleList, nn.ModuleDict)) else next(stacked, 1)
        active = _number(owner, (*_NAMES["num_active_experts"], "top_k")) or number
        yield name, min(1.0, active / max(1, number))


def _linears(block: nn.Module, hidden: int) -> Iterable[tuple[str, int, int, int]]:
    """(name, inputs, outputs, copies) of every linear layer; also of attention's joint projection, of Hugging Face's
    Conv1D, and of experts in one weight."""
    for name, part in block.named_modules():
        if isinstance(part, nn.Linear):
            yield name, part.in_features, part.out_features, 1
        elif isinstance(part, nn.MultiheadAttention) and part.in_proj_weight is not None:
            yield f"{name}.in_proj", part.embed_dim, 3 * part.embed_dim, 1
        elif type(part).__name__ == "Conv1D" and getattr(part, "weight", None) is not None:
            yield name, part.weight.shape[0], part.weight.shape[1], 1
        elif name.rpartition(".")[2] == "experts":
            for which, weight in part.named_parameters(recurse=False):
                if weight.ndim == 3:
                    copies, *sides = weight.shape
                    enters = hidden in sides and "down" not in which
                    inputs = hidden if enters else next((side for side in sides if side != hidden), hidden)
                    sides.remove(inputs)
                    yield f"{name}.{which}", inputs, sides[0], copies


def _is_rows(name: str, inputs: int, outputs: int, hidden: int) -> bool:
    if inputs == outputs:
        return name.rpartition(".")[2] in _ROWS
    return outputs == hidden


def _number(part: nn.Module, names: Iterable[str]) -> int | None:
    """The first positive number that a part of a module keeps under one of these names."""
    for inner in part.modules():
        for name in names:
            value = getattr(inner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
