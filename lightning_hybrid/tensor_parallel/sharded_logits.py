"""Loss parallelism: logits stay split over the vocabulary until their cross entropy is known.

[Note: logits that are not joined]
A column-wise head's output would be joined only to be summed up again by ``cross_entropy``: with a large vocabulary it
is the largest tensor of a step. :class:`ShardedLogits` has the shape of the joined tensor and holds this rank's
columns. Reshaping, slices of other dimensions and casts act on the columns, ``cross_entropy`` of them is computed from
shares with two sums over the ranks (Shoeybi et al., arXiv:1909.08053, section 3), and anything else joins them first,
see :mod:`joined_late`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid.tensor_parallel.collectives import share_bounds
from lightning_hybrid.tensor_parallel.joined_late import JoinedLate

__all__ = ["ShardedLogits"]


class ShardedLogits(JoinedLate):
    """Logits of which this rank holds some of the last dimension's columns."""

    what = "logits that are split over the vocabulary (loss_parallel=True)"
    remedy = "loss_parallel=False"

    def with_local(self, local: Tensor) -> ShardedLogits:
        """Return the same columns of another tensor."""
        return ShardedLogits(local, self.shape[-1], self._group)


def _reshape(logits: ShardedLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """``view``/``reshape`` to a shape that ends with all columns."""
    shape = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)) else args
    if kwargs or not shape or not all(isinstance(n, int) for n in shape):
        return NotImplemented
    rows, size = list(shape[:-1]), logits.shape[-1]
    known = [n for n in shape if n >= 0]
    last = shape[-1] if shape[-1] >= 0 else logits.numel() // max(torch.Size(known).numel(), 1)
    if last != size:
        return NotImplemented
    return logits.with_local(logits._local.reshape(*rows, logits._local.shape[-1]))


def _flatten(logits: ShardedLogits, func: Any, args: Any, kwargs: Any) -> Any:
    start = kwargs.get("start_dim", args[0] if args else 0)
    end = kwargs.get("end_dim", args[1] if len(args) > 1 else -1)
    if end % logits.dim() == logits.dim() - 1 and start % logits.dim() != logits.dim() - 1:
        return NotImplemented
    return logits.with_local(logits._local.flatten(start, end))


def _index(logits: ShardedLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """Basic slices and numbers that leave the last dimension alone."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if any(not isinstance(i, (slice, int, type(Ellipsis))) or isinstance(i, bool) for i in index):
        return NotImplemented
    is_whole = index[-1] == slice(None)
    reaches_last = Ellipsis in index or len(index) == logits.dim()
    if reaches_last and not is_whole and index[-1] is not Ellipsis:
        return NotImplemented
    return logits.with_local(logits._local[index])


def _cast(logits: ShardedLogits, func: Any, args: Any, kwargs: Any) -> Any:
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return NotImplemented
    return logits.with_local(func(logits._local, *args, **kwargs))


def _cross_entropy(logits: ShardedLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """``F.cross_entropy`` of rows ``(num_rows, num_classes)`` and class indices, without class weights."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target = given.pop("target")
    plain = all(given.pop(name, None) is None for name in ("weight", "size_average", "reduce"))
    if not plain or target.is_floating_point() or logits.dim() != 2 or target.dim() != 1:
        return NotImplemented
    ignore, reduction = given.pop("ignore_index", -100), given.pop("reduction", "mean")
    smoothing = given.pop("label_smoothing", 0.0)
    local = logits._local
    if torch.is_autocast_enabled(local.device.type):  # as F.cross_entropy does
        local = local.float()
    start, _ = share_bounds(logits.shape[-1], dist.get_world_size(logits._group), dist.get_rank(logits._group))
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        local, target, start, logits.shape[-1], ignore, reduction, smoothing, logits._group
    )
    return loss


ShardedLogits.handlers = {
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: lambda logits, func, args, kwargs: _reshape(logits, func, args, kwargs),
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _index,
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys(
        (Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.contiguous, Tensor.detach), _cast
    ),
}


class _CrossEntropy(torch.autograd.Function):
    """Mean, sum or rows of ``log(sum(exp(x))) - x[target]``, from each rank's columns of ``x``."""

    num_targets: int
    reduction: str

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        target: Tensor,
        start: int,
        size: int,
        ignore_index: int,
        reduction: str,
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        shifted = local.to(torch.promote_types(local.dtype, torch.float32))
        highest = shifted.amax(1) if local.shape[1] else shifted.new_full((len(local),), -torch.inf)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted = shifted - highest.unsqueeze(1)
        exponents = shifted.exp()
        counted = target != ignore_index
        here = counted & (target >= start) & (target < start + local.shape[1])
        column = torch.where(here, target - start, 0)
        own = shifted.gather(1, column.unsqueeze(1)).squeeze(1) if local.shape[1] else torch.zeros_like(highest)
        sums = torch.stack([exponents.sum(1), torch.where(here, own, 0.0), shifted.sum(1)])
        dist.all_reduce(sums, group=group)
        total, at_target, over_all = sums
        loss = total.log() - at_target
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (total.log() - over_all / size)
        loss = torch.where(counted, loss, 0.0)
        ctx.num_targets, ctx.reduction, ctx.smoothing, ctx.size = int(counted.sum()), reduction, smoothing, size
        ctx.save_for_backward(exponents.div_(total.unsqueeze(1)), column, here, counted)
        ctx.dtype = local.dtype
        if reduction != "none":
            loss = loss.sum() / ctx.num_targets if reduction == "mean" else loss.sum()
        result: Tensor = loss.to(local.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        softmax, column, here, counted = ctx.saved_tensors
        rows = gradient.to(softmax.dtype) / (max(ctx.num_targets, 1) if ctx.reduction == "mean" else 1)
        rows = torch.where(counted, rows, 0.0).unsqueeze(1)
        found = softmax - ctx.smoothing / ctx.size
        if found.shape[1]:
            found.scatter_add_(1, column.unsqueeze(1), -(1 - ctx.smoothing) * here.to(found.dtype).unsqueeze(1))
        return ((found * rows).to(ctx.dtype), *(None,) * 7)
