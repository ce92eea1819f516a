"""``lightning-hybrid check``: is a module the same at these degrees as in one process?"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from rich.console import Console

from lightning_hybrid.callbacks.check import check
from lightning_hybrid.errors import ConfigurationError

__all__ = ["check_command"]


def check_command(
    factory: str,
    devices: int = 2,
    steps: int = 2,
    data_parallel_size: str = "auto",
    tensor_parallel_size: str = "auto",
    pipeline_parallel_size: str = "auto",
    schedule: str = "auto",
) -> None:
    """Compare a module's first steps on several processes of this machine (CPU) with one process.

    Args:
        factory: package.module:function that returns a small LightningModule and its training loader.
        devices: Processes to start.
        steps: Optimizer steps to compare.
        data_parallel_size: A number, or auto.
        tensor_parallel_size: A number, or auto.
        pipeline_parallel_size: A number, or auto.
        schedule: Of the pipeline.
    """
    degrees = {
        "data_parallel_size": data_parallel_size,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
    }
    numbers: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in degrees.items()}
    console = Console()
    for number, values in enumerate(check(_find(factory), devices, num_steps=steps, schedule=schedule, **numbers), 1):
        said = ", ".join(f"{name} {here:.8g} (one process: {one:.8g})" for name, (here, one) in values.items())
        console.print(f"step {number}: {said}", highlight=False, soft_wrap=True)
    console.print("equal to one process")


def _find(path: str) -> Any:
    name, separator, attribute = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(name), attribute) if separator else None
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be imported: {error}.") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise ConfigurationError(f"{path!r} must name a function, such as my_package.checks:make.")
    return found
