"""The producer warp: reads the plan, loads KV and Q by TMA, leaves the work record."""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr

from ..common.barriers import MBarriers
from ..common.pipeline import PipelineState
from ..common.ptx_sm90 import EVICT_FIRST, div_pow2, nanoseconds
from ..common.self_schedule import WORDS
from ..common.tma import tma_views
from ..common.worker_plan import plan_of
from ..split_merge.swap_ab_fragments import CtaEvent
from . import kv_656
from .params import BOX, BOXES, TILE_KV, Traits
from .shared_storage import END, Globals, Shared, stage_full
from .tile_scheduler import (
    GridLoads,
    Work,
    WorkLoads,
    issue_work_loads,
    load_entries,
    next_words,
    open_grid,
    open_work,
)

#: a page outside of every cache: the TMA writes zeros and counts the bytes
NO_PAGE = 1 << 30


def kv_views(c: Traits, g: Globals, s: Shared) -> tuple[cute.Tensor, cute.Tensor]:
    """TMA views: gmem [box, row, column, page], smem [box, row slot, column slot, stage]."""
    rows, cols, box = c.box_rows, c.boxes_per_copy, c.box
    shape = (rows, (box, cols), TILE_KV // rows, c.columns // box // cols, c.stages)
    boxes = TILE_KV * box
    stride = (box, (1, boxes), rows * box, cols * boxes, TILE_KV * c.columns)
    smem = cute.make_tensor(s.sKV.iterator, cute.make_layout(shape, stride=stride))
    gmem = cute.local_tile(g.mKV, (rows, (box, cols)), (None, None, None))
    return tma_views(g.tma_kv, smem, gmem)


def acquire_stage(c: Traits, s: Shared, count: Int32) -> Int32:
    """Wait until the stage of the CTA's KV tile number `count` is empty; the stage."""
    stage = count % c.stages
    empty = MBarriers(s.kv.empty.at(stage))
    empty.wait(0, PipelineState.of_count(count, c.stages).opposite().phase)
    return stage


@cute.jit
def load_q(c: cutlass.Constexpr[Traits], g: Globals, s: Shared, row: Int32):
    """All `rows` x 576 of the row tile from row `row` of q on; rows past the end read zeros."""
    smem = cute.make_tensor(
        cute.recast_ptr(s.sQ.iterator, dtype=c.q_dtype) if c.hi_lo else s.sQ.iterator,
        cute.make_layout((c.rows, (BOX, BOXES)), stride=(BOX, (1, c.rows * BOX))),
    )
    gmem = cute.local_tile(cute.domain_offset((row, 0), g.mQ), (c.rows, (BOX, BOXES)), (0, 0))
    source, into = tma_views(g.tma_q, smem, gmem)
    cute.copy(g.tma_q, source, into, tma_bar_ptr=s.q.full.at(0))


@cute.jit
def load_tile(
    c: cutlass.Constexpr[Traits], g: Globals, s: Shared, w: Work, tile: Int32, stage: Int32
):
    """KV tile `tile` of the request into `stage`, each range of columns on its own full barrier.

    With multicast a CTA loads every `c.multicast`-th box, for all CTAs of the cluster.
    """
    gKV, sKV = kv_views(c, g, s)
    policy = Int64(EVICT_FIRST)
    slots = TILE_KV // c.box_rows
    copies = c.boxes_per_barrier // c.boxes_per_copy
    for n in cutlass.range_constexpr(c.barriers_per_stage):
        with cute.arch.elect_one():
            stage_full(c, s, stage).arrive_expect_tx(n, c.full_barrier_bytes)
    for n in cutlass.range_constexpr(c.barriers_per_stage):
        for slot in cutlass.range_constexpr(slots):
            token = tile * TILE_KV + slot * c.box_rows
            page = cute.arch.shuffle_sync(w.entry, div_pow2(token, c.page) - w.base)
            if const_expr(slots > 1):
                page = page if token < w.kv_len else Int32(NO_PAGE)
            inside = (token % c.page) // c.box_rows
            if const_expr(c.kv_656):
                kv_656.load_rope_and_scales(c, g, s, (inside, page, slot, stage), policy)
            for x in cutlass.range_constexpr(copies):
                col = n * copies + x
                if const_expr(c.multicast == 1):
                    cute.copy(
                        g.tma_kv,
                        gKV[None, inside, col, page],
                        sKV[None, slot, col, stage],
                        tma_bar_ptr=stage_full(c, s, stage).at(n),
                        cache_policy=policy,
                    )
                elif (col + tile) % c.multicast == cute.arch.block_idx_in_cluster():
                    cute.copy(
                        g.tma_kv,
                        gKV[None, inside, col, page],
                        sKV[None, slot, col, stage],
                        tma_bar_ptr=stage_full(c, s, stage).at(n),
                        mcast_mask=Int16((1 << c.multicast) - 1),
                        cache_policy=policy,
                    )


@cute.jit
def store_record(s: Shared, record: tuple):
    """The words of the work record, before the arrival at q's full barrier that publishes them."""
    for i in cutlass.range_constexpr(len(record)):
        cute.arch.store(s.record + i, record[i])


@cute.jit
def produce_plan(
    c: cutlass.Constexpr[Traits], g: Globals, s: Shared, found: Int32, loads: WorkLoads, rank: Int32
):
    """All work tiles that `find_plan` found: the first KV tile, Q and the record, then the rest.
    `loads` are of the first one; those of the next are issued under the rest."""
    cute.arch.sync_warp()  # from here on one lane arrives for all
    plan = plan_of(found)
    words = cute.make_rmem_tensor(WORDS, Int32)
    words.fill(0)
    if plan.last > 0:
        next_words(c, g, plan, Int32(0), words)
    count = Int32(0)  # KV tiles loaded so far
    for index in cutlass.range(plan.last, unroll=1):
        w, record = open_work(c, g, words, loads, rank)
        if const_expr(c.partials_on_ring):
            if index > 0:
                s.ring_drained.wait(0, (index & 1) ^ 1)
        if w.mine > 0:
            load_tile(c, g, s, w, w.first, acquire_stage(c, s, count))
        s.q.producer_acquire(PipelineState(0, (index & 1) ^ 1))
        with cute.arch.elect_one():
            store_record(s, record)
            if w.mine > 0:
                s.q.producer_expect_tx(0, c.q_bytes)
            else:
                s.q.producer_commit(0)
        if w.mine > 0:
            load_q(c, g, s, record[5])
        if index + 1 < plan.last:
            next_words(c, g, plan, index + 1, words)
            loads = issue_work_loads(c, g, words[0], words[2])
        produce_rest(c, g, s, w, count)
        count = count + w.mine
    s.q.producer_acquire(PipelineState(0, (plan.last & 1) ^ 1))
    with cute.arch.elect_one():
        cute.arch.store(s.record, Int32(END))
        s.q.producer_commit(0)


@cute.jit
def produce_grid(c: cutlass.Constexpr[Traits], g: Globals, s: Shared, a: GridLoads, rank: Int32):
    """Grid mode: the one work tile of this CTA. Q first, under the loads of length and table."""
    with cute.arch.elect_one():
        s.q.full.expect_tx(0, c.q_bytes)
    load_q(c, g, s, a.tokens.begin * g.heads + a.row_tile * c.rows)
    w, record = open_grid(c, g, a, rank)
    if w.mine > 0:
        load_tile(c, g, s, w, w.first, Int32(0))
    if const_expr(c.profile):
        with cute.arch.elect_one():
            cute.arch.store(s.profile + CtaEvent.FIRST_KV_ISSUED, nanoseconds())
    with cute.arch.elect_one():
        store_record(s, record)
        s.q.producer_commit(0)
    produce_rest(c, g, s, w, Int32(0))


@cute.jit
def produce_rest(c: cutlass.Constexpr[Traits], g: Globals, s: Shared, w: Work, count: Int32):
    """KV tiles 1, 2, ... of this CTA, as stages become empty; `count`: tiles loaded before."""
    base = w.base
    entry = w.entry
    for i in cutlass.range(1, w.mine, unroll=1):
        tile = w.first + i
        # the last entry that this tile needs
        if div_pow2(tile * TILE_KV + TILE_KV - 1, c.page) - base > 31:
            base = div_pow2(tile * TILE_KV, c.page)
            entry = load_entries(g, w.request, base)
        stage = acquire_stage(c, s, count + i)
        load_tile(c, g, s, replace(w, base=base, entry=entry), tile, stage)
