"""Batches are cut along their samples, and what cannot be told is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from lightning_hybrid.microbatches import BatchSplitter, batch_size_of, split_sizes


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
