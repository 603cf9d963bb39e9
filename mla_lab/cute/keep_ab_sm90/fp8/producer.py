"""The load role: a warp of its own keeps the ring of stages full.

A query of e4m3 has a place of its own, free as soon as the attend group holds it in registers; what
that group reads from shared memory has two, in turn. One of sixteen bits passes through two stages
of the ring, before the KV tiles of its work tile. In a cluster of two, the CTAs take turns with
thirds of a KV tile and multicast each to both.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..params import BLOCK, EVICT_FIRST, FIRST_PAGE, RECORDS, Globals, Work
from ..producer import block_pages
from ..tile_scheduler import Plan, first_pages, read_work, record, stamp_round
from .kv_656 import load_more
from .params import (
    BOX,
    BOXES,
    Q_ARRIVAL_BOXES,
    Q_BOXES,
    Q_STAGES,
    STAGE,
    Transposed,
    TransposedShared,
    next_stage,
)


@cute.jit
def arm(barrier: cute.Pointer, count: cutlass.Constexpr[int] = STAGE):
    """Expect the bytes of 64 rows, by who has written the record."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, count)


@cute.jit
def load_q(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, work: Work, turn: Int32
):
    """This CTA's 64 query rows, by boxes of 64 columns."""
    rest = BOXES - Q_BOXES
    shape = ((BLOCK, (64, 1)), Q_BOXES)
    first = cute.make_tensor(s.q.iterator, cute.make_layout(shape, stride=((64, (1, BOX)), BOX)))
    shape = ((BLOCK, (64, 1)), rest, 2)
    stride = ((64, (1, BOX)), BOX, rest * BOX)
    last = cute.make_tensor(s.q_tail.iterator, cute.make_layout(shape, stride=stride))
    src = cute.local_tile(
        cute.domain_offset((work.global_row, (0, 0)), g.q), (BLOCK, (64, 1)), (0, None)
    )
    src = cute.group_modes(src, 0, 2)
    one = cute.make_layout(1)
    to, of = cpasync.tma_partition(g.tma_q, 0, one, first, src)
    to_tail, _ = cpasync.tma_partition(g.tma_q, 0, one, last, src)
    arm(s.q_full)
    for box in cutlass.range_constexpr(BOXES):
        if const_expr(box < Q_BOXES):
            cute.copy(g.tma_q, of[None, box], to[None, box], tma_bar_ptr=s.q_full)
        else:
            place = to_tail[None, box - Q_BOXES, turn % 2]
            cute.copy(g.tma_q, of[None, box], place, tma_bar_ptr=s.q_full)


@cute.jit
def pass_q(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, work: Work, stage, phase
):
    """This CTA's 64 query rows of sixteen bits through the next stages, the first of which is free;
    the stage after them, and its parity."""
    half = Q_ARRIVAL_BOXES // Q_STAGES
    shape = ((BLOCK, (32, 1)), cfg.stages, half)
    dst = cute.make_tensor(
        cute.recast_ptr(s.kv.iterator, dtype=cfg.q_element),
        cute.make_layout(shape, stride=((32, (1, BOX // 2)), cfg.stage_bytes // 2, BOX // 2)),
    )
    src = cute.local_tile(
        cute.domain_offset((work.global_row, (0, 0)), g.q), (BLOCK, (32, 1)), (0, None)
    )
    to, of = cpasync.tma_partition(
        g.tma_q, 0, cute.make_layout(1), dst, cute.group_modes(src, 0, 2)
    )
    for part in cutlass.range_constexpr(Q_STAGES):
        cute.arch.mbarrier_wait(s.empty + stage, phase)
        arm(s.full + stage)
        for box in cutlass.range_constexpr(half):
            source = of[None, part * half + box]
            cute.copy(g.tma_q, source, to[None, stage, box], tma_bar_ptr=s.full + stage)
        stage, phase = next_stage(stage, phase, cfg.stages)
    return stage, phase


@cute.jit
def load_tile(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, block, stage, pages, rank
):
    """KV tile `block` into `stage`; in a pair, this CTA's turns of its thirds."""
    rows, boxes = cfg.box_rows, cfg.boxes_per_copy
    parts, copies = BLOCK // rows, cfg.boxes // boxes
    dst = cute.make_tensor(
        s.kv.iterator,
        cute.make_layout(
            ((rows, (64, boxes)), cfg.stages, copies, parts),
            stride=((64, (1, BOX)), cfg.stage_bytes, boxes * BOX, rows * 64),
        ),
    )
    src = cute.local_tile(g.kv, (rows, (64, boxes)), (None, None, None))
    to, of = cpasync.tma_partition(
        g.tma_kv, 0, cute.make_layout(1), dst, cute.group_modes(src, 0, 2)
    )
    row = block % (cfg.page_size // BLOCK) if const_expr(cfg.page_size > BLOCK) else 0
    arm(s.full + stage, cfg.stage_bytes)
    for third in cutlass.range_constexpr(3 if cfg.scaled else min(copies, 3)):
        mine = (third + block) % 2 == rank if const_expr(cfg.cluster == 2) else True
        if mine:
            for part in cutlass.range(parts, unroll=1):
                page = cute.arch.shuffle_sync(pages, part)
                for box in cutlass.range_constexpr(third, copies, 3):
                    if const_expr(cfg.cluster == 2):
                        cute.copy(
                            g.tma_kv,
                            of[None, row, box, page],
                            to[None, stage, box, part],
                            tma_bar_ptr=s.full + stage,
                            mcast_mask=Int16(3),
                            cache_policy=Int64(EVICT_FIRST),
                        )
                    else:
                        cute.copy(
                            g.tma_kv,
                            of[None, row, box, page],
                            to[None, stage, box, part],
                            tma_bar_ptr=s.full + stage,
                            cache_policy=Int64(EVICT_FIRST),
                        )
                if const_expr(cfg.scaled and third == 2):
                    load_more(cfg, g, s, row, page, part, stage)


@cute.jit
def load(cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, plan: Plan, rank):
    """Per work tile: its record, Q, then KV tiles as stages come free; by one warp.

    Once the attend group holds the query before, it has published the sums of the one before that,
    whose predecessor's end has been read: of three records the oldest is free. Where the query
    passes through the ring, a free stage says as much: who has read it has begun the work tile
    before the last, or a later one.
    """
    lane = cute.arch.lane_idx()
    # a fresh barrier passes a wait on parity 1
    stage, phase = Int32(0), Int32(1)
    for index in cutlass.range(plan.first, plan.last, unroll=1):
        stage = cute.arch.make_warp_uniform(stage)
        if const_expr(cfg.split):
            cute.arch.mbarrier_wait(s.empty + stage, phase)
        else:
            cute.arch.mbarrier_wait(s.q_empty, ((index - plan.first) & 1) ^ 1)
        record(cfg, g, s, plan, index, rank)
        work = read_work(g, s, index)
        if const_expr(cfg.split):
            stage, phase = pass_q(cfg, g, s, work, stage, phase)
        else:
            load_q(cfg, g, s, work, index - plan.first)
        page = s.records[FIRST_PAGE + lane % 4, index % RECORDS]
        for block in cutlass.range(work.begin, work.end, unroll=1):
            stage = cute.arch.make_warp_uniform(stage)
            checked = block_pages(cfg, g, work, block, page, lane)
            # looked at when the next slot is filled: its latency is nobody's
            page = first_pages(cfg, g, work.request, block + 1, lane)
            cute.arch.mbarrier_wait(s.empty + stage, phase)
            stamp_round(cfg, g, work.end - block, 0)
            load_tile(cfg, g, s, block, stage, checked, rank)
            stamp_round(cfg, g, work.end - block, 1)
            stage, phase = next_stage(stage, phase, cfg.stages)
