"""A batch, cut into micro-batches along its samples.

[Note: which tensors have a row per sample]
The batch size is the first dimension of the batch's first tensor. A tensor has a row per sample if its first dimension
is the batch size; any other tensor, number, string or ``None`` is the same in every micro-batch. That can be a
coincidence: an 8 x 8 bias in a batch of 8. Where the batch size is also the size of a later dimension (sequences as
long as the batch is large), nothing in the shapes says which is which. Then what earlier batches have shown decides, or
that the loader uses torch's default collate function, which only ever stacks samples; else the batch is refused, and
the user says which tensors are not cut: ``Hybrid3DStrategy(unbatched=["rel_bias"])`` (an empty list: none).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves, tree_map_with_path

from lightning_hybrid.errors import ConfigurationError, UnsupportedError

__all__ = ["BatchSplitter", "batch_size_of", "split_sizes"]


def batch_size_of(batch: Any) -> int:
    """Return the number of samples: the first dimension of the first tensor that has one.

    Raises:
        ConfigurationError: if the batch has no such tensor.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise ConfigurationError(
        f"The batch ({type(batch).__name__}) holds no tensor with a batch dimension, so it cannot be cut into"
        " micro-batches. Use pipeline_parallel_size=1, or return tensors from the dataset."
    )


def split_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Return the sizes of micro-batches, as even as possible, larger ones first; never an empty one."""
    num = min(num_samples, num_microbatches)
    small, rest = divmod(num_samples, num)
    return [small + (i < rest) for i in range(num)]


class BatchSplitter:
    """Cuts the batches of one loader, and remembers which of their tensors have a row per sample."""

    def __init__(self, unbatched: Collection[str] | None = None, *, only_stacks: bool = False) -> None:
        """``unbatched`` names tensors that are not cut; ``only_stacks``: the loader uses torch's default collate."""
        self._unbatched = unbatched
        self._only_stacks = only_stacks
        self._has_rows: dict[str, bool] = {}

    def split(self, batch: Any, num_microbatches: int) -> list[tuple[Any, int]]:
        """Cut a batch into at most ``num_microbatches`` pieces. Returns pairs of a piece and its number of samples.

        Lists of as many entries as there are samples that hold no tensors (names, texts) are cut as tensors are.

        Raises:
            ConfigurationError: if it cannot be told which tensors have a row per sample.
            UnsupportedError: for offsets into a packed batch.
        """
        return self.cut(batch, split_sizes(batch_size_of(batch), num_microbatches))

    def cut(self, batch: Any, sizes: Sequence[int]) -> list[tuple[Any, int]]:
        """Cut pieces of these sizes from the front of a batch; see :meth:`split`."""
        size = batch_size_of(batch)
        rows = self._find_rows(batch, size)
        ends = [0, *itertools.accumulate(sizes)]

        def piece(first: int, last: int) -> Any:
            def cut(path: Any, leaf: Any) -> Any:
                return leaf[first:last] if rows[_name(path)] else leaf

            return tree_map_with_path(cut, batch, is_leaf=lambda node: _is_list_of_samples(node, size))

        return [(piece(first, last), last - first) for first, last in itertools.pairwise(ends)]

    def _find_rows(self, batch: Any, size: int) -> dict[str, bool]:
        leaves: dict[str, Any] = {}

        def note(path: Any, leaf: Any) -> Any:
            leaves[_name(path)] = leaf

        tree_map_with_path(note, batch, is_leaf=lambda node: _is_list_of_samples(node, size))
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dim() > 0}
        _refuse_offsets(tensors, size)
        ambiguous = None if self._only_stacks else _coincidence(tensors, size)
        rows = {}
        for name, leaf in leaves.items():
            if not isinstance(leaf, Tensor):
                rows[name] = _is_list_of_samples(leaf, size)
            elif name not in tensors or leaf.shape[0] != size:
                rows[name] = False
            elif self._unbatched is not None:
                rows[name] = name not in self._unbatched and name.split(".")[-1] not in self._unbatched
            elif ambiguous is not None and name not in self._has_rows:
                raise ConfigurationError(_unclear(tensors, size, ambiguous))
            else:
                rows[name] = self._has_rows[name] if ambiguous is not None else True
        if ambiguous is None:
            self._has_rows.update({name: rows[name] for name in tensors})
        return rows


def _coincidence(tensors: dict[str, Tensor], size: int) -> str | None:
    """The name of a tensor that has the batch size as a later dimension too."""
    for name, tensor in tensors.items():
        if size > 1 and size in tensor.shape[1:]:
            return name
    return None


def _unclear(tensors: dict[str, Tensor], size: int, name: str) -> str:
    candidates = [other for other, tensor in tensors.items() if tensor.shape[0] == size]
    return (
        f"The batch size {size} is also the size of another dimension ({name or 'the batch'} has shape"
        f" {tuple(tensors[name].shape)}), so it cannot be told which of the tensors {candidates} have a row per sample."
        " Use Hybrid3DStrategy(unbatched=[...]) with the names of those that have none ([] if all have), another batch"
        " size, or pipeline_parallel_size=1."
    )


def _refuse_offsets(tensors: dict[str, Tensor], size: int) -> None:
    """Offsets into a packed batch speak of the whole batch; cut or not, they would be wrong."""
    sizes = {tensor.shape[0] for tensor in tensors.values()} | {size}
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or tensor.is_floating_point() or tensor.numel() < 2 or tensor.numel() == size:
            continue
        first, last = int(tensor[0]), int(tensor[-1])
        is_sorted = bool((tensor[1:] >= tensor[:-1]).all())
        if first == 0 and is_sorted and (tensor.numel() == size + 1 or last in sizes):
            raise UnsupportedError(
                f"{name} holds {tensor.numel()} ascending offsets from 0 to {last}, as packed sequences have."
                " They speak of the whole batch and cannot be cut into micro-batches. Compute them from the other"
                " tensors in training_step, or use pipeline_parallel_size=1."
            )


def _is_list_of_samples(node: Any, size: int) -> bool:
    is_list = isinstance(node, list) and len(node) == size and size > 0
    return is_list and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node))


def _name(path: Any) -> str:
    """A leaf's place in the batch, as people write it: ``mask``, ``1.mask``."""
    return keystr(path).replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").strip(".")
