"""Which axis a collective belongs to, and how much of it is exposed, on made-up profiles."""

from __future__ import annotations

import torch

from lightning_hybrid.metrics.breakdown import Span
from lightning_hybrid.metrics.collectives import TENSOR_RANGES, Event, exposed_on_cpu, exposed_on_device
from lightning_hybrid.tensor_parallel import collectives

AXES = ("tensor", "data_shard", "data_replicate")


def test_axes_follow_from_the_ranges_around() -> None:
    events = [
        Event("FSDP::all_gather (0)", 0, 3, 1),
        Event("c10d::_allgather_base_", 1, 2, 1),
        Event("FSDP::post_backward_reduce (0)", 4, 8, 1),
        Event("c10d::_reduce_scatter_base_", 4, 5, 1),
        Event("c10d::allreduce_", 6, 7, 1),
        Event("_EnterSplitBackward", 10, 13, 1),
        Event("c10d::allreduce_", 11, 12, 1),
        Event("_c10d_functional::all_reduce", 20, 22, 1),
        Event("c10d::allreduce_", 20.5, 21.5, 1),
        Event("_c10d_functional::wait_tensor", 22, 23, 1),
        Event("_c10d_functional::_wrap_tensor_autograd", 23, 24, 1),
        Event("c10d::send", 30, 31, 1),
        Event("FSDP::all_gather (1)", 32, 38, 1),
        Event("c10d::send", 33, 34, 1),  # a shard on its way, not a pipeline's message
        Event("_ScatterPartial", 35, 36, 1),
        Event("c10d::broadcast_", 40, 41, 1),
        Event("gloo:all_reduce", 40.5, 50.5, 2),
        Event("aten::mm", 50, 60, 1),
    ]
    assert exposed_on_cpu(reversed(events), 1, axes=AXES) == [
        Span("communication_data_shard", 1, 2),
        Span("communication_data_shard", 4, 5),
        Span("communication_data_replicate", 6, 7),
        Span("communication_tensor", 11, 12),
        Span("communication_tensor", 20, 22),  # the operator inside of it counts once
        Span("communication_tensor", 22, 23),
        Span("communication_pipeline", 30, 31),
        Span("communication_data_shard", 33, 34),
        Span("communication_unknown", 40, 41),
    ]


def test_every_exchange_of_tensor_ranks_is_known() -> None:
    """By the names of its autograd functions, which is all that a profile says."""
    kinds = [value for value in vars(collectives).values() if isinstance(value, type)]
    functions = {kind.__name__ for kind in kinds if issubclass(kind, torch.autograd.Function)}
    silent = {"_EnterSplit", "_LeavePartialBackward", "_KeepShare"}  # they hand on, or keep a part
    both = {name + end for name in functions for end in ("", "Backward")}
    assert len(functions) == 6 and both - silent == set(TENSOR_RANGES)


def test_waiting_for_gloo_is_exposed_and_working_beside_it_is_not() -> None:
    """Three all-reduces: waited for at once, waited for later, and finished behind a matrix product."""
    events = [
        Event("_LeavePartial", 0, 10, 1),
        Event("c10d::allreduce_", 1, 2, 1),
        Event("gloo:all_reduce", 1.5, 9, 2),
        Event("FSDP::post_backward_reduce", 20, 22, 1),
        Event("c10d::_reduce_scatter_base_", 20, 21, 1),
        Event("gloo:all_reduce", 20.5, 28, 3),
        Event("aten::mm", 22, 25, 1),
        Event("FSDP::post_backward_rs_wait", 26, 28.1, 1),
        Event("c10d::allreduce_", 30, 31, 1),
        Event("gloo:all_reduce", 30.5, 33, 2),
        Event("aten::mm", 31.5, 40, 1),
    ]
    assert exposed_on_cpu(events, 1, axes=("tensor", "data_shard")) == [
        Span("communication_tensor", 1, 2),
        Span("communication_tensor", 2, 9),
        Span("communication_data_shard", 20, 21),
        Span("communication_data_shard", 26, 28),
        Span("communication_unknown", 30, 31),
    ]


def test_with_one_axis_there_is_nothing_to_guess() -> None:
    event = Event("c10d::allreduce_", 0, 1, 1)
    assert exposed_on_cpu([event], 1, axes=("data_shard",)) == [Span("communication_data_shard", 0, 1)]
    assert exposed_on_cpu([event], 1, axes=()) == [Span("communication_unknown", 0, 1)]
    functional = Event("_c10d_functional::all_reduce", 0, 1, 1)
    assert exposed_on_cpu([functional], 1, axes=("data_shard",)) == [Span("communication_data_shard", 0, 1)]


def test_kernels_are_exposed_where_no_other_kernel_runs() -> None:
    events = [
        Event("FSDP::all_gather (0)", 0, 1, 1),
        Event("c10d::_allgather_base_", 0.2, 0.8, 1, operator=7),
        Event("_LeavePartial", 1, 2, 1),
        Event("c10d::allreduce_", 1.2, 1.8, 1, operator=8),
        Event("ncclDevKernel_AllGather_RING_LL", 1, 5, 20, True, 7),
        Event("gemm", 2, 4, 7, True, 3),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4.5, 8, 21, True, 8),
        Event("gemm", 7, 9, 7, True, 4),
    ]
    assert exposed_on_device(events, axes=AXES) == [
        Span("communication_data_shard", 1, 2),
        Span("communication_data_shard", 4, 5),
        Span("communication_tensor", 5, 7),
    ]
    assert exposed_on_device([], axes=AXES) == []
