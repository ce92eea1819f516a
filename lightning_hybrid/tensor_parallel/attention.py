"""``nn.MultiheadAttention`` on this rank's heads.

torch's own function takes the width from its input and compares it with that of its weights, so it cannot be given a
share of the heads. This one can: the same arguments and results, from local weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.batches.randomness import SHARES
from lightning_hybrid.tensor_parallel.collectives import enter_split, join_shares, leave_partial

__all__ = ["attend", "cuts_a_head", "why_not_split"]


def why_not_split(module: nn.MultiheadAttention, size: int) -> str | None:
    """Return why :func:`attend` cannot take the place of the module's forward over ``size`` ranks, if so."""
    if type(module).forward is not nn.MultiheadAttention.forward:
        return "a subclass of nn.MultiheadAttention with a forward of its own"
    if module.num_heads % size:
        return cuts_a_head("num_heads", module.num_heads, size)
    if not module._qkv_same_embed_dim:
        return "its keys or values have a width of their own (kdim, vdim)"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds a key of its own (add_bias_kv, add_zero_attn)"
    return None


def cuts_a_head(word: str, count: int, size: int) -> str:
    """Say that so many heads cannot be shared out, and among how many ranks they can."""
    fits = ", ".join(str(number) for number in range(1, size) if count % number == 0)
    return f"tensor_parallel_size={size} does not divide {word}={count}, and a head cannot be cut ({fits} would do)"


def attend(
    module: nn.MultiheadAttention,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What the module's forward returns. Its ``in_proj`` weights must be this rank's, its ``out_proj`` row-wise.

    Shapes are ``nn.MultiheadAttention``'s: ``[L, N, E]``, ``[N, L, E]`` with ``batch_first``, or ``[L, E]``.
    """
    batched = query.dim() == 3
    inputs = [enter_split(x, group) for x in (query, key, value)]
    weights = module.in_proj_weight.chunk(3)
    biases = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else (None, None, None)
    projected = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    SHARES.open(dist.get_rank(group), query.device)  # until out_proj, a row-wise layer
    if not batched:
        projected = [x.unsqueeze(0) for x in projected]
    elif not module.batch_first:
        projected = [x.transpose(0, 1) for x in projected]
    q, k, v = (
        x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in projected
    )  # [N, local heads, L, head_dim]
    causal_only = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal_only else _joined_mask(module, group, q, key_padding_mask, attn_mask)
    dropout = module.dropout if module.training else 0.0
    found = None
    if need_weights:
        scores = (q * module.head_dim**-0.5) @ k.transpose(-2, -1)
        found = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
        mixed = found @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal_only)
    out = mixed.transpose(1, 2).flatten(-2)
    out = module.out_proj(out if batched else out.squeeze(0))
    if batched and not module.batch_first:
        out = out.transpose(0, 1)
    if found is not None:
        found = _all_heads(module, group, found, average_attn_weights)
        found = found if batched else found.squeeze(0)
    return out, found


def _joined_mask(
    module: nn.MultiheadAttention, group: dist.ProcessGroup, q: Tensor, padding: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """Both masks as what is added to the scores of this rank's heads; ``[1 or N, 1 or local heads, 1 or L, S]``."""
    parts = []
    if mask is not None and mask.dim() == 3:  # [N * heads, L, S]
        mask = mask.unflatten(0, (-1, module.num_heads))
        mask = mask[:, dist.get_rank(group) * q.shape[1] :][:, : q.shape[1]]
    if mask is not None:
        parts.append(mask)
    if padding is not None:
        parts.append(padding.view(-1, 1, 1, padding.shape[-1]))
    added = [
        torch.zeros_like(x, dtype=q.dtype).masked_fill_(x, float("-inf")) if x.dtype == torch.bool else x.to(q.dtype)
        for x in parts
    ]
    joined: Tensor | None = sum(added[1:], added[0]) if added else None
    return joined


def _all_heads(module: nn.MultiheadAttention, group: dist.ProcessGroup, found: Tensor, average: bool) -> Tensor:
    """Attention weights of all ranks' heads: their mean, or ``[N, heads, L, S]``."""
    if average:
        mean: Tensor = leave_partial(found.sum(dim=1), group) / module.num_heads
        return mean
    return join_shares(found.movedim(1, -1), module.num_heads, group).movedim(-1, 1)
