"""What is wrong with a machine or job before training is: facts in, findings out. Pure but for :mod:`doctor_facts`.

[Note: adding a check]
Write a function from :class:`Facts` to findings and put ``@check`` above it. It gets plain values, which a test
makes up, and says in one sentence each what is wrong and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.version import Version

from lightning_hybrid.errors import ConfigurationError

__all__ = ["CHECKS", "Facts", "Finding", "check", "examine", "exit_code"]

Level = Literal["error", "warning", "note"]
_ORDER = ("error", "warning", "note")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One machine as one process sees it; every field is plain JSON, and unknown where its value is the default."""

    requirements: list[str] = field(default_factory=list)
    """What this library's own metadata requires."""
    versions: dict[str, str] = field(default_factory=dict)
    """Installed version by package."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that matter here, never secrets (see ``doctor_facts``)."""
    system: str = "Linux"
    cores: int | None = None
    """Cores that this process may use."""
    local_ranks: int = 1
    """Ranks of this machine: of the job that runs, else as many as GPUs, else as given."""
    num_nodes: int = 1
    gpus: list[str] = field(default_factory=list)
    """Names."""
    driver: str | None = None
    """Version of the GPUs' driver."""
    peer_access: list[list[bool]] | None = None
    """Between two GPUs of this machine; ``None`` without CUDA or where it was not asked."""
    cuda_build: str | None = None
    """CUDA version that torch was built for; ``None`` for a build without."""
    nccl: str | None = None
    interfaces: list[str] = field(default_factory=list)
    """Names of network interfaces."""
    infiniband: list[str] = field(default_factory=list)
    """Names of RDMA devices (InfiniBand, RoCE, EFA)."""
    open_files: int | None = None
    """Soft limit of this process."""
    locked_memory: int | None = None
    """Soft limit in bytes of memory that may be pinned; -1 for none."""
    shared_memory: int | None = None
    """Bytes of ``/dev/shm``."""
    hostname_resolves: bool = True
    offline: bool = False
    """Whether no route leads out of the machine (no default route)."""
    nccl_log: str = ""
    """Text of NCCL's log at ``NCCL_DEBUG=INFO``, where there is one."""

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Facts:
        """Read what ``doctor --json`` printed as ``facts``.

        Raises:
            ConfigurationError: names unknown fields.
        """
        try:
            return cls(**document)
        except TypeError as error:
            raise ConfigurationError(f"These are not facts of a machine: {error}.") from error


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong, and what to do."""

    level: Level
    """``error``: training fails or is unsafe; ``warning``: it is slow or fragile; ``note``: good to know."""
    name: str
    what: str
    """One sentence with the numbers."""
    do: str
    """One sentence."""


Check = Callable[[Facts], Iterable[Finding]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Have :func:`examine` run this too."""
    CHECKS.append(function)
    return function


def examine(facts: Facts) -> list[Finding]:
    """All findings, the worst first."""
    found = [finding for function in CHECKS for finding in function(facts)]
    return sorted(found, key=lambda finding: _ORDER.index(finding.level))


def exit_code(findings: Iterable[Finding], *, strict: bool = False) -> int:
    """For scripts: 2 if there is an error, 1 if there is a warning and ``strict``, else 0."""
    levels = {finding.level for finding in findings}
    return 2 if "error" in levels else 1 if strict and "warning" in levels else 0


def _finding(level: Level, name: str, what: str, do: str) -> Finding:
    return Finding(level=level, name=name, what=what, do=do)


#: Uploads of Lightning to the package index that carried malicious code (GHSA-w37p-236h-pfx3,
#: 30 April 2026); removed there, but caches remain.
MALICIOUS = {"lightning": ("2.6.2", "2.6.3")}


@check
def malicious_versions(facts: Facts) -> Iterator[Finding]:
    """Uploads that carried malicious code."""
    for package, versions in MALICIOUS.items():
        if (found := facts.versions.get(package)) in versions:
            yield _finding(
                "error",
                "malicious version",
                f"{package} {found} is an upload that carried malicious code.",
                f"Remove it, treat this machine's credentials as stolen, and install {package}>=2.6.6.",
            )


@check
def versions_fit(facts: Facts) -> Iterator[Finding]:
    """Installed versions beside what this library requires."""
    for text in facts.requirements:
        requirement = Requirement(text)
        marker, name = requirement.marker, requirement.name
        optional = marker is not None and not marker.evaluate({"extra": ""})
        if marker is not None and optional and not marker.evaluate({"extra": "hf"}):
            continue  # for tests, or for another Python
        found = facts.versions.get(name)
        if found is None:
            if not optional:
                yield _finding(
                    "error", "missing package", f"{name} is not installed.", f'pip install "{_plain(requirement)}"'
                )
        elif not requirement.specifier.contains(Version(found).base_version, prereleases=True):
            level: Level = "warning" if optional else "error"
            what = f"{name} {found} is installed, this library was made for {name}{requirement.specifier}."
            yield _finding(level, "versions", what, f'pip install "{_plain(requirement)}"')


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


@check
def torch_without_cuda(facts: Facts) -> Iterator[Finding]:
    """A driver, but a build of torch that cannot use it."""
    if facts.driver and facts.cuda_build is None and "torch" in facts.versions:
        what = f"A GPU driver ({facts.driver}) is there, but torch {facts.versions['torch']} was built without CUDA."
        yield _finding("error", "CPU build of torch", what, "Install a CUDA build of torch; see pytorch.org.")
    elif facts.driver and facts.cuda_build and not facts.gpus:
        visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        what = f"A GPU driver ({facts.driver}) is there, but torch sees no GPU{why}."
        yield _finding(
            "error",
            "no visible GPU",
            what,
            "Check CUDA_VISIBLE_DEVICES, the container's GPU option, and that the driver is recent enough for CUDA "
            + facts.cuda_build
            + ".",
        )


@check
def mixed_gpus(facts: Facts) -> Iterator[Finding]:
    """Unequal GPUs: all wait for the slowest."""
    if len(kinds := sorted(set(facts.gpus))) > 1:
        what = f"GPUs of {len(kinds)} kinds: {', '.join(kinds)}; every step waits for the slowest."
        yield _finding("warning", "unequal GPUs", what, "Choose one kind with CUDA_VISIBLE_DEVICES.")


@check
def peer_access(facts: Facts) -> Iterator[Finding]:
    """GPUs that cannot reach each other directly."""
    table = facts.peer_access or []
    missing = [(a, b) for a, row in enumerate(table) for b, there in enumerate(row) if a < b and not there]
    if missing:
        pairs = ", ".join(f"{a}-{b}" for a, b in missing[:4]) + (", ..." if len(missing) > 4 else "")
        what = f"{len(missing)} pairs of GPUs have no peer access ({pairs}): exchanges go through the host's memory."
        yield _finding(
            "warning",
            "no peer access",
            what,
            "Turn off IOMMU and PCIe ACS (bare metal), or give the container all GPUs of the machine;"
            " consumer cards never have it.",
        )


#: Variables that take the fast fabric away: name -> (values that do so, what then happens).
_SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": (("1",), "GPUs of a machine exchange through shared memory instead of NVLink or PCIe"),
    "NCCL_IB_DISABLE": (("1",), "machines exchange over TCP sockets instead of InfiniBand or RoCE"),
    "NCCL_SHM_DISABLE": (("1",), "where GPUs have no peer access, exchanges within a machine go over the network"),
    "NCCL_NET_GDR_LEVEL": (("0", "LOC"), "network adapters do not read the GPUs' memory directly"),
    "NCCL_NVLS_ENABLE": (("0",), "NVSwitch does not add up all-reduces (H100 and later)"),
    "NCCL_ALGO": (("Tree", "tree"), "only one algorithm is allowed for all sizes"),
    "NCCL_PROTO": (("LL", "Simple"), "only one protocol is allowed for all sizes"),
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel is waited for, so that nothing overlaps"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked on all ranks first"),
    "NCCL_BLOCKING_WAIT": (("1",), "every collective blocks the host"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "every collective blocks the host"),
}


@check
def slow_settings(facts: Facts) -> Iterator[Finding]:
    """Variables that turn off what makes exchanges fast."""
    for name, (values, effect) in _SLOW_SETTINGS.items():
        if (value := facts.environment.get(name)) in values:
            yield _finding(
                "warning",
                "slow setting",
                f"{name}={value}: {effect}.",
                f"Unset {name} unless you are looking for an error.",
            )
    if facts.environment.get("NCCL_NET", "").lower() == "socket":
        yield _finding(
            "warning",
            "slow setting",
            "NCCL_NET=Socket: machines exchange over TCP.",
            "Unset NCCL_NET where there is InfiniBand, RoCE or EFA.",
        )


@check
def no_fabric(facts: Facts) -> Iterator[Finding]:
    """Several nodes with GPUs, but no RDMA device."""
    if facts.num_nodes > 1 and facts.gpus and not facts.infiniband:
        what = (
            f"{facts.num_nodes} nodes, but this one shows no InfiniBand, RoCE or EFA device: NCCL will use TCP sockets,"
            " which reach a tenth of it."
        )
        yield _finding(
            "warning",
            "no RDMA",
            what,
            "If the machine has one, pass /dev/infiniband into the container and install libibverbs; else keep"
            " tensor and shard ranks within a node.",
        )


@check
def nccl_chose_slow(facts: Facts) -> Iterator[Finding]:
    """What NCCL's own log says that it chose."""
    log = facts.nccl_log
    if re.search(r"Using network Socket|NET/Socket : Using|via NET/Socket", log) and facts.num_nodes > 1:
        yield _finding(
            "warning",
            "NCCL on sockets",
            "NCCL's log says that it uses TCP sockets between machines.",
            "Look in the log for 'NET/IB' to see why: no device, no libibverbs, or NCCL_IB_HCA names none that exists.",
        )
    if "NET/IB : No device found" in log:
        yield _finding(
            "warning",
            "NCCL found no RDMA",
            "NCCL's log says 'NET/IB : No device found'.",
            "Pass /dev/infiniband into the container, and check NCCL_IB_HCA.",
        )
    if re.search(r"via SHM", log) and not re.search(r"via P2P", log):
        yield _finding(
            "warning",
            "NCCL on shared memory",
            "NCCL's log says that GPUs of this machine exchange 'via SHM', not 'via P2P'.",
            "See the findings on peer access and NCCL_P2P_DISABLE.",
        )
    if "via NET/IB" in log and "GDRDMA" not in log:
        yield _finding(
            "warning",
            "no GPUDirect RDMA",
            "NCCL's log shows 'NET/IB' without 'GDRDMA': each message goes through the host's memory.",
            "Load nvidia-peermem (or use a kernel with DMA-BUF), and turn off PCIe ACS.",
        )


@check
def interfaces_exist(facts: Facts) -> Iterator[Finding]:
    """Interface names in variables, beside those of the machine."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = facts.environment.get(name)
        if not value or not facts.interfaces or value.startswith("^"):
            continue
        exact = value.startswith("=") or not name.startswith("NCCL")
        wanted = [part for part in value.lstrip("=").split(",") if part]
        missing = [
            part
            for part in wanted
            if not any(have == part if exact else have.startswith(part) for have in facts.interfaces)
        ]
        if len(missing) == len(wanted) or (missing and name.startswith("GLOO")):
            what = f"{name}={value} names no interface of this machine; it has {', '.join(facts.interfaces)}."
            yield _finding("error", "interface", what, f"Set {name} to one of them, or unset it.")
    if facts.num_nodes > 1 and (loopback := _loopback(facts)):
        what = f"{loopback}={facts.environment[loopback]} with {facts.num_nodes} nodes: it leads to no other machine."
        yield _finding("error", "loopback", what, f"Set {loopback} to the interface that leads to the other machines.")


def _loopback(facts: Facts) -> str | None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return next((name for name in names if facts.environment.get(name, "").lstrip("=") in ("lo", "lo0")), None)


@check
def hostname(facts: Facts) -> Iterator[Finding]:
    """gloo looks up its own host's name."""
    if not facts.hostname_resolves and not facts.environment.get("GLOO_SOCKET_IFNAME"):
        yield _finding(
            "warning",
            "host name",
            "This machine's name does not resolve to an address, and GLOO_SOCKET_IFNAME is not set: gloo"
            " may fail or be reachable from nowhere.",
            "Add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME.",
        )


@check
def threads(facts: Facts) -> Iterator[Finding]:
    """Threads of all ranks beside cores."""
    value = facts.environment.get("OMP_NUM_THREADS")
    if facts.cores is None:
        return
    if value is not None and value.isdigit():
        total = int(value) * facts.local_ranks
        if total > facts.cores and facts.local_ranks > 1:
            fitting = max(1, facts.cores // facts.local_ranks)
            if int(value) > fitting:
                what = (
                    f"OMP_NUM_THREADS={value} x {facts.local_ranks} ranks are {total} threads on {facts.cores} cores."
                )
                yield _finding("warning", "threads", what, f"Set OMP_NUM_THREADS={fitting}.")
    elif value is None and facts.local_ranks > 1 and not facts.gpus:
        fitting = max(1, facts.cores // facts.local_ranks)
        what = (
            f"OMP_NUM_THREADS is not set: each of {facts.local_ranks} ranks may start {facts.cores} threads"
            " (torchrun sets 1)."
        )
        yield _finding("note", "threads", what, f"Set OMP_NUM_THREADS={fitting}.")
    if facts.local_ranks > facts.cores:
        what = (
            f"{facts.local_ranks} ranks share {facts.cores} cores: times measured here say little about other machines."
        )
        yield _finding("note", "cores", what, "Use fewer ranks for measurements.")


@check
def limits(facts: Facts) -> Iterator[Finding]:
    """Limits of the operating system."""
    if facts.open_files is not None and 0 < facts.open_files < 4096:
        what = f"At most {facts.open_files} files may be open: ranks with many loader workers need more."
        yield _finding("warning", "open files", what, "Run 'ulimit -n 65536' before, or raise nofile in limits.conf.")
    if facts.infiniband and facts.locked_memory is not None and 0 <= facts.locked_memory < 2**30:
        what = (
            f"Only {facts.locked_memory / 2**20:.0f} MiB of memory may be locked, which RDMA needs to register buffers."
        )
        yield _finding(
            "warning",
            "locked memory",
            what,
            "Run 'ulimit -l unlimited', or start the container with --ulimit memlock=-1.",
        )
    if facts.shared_memory is not None and facts.shared_memory < 2**30:
        what = (
            f"/dev/shm has {facts.shared_memory / 2**20:.0f} MiB: loader workers and NCCL end with 'Bus error' or"
            " 'No space left' when it is full."
        )
        yield _finding("warning", "shared memory", what, "Start the container with --shm-size=16g (or --ipc=host).")


@check
def forking(facts: Facts) -> Iterator[Finding]:
    """What does not survive a fork."""
    if facts.environment.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "0" and facts.gpus:
        what = (
            'PYTORCH_NVML_BASED_CUDA_CHECK=0: asking for GPUs starts CUDA, after which start_method="fork" cannot work.'
        )
        yield _finding("warning", "fork and CUDA", what, 'Unset it, or use start_method="spawn" or "popen".')
    if facts.system == "Darwin" and facts.environment.get("OBJC_DISABLE_INITIALIZE_FORK_SAFETY") != "YES":
        yield _finding(
            "note",
            "fork on macOS",
            "macOS ends forked processes that use its frameworks.",
            'Use start_method="popen", or set OBJC_DISABLE_INITIALIZE_FORK_SAFETY=YES.',
        )


@check
def memory_settings(facts: Facts) -> Iterator[Finding]:
    """The allocator."""
    if facts.gpus and "expandable_segments:True" not in facts.environment.get(
        "PYTORCH_CUDA_ALLOC_CONF", facts.environment.get("PYTORCH_ALLOC_CONF", "")
    ):
        yield _finding(
            "note",
            "allocator",
            "expandable_segments is off: gaps take 5 to 10 % of the memory.",
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if memory is tight.",
        )


@check
def wandb(facts: Facts) -> Iterator[Finding]:
    """Whether runs reach W&B."""
    mode = facts.environment.get("WANDB_MODE", "online")
    if mode in ("disabled", "dryrun") or facts.environment.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        yield _finding(
            "note",
            "W&B",
            f"W&B is off (WANDB_MODE={mode}): nothing is kept.",
            "Set WANDB_MODE=offline to keep runs on disk, and 'wandb sync' them later.",
        )
    elif mode == "offline":
        yield _finding(
            "note", "W&B", "W&B is offline: runs stay on this disk.", "'wandb sync FOLDER' sends them later."
        )
    elif facts.offline:
        yield _finding(
            "warning",
            "W&B",
            "This machine has no route to the outside, and WANDB_MODE is not offline: W&B"
            " waits for its server and retries.",
            "Set WANDB_MODE=offline.",
        )


@check
def rendezvous(facts: Facts) -> Iterator[Finding]:
    """Where ranks meet."""
    address = facts.environment.get("MASTER_ADDR")
    if facts.num_nodes > 1 and address in ("localhost", "127.0.0.1", "::1"):
        what = f"MASTER_ADDR={address} with {facts.num_nodes} nodes: each node waits for itself."
        yield _finding("error", "rendezvous", what, "Set MASTER_ADDR to the first node's address, on all nodes.")
