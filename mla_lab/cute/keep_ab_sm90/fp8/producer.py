"""The producer warp of the fp8 kernel: it keeps the ring of KV stages full.

An e4m3 query has its own place, free as soon as the QK-softmax warp group holds it in registers;
the boxes that this group reads from shared memory have two places, which alternate. A bf16 query
passes through two stages of the ring, before the KV tiles of its work tile. In a cluster of two,
the CTAs alternate over thirds of a KV tile and multicast each to both.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ...common.pipeline import PipelineState
from ...common.ptx_sm90 import fresh_thread
from ...rows_on_m.params import BLOCK, BOXES, FIRST_PAGE, RECORDS, Cta, Work
from ...rows_on_m.profile import profile_tile
from ...rows_on_m.work_records import first_pages, read_work, record
from ..params import BOX
from ..producer import copy_kv, valid_pages
from ..tile_scheduler import load_plan
from .kv_656 import load_rope_and_scales
from .params import Q_ARRIVAL_BOXES, Q_STAGES


@cute.jit
def expect(pipe, index, num_bytes: cutlass.Constexpr[int]):
    """Expect the bytes of 64 rows, by the lane that has written the record."""
    if cute.arch.lane_idx() == 0:
        pipe.producer_expect_tx(index, num_bytes)


def query_boxes(cta: Cta, work: Work, columns: int):
    """This CTA's 64 query rows by boxes of `columns`: (box, index)."""
    gQ = cute.local_tile(
        cute.domain_offset((work.global_row, (0, 0)), cta.g.mQ), (BLOCK, (columns, 1)), (0, None)
    )
    return cute.group_modes(gQ, 0, 2)


@cute.jit
def load_query(cta: Cta, work: Work, turn: Int32):
    """An e4m3 query, by boxes of 64 columns."""
    s, tma, q_boxes = cta.s, cta.g.tma_q, cta.cfg.q_boxes
    rest = BOXES - q_boxes
    box, box_stride = (BLOCK, (64, 1)), (64, (1, BOX))
    sQ = cute.make_tensor(s.sQ.iterator, cute.make_layout((box, q_boxes), stride=(box_stride, BOX)))
    sQ_tail = cute.make_tensor(
        s.sQ_tail.iterator,
        cute.make_layout((box, rest, 2), stride=(box_stride, BOX, rest * BOX)),
    )
    gQ, one = query_boxes(cta, work, 64), cute.make_layout(1)
    tQsQ, tQgQ = cpasync.tma_partition(tma, 0, one, sQ, gQ)
    tQsQ_tail, _ = cpasync.tma_partition(tma, 0, one, sQ_tail, gQ)
    expect(s.q_pipe, 0, BOXES * BOX)
    for i in cutlass.range_constexpr(BOXES):
        if const_expr(i < q_boxes):
            target = tQsQ[None, i]
        else:
            target = tQsQ_tail[None, i - q_boxes, turn % 2]
        cute.copy(tma, tQgQ[None, i], target, tma_bar_ptr=s.q_pipe.full.at(0))


@cute.jit
def load_query_through_ring(cta: Cta, work: Work, state: PipelineState):
    """A bf16 query through the next stages, the first of which is free; returns the state after
    them."""
    cfg, s = cta.cfg, cta.s
    half = Q_ARRIVAL_BOXES // Q_STAGES
    sQ = cute.make_tensor(
        cute.recast_ptr(s.sKV.iterator, dtype=cfg.q_element),
        cute.make_layout(
            ((BLOCK, (32, 1)), cfg.stages, half),
            stride=((32, (1, BOX // 2)), cfg.stage_bytes // 2, BOX // 2),
        ),
    )
    tQsQ, tQgQ = cpasync.tma_partition(
        cta.g.tma_q, 0, cute.make_layout(1), sQ, query_boxes(cta, work, 32)
    )
    for part in cutlass.range_constexpr(Q_STAGES):
        s.kv_pipe.producer_acquire(state)
        expect(s.kv_pipe, state.index, half * BOX)
        for i in cutlass.range_constexpr(half):
            source, target = tQgQ[None, part * half + i], tQsQ[None, state.index, i]
            cute.copy(cta.g.tma_q, source, target, tma_bar_ptr=s.kv_pipe.full.at(state.index))
        state = state.advance(cfg.stages)
    return state


@cute.jit
def load_tile(cta: Cta, block, stage, pages):
    """KV tile `block` into `stage`; in a cluster of two this CTA's share of its thirds."""
    cfg, g, s = cta.cfg, cta.g, cta.s
    rows, boxes = cfg.box_rows, cfg.boxes_per_copy
    parts, copies = BLOCK // rows, cfg.boxes // boxes
    sKV = cute.make_tensor(
        s.sKV.iterator,
        cute.make_layout(
            ((rows, (64, boxes)), cfg.stages, copies, parts),
            stride=((64, (1, BOX)), cfg.stage_bytes, boxes * BOX, rows * 64),
        ),
    )
    gKV = cute.local_tile(g.mKV, (rows, (64, boxes)), (None, None, None))
    tKsK, tKgK = cpasync.tma_partition(
        g.tma_kv, 0, cute.make_layout(1), sKV, cute.group_modes(gKV, 0, 2)
    )
    row = block % (cfg.page_size // BLOCK) if const_expr(cfg.page_size > BLOCK) else 0
    expect(s.kv_pipe, stage, cfg.stage_bytes)
    for third in cutlass.range_constexpr(3 if cfg.kv_656 else min(copies, 3)):
        mine = (third + block) % 2 == cta.rank if const_expr(cfg.cluster == 2) else True
        if mine:
            for part in cutlass.range(parts, unroll=1):
                page = cute.arch.shuffle_sync(pages, part)
                for box in cutlass.range_constexpr(third, copies, 3):
                    source, target = tKgK[None, row, box, page], tKsK[None, stage, box, part]
                    copy_kv(cta, source, target, s.kv_pipe.full.at(stage))
                if const_expr(cfg.kv_656 and third == 2):
                    load_rope_and_scales(cta, row, page, part, stage)


@cute.jit
def producer(cta: Cta):
    """Per work tile: its record, Q, then KV tiles as stages are released; by one warp.

    Of three records the oldest is free: when the QK-softmax warp group has released the previous
    query, it has stored the row sums of the work tile before, whose predecessor's epilogue has read
    its own. Where the query passes through the ring, a free stage implies the same, because the
    warps that released it have begun the work tile before the last, or a later one.
    """
    cfg, g, s, plan = cta.cfg, cta.g, cta.s, cta.plan
    lane = cute.arch.lane_idx()
    state = PipelineState.start(1)
    for index in cutlass.range(plan.first, plan.last, unroll=1):
        state = state.uniform()
        if const_expr(cfg.query_hi_lo):
            s.kv_pipe.producer_acquire(state)
        else:
            s.q_pipe.empty.wait(0, ((index - plan.first) & 1) ^ 1)
        words = plan
        if const_expr(cfg.cluster == 2 and not cfg.query_hi_lo):
            # held through the loop, the plan's words would take a register too many
            words = load_plan(cfg, s, fresh_thread() & 31)
        record(cfg, g, s, words, index, cta.rank)
        work = read_work(g, s, index)
        if const_expr(cfg.query_hi_lo):
            state = load_query_through_ring(cta, work, state)
        else:
            load_query(cta, work, index - plan.first)
        page = s.records[FIRST_PAGE + lane % 4, index % RECORDS]
        # all lanes have read the record: lane 0 alone arrives for what follows
        cute.arch.sync_warp()
        for block in cutlass.range(work.begin, work.end, unroll=1):
            state = state.uniform()
            pages = valid_pages(cta, work, block, page, lane)
            # used only for the next stage, so the load latency is hidden
            page = first_pages(cfg, g, work.request, block + 1, lane)
            s.kv_pipe.producer_acquire(state)
            profile_tile(cfg, g, work.end - block, "load: stage free")
            load_tile(cta, block, state.index, pages)
            profile_tile(cfg, g, work.end - block, "load: issued")
            state = state.advance(cfg.stages)
