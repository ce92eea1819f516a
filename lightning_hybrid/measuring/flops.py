"""Counts floating point operations of whatever runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

__all__ = ["count_flops"]


def count_flops() -> FlopCounterMode:
    """Return torch's counter, which says nothing, and counts attention on a CPU too (torch 2.13's own does not).

    Causal attention counts as if every token saw all others, as is usual for MFU.
    """
    return FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
    )


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    count: int = sdpa_flop_count(query, key, value)
    return count
