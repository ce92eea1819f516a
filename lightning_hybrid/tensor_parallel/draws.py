"""Does a split block draw random numbers as it should: alike for what tensor ranks hold alike, others for shares?

One block of each kind is run whole and split, in training mode. A draw whose result is smaller in the split block is
for a rank's share, and must come from the rank's own stream; any other must not, or ranks would disagree about values
that they all hold (see the notes in :mod:`lightning_hybrid.batches.randomness`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hybrid.batches.randomness import SHARES, random_mark
from lightning_hybrid.tensor_parallel.sequence import call_whole
from lightning_hybrid.tensor_parallel.together import together

__all__ = ["draws_of", "wrong_draws"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Draw:
    operation: str
    shape: tuple[int, ...]
    by_share: bool


class _Draws(TorchDispatchMode):
    """Notes what is drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[_Draw] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        by_share = SHARES.is_open  # before: a fused kernel may draw too
        device = next((leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_cuda), None)
        before = random_mark(device)
        out = func(*args, **(kwargs or {}))
        if random_mark(device) != before:  # fused attention need not draw
            shape = next((tuple(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), ())
            if shape:  # streams start from a single number
                self.found.append(_Draw(operation=str(func), shape=shape, by_share=by_share))
        return out


def wrong_draws(whole: nn.Module, split: nn.Module, call: Any, mesh: DeviceMesh, *, is_compiled: bool) -> str | None:
    """Say what is drawn wrongly by a block that is split over ``mesh``, in words; ``None`` if nothing is. A collective.

    Nothing is said of blocks that draw differently often when they are split, or do not run alone in training mode.
    ``is_compiled``: the block will be compiled, and compiled code draws everything from one stream.
    """
    with torch.random.fork_rng():
        try:
            expected, found = draws_of(whole, *call), list[_Draw]()
            if expected:
                found = together(lambda: draws_of(split, *call), mesh.get_group(), mesh.device_type)
        except Exception as error:
            logger.debug("The draws of %s could not be seen: %s: %s", type(whole).__name__, type(error).__name__, error)
            return None
        finally:
            SHARES.close()
    if [draw.operation for draw in found] != [draw.operation for draw in expected]:
        return None
    return next(_problems(expected, found, is_compiled), None)


def _problems(expected: list[_Draw], found: list[_Draw], is_compiled: bool) -> Iterator[str]:
    for whole, split in zip(expected, found, strict=True):
        is_share = whole.shape != split.shape
        what = f"{split.operation} draws numbers of shape {split.shape} ({whole.shape} in the whole block)"
        if is_share and is_compiled:
            yield f"{what}, and compiled code draws the same on all tensor ranks; use compile=False or no dropout there"
        elif is_share and not split.by_share:
            yield f"{what}, the same on all tensor ranks: it does not stand between a colwise and a rowwise layer"
        elif split.by_share and not is_share:
            yield f"{what} that tensor ranks must draw alike, but stands between a colwise and a rowwise layer"


def draws_of(block: nn.Module, args: Any, kwargs: Any) -> list[_Draw]:
    """Return what a block draws in training mode, in order. It is left in that mode."""
    draws = _Draws()
    with torch.no_grad(), draws:
        call_whole(block.train(), args, kwargs)
    return draws.found
