"""Tensors that stay split over the tensor ranks until something needs them whole.

A :class:`JoinedLate` has the shape of the joined tensor and holds this rank's share. What knows shares takes the share;
whatever else gets it joins it first, once; from then on it is the joined tensor, which may be changed in place. So
values are always those of the joined tensor; but whatever joins it is a collective that all tensor ranks must take part
in. Where functions can act on the share, what they return does not follow such changes: they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_hybrid.errors import UnsupportedError
from lightning_hybrid.tensor_parallel.collectives import join_shares

__all__ = ["JoinedLate", "joined"]


class JoinedLate(Tensor):
    """A tensor of which this rank holds some of one dimension's entries (shares as in ``share_bounds``)."""

    what: ClassVar[str]
    """What it is, for messages."""
    remedy: ClassVar[str]
    handlers: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    """For functions that can act on the share: what to do, given the tensor, the function, and its other arguments."""

    _local: Tensor
    _dim: int
    _group: dist.ProcessGroup
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, size: int, group: dist.ProcessGroup, dim: int = -1) -> JoinedLate:
        """Wrap the rank's share ``local`` of a dimension that has ``size`` entries in all."""
        dim %= local.dim()
        made: JoinedLate = Tensor._make_wrapper_subclass(
            cls,
            (*local.shape[:dim], size, *local.shape[dim + 1 :]),
            dtype=local.dtype,
            device=local.device,
            requires_grad=local.requires_grad,
        )
        made._local, made._dim, made._group, made._whole = local, dim, group, None
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # one rank may print it alone: no collective
        return f"{type(self).__name__}(shape={tuple(self.shape)}, this rank's share={self._local!r})"

    def join(self) -> Tensor:
        """Return the whole tensor. A collective over the tensor ranks the first time."""
        if self._whole is None:
            self._refuse_other_history()
            self._whole = join_shares(self._local, self.shape[self._dim], self._group, self._dim)
        return self._whole

    @property
    def share(self) -> Tensor | None:
        """This rank's share; ``None`` once the whole was joined, which may have been changed since."""
        if self._whole is None:
            self._refuse_other_history()
        return self._local if self._whole is None else None

    def _refuse_other_history(self) -> None:
        """Whoever returned it from an ``autograd.Function`` gave it a history that its share does not have."""
        if self.requires_grad and not self._local.requires_grad:
            raise UnsupportedError(
                f"A torch.autograd.Function (torch.utils.checkpoint with use_reentrant=True?) returned {self.what} and"
                f" its gradient would be lost. Use checkpoint(..., use_reentrant=False), or {self.remedy}."
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        changes = (name.endswith("_") and not name.endswith("__")) or name in _REFUSED or "out" in kwargs
        if changes and cls.handlers:
            raise UnsupportedError(
                f"{name} of {cls.what} would act on a copy. Use what returns a new tensor, or {cls.remedy}."
            )
        first = args[0] if args else None
        if isinstance(first, cls) and first.share is not None and func in cls.handlers:
            result = cls.handlers[func](first, func, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        return func(*joined(args), **joined(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UnsupportedError(
            f"{func} got {cls.what} in a way that cannot join them first (a torch.autograd.Function or an extension)."
            f" Use {cls.remedy}."
        )


def joined(values: Any) -> Any:
    """Return ``values`` with every :class:`JoinedLate` among them joined."""
    return tree_map_only(JoinedLate, JoinedLate.join, values)


_REFUSED = {"__setitem__", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"}
_READ = ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda", "layout")
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _READ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.ndimension),
    *(torch.is_floating_point, torch.numel, Tensor.element_size, Tensor.nelement),
}
