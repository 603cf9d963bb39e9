"""The producer of the bf16 kernel: it fills the KV ring, one stage per call.

For each work tile, Q passes through stage 0 once (64 rows of this CTA), then KV tiles follow
through stages 1, 2, 0, ... In a cluster of two, the CTAs alternate over the column chunks of a tile
and multicast each to both, so that KV crosses the L2 once for 128 rows.

No warp is left for this role alone: 64 x 256 accumulators take 160 registers of eight warps, Q in
registers 184 of four, which is the register file. So warp 0 of the PV warp groups calls
`fill_next_stage` after each PV, when the stage of that tile has just been released; all of their
warps do where tokens are fetched one by one (`producer_gather`).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..common.pipeline import LazyState, StagePhases
from ..common.ptx_sm90 import EVICT_FIRST
from ..rows_on_m.params import BLOCK, BOXES, FIRST_PAGE, NO_PAGE, RECORDS, Cta, Work
from ..rows_on_m.profile import profile_tile
from ..rows_on_m.work_records import first_pages, read_work
from .params import BOX, KV_CHUNKS, STAGE, SWIZZLE_ROWS
from .producer_gather import QUERY_CHUNK, arrive_with_query, entry_of_block, fetch_tile

#: what the next stage is for: a KV tile, a query, or nothing until the ring is back at stage 0
KV, QUERY, NOTHING = 0, 1, 2


@dataclass(frozen=True)
class ProducerState:
    """What the producer loads next, and into which stage."""

    index: Int32  # work tile
    kind: Int32
    block: Int32  # KV tile
    end: Int32
    page: Int32  # lane i: page id i of KV tile `block`; gather: table entry of its own token
    stage: Int32
    phases: StagePhases  # of kv_pipe.empty


def start_producer(stages: int, first) -> ProducerState:
    """The state before the first query. Parities are 1, which fresh `empty` barriers pass."""
    zero = Int32(0)
    return ProducerState(
        first, Int32(QUERY), zero, zero, zero, zero, StagePhases(Int32((1 << stages) - 1))
    )


@cute.jit
def expect_tile(cta: Cta, stage):
    """Expect the bytes of a 64-row tile, chunk by chunk; with `by_rows` all on the first chunk."""
    cfg = cta.cfg
    if cute.arch.lane_idx() == 0:  # the lane that has written the record
        full = cta.s.kv_pipe.full.offset(stage * len(cfg.kv_chunks))
        if const_expr(cfg.gather):  # of the query
            full.arrive_expect_tx(QUERY_CHUNK, BOXES * BOX * 2)
        else:
            for chunk in cutlass.range_constexpr(len(KV_CHUNKS)):
                boxes = BOXES // cfg.chunks * (chunk < cfg.chunks)
                full.arrive_expect_tx(chunk, boxes * BOX * 2)


def box_tensor(cta: Cta, rows, boxes):
    """The ring as copy destinations: (box of rows x boxes, stage, column box, row part)."""
    cfg, eights = cta.cfg, rows // SWIZZLE_ROWS
    return cute.make_tensor(
        cta.s.sKV.iterator,
        cute.make_layout(
            (
                ((SWIZZLE_ROWS, eights), (64, boxes)),
                cfg.stages,
                BOXES // boxes,
                BLOCK // rows,
            ),
            stride=(
                ((64, cfg.rows_stride), (1, cfg.box_stride)),
                STAGE,
                boxes * cfg.box_stride,
                eights * cfg.rows_stride,
            ),
        ),
    )


@cute.jit
def load_query(cta: Cta, index):
    """This CTA's 64 query rows into stage 0; rows past the last one arrive as zeros."""
    cfg, g = cta.cfg, cta.g
    work = read_work(g, cta.s, index)
    rows, boxes = cfg.query_rows, BOXES // cfg.chunks
    sQ = box_tensor(cta, rows, boxes)
    gQ = cute.local_tile(
        cute.domain_offset((work.global_row, (0, 0)), g.mQ), (rows, (64, boxes)), (None, None)
    )
    tQsQ, tQgQ = cpasync.tma_partition(
        g.tma_q, 0, cute.make_layout(1), sQ, cute.group_modes(gQ, 0, 2)
    )
    expect_tile(cta, 0)
    for chunk in cutlass.range_constexpr(cfg.chunks):
        for part in cutlass.range(BLOCK // rows, unroll=1):
            source, target = tQgQ[None, part, chunk], tQsQ[None, 0, chunk, part]
            barrier = cta.s.kv_pipe.full.at(QUERY_CHUNK if const_expr(cfg.gather) else chunk)
            cute.copy(g.tma_q, source, target, tma_bar_ptr=barrier)


def copy_kv(cta: Cta, source, target, barrier) -> None:
    """One TMA copy of KV; in a cluster of two to both CTAs."""
    multicast = {"mcast_mask": Int16(3)} if cta.cfg.cluster == 2 else {}
    cute.copy(
        cta.g.tma_kv, source, target, tma_bar_ptr=barrier, **multicast,
        cache_policy=Int64(EVICT_FIRST),
    )  # fmt: skip


@cute.jit
def load_tile(cta: Cta, block, stage, pages):
    """KV tile `block` into `stage`; in a cluster of two this CTA's half of the chunks or parts."""
    cfg, g = cta.cfg, cta.g
    rows, boxes = cfg.box_rows, cfg.boxes_per_copy
    sKV = box_tensor(cta, rows, boxes)
    gKV = cute.local_tile(g.mKV, (cfg.kv_rows, (64, boxes)), (None, None, None))
    tKsK, tKgK = cpasync.tma_partition(
        g.tma_kv, 0, cute.make_layout(1), sKV, cute.group_modes(gKV, 0, 2)
    )
    row = block % (cfg.page_size // BLOCK) if const_expr(cfg.page_size > BLOCK) else 0
    copies = BOXES // cfg.chunks // boxes
    expect_tile(cta, stage)
    for chunk in cutlass.range_constexpr(cfg.chunks):
        for part in cutlass.range(BLOCK // rows, unroll=1):
            turn = (part if const_expr(cfg.by_rows) else chunk) + block
            mine = turn % 2 == cta.rank if const_expr(cfg.cluster == 2) else True
            if mine:
                page = cute.arch.shuffle_sync(pages, part)
                for box in cutlass.range_constexpr(chunk * copies, (chunk + 1) * copies):
                    source, target = tKgK[None, row, box, page], tKsK[None, stage, box, part]
                    full = cta.s.kv_pipe.full.offset(stage * len(KV_CHUNKS)).at(chunk)
                    copy_kv(cta, source, target, full)


@cute.jit
def valid_pages(cta: Cta, work, block, page, lane):
    """Page ids of a KV tile, one per lane; `NO_PAGE` past kv_len, where the table is undefined."""
    rows = cta.cfg.box_rows
    first = block * BLOCK + (lane % (BLOCK // rows)) * rows
    if first >= work.kv_len:
        page = Int32(NO_PAGE)
    return page


@cute.jit
def fill_with_query(cta: Cta, work: Work, index, lane):
    """The query of work tile `index` into stage 0. Returns the `page` of its first KV tile."""
    page = Int32(0)
    if const_expr(cta.cfg.gather):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            load_query(cta, index)
        arrive_with_query(cta)
        page = entry_of_block(cta, work, work.begin)
    else:
        load_query(cta, index)
        page = cta.s.records[FIRST_PAGE + lane % 4, index % RECORDS]
    return page


@cute.jit
def fill_with_tile(cta: Cta, work: Work, state: ProducerState, at: LazyState, lane, after_pv):
    """KV tile `state.block` of a work tile into the stage of `at`."""
    cfg, g, block = cta.cfg, cta.g, state.block
    if const_expr(cfg.gather):
        fetch_tile(cta, work, block, state.page, at, after_pv)
    else:
        pages = valid_pages(cta, work, block, state.page, lane)
        profile_tile(cfg, g, state.end - block, "load: stage free")
        load_tile(cta, block, at.index, pages)
        profile_tile(cfg, g, state.end - block, "load: issued")


def entries_of(cta: Cta, work: Work, block, lane):
    """`ProducerState.page` of a KV tile."""
    if cta.cfg.gather:
        return entry_of_block(cta, work, block)
    return first_pages(cta.cfg, cta.g, work.request, block, lane)


@cute.jit
def fill_next_stage(
    cta: Cta, state: ProducerState, lane, after_pv: cutlass.Constexpr[bool] = False
):
    """Fill the next stage of the ring, or pass over it where a work tile ends inside a pass; by
    warp 0, or by all PV warps where tokens are fetched one by one (`producer_gather`). `after_pv`:
    this warp has just finished PV of the tile in that stage, and where tokens are fetched one by
    one the wait for the stage's release follows the copies of V.

    The record of a work tile is written before its query is loaded.
    """
    cfg, g, s = cta.cfg, cta.g, cta.s
    index, kind, block, end = state.index, state.kind, state.block, state.end
    page, stage, phases = state.page, state.stage, state.phases
    if index < cta.plan.last:
        if kind != NOTHING:
            work = read_work(g, s, index)
            at = phases.state(stage)
            waits = not (after_pv and cfg.gather)
            if waits | (kind == QUERY):
                s.kv_pipe.producer_acquire(at)
            phases = phases.flip(stage)
            if kind == QUERY:
                page = fill_with_query(cta, work, index, lane)
                kind = Int32(KV)
                block, end = work.begin, work.end
            else:
                fill_with_tile(cta, work, state, at, lane, after_pv)
                block = block + 1
                if block == end:
                    kind = Int32(NOTHING)
                else:
                    # used only for the next stage, so the load latency is hidden
                    page = entries_of(cta, work, block, lane)
        stage = stage + 1
        if stage == cfg.stages:
            stage = Int32(0)
            if kind == NOTHING:
                kind = Int32(QUERY)
                index = index + 1
    return ProducerState(index, kind, block, end, page, stage, phases)
