"""The plan of a split policy, or of the plain call's rule, and its predicted timeline."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..core.problem import Problem
from ..plan import Plan, make_plan
from ..plan.self_schedule import COSTS, self_schedule
from ..simulate import Timeline, constants_for, simulate

#: the rule of a call that brings no plan: each CTA finds its own work from the lengths (a few
#: requests of few heads take a static grid instead, which is not drawn here)
PLAIN = "plain call"

#: what merges a split row tile: its own CTAs, some of the rows each, or a kernel behind them
MERGES = ("cooperative", "second launch")


@lru_cache(maxsize=64)
def planned(
    problem: Problem, policy: str, sms: int = 132, merge: str = MERGES[0]
) -> tuple[Plan, Timeline]:
    """The plan of one policy, or of `PLAIN`, and its predicted timeline on a card of `sms` SMs."""
    rows = min(64, problem.heads)
    if policy == PLAIN:
        costs = COSTS["keep_ab_persistent" if rows == 64 else "swap_ab_persistent"]
        plan = self_schedule(problem, tile_rows=rows, num_workers=sms, costs=costs)
        plan = replace(plan, policy=PLAIN)
    else:
        plan = make_plan(problem, tile_rows=rows, num_workers=sms, policy=policy)
    family = constants_for(plan.tile_rows)
    constants = replace(family, sms=sms, read_tbps=family.read_tbps * sms / family.sms)
    return plan, simulate(plan, constants, fused_merge=merge == MERGES[0])


def partial_mb(plan: Plan) -> float:
    """Megabytes of fp32 partials that the plan writes, and reads again to merge."""
    pieces = int((plan.tiles[:, 5] > 1).sum())
    return pieces * plan.tile_rows * (plan.problem.latent_dim * 4 + 4) / 1e6
