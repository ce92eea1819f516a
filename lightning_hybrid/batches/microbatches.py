"""A batch, cut into micro-batches along its samples.

[Note: which tensors have a row per sample]
The batch size is the first dimension of the batch's first tensor. A tensor (or numpy array) has a row per sample if its
first dimension is the batch size; any other one, a number, a string and ``None`` are the same in every micro-batch.
That can be a coincidence: an 8 x 8 bias in a batch of 8. Where the batch size is also the size of a later dimension
(sequences as long as the batch is large), nothing in the shapes says which is which. Certain are then the first tensor,
the names that Hugging Face's models give a meaning, what earlier batches have shown, and any batch of torch's default
collate function, which only ever stacks samples; else the batch is refused, and the user says which tensors are not
cut: ``Hybrid3DStrategy(unbatched=["rel_bias"])`` (an empty list: none).

Sequences of as many strings or other objects without tensors (names, which the default collate function leaves in a
tuple) have an entry per sample too; of a tuple of as many numbers, which may be a size, that cannot be told.

Samples of different sizes may come as lists with one entry for each: of tensors, or of dicts of them, all of one kind.
Then the batch size is the number of entries. Such lists are told from lists of a batch's fields (inputs, targets) by
their first dimensions, which differ, while no tensor outside of them contradicts.
"""

from __future__ import annotations

import itertools
import numbers
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_hybrid.batches.structure import leaves_of, map_leaves, open_node
from lightning_hybrid.errors import ConfigurationError, UnsupportedError

__all__ = ["BatchSplitter", "batch_size_of", "split_sizes"]

#: What Hugging Face's models take with a row per sample, whatever its shape.
_ROWS_BY_NAME = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "decoder_")
    for name in ("input_ids", "attention_mask", "token_type_ids", "labels", "inputs_embeds", "position_ids")
) | {"pixel_values", "special_tokens_mask"}


def batch_size_of(batch: Any) -> int:
    """Return the number of samples: the length of lists of samples, else the first dimension of the first tensor.

    Raises:
        ConfigurationError: if the batch has no such tensor.
        UnsupportedError: if the first tensor is a packed, nested or sparse one.
    """
    if size := _num_listed_samples(batch):
        return size
    arrays = [leaf for leaf in leaves_of(batch) if _has_dimensions(leaf)]
    for leaf in [*(leaf for leaf in arrays if isinstance(leaf, Tensor)), *arrays]:
        return int(leaf.shape[0])
    if open_node(batch) is None and _holds_tensors(batch):
        raise ConfigurationError(
            f"The batch is a {type(batch).__name__}, a class of its own, which cannot be cut into micro-batches. Make"
            " it a dataclass, a named tuple or a dict, or use pipeline_parallel_size=1."
        )
    raise ConfigurationError(
        f"The batch ({type(batch).__name__}) holds no tensor with a batch dimension, so it cannot be cut into"
        " micro-batches. Use pipeline_parallel_size=1, or return tensors from the dataset."
    )


def split_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Return the sizes of micro-batches, as even as possible, larger ones first; never an empty one."""
    if num_samples == 0:
        raise ConfigurationError(
            "The batch has 0 samples. Leave empty batches out in the sampler, or have the collate function join them."
        )
    num = min(num_samples, num_microbatches)
    small, rest = divmod(num_samples, num)
    return [small + (i < rest) for i in range(num)]


class BatchSplitter:
    """Cuts the batches of one loader, and remembers which of their tensors have a row per sample."""

    def __init__(self, unbatched: Collection[str] | None = None, *, only_stacks: bool = False) -> None:
        """``unbatched`` names tensors that are not cut; ``only_stacks``: the loaders use torch's default collate."""
        self._unbatched = unbatched
        self.only_stacks = only_stacks
        self._has_rows: dict[str, bool] = {}

    def split(self, batch: Any, num_microbatches: int) -> list[tuple[Any, int]]:
        """Cut a batch into at most ``num_microbatches`` pieces. Returns pairs of a piece and its number of samples.

        Lists of as many entries as there are samples (names, texts, tensors of different sizes) are cut as tensors are.

        Raises:
            ConfigurationError: if it cannot be told which tensors have a row per sample.
            UnsupportedError: for what cannot be cut: offsets into a packed batch, packed, nested and sparse tensors,
                objects of other kinds that hold tensors.
        """
        return self.cut(batch, split_sizes(batch_size_of(batch), num_microbatches))

    def cut(self, batch: Any, sizes: Sequence[int]) -> list[tuple[Any, int]]:
        """Cut pieces of these sizes from the front of a batch; see :meth:`split`."""
        size = batch_size_of(batch)
        rows = self._find_rows(batch, size)
        ends = [0, *itertools.accumulate(sizes)]

        def piece(first: int, last: int) -> Any:
            def cut(name: str, leaf: Any) -> Any:
                if rows[name] and isinstance(leaf, deque):
                    return deque(itertools.islice(leaf, first, last))
                return leaf[first:last] if rows[name] else leaf

            return map_leaves(cut, batch, self._is_leaf(size))

        return [(piece(first, last), last - first) for first, last in itertools.pairwise(ends)]

    def check_first(self, batch: Any, num_samples: int | None) -> None:
        """Refuse a first batch whose samples, ``num_samples`` by the loader, lie along a later dimension.

        Raises:
            ConfigurationError: for time-major batches; the message names the tensor.
        """
        size = batch_size_of(batch)
        if num_samples in (None, 1, size) or self._unbatched is not None:
            return
        for name, tensor in self._named_leaves(batch, size).items():
            if _has_dimensions(tensor) and tensor.shape[0] == size and num_samples in tensor.shape[1:]:
                raise ConfigurationError(
                    f"The loader's batch size is {num_samples}, but {name or 'the batch'} has shape"
                    f" {tuple(tensor.shape)}, whose first dimension would be cut into micro-batches. Put the samples"
                    " first in the batch and turn it in training_step, say by unbatched=[] that the first dimension is"
                    " the samples', or use pipeline_parallel_size=1."
                )

    @property
    def cut_names(self) -> list[str]:
        """Names of what has been found to have a row per sample."""
        return [name for name, has_rows in self._has_rows.items() if has_rows and name]

    def _find_rows(self, batch: Any, size: int) -> dict[str, bool]:
        leaves = self._named_leaves(batch, size)
        tensors = {name: leaf for name, leaf in leaves.items() if _has_dimensions(leaf)}
        _refuse_offsets(tensors, size)
        for name, leaf in leaves.items():
            _refuse_opaque(name, leaf, size)
        ambiguous = None if self.only_stacks else _coincidence(tensors, size)
        rows = {}
        for name, leaf in leaves.items():
            said = None if self._unbatched is None else {name, name.split(".")[-1]}.isdisjoint(self._unbatched)
            if name not in tensors:
                rows[name] = _is_list_of_samples(leaf, size) and self._lists_samples(name, leaf, said)
            elif leaf.shape[0] != size:
                rows[name] = False
            elif said is not None:
                rows[name] = said
            elif ambiguous is None or name == next(iter(tensors)) or name.split(".")[-1] in _ROWS_BY_NAME:
                rows[name] = True
            elif name in self._has_rows:
                rows[name] = self._has_rows[name]
            else:
                raise ConfigurationError(_unclear(tensors, size, ambiguous))
        if ambiguous is None:
            self._has_rows.update(rows)
        return rows

    def _is_leaf(self, size: int) -> Callable[[Any], bool]:
        """What tells lists of samples. In stacks they are innermost: of pairs of names two tuples of names are made."""

        def is_leaf(node: Any) -> bool:
            is_stack = self.only_stacks and isinstance(node, _SEQUENCES) and any(open_node(entry) for entry in node)
            return not is_stack and _is_list_of_samples(node, size)

        return is_leaf

    def _named_leaves(self, batch: Any, size: int) -> dict[str, Any]:
        leaves: dict[str, Any] = {}
        map_leaves(leaves.__setitem__, batch, self._is_leaf(size))
        return leaves

    def _lists_samples(self, name: str, leaf: Any, said: bool | None) -> bool:
        """Whether a sequence with as many entries as there are samples is one of samples."""
        if said is not None or len(leaf) == 1:
            return said is not False
        if any(known.startswith(f"{name}.") for known in self._has_rows):  # it had another number of entries before
            return False
        kinds = {type(entry) for entry in leaf}
        is_nested = all(isinstance(entry, _SEQUENCES) and len(entry) == len(leaf) for entry in leaf)
        is_tuple = isinstance(leaf, tuple) and not any(isinstance(x, (Tensor, numpy.ndarray)) for x in leaves_of(leaf))
        if is_nested or (is_tuple and (len(kinds) > 1 or issubclass(kinds.pop(), (numbers.Number, type(None))))):
            raise ConfigurationError(
                f"{name or 'The batch'} has as many entries as the batch has samples ({len(leaf)}), and it cannot be"
                " told whether there is one for each. Use Hybrid3DStrategy(unbatched=[...]) with the names of those"
                " that have none ([] if all have), return a tensor from the collate function, or use"
                " pipeline_parallel_size=1."
            )
        return True


_SEQUENCES = (list, tuple, deque)


def _has_dimensions(leaf: Any) -> bool:
    """Whether a leaf is a tensor or array that could have a row per sample."""
    return isinstance(leaf, (Tensor, numpy.ndarray)) and leaf.ndim > 0


def _num_listed_samples(batch: Any) -> int | None:
    """The number of samples, if the batch holds lists of them; see the module's note."""
    inside: dict[int, set[int]] = {}
    outside: set[int] = set()

    def note(name: str, leaf: Any) -> None:
        if _is_alike(leaf):
            inside.setdefault(len(leaf), set()).update(t.shape[0] for t in leaves_of(leaf) if _has_dimensions(t))
        elif _has_dimensions(leaf):
            outside.add(int(leaf.shape[0]))

    map_leaves(note, batch, _is_alike)
    for length, first_dims in inside.items():
        if len(first_dims) > 1 and (length in outside or not outside):
            return length
    return None


def _is_alike(node: Any) -> bool:
    """Whether a list's entries could be samples: all have tensors, of the same names, dtypes and ranks."""
    if not isinstance(node, (list, tuple)) or hasattr(node, "_fields") or len(node) < 2 or any(map(_is_alike, node)):
        return False
    kinds = set()
    for entry in node:
        looks: list[Any] = []
        map_leaves(lambda name, leaf, looks=looks: looks.append((name, _kind(leaf))), entry)  # type: ignore[misc]
        kinds.add((type(entry), tuple(looks)))
    return len(kinds) == 1 and any(_has_dimensions(leaf) for leaf in leaves_of(node[0]))


def _kind(leaf: Any) -> Any:
    return (leaf.dtype, leaf.ndim) if isinstance(leaf, (Tensor, numpy.ndarray)) else type(leaf)


def _is_list_of_samples(node: Any, size: int) -> bool:
    """Whether a list may have an entry per sample: none of them with tensors, or all of one kind and not fields."""
    if not isinstance(node, _SEQUENCES) or isinstance(node, torch.Size) or hasattr(node, "_fields"):
        return False
    if len(node) != size or size < 1:
        return False
    dims = {int(leaf.shape[0]) for leaf in leaves_of(node) if _has_dimensions(leaf)}
    if not any(isinstance(leaf, (Tensor, numpy.ndarray)) for leaf in leaves_of(node)):
        return True
    return dims != {size} and _is_alike(node)


def _coincidence(tensors: Mapping[str, Any], size: int) -> str | None:
    """The name of a tensor that has the batch size as a later dimension too."""
    for name, tensor in tensors.items():
        if size > 1 and size in tensor.shape[1:]:
            return name
    return None


def _unclear(tensors: Mapping[str, Any], size: int, name: str) -> str:
    candidates = [other for other, tensor in tensors.items() if tensor.shape[0] == size]
    return (
        f"The batch size {size} is also the size of another dimension ({name or 'the batch'} has shape"
        f" {tuple(tensors[name].shape)}), so it cannot be told which of the tensors {candidates} have a row per sample."
        " Use Hybrid3DStrategy(unbatched=[...]) with the names of those that have none ([] if all have), another batch"
        " size, or pipeline_parallel_size=1."
    )


def _refuse_offsets(tensors: Mapping[str, Any], size: int) -> None:
    """Offsets into a packed batch speak of the whole batch; cut or not, they would be wrong."""
    sizes = {tensor.shape[0] for tensor in tensors.values()} | {size}
    for name, array in tensors.items():
        if array.ndim != 1 or array.shape[0] in (1, size) or not _is_integer(array):
            continue
        tensor = torch.as_tensor(array)
        first, last = int(tensor[0]), int(tensor[-1])
        is_sorted = bool((tensor[1:] >= tensor[:-1]).all())
        if first == 0 and is_sorted and (tensor.numel() == size + 1 or last in sizes):
            raise UnsupportedError(
                f"{name} holds {tensor.numel()} ascending offsets from 0 to {last}, as packed sequences have."
                " They speak of the whole batch and cannot be cut into micro-batches. Compute them from the other"
                " tensors in training_step, or use pipeline_parallel_size=1."
            )


def _is_integer(array: Any) -> bool:
    if isinstance(array, Tensor):
        return not (array.is_floating_point() or array.is_complex())
    return bool(numpy.issubdtype(array.dtype, numpy.integer))


def _refuse_opaque(name: str, leaf: Any, size: int) -> None:
    """Refuse what holds tensors, or an entry for each sample, in a way that cannot be cut."""
    if isinstance(leaf, Tensor):
        if leaf.layout == torch.strided and not leaf.is_nested:
            return
        what = f"a {'nested' if leaf.is_nested else str(leaf.layout).removeprefix('torch.')} tensor"
    elif isinstance(leaf, PackedSequence):
        what = "a PackedSequence"
    elif open_node(leaf) is None and not isinstance(leaf, numpy.ndarray) and _holds_tensors(leaf):
        what = f"a {type(leaf).__name__} that holds tensors"
    elif _is_foreign_sequence(leaf) and len(leaf) == size > 1:
        what = f"a {type(leaf).__name__} with as many entries as the batch has samples"
    else:
        return
    raise UnsupportedError(
        f"{name or 'The batch'} is {what}, which cannot be cut into micro-batches. Return plain tensors in dicts,"
        " lists, tuples or dataclasses from the collate function, or use pipeline_parallel_size=1."
    )


def _is_foreign_sequence(leaf: Any) -> bool:
    known = (str, bytes, bytearray, *_SEQUENCES)
    return isinstance(leaf, Sequence) and not isinstance(leaf, known)


def _holds_tensors(node: Any, depth: int = 3) -> bool:
    if isinstance(node, (Tensor, numpy.ndarray)):
        return True
    if depth == 0 or isinstance(node, (type, nn.Module)):
        return False
    opened = open_node(node)
    entries = opened[1] if opened is not None else list(getattr(node, "__dict__", {}).values())
    return any(_holds_tensors(entry, depth - 1) for entry in entries)
