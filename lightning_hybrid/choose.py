"""Where a run without degrees gets them from: the archive's best entry that fits, if there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_hybrid.archive import choose_degrees, detect_hardware, fingerprint_module
from lightning_hybrid.layout import Layout

__all__ = ["Choice", "choose_from_archive"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Degrees and settings to start from."""

    layout: Layout
    entry_id: str
    settings: dict[str, Any]
    reason: str


def choose_from_archive(
    url: str, module: Any, device: torch.device, num_devices: int, num_nodes: int, broadcast: Callable[[Any], Any]
) -> Choice | None:
    """Return what global rank 0 finds in the archive, the same on all ranks; ``None`` if nothing fits. A collective."""
    choice: Choice | None = None
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        hardware = detect_hardware(device.type, num_devices=num_devices, num_nodes=num_nodes)
        match = choose_degrees(url, fingerprint_module(module), hardware, num_devices)
        if match is not None:
            choice = Choice(
                layout=match.degrees, entry_id=match.entry.id, settings=vars(match.entry.settings), reason=match.reason
            )
    result: Choice | None = broadcast(choice)
    return result
