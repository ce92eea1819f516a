"""One gradient norm over all axes, whatever mixture of shards and copies the ranks hold."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.layout import AXES
from lightning_hybrid.optimizer import (
    clip_grad_norm,
    clip_grad_value,
    disable_foreach_on_mixed_tensors,
    global_grad_norm,
)

Ranks = Callable[..., list[Any]]


def world(pipeline: int, replicate: int, shard: int, tensor: int) -> DeviceMesh:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    return init_device_mesh("cpu", (pipeline, replicate, shard, tensor), mesh_dim_names=AXES)


def gradient(index: int) -> Tensor:
    """The whole gradient of parameter ``index``; uneven shapes on purpose."""
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(index))


def with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(gradient.detach().clone())
    parameter.grad = gradient
    return parameter


def split(mesh: DeviceMesh, whole: Tensor, *placements: Placement) -> nn.Parameter:
    return with_gradient(distribute_tensor(whole, mesh, placements, src_data_rank=None))


def mixture(mesh: DeviceMesh, stage: int) -> list[nn.Parameter]:
    """Six parameters of one stage, one of each kind that the strategies make; equal values as whole tensors."""
    data, tensor = mesh["data_parallel_shard"], mesh["tensor_parallel"]
    both, hybrid = (
        mesh["data_parallel_shard", "tensor_parallel"],
        mesh["data_parallel_replicate", "data_parallel_shard"],
    )
    first = 6 * stage
    return [
        with_gradient(gradient(first)),
        split(tensor, gradient(first + 1), Shard(1)),
        split(data, gradient(first + 2), Shard(0)),
        split(both, gradient(first + 3), Shard(0), Shard(1)),
        split(both, gradient(first + 4), Shard(0), Replicate()),
        split(hybrid, gradient(first + 5), Replicate(), Shard(0)),
    ]


def whole_norm(num_stages: int, p: float) -> float:
    everything = torch.cat([gradient(index).flatten() for index in range(6 * num_stages)])
    return torch.linalg.vector_norm(everything.double(), p).item()


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (2, 1, 2, 2), (2, 2, 2, 1), (1, 2, 2, 2), (4, 1, 1, 2)])
def test_the_norm_of_the_whole_model(run_ranks: Ranks, shape: tuple[int, ...], p: float) -> None:
    def rank(rank: int) -> float:
        mesh = world(*shape)
        parameters = mixture(mesh, mesh.get_local_rank("pipeline_parallel"))
        return global_grad_norm([*parameters, parameters[0]], mesh=mesh, norm_type=p).item()  # one named twice

    results = run_ranks(math.prod(shape), rank)
    assert len(set(results)) == 1
    assert results[0] == pytest.approx(whole_norm(shape[0], p), rel=1e-6)


def test_counting_copies_per_rank_is_seen(run_ranks: Ranks) -> None:
    """Wrong on purpose: what one gets by summing every rank's local norm."""

    def rank(rank: int) -> float:
        mesh = world(1, 1, 2, 2)
        local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in mixture(mesh, 0)]
        total = sum(gradient.pow(2).sum() for gradient in local)
        dist.all_reduce(total)
        return total.sqrt().item()

    assert abs(run_ranks(4, rank)[0] / whole_norm(1, 2.0) - 1) > 0.1


def test_clipping_scales_every_share_and_tied_copies_count_once(run_ranks: Ranks) -> None:
    def rank(rank: int) -> tuple[float, float, float]:
        mesh = world(2, 1, 1, 2)
        stage = mesh.get_local_rank("pipeline_parallel")
        tied, own = with_gradient(gradient(0)), split(mesh["tensor_parallel"], gradient(1 + stage), Shard(0))
        before = own.grad.to_local().clone()
        norm = clip_grad_norm(iter([tied, own]), 0.5, mesh=mesh, copies={tied: 2})
        after = global_grad_norm([tied, own], mesh=mesh, copies={tied: 2})
        return norm.item(), after.item(), (own.grad.to_local() / before).mean().item()

    expected = torch.cat([gradient(index).flatten() for index in range(3)]).norm().item()
    for norm, after, factor in run_ranks(4, rank):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert after == pytest.approx(0.5, rel=1e-5)
        assert factor == pytest.approx(0.5 / (expected + 1e-6), rel=1e-6)


def test_partial_sums_are_completed_and_an_empty_stage_takes_part(run_ranks: Ranks) -> None:
    def rank(rank: int) -> tuple[float, bool]:
        mesh = world(2, 1, 1, 2)
        parameters = []
        if mesh.get_local_rank("pipeline_parallel") == 0:
            half = DTensor.from_local(gradient(0) / 2, mesh["tensor_parallel"], [Partial()], run_check=False)
            parameters = [nn.Parameter(distribute_tensor(gradient(0), mesh["tensor_parallel"], [Replicate()]))]
            parameters[0].grad = half
        clip_grad_value(parameters, 1e9)
        done = all(p.grad.placements == (Replicate(),) for p in parameters)
        return global_grad_norm(parameters, mesh=mesh).item(), done

    for norm, done in run_ranks(4, rank):
        assert norm == pytest.approx(gradient(0).norm().item(), rel=1e-6)
        assert done


def test_clip_grad_value_clamps_the_shares(run_ranks: Ranks) -> None:
    def rank(rank: int) -> Tensor:
        mesh = world(1, 1, 1, 2)
        parameter = split(mesh["tensor_parallel"], gradient(0), Shard(0))
        clip_grad_value([parameter], 0.25)
        return parameter.grad.full_tensor()

    assert torch.equal(run_ranks(2, rank)[1], gradient(0).clamp(-0.25, 0.25))


def test_without_a_process_group_it_is_torchs() -> None:
    model = nn.Linear(4, 4)
    model(torch.randn(2, 4)).pow(2).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    norm = clip_grad_norm(model.parameters(), 0.1, mesh=None)
    ours = [p.grad for p in model.parameters()]
    for parameter, own in zip(model.parameters(), expected, strict=True):
        parameter.grad = own
    assert torch.equal(norm, nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))


def test_refusals() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"norm_type=0 must be positive"):
        global_grad_norm(model.parameters(), mesh=None, norm_type=0)
    model.weight.grad = torch.full((2, 2), math.nan)
    with pytest.raises(RuntimeError, match="is nan"):
        global_grad_norm(model.parameters(), mesh=None, error_if_nonfinite=True)


def test_low_precision_gradients_are_summed_in_fp32() -> None:
    parameters = [with_gradient(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(3)]
    norm = global_grad_norm(parameters, mesh=None)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(3 * 4096), rel=1e-6)


def test_a_mixture_of_plain_and_split_parameters_steps_one_by_one(run_ranks: Ranks) -> None:
    def rank(rank: int) -> None:
        mesh = world(1, 1, 1, 2)
        mixed = [with_gradient(gradient(0)), split(mesh["tensor_parallel"], gradient(1), Shard(0))]
        optimizer = torch.optim.AdamW(mixed, foreach=True)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            optimizer.step()
        assert disable_foreach_on_mixed_tensors(optimizer)
        optimizer.step()
        alike = torch.optim.AdamW([split(mesh["tensor_parallel"], gradient(1), Shard(0))], foreach=True)
        assert not disable_foreach_on_mixed_tensors(alike)
        assert alike.param_groups[0]["foreach"]

    run_ranks(2, rank)
