"""What a run stands on: devices and software versions. Never environment variables."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata

import torch

from lightning_hybrid.archive.entry import Hardware

__all__ = ["detect_hardware", "detect_software", "redact"]

_PACKAGES = ("lightning-hybrid", "torch", "lightning", "transformers")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_MAX_MESSAGE = 2000


def detect_hardware(device: str, *, num_devices: int, num_nodes: int = 1) -> Hardware:
    """Describe the devices of this process's machine (all others are taken to be alike).

    For ``device="cuda"`` this initializes CUDA in the calling process: call it in a rank, not before ranks are forked.

    Args:
        device: type of device, such as ``"cpu"`` or ``"cuda"``.
        num_devices: devices used over all nodes.
        num_nodes: machines used.
    """
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        kind = str(properties.name)
        memory: int | None = properties.total_memory
    else:
        kind = _processor_name() if device == "cpu" else device
        memory = _memory_of_machine() if device == "cpu" else None
    return Hardware(device=device, kind=kind, num_devices=num_devices, num_nodes=num_nodes, memory_bytes=memory)


def detect_software() -> dict[str, str]:
    """Return package -> version, of Python, CUDA and NCCL too where they are in use."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return versions


def redact(text: str) -> str:
    """Return a message fit for a shared archive: no credentials in URLs, no secret of this process, not too long.

    A secret is the value (of 6 characters or more) of an environment variable whose name says key, token, secret,
    password or credential.
    """
    for name, value in os.environ.items():
        if len(value) >= 6 and _SECRET_NAME.search(name):
            text = text.replace(value, "***")
    text = re.sub(r"(?<=://)[^/\s@]+@", "***@", text)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ..."


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "cpu"


def _memory_of_machine() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
