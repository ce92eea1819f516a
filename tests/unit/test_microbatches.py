"""Batches are cut along their samples, and what cannot be told is refused by name."""

from __future__ import annotations

from collections import UserDict, UserList, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor

from lightning_hybrid.batches.microbatches import BatchSplitter, batch_size_of, split_sizes
from lightning_hybrid.errors import ConfigurationError, UnsupportedError


def test_sizes_are_even_and_never_empty() -> None:
    assert split_sizes(9, 4) == [3, 2, 2, 2]
    assert split_sizes(2, 4) == [1, 1]
    assert sum(split_sizes(26, 3)) == 26


def test_nested_batches() -> None:
    batch: Any = [
        torch.arange(5),
        {"mask": torch.ones(5, 3, dtype=torch.bool), "names": list("abcde"), "bias": torch.zeros(3, 3)},
        3.0,
        None,
        "text",
        (torch.tensor(2.0),),
    ]
    parts = BatchSplitter().split(batch, 2)
    assert [size for _, size in parts] == [3, 2]
    second = parts[1][0]
    assert second[0].tolist() == [3, 4]
    assert second[1]["mask"].shape == (2, 3)
    assert second[1]["names"] == ["d", "e"]
    assert second[1]["bias"].shape == (3, 3)
    assert second[2:5] == [3.0, None, "text"]
    assert second[5][0] == 2.0


def test_a_coincidence_is_refused_by_name_and_can_be_said() -> None:
    batch = {"ids": torch.zeros(4, 4), "bias": torch.zeros(4, 4)}
    with pytest.raises(ConfigurationError, match=r"batch size 4.*\['ids', 'bias'\].*unbatched"):
        BatchSplitter().split(batch, 2)
    (part, _), _ = BatchSplitter(["bias"]).split(batch, 2)
    assert part["ids"].shape == (2, 4)
    assert part["bias"].shape == (4, 4)


def test_earlier_batches_decide_later_coincidences() -> None:
    splitter = BatchSplitter()
    splitter.split({"ids": torch.zeros(4, 6), "bias": torch.zeros(6, 6)}, 2)
    (part, _), _ = splitter.split({"ids": torch.zeros(4, 4), "bias": torch.zeros(4, 4)}, 2)
    assert part["ids"].shape == (2, 4)
    assert part["bias"].shape == (4, 4)


def test_stacked_samples_are_never_unclear() -> None:
    (part, _), _ = BatchSplitter(only_stacks=True).split({"image": torch.zeros(4, 4, 4)}, 2)
    assert part["image"].shape == (2, 4, 4)


@pytest.mark.parametrize(
    "batch",
    [
        {"ids": torch.zeros(4, 6), "cu_lens": torch.tensor([0, 2, 3, 5, 6])},
        {"ids": torch.zeros(12), "cu_seqlens": torch.tensor([0, 5, 12])},
    ],
)
def test_offsets_are_refused_by_name(batch: Any) -> None:
    with pytest.raises(UnsupportedError, match="cu_"):
        BatchSplitter().split(batch, 2)


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no tensor with a batch dimension"):
        batch_size_of({"a": 1, "b": torch.tensor(1.0)})


class Pair(NamedTuple):
    ids: Tensor
    lengths: numpy.ndarray[Any, Any]


@dataclass(frozen=True)
class Sample:
    pair: Pair
    names: list[str]
    scale: float = 2.0
    note: str | None = None


class Opaque:
    def __init__(self) -> None:
        self.inner = {"ids": torch.zeros(4)}


def test_any_structure_is_cut_and_keeps_its_type() -> None:
    pair = Pair(torch.arange(4), numpy.arange(4) * 2)
    batch = {"sample": Sample(pair, list("abcd")), "user": UserDict(x=torch.ones(4, 2)), "zero": torch.tensor(1)}
    (_, _), (second, size) = BatchSplitter().split(batch, 2)
    assert size == 2 and type(second["sample"]) is Sample and type(second["sample"].pair) is Pair
    assert second["sample"].pair.ids.tolist() == [2, 3]
    assert second["sample"].pair.lengths.tolist() == [4, 6]
    assert second["sample"].names == ["c", "d"] and second["sample"].scale == 2.0
    assert type(second["user"]) is UserDict and second["user"]["x"].shape == (2, 2)
    assert batch["user"]["x"].shape == (4, 2) and len(pair.ids) == 4


def test_batch_encodings() -> None:
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": torch.arange(12).view(4, 3)})
    (_, _), (second, _) = BatchSplitter().split(encoding, 2)
    assert type(second) is type(encoding)
    assert second.input_ids.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert dict(**second).keys() == {"input_ids"}


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_samples_of_different_sizes(kind: Any) -> None:
    images = kind(torch.full((3, 4, 4), float(i)) for i in range(4))
    targets = kind({"boxes": torch.zeros(1 + i % 2, 4), "name": str(i)} for i in range(4))
    for batch in ((images, targets), {"images": images, "targets": targets, "y": torch.arange(4)}):
        assert batch_size_of(batch) == 4
        (second, size) = BatchSplitter().split(batch, 2)[1]
        first, other, *_ = second.values() if isinstance(second, dict) else second
        assert size == 2 and [int(image[0, 0, 0]) for image in first] == [2, 3]
        assert [target["name"] for target in other] == ["2", "3"]
    alone = [torch.zeros(5), torch.ones(7), torch.ones(2)]
    assert [len(part) for part, _ in BatchSplitter().split(alone, 2)] == [2, 1]


def test_lists_of_fields_are_no_lists_of_samples() -> None:
    fields = [torch.zeros(4, 3), torch.zeros(4, 1)]
    assert batch_size_of(fields) == 4
    assert [x.shape[0] for x in BatchSplitter().split(fields, 2)[0][0]] == [2, 2]
    levels = {"x": torch.zeros(4, 3), "anchors": [torch.zeros(9, 2), torch.zeros(5, 2)]}
    assert [len(x) for x in BatchSplitter().split(levels, 2)[0][0]["anchors"]] == [9, 5]
    levels["x"] = torch.zeros(2, 3)
    assert len(BatchSplitter().split(levels, 2)[0][0]["anchors"]) == 1
    assert len(BatchSplitter(["anchors"]).split(levels, 2)[0][0]["anchors"]) == 2


@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_sequences_of_names_are_cut(kind: Any) -> None:
    """The default collate function leaves strings in tuples (of pairs) and lists (of dicts)."""
    batch = (torch.arange(4), kind("abcd"), {"paths": kind("wxyz")}, torch.Size((4, 8, 1, 2)))
    _, names, inner, shape = BatchSplitter().split(batch, 2)[1][0]
    assert type(names) is kind and list(names) == ["c", "d"] and list(inner["paths"]) == ["y", "z"]
    assert shape == (4, 8, 1, 2)
    pairs = torch.utils.data.default_collate([(0, ("a", "b")), (1, ("c", "d"))])
    assert BatchSplitter(only_stacks=True).split(pairs, 2)[1][0][1] == [("c",), ("d",)]


@pytest.mark.parametrize("value", [(4, 8), ("a", 1), (None, None), [["a", "b"], ["c", "d"]]])
def test_sequences_that_may_be_anything_are_refused_by_name(value: Any) -> None:
    batch = {"x": torch.zeros(2, 3), "more": value}
    with pytest.raises(ConfigurationError, match=r"more has as many entries.*unbatched"):
        BatchSplitter().split(batch, 2)
    assert BatchSplitter([]).split(batch, 2)[0][0]["more"] == value[:1]
    assert BatchSplitter(["more"]).split(batch, 2)[0][0]["more"] == value
    assert BatchSplitter().split({"x": torch.zeros(1, 3), "more": value[:1]}, 2)
    splitter = BatchSplitter()
    splitter.split({**batch, "x": torch.zeros(4, 3)}, 2)  # a number of entries that is not that of the samples
    assert splitter.split(batch, 2)[0][0]["more"] == value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (UserList("abcd"), "more is a UserList with as many entries"),
        (torch.nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)]), "more is a PackedSequence"),
        (torch.eye(4).to_sparse(), "more is a sparse_coo tensor"),
        (Opaque(), "more is a Opaque that holds tensors"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        BatchSplitter().split({"x": torch.zeros(4, 2), "more": value}, 2)


def test_names_of_hugging_face_are_certain() -> None:
    batch = {"input_ids": torch.zeros(4, 4), "attention_mask": torch.ones(4, 4), "labels": torch.zeros(4, 4)}
    (part, _), _ = BatchSplitter().split(batch, 2)
    assert {tensor.shape for tensor in part.values()} == {(2, 4)}
    with pytest.raises(ConfigurationError, match="unbatched"):
        BatchSplitter().split({**batch, "bias": torch.zeros(4, 4)}, 2)
    (alone, _), _ = BatchSplitter().split(torch.zeros(4, 4), 2)
    assert alone.shape == (2, 4)


def test_time_major_batches_are_refused_by_name() -> None:
    batch = {"x": torch.zeros(12, 8, 3), "y": torch.zeros(8)}
    with pytest.raises(ConfigurationError, match=r"batch size is 8, but x has shape \(12, 8, 3\)"):
        BatchSplitter().check_first(batch, 8)
    BatchSplitter().check_first(batch, None)
    BatchSplitter([]).check_first(batch, 8)
    BatchSplitter().check_first({"x": torch.zeros(8, 12)}, 8)
    BatchSplitter().check_first({"x": torch.zeros(16, 12)}, 8)  # two views of each sample
