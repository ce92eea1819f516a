"""Random values for parameters that are split or sharded, as when a hook calls ``reset_parameters()``.

On a CPU torch fills each share from the rank's generator, and generators of ranks agree: all shares were alike. Here
each rank draws the whole parameter, as one process does, and keeps its share. (Of joined weights, such as query, key
and value in one, the rows come in the ranks' order: as random, not equal.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_hybrid.checkpoint.shares import share_of

__all__ = ["draw_as_one_process"]

_DRAWS = (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default, torch.ops.aten.bernoulli_.float)


def draw_as_one_process() -> None:
    """Have this process's DTensors drawn whole. It may be called again."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(_DRAWS, _draw))


def _draw(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor: DTensor = args[0]
    local = tensor._local_tensor
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
    operation(whole, *args[1:], **kwargs)
    local.copy_(share_of(tensor, whole)._local_tensor)
    return tensor
