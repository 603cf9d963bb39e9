"""Plans as values: cut a batch's keys into work tiles and give them to workers."""

from .choose import choose
from .config import KernelConfig
from .cost import CostModel
from .kernel_costs import KernelCosts, default_model
from .pricing import Choice
from .schedule import POLICIES, SCHEDULES, make_plan, plan_on, predicted_us
from .tile import Plan, WorkTile
from .without_plan import RULES, plan_without
from .workspace import WorkspaceLayout

__all__ = [
    "POLICIES",
    "RULES",
    "SCHEDULES",
    "Choice",
    "CostModel",
    "KernelConfig",
    "KernelCosts",
    "Plan",
    "WorkTile",
    "WorkspaceLayout",
    "choose",
    "default_model",
    "make_plan",
    "plan_on",
    "plan_without",
    "predicted_us",
]
