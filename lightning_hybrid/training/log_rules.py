"""How the values that a training step logs for micro-batches make the one of the whole batch: found by trying.

``self.log("loss", loss)`` is a mean, ``self.log("tokens", mask.sum())`` adds up, ``self.log("peak", x.abs().max())`` is
the largest one, whatever ``reduce_fx`` then does with the values of batches. When the contract of micro-batches is
rehearsed (:mod:`~lightning_hybrid.pipeline.contract`), some samples go through the step in one piece and in two parts.
So for each name
it is seen which rules give the value of the whole from those of the parts, and what none of them explains is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_hybrid.pipeline.loss import MicrobatchLoss, combine

__all__ = ["LogRules", "LoggedFact", "apply_rule", "fitting_rules"]

Rule = Callable[[Tensor, Sequence[MicrobatchLoss], Tensor], Tensor]

#: Given one value, one loss and the number of samples of each micro-batch. The first that fits is taken.
_RULES: dict[str, Rule] = {
    "loss": lambda values, losses, sizes: combine(list(values), losses),
    "samples": lambda values, losses, sizes: (values * sizes).sum() / sizes.sum(),
    "sum": lambda values, losses, sizes: values.sum(),
    "min": lambda values, losses, sizes: values.min(),
    "max": lambda values, losses, sizes: values.max(),
}


def apply_rule(rule: str, values: Tensor, losses: Sequence[MicrobatchLoss], sizes: Sequence[int]) -> Tensor:
    """Return the value of the batch from one of each micro-batch, with its loss and number of samples."""
    return _RULES[rule](values, losses, torch.tensor(sizes, dtype=values.dtype, device=values.device))


def fitting_rules(
    whole: float, values: Sequence[float], losses: Sequence[MicrobatchLoss], sizes: Sequence[int], tolerance: float
) -> set[str]:
    """Return the rules that make ``whole`` of ``values``, to a ``tolerance`` of the largest of them.

    Values that are not finite are explained by anything.
    """
    if not all(math.isfinite(value) for value in (whole, *values)):
        return set(_RULES)
    near = tolerance * max(map(abs, (whole, *values))) + 1e-7
    parts = torch.tensor(values, dtype=torch.float64)
    return {rule for rule in _RULES if abs(float(apply_rule(rule, parts, losses, sizes)) - whole) <= near}


@dataclass(frozen=True, kw_only=True)
class LoggedFact:
    """What was found about one name."""

    rules: set[str]
    """Those that fit."""
    is_tensor: bool
    text: str
    """The values, for a message."""


class LogRules:
    """What is known of the names that a training step logs; the same on all ranks."""

    def __init__(self) -> None:
        self._fits: dict[str, set[str]] = {}
        self._warned: set[str] = set()

    def learn(self, found: Mapping[str, LoggedFact]) -> str | None:
        """Take in what one rank has found by name. Returns a refusal if no rule explains a tensor.

        Python numbers may be times or counts of anything: they are warned of, and so is a name for which a rule has
        been found before.
        """
        for name, fact in sorted(found.items()):
            known = self._fits.get(name)
            if fact.rules:
                self._fits[name] = (known & fact.rules if known is not None else fact.rules) or fact.rules
                continue
            text = f'self.log("{name}", ...) in training_step {fact.text}, so it is no mean, no sum and no extreme'
            if known is None and fact.is_tensor:
                return f"{text}, and micro-batches cannot tell it. {_REMEDY}"
            if name not in self._warned:
                self._warned.add(name)
                rank_zero_warn(f"{text}. What is logged may be off.")
        return None

    def rule(self, name: str, reduce_fx: Any) -> str | None:
        """Return the rule for a name; ``None`` if nothing is known of it."""
        if name not in self._fits:
            return None
        wish = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        return next(rule for rule in (wish, *_RULES) if rule in self._fits[name])


_REMEDY = (
    "Log what it is made of (sums, counts), a torchmetrics object, or log it in validation_step; or use"
    ' whole_batch_loss=True, num_microbatches=1 with schedule="GPipe", or pipeline_parallel_size=1.'
)
