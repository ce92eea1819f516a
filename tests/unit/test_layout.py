"""Degrees, ranks and coordinates; each refusal states the numbers and a way out."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import AXES, Layout, divisors, resolve_layout

LAYOUT = Layout(data_parallel_size=4, tensor_parallel_size=2, pipeline_parallel_size=3, replicate_size=2)


def test_coordinate_and_rank_are_inverse():
    coordinates = [LAYOUT.coordinate(rank) for rank in range(LAYOUT.world_size)]
    assert len(set(coordinates)) == LAYOUT.world_size == 24
    for rank, at in enumerate(coordinates):
        assert LAYOUT.rank(pipeline=at.pipeline, replicate=at.replicate, shard=at.shard, tensor=at.tensor) == rank


def test_tensor_is_innermost_and_pipeline_outermost():
    steps = {field: LAYOUT.rank(**{field: 1}) - LAYOUT.rank() for field in ("tensor", "shard", "replicate", "pipeline")}
    assert steps == {"tensor": 1, "shard": 2, "replicate": 4, "pipeline": 8}


def test_data_counts_replicas_and_shards():
    seen = {(at.replicate, at.shard): at.data for at in map(LAYOUT.coordinate, range(LAYOUT.world_size))}
    assert seen == {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3}


def test_shape_follows_the_axes():
    assert dict(zip(AXES, LAYOUT.shape, strict=True)) == {
        "pipeline_parallel": 3,
        "data_parallel_replicate": 2,
        "data_parallel_shard": 2,
        "tensor_parallel": 2,
    }
    assert math.prod(LAYOUT.shape) == LAYOUT.world_size
    assert str(LAYOUT) == "data 4 x tensor 2 x pipeline 3"


def test_layout_is_a_value():
    assert dataclasses.replace(LAYOUT) == LAYOUT
    with pytest.raises(dataclasses.FrozenInstanceError):
        LAYOUT.data_parallel_size = 1  # type: ignore[misc]


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (8, 1, 1)),
        ({"tensor_parallel_size": 2}, (4, 2, 1)),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (2, 2, 2)),
        ({"data_parallel_size": 2}, (2, 1, 4)),
        ({"data_parallel_size": 2, "pipeline_parallel_size": 2}, (2, 2, 2)),
        ({"data_parallel_size": 1, "tensor_parallel_size": 8, "pipeline_parallel_size": 1}, (1, 8, 1)),
    ],
)
def test_what_is_left_over_goes_to_the_first_automatic_degree(given: dict[str, int], expected: tuple[int, int, int]):
    layout = resolve_layout(8, **given)
    assert (layout.data_parallel_size, layout.tensor_parallel_size, layout.pipeline_parallel_size) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 does not divide 8 devices; use one of 1, 2, 4, 8."),
        (
            {"tensor_parallel_size": 4, "pipeline_parallel_size": 4},
            "tensor_parallel_size=4 x pipeline_parallel_size=4 makes 16, but there are 8 devices.",
        ),
        (
            {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 1},
            'makes 4, but there are 8 devices. Change a degree so that the product is 8, set one of them to "auto",'
            " or use devices=4.",
        ),
        ({"data_parallel_size": 0}, 'data_parallel_size=0 must be "auto" or an integer of at least 1.'),
        ({"data_parallel_size": True}, 'data_parallel_size=True must be "auto" or an integer of at least 1.'),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size='2' must be \"auto\" or an integer of at least 1."),
        ({"replicate_size": 3}, "replicate_size=3 does not divide data_parallel_size=8; use one of "),
    ],
)
def test_refusals_state_the_numbers(given: dict[str, object], message: str):
    with pytest.raises(ConfigurationError) as caught:
        resolve_layout(8, **given)
    assert message in str(caught.value)


def test_layout_refuses_what_is_no_degree():
    with pytest.raises(ConfigurationError, match=r"tensor_parallel_size=-2 must be an integer of at least 1"):
        Layout(tensor_parallel_size=-2)
    with pytest.raises(ConfigurationError, match=r"rank 24 is outside of 0\.\.23"):
        LAYOUT.coordinate(24)
