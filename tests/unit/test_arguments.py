"""Arguments of a wrong kind are refused where they are given; blocks may be named in several ways."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.pipeline.blocks import list_blocks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"blocks": 3}, r"blocks=3 must be the name of a list"),
        ({"blocks": ["a", 3]}, r"blocks=\['a', 3\] must be"),
        ({"tp_plan": "colwise"}, r"tp_plan='colwise' must be a dict"),
        ({"timeout": 30}, r"timeout=30 must be a positive datetime.timedelta"),
        ({"archive": 5}, r"archive=5 must be a folder"),
        ({"process_group_backend": "mpi2"}, r"process_group_backend='mpi2' must be None or one of .*gloo, nccl"),
        ({"unbatched": "mask"}, r"unbatched='mask' must be a list of names"),
        ({"start_method": "thread"}, r"start_method='thread' must be .*spawn"),
        ({"whole_batch_loss": "yes"}, r"whole_batch_loss='yes' must be True or False"),
        ({"reshard_after_forward": "no"}, r"reshard_after_forward='no' must be"),
        ({"cpu_offload": None}, r"cpu_offload=None must be True or False"),
        ({"whole_batch_loss": True, "schedule": "1F1B"}, r"whole_batch_loss=True needs all forwards.*GPipe"),
    ],
)
def test_wrong_kinds_are_refused_where_they_are_given(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Hybrid3DStrategy(**arguments)


def test_right_kinds_are_taken(tmp_path: Path) -> None:
    Hybrid3DStrategy(
        blocks=lambda module: module.layers,
        unbatched=("mask",),  # type: ignore[arg-type]
        tp_plan={"layers.*.q": "colwise"},
        archive=tmp_path,
        process_group_backend="cpu:gloo,cuda:nccl",
        timeout=timedelta(seconds=30),
        whole_batch_loss=True,
        schedule="LoopedBFS",
    )


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def chain(self) -> list[nn.Module]:
        return [self.first, *self.layers, self.second]

    @property
    def names(self) -> list[str]:
        return ["first", "second"]

    def wrong(self) -> Any:
        return [self.first, torch.nn.ReLU()]

    def empty(self) -> Any:
        return None


def test_blocks_by_method_property_or_function() -> None:
    outer = nn.Module()
    outer.tower = Tower()
    assert list_blocks(outer, "tower.chain") == ["tower.first", "tower.layers.0", "tower.layers.1", "tower.second"]
    assert list_blocks(outer.tower, "names") == ["first", "second"]
    assert list_blocks(outer, lambda module: module.tower.layers) == ["tower.layers.0", "tower.layers.1"]
    assert list_blocks(outer, "tower.layers") == ["tower.layers.0", "tower.layers.1"]


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ("wrong", r"blocks='wrong' must return a list of Tower's modules.*ReLU"),
        ("empty", r"blocks='empty' must return a list of Tower's modules.*got None"),
        (lambda module: ["nowhere"], r"must return a list of Tower's modules.*'nowhere' among them"),
        (lambda module: [module.first] * 2, "each once"),
        ("nothing", r"blocks='nothing' is not a module, method or property of Tower.*layers"),
    ],
)
def test_what_is_no_list_of_blocks_is_refused(blocks: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        list_blocks(Tower(), blocks)
