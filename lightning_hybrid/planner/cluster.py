"""Devices and the links between them, nominal or measured. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.planner.gpus import Gpu, find_gpu

__all__ = ["Cluster"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal nodes.

    Raises:
        ConfigurationError: if a number is not positive.
    """

    gpu: Gpu
    num_devices: int
    per_node: int
    """Devices of one node."""
    link: float
    """GB/s of one device to the others of its node, one direction (nominal; collectives reach a part of it)."""
    network: float
    """GB/s of one *node* to the others, one direction."""

    def __post_init__(self) -> None:
        for name in ("num_devices", "per_node", "link", "network"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} of a cluster must be positive.")

    @classmethod
    def named(
        cls,
        device: str,
        num_devices: int,
        *,
        per_node: int | None = None,
        link: float | None = None,
        network_gbits: float | None = None,
    ) -> Cluster:
        """Return nodes as they are usually built around a device.

        Args:
            device: Its name, such as ``"H100"`` or ``"A100-40GB"``.
            num_devices: Of the whole cluster.
            per_node: Devices of a node; by default as usual (8), or all if they are fewer.
            link: GB/s of one device to others of its node, one direction.
            network_gbits: Gbit/s of one node to others, all adapters together.

        Raises:
            ConfigurationError: if the device is unknown.
        """
        gpu = find_gpu(device)
        full = per_node or gpu.per_node
        return cls(
            gpu=gpu,
            num_devices=num_devices,
            per_node=min(full, num_devices),
            link=link or gpu.link,
            network=(network_gbits or gpu.network * full) / 8,
        )

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster: ``{"device": "H100", "num_devices": 64, ...}``.

        ``device`` is a name, or an object with the fields of :class:`~lightning_hybrid.planner.gpus.Gpu`; other keys
        are the arguments of :meth:`named`.

        Raises:
            ConfigurationError: if the file cannot be read, or a key is missing or unknown.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(document, dict):
                raise ValueError(f"it holds {type(document).__name__}, not an object")
            return cls._from_document(document)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(f"{os.fspath(path)} does not describe a cluster: {error}.") from error

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> Cluster:
        rest = dict(document)
        device = rest.pop("device", None)
        if isinstance(device, str):
            return cls.named(device, **rest)
        if not isinstance(device, dict):
            raise ValueError('"device" is missing')
        gpu = Gpu(**device)
        num_devices = int(rest.pop("num_devices"))
        full = rest.pop("per_node", None) or gpu.per_node
        link, gbits = rest.pop("link", None) or gpu.link, rest.pop("network_gbits", None) or gpu.network * full
        if rest:
            raise ValueError(f"unknown keys {', '.join(rest)}")
        return cls(gpu=gpu, num_devices=num_devices, per_node=min(full, num_devices), link=link, network=gbits / 8)

    def to_json(self) -> str:
        """Return what :meth:`from_json` reads."""
        document = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("gpu", "network")}
        return json.dumps({"device": asdict(self.gpu), **document, "network_gbits": self.network * 8}, indent=2)

    def with_devices(self, num_devices: int) -> Cluster:
        """Return the same nodes with another number of devices."""
        return replace(self, num_devices=num_devices)

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.num_devices // self.per_node)

    def __str__(self) -> str:
        return (
            f"{self.num_devices} x {self.gpu.name}, {self.per_node} a node, {self.link:.0f} GB/s within,"
            f" {self.network * 8:.0f} Gbit/s between nodes"
        )
