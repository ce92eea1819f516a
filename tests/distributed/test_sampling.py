"""A sampled step on real ranks: a rank that comes late shows on the others, in seconds, under the right axis."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_hybrid.sampling import StepSample
from lightning_hybrid.tensor_parallel.collectives import enter_split, leave_partial

LATE = 0.3


class Late(nn.Module):
    """Sleeps in the forward pass when told to."""

    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


class OwnExchanges(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.up, self.down, self.group = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return leave_partial(self.down(torch.relu(self.up(enter_split(x, self.group)))), self.group)


def own_tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Late(), OwnExchanges(mesh["tensor"].get_group()))


def dtensor_parallel(mesh: DeviceMesh) -> nn.Module:
    plan = {"2": ColwiseParallel(), "3": RowwiseParallel()}
    return parallelize_module(
        nn.Sequential(nn.Linear(8, 8), Late(), nn.Linear(8, 8), nn.Linear(8, 8)), mesh["tensor"], plan
    )


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(Late(), nn.Linear(8, 8))
    fully_shard(model[1], mesh=mesh["data_shard"])
    return model


def both(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), Late(), OwnExchanges(mesh["tensor"].get_group()))
    fully_shard(model[2], mesh=mesh["data_shard"])
    return model


def sample(rank: int, build: Callable[[DeviceMesh], nn.Module], shape: tuple[int, int]) -> dict[str, float]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_shard", "tensor"))
    model = build(mesh)
    axes = [name for name, size in zip(("data_shard", "tensor"), shape, strict=True) if size > 1]

    def step(late: float = 0.0) -> None:
        next(m for m in model if isinstance(m, Late)).seconds = late if rank == 0 else 0.0
        model(torch.ones(2, 8)).sum().backward()

    step()
    sampler = StepSample(torch.device("cpu"), axes)
    dist.barrier()
    start = time.perf_counter()
    assert sampler.start()
    assert not StepSample(torch.device("cpu"), axes).start()  # one at a time
    step(LATE)
    spans = sampler.stop()
    end = time.perf_counter()
    assert all(start <= span.start <= span.end <= end for span in spans)
    dist.barrier()
    dist.destroy_process_group()
    seconds: dict[str, float] = {}
    for part, left, right in spans:
        seconds[part] = seconds.get(part, 0.0) + right - left
    return seconds


@pytest.mark.parametrize(
    ("build", "shape", "late"),
    [
        (own_tensor_parallel, (1, 2), {"communication_tensor"}),
        (dtensor_parallel, (1, 2), {"communication_tensor"}),
        (sharded, (2, 1), {"communication_data_shard"}),
        (both, (2, 2), {"communication_tensor", "communication_data_shard"}),
    ],
)
def test_a_late_rank_is_exposed_communication_of_the_others(
    run_ranks: Any, build: Any, shape: tuple[int, int], late: set[str]
) -> None:
    results = run_ranks(shape[0] * shape[1], sample, build, shape)
    for seconds in results:
        assert set(seconds) == late  # nothing unknown, no other axis
    first, second = (sum(seconds.values()) for seconds in results[:2])
    assert second > 0.9 * LATE  # waited for rank 0 ...
    assert first < second - LATE / 2  # ... which slept in the forward pass, not in a collective
