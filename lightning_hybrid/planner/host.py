"""A host without accelerators as a cluster: each rank is a process, and they share the cores. Pure.

[Note: what a host's constants stand for]
Fitted on 2 quiet cores to the step and processor time of a GPT (8 blocks of width 256) at 2, 4 and 8 ranks with gloo,
for data, sharded, tensor and pipeline parallelism (``benchmarks/chosen.py``). Exchanges do not hide behind compute:
both need the cores. What the kernels do follows from two measurements, a matrix product and a copy. Within a pipeline
replicas took as long as shards (data 4 x pipeline 2: 1094 and 1050 ms of a core, data 2 x pipeline 2: 712 and 690):
fully_shard runs both there.
"""

from __future__ import annotations

from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.constants import Constants
from lightning_hybrid.planner.gpus import Gpu

__all__ = ["CLOSE_ON_HOST", "HOST", "host_cluster"]

#: Plans that are slower by less than this are as good: so near are estimates for processes that share cores.
CLOSE_ON_HOST = 0.05
#: GB/s of copies for each GFLOP/s of products: less is another program's doing, and would speak against replicas.
_LEAST_BANDWIDTH = 0.08
#: GB/s that a process sends to another one of its host by gloo, while it receives as much.
_LOOPBACK = 1.0

HOST = Constants(
    matmul=0.75,
    throttle=0.0,
    wave=0.0,
    operands=0.5,
    flash=0.6,
    first_flash=1.0,
    elementwise=1.0,
    scores=1.0,
    launch=5.0e-4,
    link=1.0,
    network=0.8,
    crowd=0.05,
    latency=2.0e-3,
    handover=1.5e-3,
    hop=2.0e-4,
    overlap=0.2,
    sharpness=1.0,
    replicas_as_shards=True,
    microbatch=7.0e-3,
    step=2.0e-3,
)


def host_cluster(
    *,
    num_ranks: int,
    num_nodes: int,
    cores: float,
    threads: int,
    gflops: float,
    bandwidth: float,
    memory_bytes: float,
    network_gbits: float = 10.0,
) -> Cluster:
    """Return equal hosts of CPU ranks.

    Args:
        num_ranks: Of the whole run.
        num_nodes: Hosts.
        cores: That a host's ranks may use.
        threads: Of each rank.
        gflops: 10^9 operations a second of a rank's matrix products in fp32, with its threads.
        bandwidth: GB/s of a rank's copies, reading and writing counted.
        memory_bytes: That a host's ranks may use together.
        network_gbits: Gbit/s of a host to others.
    """
    per_node = max(1, num_ranks // num_nodes)
    gpu = Gpu(
        name=f"{num_ranks} CPU ranks of {threads} thread{'s' * (threads > 1)}, hosts of {cores:g} cores",
        tflops={"fp32": gflops / 1e3},
        memory=memory_bytes / per_node / 2**30,
        bandwidth=max(bandwidth, _LEAST_BANDWIDTH * gflops),
        link=_LOOPBACK,
        network=network_gbits / per_node,
        multiprocessors=0,
        watts=1e9,
        per_node=per_node,
        matmul=1.0,
        host=True,
    )
    return Cluster(
        gpu=gpu,
        num_devices=num_ranks,
        per_node=per_node,
        seats=max(1.0, cores / threads),
        link=gpu.link,
        network=network_gbits / 8,
    )
