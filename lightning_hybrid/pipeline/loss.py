"""How much each micro-batch's loss counts, so that the step's loss is that of the whole batch. Pure autograd.

[Note: the weight of a micro-batch]
A mean over a batch is the weighted mean of the means over its micro-batches, weighted by the number of elements that
each mean was taken over. That number is read from the loss's own autograd graph: below scaling by constants there is
the node of the reduction, and it knows what it averaged. In order:

1. ``user``: the step returns ``{"loss": loss, "loss_weight": n}``;
2. ``targets``: a mean-reduced ``nll_loss``/``cross_entropy``; ``n`` is the (class-weighted) number of targets that
   are not ``ignore_index``;
3. ``divisor``: a value divided by a tensor (``(loss * mask).sum() / mask.sum()``); ``n`` is the divisor;
4. ``sum``: a sum that was not divided by its own number of samples or elements; micro-batches add up;
5. ``samples``: anything else; ``n`` is the number of samples (``mixed``: terms with different counts were added).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["MicrobatchLoss", "combine", "read_loss"]

#: Nodes through which a loss may be scaled, shifted or reshaped without changing what it is a mean of.
_LINEAR = (
    *(
        "MulBackward0",
        "MulBackward1",
        "DivBackward0",
        "NegBackward0",
        "AddBackward0",
        "SubBackward0",
        "ToCopyBackward0",
    ),
    *("ViewBackward0", "SqueezeBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "AliasBackward0"),
)
_NLL = ("NllLossBackward0", "NllLoss2DBackward0")
_MEAN, _SUM = 1, 2  # torch's numbers of the reductions


@dataclass(frozen=True, kw_only=True)
class MicrobatchLoss:
    """One micro-batch's loss and what it counts."""

    value: Tensor
    """Scalar, with its graph."""
    weight: float
    """What the loss is multiplied with before micro-batches are added."""
    rule: str
    """Which rule gave the weight; see the module's note."""


def read_loss(output: Any, num_samples: int) -> MicrobatchLoss:
    """Find the loss in what a training step returned, and its weight.

    Raises:
        ValueError: if there is no scalar loss tensor in ``output``.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            "With pipeline_parallel_size > 1, training_step must return a scalar loss tensor or a dict with one under"
            f' "loss", but it returned {type(output).__name__}.'
        )
    if isinstance(output, dict) and "loss_weight" in output:
        return MicrobatchLoss(value=loss, weight=float(output["loss_weight"]), rule="user")
    rule, weight = _Reading(num_samples).read(loss.grad_fn)
    return MicrobatchLoss(value=loss, weight=weight, rule=rule)


def combine(values: Sequence[Tensor], losses: Sequence[MicrobatchLoss]) -> Tensor:
    """Combine one value per micro-batch (``values``) as the losses are combined into the loss of the batch."""
    if losses[0].rule == "sum":
        return torch.stack([value.detach() for value in values]).sum()
    total = sum(loss.weight for loss in losses)
    counted = [(v.detach(), loss.weight) for v, loss in zip(values, losses, strict=True) if loss.weight or not total]
    if not total:  # nothing counted anywhere: what one process would get, usually NaN
        return torch.stack([value for value, _ in counted]).mean()
    return torch.stack([value * (weight / total) for value, weight in counted]).sum()


@dataclass
class _Reading:
    """Walks from a loss down to the reductions that it is made of."""

    num_samples: int
    numbers: tuple[float, ...] = ()
    """Python numbers that the value was divided by on the way."""

    def read(self, node: Any) -> tuple[str, float]:
        """Return the rule and the weight of the value that ``node`` made."""
        name = type(node).__name__
        if name in _NLL and node._saved_reduction in (_MEAN, _SUM):
            mean = node._saved_reduction == _MEAN
            return ("targets", float(node._saved_total_weight)) if mean else self._sum(node._saved_target.numel())
        if name == "SumBackward0":
            return self._sum(math.prod(node._saved_self_sym_sizes))
        if name == "DivBackward0" and not _is_number(node._saved_other) and node._saved_other.numel() == 1:
            return "divisor", float(node._saved_other)
        if name not in _LINEAR:
            return "samples", float(self.num_samples)
        if name == "DivBackward0":
            self.numbers += (float(node._saved_other),)
        branches = {self.read(parent) for parent, _ in node.next_functions if parent is not None}
        return branches.pop() if len(branches) == 1 else ("mixed", float(self.num_samples))

    def _sum(self, num_elements: int) -> tuple[str, float]:
        """A sum adds up, unless it was divided by the number of its samples or elements: then it was a mean."""
        is_mean = any(number in (self.num_samples, num_elements) for number in self.numbers)
        return ("samples", float(self.num_samples)) if is_mean else ("sum", 1.0)


def _is_number(other: Tensor | None) -> bool:
    """Whether a division was by a Python number: autograd keeps it as a tensor that never wins type promotion."""
    if other is None:
        return True
    small = torch.tensor(0, dtype=torch.float16 if other.is_floating_point() else torch.int8)
    return torch.result_type(other, small) == small.dtype
