"""A worker's tiles as one register a lane: found by the rule, or read from a plan in memory.

The words and their lanes are those of the table in `common.self_schedule`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...plan.workspace import KEPT_WORDS as KEPT
from .fixed_pieces import Before, next_piece
from .kept_schedule import find_plan_words, prefetch_kept
from .kv_prefetch import KvCache
from .ptx_sm90 import load_lasting
from .self_schedule import (
    BUNDLED,
    CLOSED,
    COUNT,
    FIRST,
    MIDDLE,
    PLAN_ROW,
    REST,
    WORDS,
    Batch,
    Plan,
    next_item,
    pack,
)


@cute.jit
def read_plan(tiles: cute.Tensor, worker_begin: cute.Tensor, worker: Int32) -> Plan:
    """The worker's rows of a plan in memory; by one warp.

    Most workers have one, row `worker`: it is loaded together with their bounds."""
    lane = cute.arch.lane_idx()
    words = tiles[cutlass.min(worker, tiles.shape[0] - 1), lane % WORDS]
    bound = worker_begin[worker + lane % 2]
    first = cute.arch.shuffle_sync(bound, 0)
    count = cute.arch.shuffle_sync(bound, 1) - first
    if (first != worker) & (count > 0):
        words = tiles[first, lane % WORDS]
    found = [Int32(0), first, count, Int32(0), Int32(0)]
    return Plan(Int32(0), count, pack(lane, found, BUNDLED, words))


@cute.jit
def open_plan(b: Batch, tiles: cute.Tensor, schedule: cute.Tensor, cta: Int32, cluster: int):
    """The words of the module's table for CTA `cta`, by one warp, behind the wait for the kernel in
    front. `schedule` is int32 [workers + 1], where a worker's rows of `tiles` begin; without tiles
    it is [CTAs * KEPT], what each CTA found in a launch before (`kept_schedule`)."""
    words, worker = Int32(0), cta // cluster
    if tiles.shape[0] > 0:
        words = read_plan(tiles, schedule, worker).words
    else:
        words = find_plan_words(b, worker, kept_of(schedule, cta))
    return words


@cute.jit
def likely_words(tiles: cute.Tensor, schedule: cute.Tensor, cta: Int32) -> Int32:
    """What `open_plan` will most likely return, ahead of the wait for the kernel in front: what the
    CTA kept. It may hold anything; zeros where there is a plan in memory."""
    words = Int32(0)
    if tiles.shape[0] == 0:
        words = load_lasting(kept_of(schedule, cta).iterator + cute.arch.lane_idx())
    return words


def kept_of(schedule: cute.Tensor, cta: Int32) -> cute.Tensor:
    """The CTA's words of a schedule without tiles."""
    return cute.make_tensor(schedule.iterator + cta * KEPT, cute.make_layout(KEPT))


@cute.jit
def prefetch_ahead(kv: KvCache, tiles: cute.Tensor, schedule: cute.Tensor, cta: Int32):
    """`prefetch_kept`, where there is no plan in memory."""
    if tiles.shape[0] == 0:
        prefetch_kept(kv, kept_of(schedule, cta))


@cute.jit
def plan_of(words: Int32) -> Plan:
    """The plan of the module's table."""
    count = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(words, COUNT))
    first = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(words, FIRST))
    return Plan(first, count, words)


def gate_closed(plan: Plan):
    """Whether the gate of the launch is closed to this batch."""
    return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(plan.words, CLOSED)) == 1


@cute.jit
def tile_words(b: Batch, tiles: cute.Tensor, plan: Plan, index: Int32, before: Before) -> Int32:
    """The plan row of tile `index`, lane i word i of eight; `before` is tile `index` - 1."""
    words = plan.words
    if const_expr(b.pieces):
        words = next_piece(b, plan.words, index, before)
    else:
        words = planned_words(b, tiles, plan, index, before)
    return words


@cute.jit
def planned_words(b: Batch, tiles: cute.Tensor, plan: Plan, index: Int32, before: Before) -> Int32:
    """`tile_words` of a plan in memory, or by the rule of `self_schedule`."""
    lane = cute.arch.lane_idx()
    words, request, row_tile = plan.words, before.request, before.row_tile
    row = cute.arch.shuffle_sync(words, PLAN_ROW)
    if row >= 0:
        words = tiles[row + index, lane % WORDS]
    elif index > 0:
        words = cute.arch.shuffle_sync(plan.words, WORDS + lane % WORDS)
        if (index + 1 < plan.last) | (cute.arch.shuffle_sync(words, 0) < 0):
            middle = Int32(-1)
            if const_expr(b.deals):
                middle = cute.arch.shuffle_sync(plan.words, MIDDLE)
            if middle >= 0:
                request = cute.arch.shuffle_sync(plan.words, MIDDLE - 1 + index)
            else:
                bundled = cute.arch.shuffle_sync(plan.words, BUNDLED)
                request, row_tile = next_item(b, bundled, request, row_tile)
            whole = [request, row_tile, Int32(0), Int32(REST), Int32(0), Int32(1)]
            words = pack(lane, whole, 0, Int32(-1))
    return words


@cute.jit
def may_be_split(plan: Plan, index: Int32):
    """Whether tile `index` may be a piece: of a plan in memory any, else the first and the last."""
    row = cute.arch.shuffle_sync(plan.words, PLAN_ROW)
    return (row >= 0) | (index == 0) | (index + 1 == plan.last)


@cute.jit
def split_words(tiles: cute.Tensor, plan: Plan, index: Int32) -> Int32:
    """`tile_words` of a tile that `may_be_split`; one that is whole has at most 1 split."""
    lane = cute.arch.lane_idx()
    words = plan.words
    row = cute.arch.shuffle_sync(words, PLAN_ROW)
    if row >= 0:
        words = tiles[row + index, lane % WORDS]
    elif index > 0:
        words = cute.arch.shuffle_sync(plan.words, WORDS + lane % WORDS)
    return words
