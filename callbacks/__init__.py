"""Callbacks of lightning_hybrid: hooks only, one class a file. Import them from ``lightning_hybrid.callbacks``."""

if __name__ != "lightning_hybrid.callbacks":  # a top-level `callbacks` would shadow the user's own folder of that name
    raise ImportError("Import these callbacks as `lightning_hybrid.callbacks`, not as top-level `callbacks`.")

from lightning_hybrid.callbacks.bubble_ratio import BubbleRatio
from lightning_hybrid.callbacks.check import check
from lightning_hybrid.callbacks.config_archive import ConfigArchive
from lightning_hybrid.callbacks.finite_gradients import FiniteGradients
from lightning_hybrid.callbacks.link_probe import LinkProbe
from lightning_hybrid.callbacks.scaling_efficiency import ScalingEfficiency
from lightning_hybrid.callbacks.step_breakdown import StepBreakdown
from lightning_hybrid.training.verify import Verify

__all__ = [
    "BubbleRatio",
    "ConfigArchive",
    "FiniteGradients",
    "LinkProbe",
    "ScalingEfficiency",
    "StepBreakdown",
    "Verify",
    "check",
]
