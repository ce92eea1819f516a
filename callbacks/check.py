"""Is a module the same at these degrees as in one process? On this machine's CPUs, for tests and the command line."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_hybrid.errors import ConfigurationError, HybridError, ProbeError, VerificationError
from lightning_hybrid.machine.local_ranks import run_here
from lightning_hybrid.strategy import Hybrid3DStrategy
from lightning_hybrid.training.verify import Verify

__all__ = ["check"]

#: What is compared, by step: of the run, and of one process.
Compared = list[dict[str, tuple[float, float]]]


def check(
    make: Callable[[], tuple[LightningModule, Any]],
    num_devices: int = 2,
    *,
    num_steps: int = 2,
    tolerance: float | None = None,
    timeout: float = 300.0,
    **arguments: Any,
) -> Compared:
    """Train a few steps on so many processes (CPU, gloo), and compare each with one process by :class:`Verify`.

    For a test of your own: ``check(make, 4, tensor_parallel_size=2)``, where ``make()`` returns a small module and its
    loader. Nothing of the calling process changes.

    Args:
        make: Returns the LightningModule and its training loader; called in every process.
        num_devices: Processes to start.
        num_steps: Optimizer steps to compare.
        tolerance: See :class:`Verify`.
        timeout: Seconds after which it fails.
        **arguments: Of :class:`~lightning_hybrid.Hybrid3DStrategy`.

    Returns:
        For each step ``{"loss": (here, one process), "grad_norm": (here, one process)}``.

    Raises:
        VerificationError: if a step differs, or could not be compared; the message says why.
        ConfigurationError: for arguments that cannot work.
        HybridError: any other refusal of this library, as ``Trainer.fit`` would raise it.
        ProbeError: if a process fails for another reason, with its traceback.
    """
    if type(num_devices) is not int or num_devices < 1:
        raise ConfigurationError(f"num_devices={num_devices!r} must be an integer of at least 1.")
    Verify(num_steps, tolerance=tolerance)
    Hybrid3DStrategy(**{"archive": None, **arguments}).choice.resolve(num_devices)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    run = functools.partial(_run, make, port, num_steps, tolerance, arguments)
    try:
        compared, why_not = run_here(num_devices, run, timeout=timeout)
    except ProbeError as error:
        if isinstance(error.__cause__, HybridError):
            raise error.__cause__ from None
        raise
    if len(compared) < num_steps:
        raise VerificationError(f"{len(compared)} of {num_steps} steps could be compared: {why_not or 'no more data'}.")
    found: Compared = compared
    return found


def _run(
    make: Callable[[], tuple[LightningModule, Any]],
    port: int,
    num_steps: int,
    tolerance: float | None,
    arguments: dict[str, Any],
    store: str,
    rank: int,
    num_devices: int,
) -> tuple[Compared, str]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    torch.manual_seed(0)
    made: Any = make()
    if not isinstance(made, (tuple, list)) or len(made) != 2 or not isinstance(made[0], LightningModule):
        what = f"{len(made)} values" if isinstance(made, (tuple, list)) else type(made).__name__
        name = getattr(make, "__name__", make)
        raise ConfigurationError(f"{name} gave {what}; it must return (LightningModule, training loader).")
    module, loader = made
    verify = Verify(num_steps, tolerance=tolerance)
    trainer = Trainer(
        accelerator="cpu",
        devices=num_devices,
        strategy=Hybrid3DStrategy(**{"archive": None, **arguments}),
        max_steps=num_steps,
        callbacks=[verify],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return verify.compared, verify.why_not
