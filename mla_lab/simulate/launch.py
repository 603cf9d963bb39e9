"""Predicted time of one launch of a plan: clock, merge, lower bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.errors import invalid
from ..core.gpu import MAX_CLUSTER
from ..plan.tile import Plan
from .constants import Constants
from .engine import Engine
from .recorded import constants_for
from .timeline import Event, Timeline
from .work import Share, Work


def simulate(
    plan: Plan, constants: Constants | None = None, *, cluster: int = 1, fused_merge: bool = True
) -> Timeline:
    """Predicts one launch of `plan`: a `Timeline` in us from the launch.

    constants: default are those fitted to the record for the kernel with such tiles. cluster: CTAs
    of a worker. fused_merge: the workers that split a row tile merge it together; otherwise, or
    where not all workers are resident at once (a merge would wait for a worker that has not
    started), a second launch merges with its rows spread over the whole card.
    """
    constants = _settled(plan, constants, cluster)
    lanes = constants.lanes(cluster)
    fused_merge = fused_merge and runs_at_once(plan, constants, cluster)
    engine = Engine(plan, constants, cluster, fused_merge)
    events = engine.go()
    events.append(Event(0, -1, "launch", 0.0, constants.launch_us, -1))
    if not fused_merge and plan.num_groups:
        events += _merge_launch(plan, engine, lanes)
    return Timeline.from_events(events, lanes)


def runs_at_once(plan: Plan, constants: Constants, cluster: int = 1) -> bool:
    """True if all workers of the plan are resident at once, so that one may wait for another."""
    return plan.num_workers <= constants.lanes(cluster)


def _settled(plan: Plan, constants: Constants | None, cluster: int) -> Constants:
    """`settle` of the given constants or the plan's own. Raises InvalidInput for a cluster that no
    card has."""
    if not 1 <= cluster <= MAX_CLUSTER:
        raise invalid("cluster", cluster, f"1 to {MAX_CLUSTER} CTAs")
    return settle(plan, constants or constants_for(plan.tile_rows), cluster)


def settle(plan: Plan, constants: Constants, cluster: int = 1) -> Constants:
    """`constants` at the clock under this plan's MMA load, which a trial run determines."""
    if not constants.burst_ghz:
        return constants
    trial = replace(constants, clock_ghz=constants.burst_ghz, burst_ghz=0.0)
    end = max(e.end for e in Engine(plan, trial, cluster, runs_at_once(plan, trial, cluster)).go())
    share = Share.of(plan, cluster)
    blocks = plan.tiles[:, 3].astype(np.int64) - plan.tiles[:, 2]
    clocks = trial.matrix_clocks(share.rows, plan.tile_kv) * float(
        -(-blocks // share.kv_ways).sum() * cluster
    )
    return constants.at_load(clocks / (trial.clock_ghz * 1e3 * trial.sms * end))


def _merge_launch(plan: Plan, engine: Engine, lanes: int) -> list[Event]:
    """The merge kernel's launch: a block for each query row, rows dealt evenly to the lanes."""
    c = engine.c
    begin = max(e.end for e in engine.events) + c.relaunch_us
    rows = plan.num_groups * plan.tile_rows
    megabytes = plan.num_slots * plan.tile_rows * (plan.problem.latent_dim * 4 + 4) / 1e6
    users = min(lanes, rows)
    read = max(megabytes / users / c.sm_read_tbps, megabytes / c.merge_launch_tbps)
    end = begin + c.merge_us + read
    return [Event(lane, -1, "merge", begin, end, -1) for lane in range(users)]


def bounds(plan: Plan, constants: Constants | None = None, *, cluster: int = 1) -> dict[str, float]:
    """Times in us that no schedule of these tiles beats, by what they rest on.

    `matrix`: the loops of all tiles over all lanes; `read`: the KV once from HBM; `longest`: the
    loop of the largest single tile.
    """
    constants = _settled(plan, constants, cluster)
    work = Work(plan, constants, cluster)
    alone = [work.loop.alone(work.blocks(tile)) for tile in plan.tiles.tolist()]
    problem = plan.problem
    return {
        "matrix": sum(alone) / constants.lanes(cluster),
        "read": problem.total_kv * problem.kv_token_bytes / 1e6 / constants.read_tbps,
        "longest": max(alone, default=0.0),
    }
