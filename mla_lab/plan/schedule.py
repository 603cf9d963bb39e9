"""From a problem to a Plan: cut, number, order, assign.

Two schedules over the same tiles:

- "persistent": `num_workers` workers, each with a range of tiles. "greedy" assigns its parts
  itself; "fixed_size" deals the tiles out in turn; every other policy assigns the longest tile
  first to the least loaded worker (LPT).
- "grid": one worker a tile, longest first: the GPU's block scheduler starts the next CTA
  when one ends, which is LPT decided at run time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np

from ..core.errors import invalid, invalid_type
from ..core.problem import Problem
from .assign import beside, by_part, in_turn, one_each
from .config import KernelConfig
from .cost import CostModel, makespan
from .cuts import Cuts, Shape, number
from .kernel_costs import default_model
from .policies import PUBLISHED
from .search import cost, memory_time, tile_times
from .tile import Plan

SCHEDULES = ("persistent", "grid")
#: every policy by name
POLICIES: dict[str, Callable[..., Cuts]] = {**PUBLISHED, "cost": cost}
NO_CUTS = Cuts(*(np.zeros(0, dtype=np.int64),) * 3)


def make_plan(
    problem: Problem,
    *,
    tile_rows: int = 64,
    tile_kv: int = 64,
    num_workers: int = 132,
    policy: str = "cost",
    schedule: str = "persistent",
    model: CostModel | None = None,
    **knobs: Any,
) -> Plan:
    """Plan one decode call. Deterministic, NumPy only, no device.

    `policy` is a name in `POLICIES` and `knobs` are that function's own arguments. `model` weighs
    the tiles (default: the recorded constants for this tile shape). A persistent plan has exactly
    `num_workers` workers, idle ones included; a grid plan has one a tile.
    """
    if not isinstance(problem, Problem):
        raise invalid_type("problem", type(problem).__name__, "a mla_lab Problem")
    if not isinstance(model, CostModel | None):
        raise invalid_type("model", type(model).__name__, "a mla_lab CostModel, or None")
    _validate(tile_rows, tile_kv, num_workers, policy, schedule)
    _validate_knobs(policy, knobs)
    shape = Shape.of(problem, tile_rows, tile_kv, num_workers)
    model = model or default_model(problem, tile_rows, tile_kv)
    if policy == "cost":
        knobs["model"] = model
    cuts = POLICIES[policy](shape, **knobs) if shape.batch else NO_CUTS
    tiles, piece = number(shape, cuts)
    blocks = tiles[:, 3] - tiles[:, 2]
    if schedule == "grid":
        order, begins = one_each(blocks)
    elif cuts.part is not None:
        order, begins = by_part(tiles[:, 1], cuts.part[piece], shape.max_row_tiles, num_workers)
    elif policy == "fixed_size":
        order, begins = in_turn(blocks, num_workers)
    else:
        order, begins = beside(tiles, tile_times(shape, model, tiles), num_workers)
    return Plan(
        problem, tile_rows, tile_kv, policy, schedule, tiles[order], begins.astype(np.int32)
    )


def plan_on(config: KernelConfig, problem: Problem, **how: Any) -> Plan:
    """`make_plan` of a kernel's tiles, which the plan names; `how` are further arguments of it."""
    plan = make_plan(problem, tile_rows=config.tile_rows, tile_kv=config.tile_kv, **how)
    return replace(plan, config=config)


def predicted_us(plan: Plan, model: CostModel | None = None) -> float:
    """Microseconds that the cost model expects of `plan`, launch and merge included.

    A grid plan is priced with as many workers as it has tiles, as if all were resident at once.
    """
    model = model or default_model(plan.problem, plan.tile_rows, plan.tile_kv)
    shape = Shape.of(plan.problem, plan.tile_rows, plan.tile_kv, max(1, plan.num_workers))
    times = tile_times(shape, model, plan.tiles)
    memory = memory_time(shape, model)
    return makespan(model, plan.tiles, times, plan.worker_begin, memory) / 1e3


#: rows and tokens of a tile, workers: far beyond any card's
MOST = 1 << 20
#: of a policy's own arguments: counts of pieces and blocks, which are int32
MOST_OF_KNOB = 2**31 - 1


def _validate(rows: int, kv: int, workers: int, policy: str, schedule: str) -> None:
    for name, value in (("tile_rows", rows), ("tile_kv", kv), ("num_workers", workers)):
        _validate_integer(name, value, MOST)
        if value < 1:
            raise invalid(name, value, "1 or more")
    if not isinstance(policy, str) or policy not in POLICIES:
        raise invalid("policy", repr(policy), tuple(POLICIES))
    if schedule not in SCHEDULES:
        raise invalid("schedule", repr(schedule), SCHEDULES)


def _validate_integer(name: str, value: object, most: int) -> None:
    """An int, Python's or NumPy's (no bool), of at most `most`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise invalid_type(name, type(value).__name__, "an int")
    if int(value) > most:
        raise invalid(name, value, f"up to {most}")


def _validate_knobs(policy: str, knobs: dict[str, Any]) -> None:
    """Names and types; the policy checks the least values. None stands for a default of None."""
    known = dict(inspect.signature(POLICIES[policy]).parameters)
    for name in ("shape", "model"):
        known.pop(name, None)
    unknown = sorted(set(knobs) - set(known))
    if unknown:
        raise invalid(f"knobs of policy {policy!r}", unknown, list(known))
    for name, value in knobs.items():
        if value is not None or known[name].default is not None:
            _validate_integer(name, value, MOST_OF_KNOB)
