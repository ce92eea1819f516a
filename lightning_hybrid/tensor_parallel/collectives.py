"""The exchanges of tensor parallelism, each with the exchange that its gradient needs.

Between modules every tensor-parallel rank holds the same full tensor and, on the way back, the same full gradient.
Inside, a rank holds its share of the features (the last dimension). These functions cross that border:

========================  =======================  =======================  ==========================================
function                  forward                  backward                 stands before/after
========================  =======================  =======================  ==========================================
:func:`enter_split`       hand on                  sum over ranks           a column-wise linear's input
:func:`leave_partial`     sum over ranks           hand on                  a row-wise linear's output
:func:`join_shares`       join the ranks' shares   keep the own share       a column-wise output that is needed whole
:func:`keep_share`        keep the own share       join the ranks' shares   a row-wise linear's input that comes whole
:func:`gather_tokens`     join the ranks' shares   sum, keep the own share  what is split, with sequence parallelism
:func:`scatter_partial`   sum, keep the own share  join the ranks' shares   a row-wise linear, with sequence parallelism
========================  =======================  =======================  ==========================================

(Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3: ``f`` and ``g``; Korthikanti et al., arXiv:2205.05198,
section 4.2.2: the last two.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.data_parallel.gloo import reduce_scatter
from lightning_hybrid.tensor_parallel.together import agree_first

__all__ = [
    "JoinedRows",
    "enter_split",
    "gather_tokens",
    "join_shares",
    "keep_share",
    "leave_partial",
    "scatter_partial",
    "share_bounds",
]


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
    if not (torch.is_grad_enabled() and x.requires_grad) or hasattr(x, "_hybrid_gathered"):
        return x  # the gradient of what gather_tokens joined is summed there
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


def join_shares(x: Tensor, size: int, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """Join the ranks' shares of a dimension into its full ``size`` (shares may differ, see share_bounds)."""
    return _JoinShares.apply(x, size, dim, group)  # type: ignore[no-any-return, no-untyped-call]


def keep_share(x: Tensor, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """Keep this rank's share of a dimension of a full tensor."""
    return _KeepShare.apply(x, dim, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_tokens(x: Tensor, size: int, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Join the ranks' shares of a dimension for modules that are split; their partial gradients are summed."""
    return _GatherTokens.apply(x, size, dim, group)  # type: ignore[no-any-return, no-untyped-call]


def scatter_partial(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Sum the ranks' partial results and keep this rank's share of a dimension."""
    return _ScatterPartial.apply(x, dim, group)  # type: ignore[no-any-return, no-untyped-call]


def _join(x: Tensor, size: int, dim: int, group: dist.ProcessGroup) -> Tensor:
    num_shares, dim = dist.get_world_size(group), dim % x.dim()
    x = _padded(x, dim, share_bounds(size, num_shares, 0)[1])  # behind the last row, where it is cut off again
    shares = x.new_empty((num_shares * x.shape[0], *x.shape[1:]))  # gloo insists on this shape
    agree_first(group)
    dist.all_gather_single(shares, x.contiguous(), group=group)
    joined = shares.view(num_shares, *x.shape).movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, size)
    # Not a view: users may change outputs (logits) in place, which autograd refuses for a function's view.
    return joined.clone(memory_format=torch.contiguous_format) if joined._base is not None else joined


def _sum_and_keep(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    num_shares, dim, size = dist.get_world_size(group), dim % x.dim(), x.shape[dim]
    step = share_bounds(size, num_shares, 0)[1]
    shares = _padded(x, dim, num_shares * step).unflatten(dim, (num_shares, step)).movedim(dim, 0).contiguous()
    own = torch.empty_like(shares[0])
    agree_first(group)
    reduce_scatter(own, shares, group)
    start, end = share_bounds(size, num_shares, dist.get_rank(group))
    return own if end - start == step else own.narrow(dim, 0, end - start).clone()


def _keep(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    start, end = share_bounds(x.shape[dim], dist.get_world_size(group), dist.get_rank(group))
    return x.narrow(dim, start, end - start).clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Collectives want equal shares."""
    missing = size - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim)


class _EnterSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.detach()  # a view would hold x, which remembers it: a cycle that Python cannot see

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may hand the same gradient tensor to another consumer, which must not see the sum.
        grad = grad.clone(memory_format=torch.contiguous_format)
        agree_first(ctx.group)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _LeavePartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        # Not in place: selective recomputation keeps the product before, and would sum it once more.
        total = x.detach().clone(memory_format=torch.contiguous_format)
        agree_first(group)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _JoinShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _join(x, size, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _keep(grad, ctx.dim, ctx.group), None, None, None


class _KeepShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, x.shape[dim]
        return _keep(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _join(grad, ctx.size, ctx.dim, ctx.group), None, None


class _GatherTokens(_JoinShares):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_and_keep(grad, ctx.dim, ctx.group), None, None, None


class _ScatterPartial(_KeepShare):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, x.shape[dim]
        return _sum_and_keep(x, dim, group)
