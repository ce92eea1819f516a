"""Measures devices and links of a job, or of this machine: a :class:`Cluster` that the planner believes.

Three ways to run: within a job whose ranks all call :func:`probe` (``torchrun``, SLURM with its variables, a process
group that exists), or alone, when ranks are started on this machine for the time of the probe.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_hybrid.errors import ConfigurationError, ProbeError
from lightning_hybrid.layout import Layout
from lightning_hybrid.machine.device_speed import cores, measure_device
from lightning_hybrid.machine.link_times import (
    FULL,
    QUICK,
    Kind,
    gather_objects,
    kinds_of_groups,
    measure_axes,
    measure_groups,
    measure_pairs,
)
from lightning_hybrid.machine.local_ranks import run_here
from lightning_hybrid.machine.report import compare_with_nominal
from lightning_hybrid.mesh import axis_group
from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.constants import FITTED
from lightning_hybrid.planner.gpus import Gpu, find_gpu
from lightning_hybrid.planner.links import Device, Measured, find_slow
from lightning_hybrid.planner.placement import Group

__all__ = ["kinds_of_layout", "probe", "probe_axes", "probe_group"]


def probe(
    devices: int | None = None, *, quick: bool = False, layout: Layout | None = None, timeout: float = 120.0
) -> Cluster:
    """Measure devices and links; see :meth:`lightning_hybrid.planner.Cluster.probe`.

    Args:
        devices: Ranks to start on this machine where no job is running; by default all GPUs, or one rank without any.
        quick: Fewer sizes and repetitions.
        layout: Measures the axes of these degrees alone, instead of all groups that degrees could make.
        timeout: Seconds after which it fails on all ranks.

    Raises:
        ConfigurationError: if the degrees do not fit the number of ranks, or there are fewer GPUs than asked for.
        ProbeError: if a rank fails or the time is over.
    """
    if dist.is_initialized():
        return probe_group(_device_of_group(), quick=quick, layout=layout)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        if devices not in (None, int(os.environ["WORLD_SIZE"])):
            raise ConfigurationError(
                f"{devices} devices were asked for in a job of {os.environ['WORLD_SIZE']} ranks; leave the number out."
            )
        return _probe_as_rank("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), quick, layout, timeout)
    gpus = torch.cuda.device_count()
    if devices is not None and devices < 1:
        raise ConfigurationError(f"devices={devices} to probe must be at least 1.")
    count = devices or gpus or 1
    if 0 < gpus < count:
        raise ConfigurationError(f"There are {gpus} GPUs, not {count}; use at most {gpus} devices.")
    if layout is not None and layout.world_size != count:
        raise ConfigurationError(f"{layout} are {layout.world_size} ranks, but {count} devices are probed.")
    found: Cluster = run_here(count, _probe_as_rank, quick, layout, timeout, timeout=timeout)
    return found


def _probe_as_rank(
    store: str, rank: int, world_size: int, quick: bool, layout: Layout | None, timeout: float
) -> Cluster:
    """One rank of a job that has no process group yet. After a failure nothing waits for other ranks."""
    local = int(os.environ.get("LOCAL_RANK", rank))
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = torch.device("cuda", local) if torch.cuda.device_count() >= on_host else torch.device("cpu")
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout)}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    else:
        torch.set_num_threads(max(1, cores() // on_host))
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size, **options)
        found = probe_group(device, quick=quick, layout=layout)
    except (RuntimeError, ValueError, OSError) as error:  # torch's distributed errors are RuntimeErrors
        raise ProbeError(f"Rank {rank} of {world_size} could not be probed: {type(error).__name__}: {error}") from error
    dist.destroy_process_group()
    return found


def _device_of_group() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def probe_group(device: torch.device, *, quick: bool = False, layout: Layout | None = None) -> Cluster:
    """Measure in the running process group; a collective, whose result is the same on all ranks.

    Args:
        device: This rank's device; the process group's backend must be able to send from it.
        quick: Fewer sizes and repetitions.
        layout: Measures the axes of these degrees alone.
    """
    begin, rank, world = time.monotonic(), dist.get_rank(), dist.get_world_size()
    if layout is not None and layout.world_size != world:
        raise ConfigurationError(f"{layout} are {layout.world_size} ranks, but the job has {world}.")
    effort, seconds = (QUICK, 0.05) if quick else (FULL, 0.3)
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    devices = gather_objects(measure_device(rank, device, seconds=seconds, ranks_on_host=on_host))
    hosts = [found.host for found in devices]
    per_node = max(map(hosts.count, hosts))
    kinds = kinds_of_layout(layout) if layout is not None else kinds_of_groups(world, per_node)
    collectives, left_out = measure_groups(kinds[:3] if quick and layout is None else kinds, device, effort)
    pairs = measure_pairs(hosts, device, effort) if world > 1 else []
    about = _about(begin, left_out)
    measured = Measured(
        backend=dist.get_backend(),
        devices=tuple(devices),
        collectives=tuple(collectives),
        pairs=tuple(pairs),
        about=gather_objects(about)[0],
    )
    return cluster_of(measured)


def _about(begin: float, left_out: Sequence[str]) -> dict[str, Any]:
    about: dict[str, Any] = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
    about |= {"seconds": round(time.monotonic() - begin, 2), "torch": torch.__version__}
    about |= {"load": round(os.getloadavg()[0], 1), "cores": cores()}
    if torch.cuda.is_available():
        about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if left_out:
        about["left_out"] = list(left_out)
    return about


def probe_axes(mesh: DeviceMesh, layout: Layout, device: torch.device) -> tuple[dict[str, float], list[str]]:
    """Measure the axes of a mesh in its own process groups, quickly; a collective over the world.

    Returns:
        Bytes per second on each link in a gather, by axis with more than one rank; and a sentence for each axis below
        half of what the device's links should reach (none for devices that are not known, nor for CPUs).
    """
    axes = [(kind, axis_group(mesh, kind.axis)) for kind in kinds_of_layout(layout) if kind.axis]
    found = measure_axes(axes, device, QUICK)
    rates = {str(each.axis): each.bus_rate for each in found if each.op == "all_gather"}
    if device.type == "cpu":
        return rates, []
    try:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
        cluster = Cluster.named(torch.cuda.get_device_name(device), layout.world_size, per_node=per_node)
    except ConfigurationError:
        return rates, []
    measured = Measured(backend=dist.get_backend(), devices=(), collectives=tuple(found))
    return rates, compare_with_nominal(replace(cluster, measured=measured))


def kinds_of_layout(layout: Layout) -> list[Kind]:
    """The mesh axes of these degrees that have more than one rank."""
    tensor, shards, replicas = layout.tensor_parallel_size, layout.shard_size, layout.replicate_size
    axes = {
        "tensor_parallel": Group(tensor, 1),
        "data_parallel_shard": Group(shards, tensor),
        "data_parallel_replicate": Group(replicas, tensor * shards),
        "pipeline_parallel": Group(layout.pipeline_parallel_size, tensor * shards * replicas),
    }
    return [Kind(group, axis) for axis, group in axes.items() if group.size > 1]


def cluster_of(measured: Measured) -> Cluster:
    """The cluster as it was measured: nodes of equal size, and the slowest device's rates for all.

    Links keep their nominal values beside the measured ones where the device is known; else they are what was measured.
    """
    measured, hosts = replace(measured, slow=find_slow(measured)), measured.hosts
    per_node = max(map(hosts.count, hosts))
    gpu = _gpu_of(measured.devices)
    link = gpu.link or _rate_of(measured, across=False)
    network = gpu.network / 8 * per_node if gpu.network else _rate_of(measured, across=True) * per_node
    gpu = replace(gpu, link=link, network=network * 8 / per_node, per_node=per_node)
    return Cluster(gpu=gpu, num_devices=len(hosts), per_node=per_node, link=link, network=network, measured=measured)


def _rate_of(measured: Measured, *, across: bool) -> float:
    """GB/s of the median pair; 1 where there is none, since nothing will use it."""
    usual = measured.typical.get(across) or measured.typical.get(not across)
    return usual.rate / 1e9 / FITTED.link if usual else 1.0


def _gpu_of(devices: Sequence[Device]) -> Gpu:
    """The kind of device with the rates of the slowest and the memory of the smallest: all wait for it."""
    memory = min(device.memory for device in devices)
    rates = {name: _slowest(devices, lambda device: device.tflops[name]) for name in devices[0].tflops}  # noqa: B023
    bandwidth = _slowest(devices, lambda device: device.bandwidth) / FITTED.memory
    try:
        known = find_gpu(devices[0].name)
    except ConfigurationError:
        return Gpu(
            name=devices[0].name,
            tflops=rates,
            memory=memory,
            bandwidth=bandwidth,
            link=0.0,
            network=0.0,
            multiprocessors=1 if "bf16" not in rates else 100,
            watts=1e9,  # nothing is known of clocks under load
            matmul=1.0,
            host=devices[0].type == "cpu",
        )
    return replace(known, memory=memory, bandwidth=bandwidth, matmul=rates["bf16"] * 1e12 / known.peak("bf16"))


def _slowest(devices: Sequence[Device], rate: Callable[[Device], float]) -> float:
    """The lowest rate of a device; on CPUs, where ranks share cores, the lowest median of a host."""
    groups: dict[object, list[float]] = {}
    for device in devices:
        groups.setdefault(device.host if device.type == "cpu" else device.rank, []).append(rate(device))
    return min(median(found) for found in groups.values())
