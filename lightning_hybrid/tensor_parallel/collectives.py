"""The four exchanges of tensor parallelism, each with the exchange that its gradient needs.

Between modules every tensor-parallel rank holds the same full tensor and, on the way back, the same full gradient.
Inside, a rank holds its share of the features (the last dimension). These functions cross that border:

========================  =======================  =======================  ==========================================
function                  forward                  backward                 stands before/after
========================  =======================  =======================  ==========================================
:func:`enter_split`       hand on                  sum over ranks           a column-wise linear's input
:func:`leave_partial`     sum over ranks           hand on                  a row-wise linear's output
:func:`gather_features`   join the ranks' shares   keep the own share       a column-wise output that is needed whole
:func:`split_features`    keep the own share       join the ranks' shares   a row-wise linear's input that comes whole
========================  =======================  =======================  ==========================================

(Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3: ``f`` and ``g``.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["JoinedRows", "enter_split", "gather_features", "leave_partial", "share_bounds", "split_features"]


def share_bounds(size: int, num_shares: int, index: int) -> tuple[int, int]:
    """Return where share ``index`` of ``size`` rows starts and ends, as ``torch.chunk`` and DTensor's Shard cut them.

    Every share has ``ceil(size / num_shares)`` rows; the last ones may be shorter, or empty.
    """
    step = -(-size // num_shares)
    return min(index * step, size), min((index + 1) * step, size)


@dataclass(frozen=True, kw_only=True)
class JoinedRows:
    """A weight that joins several projections (query, key and value), each split by itself over the ranks."""

    parts: tuple[int, ...]
    """Rows of each projection; ``num_shares`` divides each."""
    num_shares: int
    dim: int = 0
    """Along which the rows stand: 1 in a weight ``[in, out]``."""

    @property
    def order(self) -> Tensor:
        """Which row stands where: the ranks' shares one after the other are ``whole[order]``."""
        rows = torch.arange(sum(self.parts)).split(list(self.parts))
        return torch.cat([part.chunk(self.num_shares)[share] for share in range(self.num_shares) for part in rows])

    def fit(self, tensor: Tensor | Any) -> bool:
        """Whether a tensor (an optimizer's state) has these rows."""
        return len(tensor.shape) > self.dim and tensor.shape[self.dim] == sum(self.parts)

    def sorted(self, whole: Tensor) -> Tensor:
        """Put rows that stand in the ranks' order back into that of one process."""
        return torch.empty_like(whole).index_copy_(self.dim, self.order.to(whole.device), whole)


def enter_split(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Hand on a full tensor to modules that are split; their partial gradients are summed over ``group``.

    Several projections of one tensor (query, key, value; gate, up) share one sum: what is handed on is remembered on
    the tensor itself, so it lives exactly as long.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if x.is_leaf or torch.compiler.is_compiling():  # remembered on a leaf, it would hold the leaf in a cycle
        return _EnterSplit.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]
    key = (x._version, id(group))  # changed in place since then: not the same values
    remembered = getattr(x, "_hybrid_entered", None)
    if remembered is None or remembered[0] != key:
        remembered = (key, _EnterSplit.apply(x, group))  # type: ignore[no-untyped-call]
        x._hybrid_entered = remembered  # type: ignore[attr-defined]
    entered: Tensor = remembered[1]
    return entered


def leave_partial(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' partial results."""
    return _LeavePartial.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_features(x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """Join the ranks' shares of the last dimension into its full ``size`` (shares may differ, see share_bounds)."""
    return _GatherFeatures.apply(x, size, group)  # type: ignore[no-any-return, no-untyped-call]


def split_features(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Keep this rank's share of the last dimension of a full tensor."""
    return _SplitFeatures.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def _gather(x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    num_shares = dist.get_world_size(group)
    step = share_bounds(size, num_shares, 0)[1]
    if x.shape[-1] < step:  # collectives want equal shares; the padding ends up behind the last feature
        x = torch.nn.functional.pad(x, (0, step - x.shape[-1]))
    shares = x.new_empty((num_shares * x.shape[0], *x.shape[1:]))  # gloo insists on this shape
    dist.all_gather_single(shares, x.contiguous(), group=group)
    joined = shares.view(num_shares, *x.shape).movedim(0, -2).flatten(-2)
    # Not a view: users may change outputs (logits) in place, which autograd refuses for a function's view.
    return joined[..., :size].clone(memory_format=torch.contiguous_format) if joined.shape[-1] > size else joined


def _keep(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    start, end = share_bounds(x.shape[-1], dist.get_world_size(group), dist.get_rank(group))
    return x[..., start:end].contiguous()


class _EnterSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.detach()  # a view would hold x, which remembers it: a cycle that Python cannot see

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may hand the same gradient tensor to another consumer, which must not see the sum.
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _LeavePartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        # Not in place: selective recomputation keeps the product before, and would sum it once more.
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _keep(grad, ctx.group), None, None


class _SplitFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.size = group, x.shape[-1]
        return _keep(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.size, ctx.group), None
