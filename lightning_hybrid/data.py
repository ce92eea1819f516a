"""Batches: cut into micro-batches, looked at before the first step, and the same on all ranks of a group."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

__all__ = ["batch_size_of", "make_peekable", "peek_first_batch", "same_worker_seeds", "split_batch", "split_sizes"]

logger = logging.getLogger(__name__)


def batch_size_of(batch: Any) -> int:
    """Return the number of samples: the first dimension of the first tensor that has one.

    Raises:
        ValueError: if the batch has no such tensor.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise ValueError(
        f"The batch ({type(batch).__name__}) holds no tensor with a batch dimension, so it cannot be cut into"
        " micro-batches; use pipeline_parallel_size=1 or return tensors from the dataset."
    )


def split_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Return the sizes of micro-batches, as even as possible, larger ones first; never an empty one."""
    num = min(num_samples, num_microbatches)
    small, rest = divmod(num_samples, num)
    return [small + (i < rest) for i in range(num)]


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Cut a batch into at most ``num_microbatches`` micro-batches.

    Tensors whose first dimension is the batch size are cut, and so are lists of that length that hold no tensors; all
    other leaves are the same in every micro-batch.
    """
    size = batch_size_of(batch)
    ends = [0]
    for part in split_sizes(size, num_microbatches):
        ends.append(ends[-1] + part)

    def is_list_of_samples(node: Any) -> bool:
        return (
            isinstance(node, list) and len(node) == size and not any(isinstance(x, Tensor) for x in tree_leaves(node))
        )

    def cut(leaf: Any, first: int, last: int) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[first:last] if leaf.dim() > 0 and leaf.shape[0] == size else leaf
        return leaf[first:last] if is_list_of_samples(leaf) else leaf

    return [
        tree_map(lambda leaf, a=first, b=last: cut(leaf, a, b), batch, is_leaf=is_list_of_samples)
        for first, last in itertools.pairwise(ends)
    ]


class _PeekableIterator:
    """An iterator whose first item can be looked at before it is delivered."""

    def __init__(self, loader: Any, make: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._make = loader, make
        self._iterator = make()
        self._first: list[Any] = []
        self._epoch: Any = None
        self.started = False

    def __iter__(self) -> _PeekableIterator:
        return self

    def __next__(self) -> Any:
        if not self.started:
            self.started = True
            first, self._first = self._first, []
            if first and self._epoch == _epoch_of(self._loader):
                return first[0]
            if first:  # the sampler has moved to another epoch since: its order is another one
                self._iterator = self._make()
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def peek(self) -> Any:
        if not self._first:
            self._epoch = _epoch_of(self._loader)
            self._first = [next(self._iterator)]
        return self._first[0]


class _Peekable:
    """Mixed into a loader's class: remembers its latest iterator, and hands one out that was only looked at."""

    def __iter__(self) -> Iterator[Any]:
        waiting = self.__dict__.pop("_looked_at", None)
        iterator = waiting or _PeekableIterator(self, super().__iter__)  # type: ignore[misc]
        self.__dict__["_latest"] = iterator
        return iterator

    def load_state_dict(self, state: Any) -> None:
        """A restored loader starts elsewhere: forget what was looked at."""
        self.__dict__.pop("_looked_at", None)
        super().load_state_dict(state)  # type: ignore[misc]


def _epoch_of(loader: Any) -> Any:
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    return tuple(getattr(sampler, "epoch", None) for sampler in samplers)


def make_peekable(loader: Any) -> Any:
    """Give a loader a class whose iterators can be looked into by :func:`peek_first_batch`."""
    cls = type(loader)
    if not issubclass(cls, _Peekable) and hasattr(cls, "__iter__"):
        try:
            loader.__class__ = type(cls.__name__, (_Peekable, cls), {"__module__": cls.__module__})
        except TypeError as error:  # lists and other built-in iterables start anew each time anyway
            logger.debug("%s cannot be made peekable: %s", cls.__name__, error)
    return loader


def peek_first_batch(loader: Any) -> Any:
    """Return the first batch of a loader, which will still deliver it as its first batch.

    Nothing is consumed: what was taken from the loader's latest (or next) iterator is put in front of it again, unless
    the sampler has moved to another epoch by then.

    Raises:
        ValueError: if the loader is empty.
    """
    try:
        if not isinstance(loader, _Peekable):
            return next(iter(loader))
        iterator = loader.__dict__.get("_latest")
        if iterator is None or iterator.started:
            iterator = iter(loader)
            loader.__dict__["_looked_at"] = iterator
        return iterator.peek()  # type: ignore[union-attr]
    except StopIteration:
        raise ValueError("The data loader is empty, so there is no batch along which the step could be cut.") from None


def same_worker_seeds(loader: Any, data_rank: int) -> None:
    """Seed the workers of a loader by data coordinate, so that ranks of one group augment alike.

    Lightning would seed them by global rank. A ``worker_init_fn`` of the user's is left alone.
    """
    from lightning.fabric.utilities.seed import pl_worker_init_function

    if isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        loader.worker_init_fn = _WorkerInit(pl_worker_init_function, data_rank)


class _WorkerInit:
    def __init__(self, function: Any, data_rank: int) -> None:
        self._function, self._data_rank = function, data_rank

    def __call__(self, worker_id: int) -> None:
        self._function(worker_id, self._data_rank)
