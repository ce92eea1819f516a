"""``lightning-hybrid check``: is a module the same at these degrees as in one process?"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from jsonargparse import Namespace
from rich.console import Console

from lightning_hybrid.callbacks.check import check
from lightning_hybrid.errors import ConfigurationError

__all__ = ["check_command"]


def check_command(factory: str, devices: int = 2, steps: int = 2, **arguments: Any) -> None:
    """Compare a module's first steps on several processes of this machine (CPU) with one process.

    Args:
        factory: package.module:function that returns a small LightningModule and its training loader.
        devices: Processes to start.
        steps: Optimizer steps to compare.
        **arguments: Of :class:`~lightning_hybrid.Hybrid3DStrategy`.
    """
    arguments = {name: vars(value) if isinstance(value, Namespace) else value for name, value in arguments.items()}
    console = Console()
    for number, values in enumerate(check(_find(factory), devices, num_steps=steps, **arguments), 1):
        said = ", ".join(f"{name} {here:.8g} (one process: {one:.8g})" for name, (here, one) in values.items())
        console.print(f"step {number}: {said}", highlight=False, markup=False, soft_wrap=True)
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
