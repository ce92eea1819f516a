"""The public surface, frozen: a name added or removed here is a line in CHANGELOG.md."""

from __future__ import annotations

import importlib

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_hybrid

PUBLIC = {
    "lightning_hybrid": {
        "Hybrid3DStrategy",
        "HybridError",
        "ReplicaSync",
        "__version__",
        "describe_rank",
        "grad_norm",
        "latest_checkpoint",
        "load_safetensors",
        "save_safetensors",
    },
    "lightning_hybrid.callbacks": {
        "BubbleRatio",
        "ConfigArchive",
        "FiniteGradients",
        "LinkProbe",
        "ScalingEfficiency",
        "StepBreakdown",
        "Verify",
        "check",
    },
    "lightning_hybrid.errors": {
        "ArchiveError",
        "CheckpointError",
        "ConfigurationError",
        "HybridError",
        "NonFiniteError",
        "PipelineError",
        "ProbeError",
        "UnsupportedError",
        "VerificationError",
    },
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module: str):
    imported = importlib.import_module(module)
    assert set(imported.__all__) == PUBLIC[module]
    assert all(hasattr(imported, name) for name in imported.__all__)


def test_strategies_are_registered_by_the_import():
    assert lightning_hybrid.Hybrid3DStrategy.__module__ == "lightning_hybrid.strategy"
    assert {"hybrid3d", "hybrid3d_fork"} <= set(StrategyRegistry.available_strategies())
