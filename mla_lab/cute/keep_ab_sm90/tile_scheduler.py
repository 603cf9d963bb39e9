"""The worker's tiles, from the schedule into shared memory, and the record of the first one."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..common.self_schedule import COUNT, Plan
from ..common.worker_plan import likely_words, open_plan, plan_of
from ..rows_on_m.params import Globals
from ..rows_on_m.work_records import batch_of, issue_loads, store_record
from .params import Config, Shared


@cute.jit
def find_plan(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, cta: Int32, rank: Int32):
    """Leave this CTA's tiles in shared memory for `load_plan`, by one warp, and with 16 bits the
    record of the first one.

    What the record needs is loaded beside the lengths that the tiles are checked against, for the
    tile that the CTA began with last: one latency less in all layers of a step but the first."""
    b = batch_of(cfg, g)
    likely = Int32(0)
    if const_expr(not cfg.fp8):
        likely = likely_words(g.tiles, g.schedule, cta)
    if const_expr(cfg.pdl):
        cute.arch.griddepcontrol_wait()
    if const_expr(cfg.fp8):
        words = open_plan(b, g.tiles, g.schedule, cta, cfg.cluster)
        plan_words(cfg, s)[cute.arch.lane_idx()] = words
    else:
        loads = issue_loads(cfg, g, likely)
        words = open_plan(b, g.tiles, g.schedule, cta, cfg.cluster)
        plan_words(cfg, s)[cute.arch.lane_idx()] = words
        if not cute.arch.vote_all_sync(words == likely):
            loads = issue_loads(cfg, g, words)
        if cute.arch.shuffle_sync(words, COUNT) > 0:
            store_record(cfg, g, s, words, loads, Int32(0), rank)


@cute.jit
def load_plan(cfg: cutlass.Constexpr[Config], s: Shared, lane: Any = None) -> Plan:
    """What `find_plan` left, behind a barrier. With a `lane` computed anew no address is held from
    an earlier call on."""
    return plan_of(plan_words(cfg, s)[cute.arch.lane_idx() if lane is None else lane])


def plan_words(cfg: Config, s: Shared) -> cute.Tensor:
    """32 words. With 16 bits shared memory is full: they lie on the row sums, which nothing needs
    before the first work tile."""
    if cfg.fp8:
        return s.plan
    return cute.make_tensor(cute.recast_ptr(s.sRowSum.iterator, dtype=Int32), cute.make_layout(32))
