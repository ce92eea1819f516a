"""Dicts by parameter name that each stage's hook has made are joined; everything else stays the rank's own."""

from __future__ import annotations

from typing import Any

import torch

from lightning_hybrid.checkpoint.stage_parts import join_stages

NAMES = ("a", "b", "c")


def checkpoint(*names: str) -> dict[str, Any]:
    return {
        "state_dict": {"a": torch.zeros(1)},
        "ema": {**{name: torch.full((2,), float(ord(name))) for name in names}, "decay": 0.9},
        "callbacks": {"Mine": {"shadow": {name: torch.ones(1) for name in names}, "list": [1]}},
        "other": {"x": torch.ones(3)},
    }


def joined(*ranks: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """What each rank has afterwards, and how many exchanges it took."""
    said: list[list[Any]] = []
    while True:  # each rank in turn with what the others say up to the next exchange
        found, asked = [], []
        for rank in ranks:
            answers = iter(said)

            def gather(value: Any, answers: Any = answers, asked: list[Any] = asked) -> list[Any]:
                if (answer := next(answers, None)) is None:
                    asked.append(value)
                    raise StopIteration
                found_answer: list[Any] = answer
                return found_answer

            try:
                found.append(join_stages(rank, NAMES, gather))
            except StopIteration:
                continue
        if not asked:
            return found, len(said)
        said.append(asked)


def test_parts_are_joined_in_order() -> None:
    ranks = checkpoint("c"), checkpoint("a", "b")
    found, exchanges = joined(*ranks)
    for result in found:
        assert list(result["ema"]) == ["a", "b", "c", "decay"]
        assert [int(result["ema"][name][0]) for name in NAMES] == [97, 98, 99]
        assert list(result["callbacks"]["Mine"]["shadow"]) == ["a", "b", "c"]
    assert exchanges == 2
    assert list(ranks[0]["ema"]) == ["c", "decay"], "the user's own dict is as it was"


def test_equal_ones_are_not_exchanged() -> None:
    found, exchanges = joined(checkpoint("a", "b"), checkpoint("a", "b"))
    assert (list(found[0]["ema"]), exchanges) == (["a", "b", "decay"], 1)


def test_what_one_rank_alone_has_stays() -> None:
    alone = {"state_dict": {}, "ema": {"c": torch.ones(1)}}
    found, _ = joined(alone, {"state_dict": {}})
    assert list(found[0]["ema"]) == ["c"]
    assert "ema" not in found[1]
