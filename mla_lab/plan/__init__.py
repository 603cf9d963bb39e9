"""Plans as values: cut a batch's keys into work tiles and give them to workers."""

from .config import KernelConfig
from .cost import CostModel, default_model
from .schedule import POLICIES, SCHEDULES, make_plan, predicted_us
from .tile import Plan, WorkTile
from .workspace import WorkspaceLayout

__all__ = [
    "POLICIES",
    "SCHEDULES",
    "CostModel",
    "KernelConfig",
    "Plan",
    "WorkTile",
    "WorkspaceLayout",
    "default_model",
    "make_plan",
    "predicted_us",
]
