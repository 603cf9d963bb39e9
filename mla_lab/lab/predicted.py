"""The plan of a split policy, or of a call without a plan, and its predicted timeline."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..core.problem import Problem
from ..plan import RULES, Plan, make_plan, plan_without
from ..plan.without_plan import PLAIN
from ..simulate import Timeline, constants_for, simulate

__all__ = ["MERGES", "PLAIN", "partial_mb", "planned"]

#: what merges a split row tile: its own CTAs, some of the rows each, or a kernel behind them
MERGES = ("cooperative", "second launch")


@lru_cache(maxsize=64)
def planned(
    problem: Problem, policy: str, sms: int = 132, merge: str = MERGES[0]
) -> tuple[Plan, Timeline]:
    """The plan of one policy, or of one of `RULES`, and its predicted timeline on a card of `sms`
    SMs."""
    rows = min(64, problem.heads)
    if policy in RULES:
        plan = plan_without(problem, policy, rows, sms)
    else:
        plan = make_plan(problem, tile_rows=rows, num_workers=sms, policy=policy)
    family = constants_for(plan.tile_rows)
    constants = replace(family, sms=sms, read_tbps=family.read_tbps * sms / family.sms)
    return plan, simulate(plan, constants, fused_merge=merge == MERGES[0])


def partial_mb(plan: Plan) -> float:
    """Megabytes of fp32 partials that the plan writes, and reads again to merge."""
    pieces = int((plan.tiles[:, 5] > 1).sum())
    return pieces * plan.tile_rows * (plan.problem.latent_dim * 4 + 4) / 1e6
