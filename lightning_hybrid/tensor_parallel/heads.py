"""Attention heads cannot be cut: does the degree divide them? Pure.

A split linear's features divide more often than its heads do (width 18 over 2 ranks is 9 and 9, but 3 heads are not
1.5 and 1.5), and then every shape fits and every value is wrong, or a view fails deep inside of the model's code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.tensor_parallel.linears import features_of, is_linear

__all__ = ["NUM_HEADS", "check_heads", "head_counts", "shared_groups", "shared_heads", "widths"]

NUM_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_query_groups")
_GROUPS = ("num_key_value_groups", "n_rep", "num_groups", "kv_groups", "n_groups", "num_queries_per_kv", "repeats")
_HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_head", "dim_per_head")
_WIDTH: tuple[str, ...] = (
    "n_embd",
    "embed_dim",
    "embedding_dim",
    "emb_dim",
    "hidden_size",
    "hidden_dim",
    "d_model",
    "model_dim",
    "dim",
)
_WIDTH += ("width", "channels", "inner_dim", "all_head_size", "split_size", "q_dim", "kv_dim", "q_size", "kv_size")


def head_counts(owner: nn.Module) -> dict[str, int]:
    """Return the counts of heads that a module keeps, by attribute; those of its ``config`` as ``config.name``."""
    return _integers(owner, (*NUM_HEADS, *_NUM_KV_HEADS))


def widths(owner: nn.Module, sizes: Collection[int]) -> dict[str, int]:
    """Return the widths that a module keeps and that are among ``sizes``, by attribute as in :func:`head_counts`."""
    return {name: size for name, size in _integers(owner, _WIDTH).items() if size in sizes}


def _integers(owner: nn.Module, names: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for prefix, source in (("", owner), ("config.", getattr(owner, "config", None))):
        for name in names:
            if (value := _first(source, (name,))) is not None:
                found[prefix + name] = value[1]
    return found


def check_heads(module: nn.Module, styles: Mapping[str, str], tensor_parallel_size: int) -> None:
    """Refuse a plan that would cut through a head.

    ``styles`` maps FQNs of modules to style names. Looked at are the ``colwise`` linears of each module that speaks of
    heads: by a count of heads or a head size among its attributes (the usual names), or in its Hugging Face ``config``.

    Raises:
        ConfigurationError: with the module, the number of heads, and the degrees that would do.
    """
    owners: dict[str, list[nn.Module]] = {}
    for name, style in styles.items():
        child = module.get_submodule(name)
        if style == "colwise" and is_linear(child):
            owners.setdefault(name.rpartition(".")[0], []).append(child)
    shared = {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise_shared"}
    for name, linears in owners.items():
        for word, count in _head_counts(module.get_submodule(name), linears, name in shared):
            if count % tensor_parallel_size:
                fits = ", ".join(str(n) for n in range(1, tensor_parallel_size + 1) if count % n == 0)
                raise ConfigurationError(
                    f"tensor_parallel_size={tensor_parallel_size} does not divide {word}={count} of {name!r}: a head"
                    f' cannot be cut. Use tensor_parallel_size={fits}, or keep this attention "whole" in tp_plan.'
                )


def shared_heads(owner: nn.Module, linears: Mapping[str, int], size: int) -> dict[str, tuple[int, ...]]:
    """Which projections of an attention have fewer heads than ranks, and may be shared by several; rows of each head.

    Each rank's query heads must attend to one head of those: the degree is a multiple of their number. ``linears`` maps
    names of the owner's column-wise linears to their output features.
    """
    own = _first(owner, (*NUM_HEADS, *_NUM_KV_HEADS, *_HEAD_DIM))
    heads, head_dim = _known(owner, NUM_HEADS), _known(owner, _HEAD_DIM)
    if own is None or not (heads or head_dim):
        return {}
    head_dim = head_dim or max(linears.values()) // heads
    heads = heads or max(linears.values()) // head_dim
    found = {}
    for name, width in linears.items():
        count = width // head_dim
        if width == count * head_dim and 0 < count < min(size, heads) and size % count == 0 and heads % size == 0:
            found[name] = (head_dim,) * count
    return found


def shared_groups(owner: nn.Module, size: int) -> tuple[tuple[str, int], ...]:
    """What an attention's number of query heads for each shared head is on one rank, by attribute."""
    heads, kv_heads = _known(owner, NUM_HEADS), _known(owner, _NUM_KV_HEADS)
    own = {name: value for name in _GROUPS if (value := getattr(owner, name, None)) and isinstance(value, int)}
    return tuple((name, heads // size) for name, value in own.items() if kv_heads and value == heads // kv_heads)


def _known(owner: nn.Module, names: tuple[str, ...]) -> int:
    """The first of these numbers that a module or its config has; 0 if none."""
    found = _first(owner, names) or _first(getattr(owner, "config", None), names)
    return found[1] if found else 0


def _head_counts(owner: nn.Module, linears: list[nn.Module], shares_kv: bool) -> Iterator[tuple[str, int]]:
    """Every count of heads that must divide, with what it is called."""
    own = _first(owner, (*NUM_HEADS, *_NUM_KV_HEADS, *_HEAD_DIM))
    if own is None:
        return  # an MLP, or an attention that says nothing of heads
    sources = [owner, getattr(owner, "config", None)]
    heads = next((found for source in sources if (found := _first(source, NUM_HEADS))), None)
    kv_heads = next((found for source in sources if (found := _first(source, _NUM_KV_HEADS))), None)
    head_dim = _first(owner, _HEAD_DIM)
    if heads:
        yield heads
    outs = [features_of(x)[0] for x in linears]
    if kv_heads and not shares_kv and (not heads or not head_dim or any(out != heads[1] * head_dim[1] for out in outs)):
        yield kv_heads
    if head_dim:
        word, size = head_dim
        yield from ((f"out_features/{word}", out // size) for out in outs if out % size == 0)


def _first(source: Any, names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        value = getattr(source, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return name, value
    return None
