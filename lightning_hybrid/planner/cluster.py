"""Devices and the links between them, nominal or measured. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.planner.gpus import Gpu, find_gpu, unlisted_gpu
from lightning_hybrid.planner.links import Measured
from lightning_hybrid.planner.placement import Placement

__all__ = ["SCHEMA", "Cluster"]

#: Version of the JSON document; it grows when an older reader would misunderstand a newer document.
SCHEMA = 1
#: A larger file is none; it may come from anybody.
_MOST_BYTES = 16 << 20


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
    seats: float | None = None
    """Devices of a node that can work at once, where they are processes that share a host's cores; ``None``: all."""
    link: float
    """GB/s of one device to the others of its node, one direction (nominal; collectives reach a part of it)."""
    network: float
    """GB/s of one *node* to the others, one direction."""
    measured: Measured | None = None
    """What a probe found; counts instead of the nominal links."""
    placement: Placement = field(default_factory=Placement)
    """Which device each rank has."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """What real steps on these devices took over what was predicted, by part: estimates are corrected by it."""

    def __post_init__(self) -> None:
        for name in ("num_devices", "per_node", "link", "network"):
            value, whole = getattr(self, name), name in ("num_devices", "per_node")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value > 0:
                kind = "integer" if whole else "number"
                raise ConfigurationError(f"{name}={value!r} of a cluster must be a positive {kind}.")

    @classmethod
    def named(
        cls,
        device: str,
        num_devices: int,
        *,
        per_node: int | None = None,
        link: float | None = None,
        network_gbits: float | None = None,
        peak: float | None = None,
        memory: float | None = None,
    ) -> Cluster:
        """Return nodes as they are usually built around a device.

        Args:
            device: Its name, such as ``"H100"`` or ``"A100-40GB"``.
            num_devices: Of the whole cluster.
            per_node: Devices of a node; by default as usual (8), or all if they are fewer.
            link: GB/s of one device to others of its node, one direction.
            network_gbits: Gbit/s of one node to others, all adapters together.
            peak: TFLOP/s of 16-bit matrix products, dense, of a device that is not in the table; needs ``memory``.
            memory: GiB of a device that is not in the table; needs ``peak``.

        Raises:
            ConfigurationError: if the device is unknown, or only one of ``peak`` and ``memory`` is given.
        """
        if (peak is None) != (memory is None):
            raise ConfigurationError("Give both, peak (TFLOP/s) and memory (GiB), or neither of them.")
        for name, value in (("peak", peak), ("memory", memory)):
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name}={value!r} of a device must be a positive number.")
        gpu = find_gpu(device) if peak is None or memory is None else unlisted_gpu(device, peak, memory)
        return cls._of(gpu, num_devices, per_node=per_node, link=link, network_gbits=network_gbits)

    @classmethod
    def _of(
        cls,
        gpu: Gpu,
        num_devices: int,
        *,
        per_node: int | None = None,
        link: float | None = None,
        network_gbits: float | None = None,
        seats: float | None = None,
    ) -> Cluster:
        full = gpu.per_node if per_node is None else per_node
        return cls(
            gpu=gpu,
            num_devices=num_devices,
            per_node=min(full, num_devices),
            seats=seats,
            link=gpu.link if link is None else link,
            network=(gpu.network * full if network_gbits is None else network_gbits) / 8,
        )

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster: ``{"device": "H100", "num_devices": 64, ...}``, or the profile that a probe wrote.

        ``device`` is a name, or an object with the fields of :class:`~lightning_hybrid.planner.gpus.Gpu`; ``measured``
        an object with those of :class:`~lightning_hybrid.planner.links.Measured`; other keys are the arguments of
        :meth:`named`.

        Raises:
            ConfigurationError: if the file cannot be read, a key is missing or unknown, or a newer version wrote it.
        """
        try:
            if (size := Path(path).stat().st_size) > _MOST_BYTES:
                raise ValueError(f"its {size} bytes are more than the {_MOST_BYTES} that a cluster may have")
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(document, dict):
                raise ValueError(f"it holds {type(document).__name__}, not an object")
            return cls._from_document(document)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f"{os.fspath(path)} does not describe a cluster: {error}.") from error

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> Cluster:
        rest = dict(document)
        if (schema := rest.pop("schema", SCHEMA)) not in range(1, SCHEMA + 1):
            raise ValueError(f"its schema is {schema!r}, this version reads up to {SCHEMA}: update lightning-hybrid")
        device, measured = rest.pop("device", None), rest.pop("measured", None)
        if not isinstance(device, (str, dict)):
            raise ValueError('"device" is missing')
        if measured is not None and not isinstance(measured, dict):
            raise ValueError(f'"measured" is {measured!r}, not an object')
        if missing := {"num_devices", *rest} - {"num_devices", "per_node", "link", "network_gbits"}:
            raise ValueError(f"it has unknown keys: {', '.join(sorted(missing))}")
        for name in ("per_node", "link", "network_gbits", "num_devices"):
            value = rest.get(name)
            if name in rest and (isinstance(value, bool) or not isinstance(value, (int, float, type(None)))):
                raise ValueError(f'"{name}" is {value!r}, not a number')
        known = find_gpu(device) if isinstance(device, str) else _gpu_of(device)
        nodes = cls._of(known, rest.pop("num_devices"), **rest)
        return replace(nodes, measured=Measured.from_document(measured)) if measured else nodes

    @classmethod
    def probe(cls, devices: int | None = None, *, quick: bool = False, timeout: float = 120.0) -> Cluster:
        """Measure the devices and links of this job, or of this machine; see :func:`lightning_hybrid.probe.probe`.

        In a job with several ranks (under ``torchrun``, or where a process group exists) all ranks call this, and all
        get the same cluster; else ``devices`` processes are started on this machine for the time of the probe.

        Args:
            devices: Ranks to start; by default all GPUs, or one rank without any.
            quick: Fewer sizes and repetitions: a second or two.
            timeout: Seconds after which it fails on all ranks.

        Raises:
            ProbeError: if a rank fails or the time is over; the message has the first cause.
        """
        from lightning_hybrid.probe import probe  # needs process groups, which the planner does not

        return probe(devices, quick=quick, timeout=timeout)

    def to_json(self) -> str:
        """Return what :meth:`from_json` reads (not the placement, which belongs to a plan)."""
        document: dict[str, Any] = {"schema": SCHEMA, "device": asdict(self.gpu), "num_devices": self.num_devices}
        if self.seats is not None:
            document["seats"] = self.seats
        document |= {"per_node": self.per_node, "link": self.link, "network_gbits": self.network * 8}
        if self.measured is not None:
            document["measured"] = self.measured.to_document()
        return json.dumps(document, indent=2)

    def with_devices(self, num_devices: int) -> Cluster:
        """Return the same nodes with another number of devices, in the usual order."""
        return replace(self, num_devices=num_devices, placement=Placement())

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.num_devices // self.per_node)

    def __str__(self) -> str:
        link = f"{self.link:.0f}" if self.link >= 10 else f"{self.link:.2g}"
        text = f"{self.num_devices} x {self.gpu.name}, {self.per_node} a node, {link} GB/s within"
        if self.num_nodes > 1:
            text += f", {self.network * 8:.0f} Gbit/s between nodes"
        return text + ("" if self.measured is None else "; links measured")


def _gpu_of(values: Mapping[str, Any]) -> Gpu:
    """Return the device with these fields."""
    known = {one.name: one.default is MISSING for one in fields(Gpu)}
    missing = [name for name, is_needed in known.items() if is_needed and name not in values]
    unknown = [name for name in values if name not in known]
    if missing or unknown:
        raise ValueError(f'"device" lacks {missing or "nothing"}, and has unknown fields {unknown or "none"}')
    return Gpu(**values)
