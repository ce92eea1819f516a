"""Hybrid 3D parallelism (data x tensor x pipeline) for ordinary LightningModules.

Importing this package registers the strategies ``"hybrid3d"`` and ``"hybrid3d_fork"``, and lets
``LightningModule.load_from_checkpoint`` read the directories that they write.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hybrid.checkpoint.export import save_safetensors
from lightning_hybrid.checkpoint.files import load_from_directories
from lightning_hybrid.checkpoint.pretrained import load_safetensors
from lightning_hybrid.checkpoint.whole import latest_checkpoint
from lightning_hybrid.describing.estimate import describe_rank
from lightning_hybrid.errors import HybridError
from lightning_hybrid.optimizer import grad_norm
from lightning_hybrid.replicas.options import ReplicaSync
from lightning_hybrid.strategy import Hybrid3DStrategy

__all__ = [
    "Hybrid3DStrategy",
    "HybridError",
    "ReplicaSync",
    "__version__",
    "describe_rank",
    "grad_norm",
    "latest_checkpoint",
    "load_safetensors",
    "save_safetensors",
]

__version__ = "0.1.0"

if "hybrid3d" not in StrategyRegistry:
    Hybrid3DStrategy.register_strategies(StrategyRegistry)
load_from_directories()
