"""Plans of calls that bring none: what the kernels find from the lengths, as a value.

PLAIN and INVARIANT name the two rules beside the policies of `schedule.POLICIES`. A call of a few
requests and few heads takes a static grid instead (`formula`), which is not drawn here.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.errors import invalid
from ..core.problem import Problem
from .choose import invariant_cuts
from .fixed_pieces import fixed_pieces
from .gate import LEAST_BLOCKS, LEAST_DUAL_ROWS
from .pricing import TILE_KV
from .selection import dual_option
from .self_schedule import COSTS, self_schedule
from .tile import Plan

#: each CTA finds its tiles by `self_schedule`; with `batch_invariant`, its pieces by `fixed_pieces`
PLAIN, INVARIANT = "plain call", "batch invariant"
RULES = (PLAIN, INVARIANT)


def plan_without(problem: Problem, rule: str, tile_rows: int = 64, num_workers: int = 132) -> Plan:
    """The plan of one of `RULES`, with row tiles of `tile_rows` rows. Raises InvalidInput for
    another name, and where the rule has none: see `self_schedule` and `fixed_pieces`.
    """
    if rule not in RULES:
        raise invalid("rule", repr(rule), RULES)
    if rule == INVARIANT:
        cuts = invariant_cuts(problem.heads, tile_rows)
        plan = fixed_pieces(problem, tile_rows=tile_rows, num_workers=num_workers, cuts=cuts)
        return replace(plan, policy=INVARIANT)
    costs = COSTS["keep_ab_persistent" if tile_rows >= TILE_KV else "swap_ab_persistent"]
    dual = dual_option(problem) if tile_rows == TILE_KV else 0
    if dual and problem.rows[0] >= LEAST_DUAL_ROWS:
        costs = replace(costs, least=LEAST_BLOCKS[dual])
    plan = self_schedule(problem, tile_rows=tile_rows, num_workers=num_workers, costs=costs)
    return replace(plan, policy=PLAIN)
