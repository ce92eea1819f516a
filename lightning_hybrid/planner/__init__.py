"""How long a run would take and what memory it would need, and which degrees are best: nothing runs. Pure."""

from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.profile import ModelProfile
from lightning_hybrid.planner.search import Plan, Planning, plan
from lightning_hybrid.planner.setup import Setup
from lightning_hybrid.planner.step import Estimate, estimate

__all__ = ["Cluster", "Estimate", "ModelProfile", "Plan", "Planning", "Setup", "estimate", "plan"]
