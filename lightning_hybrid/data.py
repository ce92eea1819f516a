"""Loaders: looked at before the first step, and the same on all ranks of a group."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from lightning_hybrid.batches.one_reader import OneReader, SharedIterator
from lightning_hybrid.batches.randomness import is_same_state, random_state, restore_random_state
from lightning_hybrid.batches.structure import leaves_of
from lightning_hybrid.errors import ConfigurationError

__all__ = [
    "check_same_batch",
    "checksum",
    "first_batch_size",
    "make_peekable",
    "peek_first_batch",
    "prepare_loader",
    "restore_loader_states",
    "same_worker_seeds",
    "uses_default_collate",
]

logger = logging.getLogger(__name__)


class _PeekableIterator:
    """An iterator whose first item can be looked at before it is delivered.

    A look draws random numbers (an order, augmentation) that are due later. Where the loader can be read again, they
    are put back; if others are drawn before the item is due, it is read anew, from where the generators are by then.
    """

    def __init__(self, loader: Any, make: Callable[[], Iterator[Any]], agree: Callable[[bool], bool]) -> None:
        """``agree`` returns what is decided on all ranks that must read alike, given this rank's opinion."""
        self._loader, self._make, self._agree = loader, make, agree
        self._iterator = make()
        self._first: list[Any] = []
        self._epoch: Any = None
        self._states: list[Any] = []
        self.num_delivered = 0

    def __iter__(self) -> _PeekableIterator:
        return self

    def __next__(self) -> Any:
        if self.num_delivered:
            self._first, self._states = [], []  # nobody asked for it
            item = next(self._iterator)
        elif self._first and self._agree(self._is_due()):
            for _, after in self._states:
                restore_random_state(after)
            item = self._first[0]
        else:
            if self._first:
                here = random_state()
                self._iterator = self._make()
                restore_random_state(here)  # a number was drawn when the first one was made
            item = next(self._iterator)
            self._first = [item]  # kept for a look that comes after a prefetch
        self.num_delivered += 1
        return item

    def _is_due(self) -> bool:
        """Whether what was looked at is what would be read now: the sampler is in that epoch, and nothing was drawn."""
        same_states = all(is_same_state(before, random_state()) for before, _ in self._states)
        return self._epoch == _epoch_of(self._loader) and same_states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def peek(self) -> Any:
        if not self._first:
            before = random_state()
            self._first = [next(self._iterator)]
            self._epoch = _epoch_of(self._loader)  # after that: some samplers count their epochs themselves
            if _can_be_read_again(self._loader):
                self._states = [(before, random_state())]
                restore_random_state(before)
        return self._first[0]


def _can_be_read_again(loader: Any) -> bool:
    """Whether a loader's order and samples follow from the global random state: nothing else is used up by reading."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    sampler = loader.sampler
    known = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    generators = (loader.generator, getattr(sampler, "generator", None))
    return type(sampler) in known and type(loader.batch_sampler) is BatchSampler and generators == (None, None)


_WAITING, _LATEST, _READER = "_hybrid_waiting_iterator", "_hybrid_latest_iterator", "_hybrid_reader"
#: Where iterators are made on all ranks alike: Lightning's loops make theirs in the first one.
_ASKED_BY_ALL = (CombinedLoader.__module__, __name__)


def _iter(self: Any) -> Any:
    """Of a peekable loader: hand out the iterator that was only looked at, or a new one, and remember it."""
    base, reader = functools.partial(type(self)._hybrid_base.__iter__, self), self.__dict__.get(_READER)
    if reader is not None and sys._getframe(1).f_globals["__name__"] not in _ASKED_BY_ALL:
        return base()  # a callback that shows samples on rank 0, say: the others do not come
    make = base if reader is None else functools.partial(SharedIterator, reader, base)
    agree = bool if reader is None else lambda value: bool(reader.share(lambda: value))
    self.__dict__[_LATEST] = self.__dict__.pop(_WAITING, None) or _PeekableIterator(self, make, agree)
    return self.__dict__[_LATEST]


def _load_state_dict(self: Any, state: Any) -> None:
    """Of a peekable loader: a restored one starts elsewhere, so forget what was looked at."""
    self.__dict__.pop(_WAITING, None)
    type(self)._hybrid_base.load_state_dict(self, state)


def _state_dict(self: Any) -> Any:
    """Of a peekable loader: a rank that does not read has no state (and to ask for it may start workers)."""
    reader = self.__dict__.get(_READER)
    return {} if reader is not None and not reader.reads else type(self)._hybrid_base.state_dict(self)


def _epoch_of(loader: Any) -> Any:
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    return tuple(getattr(sampler, "epoch", None) for sampler in samplers)


def make_peekable(loader: Any, reader: OneReader | None = None) -> Any:
    """Give a loader a class whose iterators can be looked into by :func:`peek_first_batch`, and are read by ``reader``.

    The class has one base only: Python refuses to change an instance's class to one with another layout.
    """
    cls = type(loader)
    if not hasattr(cls, "_hybrid_base"):
        loader = _with_peekable_class(loader, cls)
    if hasattr(type(loader), "_hybrid_base"):
        loader.__dict__[_READER] = reader
    return loader


def _with_peekable_class(loader: Any, cls: Any) -> Any:
    if not hasattr(cls, "__iter__"):
        return loader
    methods: dict[str, Any] = {"__iter__": _iter, "_hybrid_base": cls, "__module__": cls.__module__}
    if hasattr(cls, "load_state_dict"):
        methods["load_state_dict"] = _load_state_dict
    if hasattr(cls, "state_dict"):
        methods["state_dict"] = _state_dict
    try:
        loader.__class__ = type(cls.__name__, (cls,), methods)
    except TypeError:  # lists and other built-in iterables, which start anew each time anyway
        logger.debug("%s cannot be looked into beforehand; its first batch is read twice.", cls.__name__)
    return loader


def peek_first_batch(loader: Any) -> Any:
    """Return the first batch of a loader, which will still deliver it as its first batch.

    Nothing is consumed: what was taken from the loader's latest (or next) iterator is put in front of it again, unless
    the sampler has moved to another epoch by then.

    Raises:
        ValueError: if the loader is empty.
    """
    try:
        if not hasattr(type(loader), "_hybrid_base"):
            return next(iter(loader))
        iterator = loader.__dict__.get(_LATEST)
        if iterator is None or iterator.num_delivered > 1:
            iterator = iter(loader)
            loader.__dict__[_WAITING] = iterator
        return iterator.peek()
    except StopIteration:
        raise ValueError("The data loader is empty, so there is no batch along which the step could be cut.") from None


def restore_loader_states(module: Any) -> None:
    """Hand a checkpoint's states to training loaders that were set up, for a look, before the checkpoint was read."""
    fit_loop = module.trainer.fit_loop
    if states := fit_loop._combined_loader_states_to_load:
        fit_loop._combined_loader._load_state_dicts(states)  # Lightning's own method does so before this point only
        fit_loop._combined_loader_states_to_load = []
        iter(fit_loop._data_fetcher)


def prepare_loader(loader: Any, strategy: Any) -> Any:
    """Make a loader of a Trainer what ranks of one data coordinate need: alike, read by one of them, looked into."""
    same_worker_seeds(loader, strategy.coordinate.data)
    if strategy.layout.pipeline_parallel_size == strategy.layout.tensor_parallel_size == 1:
        return loader
    reader = OneReader(strategy.device_mesh, strategy.root_device) if strategy.settings.load_once else None
    return make_peekable(loader, reader)


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


def first_batch_size(loader: Any) -> int | None:
    """Return how many samples a loader's first batch has, if its batch size and the number of samples are known."""
    try:
        return min(int(loader.batch_size), len(loader.sampler))
    except (AttributeError, TypeError):
        return None


def uses_default_collate(loader: Any) -> bool:
    """Whether batches are samples stacked by torch's default function, so that every tensor has a row per sample."""
    return getattr(loader, "collate_fn", None) is default_collate


def checksum(batch: Any) -> tuple[Any, ...]:
    """Return a few numbers that tell whether two ranks have the same batch: shapes and sums of its tensors.

    Tensors on a device tell their shapes only: to read a sum would stop the host until the device has caught up.
    """
    tensors = [leaf.detach() for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
    return tuple((tuple(t.shape), float(t.double().sum()) if t.device.type == "cpu" else None) for t in tensors)


def check_same_batch(batch: Any, group: dist.ProcessGroup, what: str) -> None:
    """Refuse to go on if the ranks of a tensor or pipeline group read different batches. A collective.

    Raises:
        ConfigurationError: on every rank of the group.
    """
    mine = checksum(batch)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    if any(repr(other) != repr(found[0]) for other in found):  # by text: NaN equals itself
        ranks = dist.get_process_group_ranks(group)
        raise ConfigurationError(
            f"The {what} of one data coordinate read different batches: "
            + "; ".join(f"rank {rank}: {other[:2]}" for rank, other in zip(ranks, found, strict=True))
            + ". Shard data by trainer.distributed_sampler_kwargs (num_replicas, rank), not by the world size and the"
            " global rank, and make splits with a seed (seed_everything)."
        )
