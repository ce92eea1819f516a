"""The links of each mesh axis, measured when training starts."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_hybrid.probe import probe_axes

__all__ = ["LinkProbe"]


class LinkProbe(Callback):
    """Measures the links of each mesh axis before the first step, and warns of those that are too slow.

    It takes about a second: gathers of two sizes on each axis with more than one rank, in the process groups that
    training uses. Rates are said once, kept with the run's archive entry (``hardware.links``, bytes per second), and in
    :attr:`links`. An axis below half of what a known device's links should reach is a warning, with the numbers.
    ``lightning-hybrid probe`` measures more.
    """

    def __init__(self) -> None:
        self.links: dict[str, float] = {}
        """Bytes per second of a gather by mesh axis, once measured."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        if stage != "fit" or not hasattr(strategy, "layout") or self.links:
            return
        self.links, warnings = probe_axes(strategy._mesh, strategy.layout, strategy.root_device)
        strategy.links = self.links
        for text in warnings:
            rank_zero_warn(text)
        if self.links:
            rates = ", ".join(f"{axis} {rate / 1e9:.3g} GB/s" for axis, rate in self.links.items())
            rank_zero_info(f"Links as measured: {rates}.")
