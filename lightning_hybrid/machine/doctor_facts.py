"""Gathers what :mod:`lightning_hybrid.doctor` examines, where it runs. Nothing is changed, nothing is sent."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from importlib import metadata
from pathlib import Path

import torch

from lightning_hybrid.doctor import Facts
from lightning_hybrid.machine.device_speed import cores

__all__ = ["gather_facts"]

#: Variables that findings are about. Others, which may hold secrets, are never read.
VARIABLES = (
    *("CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"),
    *("NCCL_ALGO", "NCCL_BLOCKING_WAIT", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_IB_DISABLE", "NCCL_IB_HCA"),
    *("NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO"),
    *("NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME", "OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "OMP_NUM_THREADS"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_DISTRIBUTED_DEBUG"),
    *("TORCH_NCCL_BLOCKING_WAIT", "TP_SOCKET_IFNAME", "WANDB_DISABLED", "WANDB_MODE"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)
_MOST_OF_LOG = 4 * 2**20


def gather_facts(*, ranks: int | None = None, nodes: int | None = None, nccl_log: str | None = None) -> Facts:
    """Return what this process sees.

    Args:
        ranks: Of this machine; by default those of the job that runs, else as many as GPUs, else one.
        nodes: Machines of the job; by default those of the job that runs.
        nccl_log: File with NCCL's log; by default the one that ``NCCL_DEBUG_FILE`` names.
    """
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    local = int(environment.get("LOCAL_WORLD_SIZE", "0"))
    local_ranks = ranks or local or len(gpus) or 1
    world = int(environment.get("WORLD_SIZE", "0"))
    requirements = _requirements()
    return Facts(
        requirements=requirements,
        versions=_versions(requirements),
        environment=environment,
        system=platform.system(),
        cores=cores(),
        local_ranks=local_ranks,
        num_nodes=nodes or max(1, world // local if local else _slurm_nodes()),
        gpus=gpus,
        driver=_driver(),
        peer_access=_peer_access(len(gpus)),
        cuda_build=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        interfaces=[name for _, name in socket.if_nameindex()],
        infiniband=_names("/sys/class/infiniband"),
        open_files=_limit("RLIMIT_NOFILE"),
        locked_memory=_limit("RLIMIT_MEMLOCK"),
        shared_memory=_free_shared_memory(),
        hostname_resolves=_resolves(socket.gethostname()),
        offline=_has_no_route(),
        nccl_log=_read(nccl_log or environment.get("NCCL_DEBUG_FILE", "")),
    )


def _requirements() -> list[str]:
    try:
        return metadata.requires("lightning-hybrid") or []
    except metadata.PackageNotFoundError:
        return []


def _versions(requirements: list[str]) -> dict[str, str]:
    from packaging.requirements import Requirement

    found = {"python": platform.python_version()}
    for name in sorted({Requirement(text).name for text in requirements}):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    if path.exists():
        words = _read(str(path)).split()
        return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), "unknown")
    return "unknown" if shutil.which("nvidia-smi") or Path("/dev/kfd").exists() else None


def _peer_access(count: int) -> list[list[bool]] | None:
    if count < 2:
        return None
    return [
        [one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)]
        for one in range(count)
    ]


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _limit(name: str) -> int | None:
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    return resource.getrlimit(getattr(resource, name))[0] if hasattr(resource, name) else None


def _free_shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def _resolves(host: str) -> bool:
    try:
        socket.gethostbyname(host)
    except OSError:
        return False
    return True


def _has_no_route() -> bool:
    """Whether the kernel knows no default route (Linux); asking sends nothing."""
    table = _read("/proc/net/route").splitlines()[1:]
    return bool(table) and not any(line.split()[1] == "00000000" for line in table)


def _slurm_nodes() -> int:
    value = os.environ.get("SLURM_NNODES", "1")
    return int(value) if value.isdigit() else 1


def _read(path: str) -> str:
    """A file's text, or its end if it is long; nothing if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_OF_LOG)
    except OSError:
        return ""
