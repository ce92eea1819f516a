"""Loaders: looked at before the first step, and the same on all ranks of a group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, default_collate

__all__ = ["make_peekable", "peek_first_batch", "same_worker_seeds", "uses_default_collate"]

logger = logging.getLogger(__name__)


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


def uses_default_collate(loader: Any) -> bool:
    """Whether batches are samples stacked by torch's default function, so that every tensor has a row per sample."""
    return getattr(loader, "collate_fn", None) is default_collate
