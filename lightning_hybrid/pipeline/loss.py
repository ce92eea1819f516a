"""How much each micro-batch's loss counts, so that the step's loss is that of the whole batch. Pure autograd.

[Note: the weight of a micro-batch]
A mean over a batch is the weighted mean of the means over its micro-batches, weighted by the number of elements that
each mean was taken over. That number is read from the loss's own autograd graph: below scaling by constants there is
the node of the reduction, and it knows what it averaged. The rules:

- ``user``: the step returns ``{"loss": loss, "loss_weight": n}``;
- ``targets``: a mean-reduced ``nll_loss``/``cross_entropy``; ``n`` is the (class-weighted) number of targets that are
  not ``ignore_index``;
- ``elements``: any other mean; ``n`` is the number of elements averaged (``loss[mask].mean()``), which goes with the
  number of samples where it does not depend on the data;
- ``divisor``: a sum divided by a tensor, or by a Python number that is a count of what was summed; ``n`` is the
  divisor. A divided mean is only scaled;
- ``sum``: a sum that was not divided by such a count; micro-batches add up;
- ``samples``: anything else; ``n`` is the number of samples (``mixed``: terms with different counts were added).

The unit of a weight must not change between micro-batches, so no rule falls back to another one by the data's values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.errors import ConfigurationError

__all__ = ["MicrobatchLoss", "combine", "read_loss"]

#: Nodes through which a loss may be scaled, shifted or reshaped without changing what it is a mean of.
_LINEAR = (
    *("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1", "NegBackward0", "AddBackward0", "SubBackward0"),
    *("ToCopyBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "AliasBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "CloneBackward0", "ExpandBackward0"),
)
_NLL = ("NllLossBackward0", "NllLoss2DBackward0")
_MEANS, _SUMS = ("MeanBackward0", "MeanBackward1"), ("SumBackward0", "SumBackward1", "NansumBackward0")
_MEAN, _SUM = 1, 2  # torch's numbers of the reductions
_WAY_OUT = 'Return {"loss": ..., "loss_weight": n} from training_step to say the weight.'
_SAME = 4e-3  # counts that differ by less agree: a bfloat16 loss rounds its divisor


@dataclass(frozen=True, kw_only=True)
class MicrobatchLoss:
    """One micro-batch's loss and what it counts."""

    value: Tensor
    """Scalar, with its graph."""
    weight: float
    """What the loss is multiplied with before micro-batches are added."""
    rule: str
    """Which rule gave the weight; see the module's note."""
    doubt: str = ""
    """What was not understood, as a sentence that says the way out."""


def read_loss(output: Any, num_samples: int) -> MicrobatchLoss:
    """Find the loss in what a training step returned, and its weight.

    Raises:
        ConfigurationError: if there is no scalar loss tensor in ``output``.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if loss is None:
        raise ConfigurationError(
            "training_step returned no loss, by which Lightning skips a batch. A pipeline cannot skip a micro-batch:"
            " leave such samples out in the dataset or the collate function, return the loss times 0, or use"
            " pipeline_parallel_size=1."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigurationError(
            "With pipeline_parallel_size > 1, training_step must return a scalar loss tensor or a dict with one under"
            f' "loss", but it returned {type(output).__name__}.'
        )
    if isinstance(output, dict) and "loss_weight" in output:
        return MicrobatchLoss(value=loss, weight=float(output["loss_weight"]), rule="user")
    reading = _Reading(num_samples)
    rule, weight = reading.read(loss.grad_fn, _Divided())
    doubt = f"{reading.doubt} {_WAY_OUT}" if reading.doubt else ""
    return MicrobatchLoss(value=loss, weight=weight, rule=rule, doubt=doubt)


def combine(values: Sequence[Tensor], losses: Sequence[MicrobatchLoss]) -> Tensor:
    """Combine one value per micro-batch (``values``) as the losses are combined into the loss of the batch."""
    if losses[0].rule == "sum":
        return torch.stack([value.detach() for value in values]).sum()
    total = sum(loss.weight for loss in losses)
    counted = [(v.detach(), loss.weight) for v, loss in zip(values, losses, strict=True) if loss.weight or not total]
    if not total:  # nothing counted anywhere: what one process would get, usually NaN
        return torch.stack([value for value, _ in counted]).mean()
    return torch.stack([value * (weight / total) for value, weight in counted]).sum()


@dataclass(frozen=True)
class _Divided:
    """What a value was divided by between the loss and a node below it."""

    numbers: tuple[float, ...] = ()
    inverses: tuple[float, ...] = ()
    """Inverses of the Python numbers that it was multiplied with."""
    tensors: tuple[float, ...] = ()

    def below(self, node: Any) -> _Divided:
        """Go through ``node``."""
        name = type(node).__name__
        other = getattr(node, "_saved_other", None)
        if other is None or (isinstance(other, Tensor) and other.numel() != 1) or not name.startswith(("Div", "Mul")):
            return self
        number = abs(float(other))
        if name.startswith("Mul"):
            return replace(self, inverses=(*self.inverses, 1 / number)) if number and _is_number(other) else self
        if _is_number(other):
            return replace(self, numbers=(*self.numbers, number))
        return replace(self, tensors=(*self.tensors, number))


@dataclass
class _Reading:
    """Walks from a loss down to the reductions that it is made of."""

    num_samples: int
    doubt: str = ""

    def read(self, node: Any, divided: _Divided) -> tuple[str, float]:
        """Return the rule and the weight of the value that ``node`` made."""
        name, reduction = type(node).__name__, getattr(node, "_saved_reduction", None)
        if hasattr(node, "num_targets"):  # of logits that are split over the vocabulary
            count = float(node.num_targets)
            return ("targets", count) if node.reduction == "mean" else self._sum(int(count), [count], divided)
        if name in _NLL and reduction == _MEAN:
            return "targets", float(_num_targets(node) if node._saved_weight is None else node._saved_total_weight)
        if reduction == _MEAN and hasattr(node, "_saved_self"):
            return "elements", float(node._saved_self.numel())
        if reduction == _SUM and hasattr(node, "_saved_self"):
            rows = node._saved_target if name in _NLL else node._saved_self
            return self._sum(rows.numel(), [_num_targets(node)] if name in _NLL else [], divided)
        if name in (*_MEANS, *_SUMS):
            return self._reduction(node, divided)
        if name not in _LINEAR:
            return "samples", float(self.num_samples)
        return self._branches(node, divided.below(node))

    def _branches(self, node: Any, divided: _Divided) -> tuple[str, float]:
        """Terms that were added must count the same, whichever rule says so."""
        read = [self.read(parent, divided) for parent, _ in node.next_functions if parent is not None]
        if not read:
            return "samples", float(self.num_samples)
        rule, weight = read[0]
        if all(math.isclose(weight, w, rel_tol=_SAME) and (rule == "sum") == (r == "sum") for r, w in read):
            return rule, weight
        self.doubt = "The loss adds terms that average over different counts, so it is weighted by samples."
        return "mixed", float(self.num_samples)

    def _reduction(self, node: Any, divided: _Divided) -> tuple[str, float]:
        """A mean or sum of elements, which may themselves be losses or reductions over some dimensions."""
        is_mean, size = type(node).__name__ in _MEANS, _num_elements(node)
        inner = _below_linear(node)
        name = type(inner).__name__
        if name in ("StackBackward0", "CatBackward0") and size == len(inner.next_functions):  # of scalar losses
            if not is_mean:
                return self._branches(inner, divided)
            rules = {self.read(parent, divided)[0] for parent, _ in inner.next_functions if parent is not None}
            if size != self.num_samples and rules - {"elements", "samples"}:
                self.doubt = "The loss is the mean of a stack of losses, so it is weighted by samples."
            return "samples", float(self.num_samples)
        if name in ("MeanBackward1", "SumBackward1") and _reduces_samples(inner):
            is_mean, size = name in _MEANS, _num_elements(inner)
        if is_mean:
            return "elements", float(size)
        return self._sum(size, _masks(inner), divided)

    def _sum(self, num_elements: int, counts: list[float], divided: _Divided) -> tuple[str, float]:
        """A sum adds up, unless it was divided by a count of what was summed: then it was a mean."""
        if divided.tensors:
            return "divisor", math.prod(divided.tensors)
        known = [self.num_samples, num_elements, *counts]
        shares = [n for n in divided.numbers if n and n % self.num_samples == 0 and num_elements % n == 0]
        if shares or any(number in known for number in divided.numbers):
            # All numbers, as ``sum / B / T`` may match in one of them here and in the other one elsewhere.
            return "divisor", math.prod(divided.numbers)
        inverses = [n for n in divided.inverses if any(math.isclose(n, count, rel_tol=1e-9) for count in known)]
        if inverses:  # half of a sum is far more usual than a mean written as a product
            self.doubt = f"The loss is a sum multiplied with 1/{inverses[0]:g}, which was taken for a constant."
        strange = [number for number in divided.numbers if number != 1]
        if strange:
            self.doubt = (
                f"The loss is a sum divided by {strange[0]:g}, which is no count of its {self.num_samples} samples and"
                f" {num_elements} elements, so it was taken for a constant and micro-batches add up."
            )
        return "sum", 1.0


def _num_targets(node: Any) -> int:
    ignored = int(node._saved_ignore_index)
    ignored -= 2**64 if ignored >= 2**63 else 0  # autograd shows it unsigned
    return int((node._saved_target != ignored).sum())


def _num_elements(node: Any) -> int:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return math.prod(sizes) if sizes is not None else int(node._saved_self.numel())


def _reduces_samples(node: Any) -> bool:
    """Whether a reduction over some dimensions is over the first one, or over all (no dimension named)."""
    rank = len(node._saved_self_sym_sizes)
    dims = [int(dim) - (2**64 if dim >= 2**63 else 0) for dim in node._saved_dim or ()]
    return not dims or any(dim % max(rank, 1) == 0 for dim in dims)


def _below_linear(node: Any) -> Any:
    """The first node below a reduction that does more than scale or reshape one value."""
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    while len(parents) == 1 and type(parents[0]).__name__ in _LINEAR and not _masks(parents[0]):
        parents = [parent for parent, _ in parents[0].next_functions if parent is not None]
    return parents[0] if len(parents) == 1 else None


def _masks(node: Any) -> list[float]:
    """How many elements the mask counts that ``node`` multiplied, filled or selected with."""
    name = type(node).__name__
    if name == "MaskedFillBackward0":
        return [float((~node._saved_mask).sum())]
    if name == "WhereBackward0":
        chosen = node._saved_condition.sum()
        return [float(chosen), float(node._saved_condition.numel() - chosen)]
    if name == "MulBackward0":
        saved = (node._saved_other, node._saved_self)
        return [float(mask.sum()) for mask in saved if mask is not None and mask.numel() != 1]
    return []


def _is_number(other: Any) -> bool:
    """Whether a scalar is a Python number: autograd keeps it as a tensor that never wins type promotion."""
    if not isinstance(other, Tensor):
        return True
    small = torch.tensor(0, dtype=torch.float16 if other.is_floating_point() else torch.int8)
    return torch.result_type(other, small) == small.dtype
