"""The load role: keep the ring of three stages full, one slot a call.

For each work tile, Q passes through stage 0 once (64 rows of this CTA), then KV tiles follow
through stages 1, 2, 0, ... In a cluster of two, the CTAs take turns with the column groups of a
tile and multicast each to both, so that KV crosses the L2 once for 128 rows.

No thread is left for a role of its own: 64 x 256 accumulators need 160 registers of eight warps,
Q in registers needs 184 of four, and that is the register file. So the first warp of the first
accumulate group calls `fill` after each PV, when the slot of that tile has just come free.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from .params import (
    BLOCK,
    BOX,
    EIGHT_ROWS,
    EVICT_FIRST,
    FIRST_PAGE,
    GROUPS,
    NO_PAGE,
    RECORDS,
    STAGE,
    STAGES,
    Config,
    Globals,
    Shared,
)
from .tile_scheduler import first_pages, read_work, stamp_round

#: what the next slot is for
KV, QUERY, SKIP = 0, 1, 2


@dataclass(frozen=True)
class Feed:
    """Where the ring's filling stands. `phases` holds one bit a stage."""

    index: Int32
    kind: Int32
    block: Int32
    end: Int32
    page: Int32  # lane i: the i-th page of the next block
    stage: Int32
    phases: Int32


@cute.jit
def arm(cfg: cutlass.Constexpr[Config], s: Shared, stage):
    """Expect the bytes of a 64-row tile, column group by column group; by rows, with the first."""
    if cute.arch.lane_idx() == 0:  # who has written the record
        for group in cutlass.range_constexpr(len(GROUPS)):
            first, last = GROUPS[group]
            count = (last - first) * (group < cfg.pieces) * (len(GROUPS) // cfg.pieces)
            cute.arch.mbarrier_arrive_and_expect_tx(
                s.full + stage * len(GROUPS) + group, count * BOX * 2
            )


def box_tensor(s, cfg, rows, boxes):
    """Shared-memory destinations of (rows, boxes) each, as (box, stage, column box, row part)."""
    eights = rows // EIGHT_ROWS
    return cute.make_tensor(
        s.kv.iterator,
        cute.make_layout(
            (((EIGHT_ROWS, eights), (64, boxes)), STAGES, 9 // boxes, BLOCK // rows),
            stride=(
                ((64, cfg.rows_stride), (1, cfg.box_stride)),
                STAGE,
                boxes * cfg.box_stride,
                eights * cfg.rows_stride,
            ),
        ),
    )


@cute.jit
def load_q(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, index):
    """This CTA's 64 query rows into stage 0; rows past the last one arrive as zeros."""
    work = read_work(g, s, index)
    rows, boxes = cfg.query_rows, 9 // cfg.pieces
    dst = box_tensor(s, cfg, rows, boxes)
    src = cute.local_tile(
        cute.domain_offset((work.global_row, (0, 0)), g.q), (rows, (64, boxes)), (None, None)
    )
    sQ, gQ = cpasync.tma_partition(
        g.tma_q, 0, cute.make_layout(1), dst, cute.group_modes(src, 0, 2)
    )
    arm(cfg, s, 0)
    for group in cutlass.range_constexpr(cfg.pieces):
        for part in cutlass.range(BLOCK // rows, unroll=1):
            source, target = gQ[None, part, group], sQ[None, 0, group, part]
            cute.copy(g.tma_q, source, target, tma_bar_ptr=s.full + group)


@cute.jit
def load_tile(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, block, stage, pages, rank):
    """KV tile `block` into `stage`; in a pair, this CTA's turns of its column groups or parts."""
    rows, boxes = cfg.box_rows, cfg.boxes_per_copy
    dst = box_tensor(s, cfg, rows, boxes)
    src = cute.local_tile(g.kv, (cfg.kv_rows, (64, boxes)), (None, None, None))
    sK, gK = cpasync.tma_partition(
        g.tma_kv, 0, cute.make_layout(1), dst, cute.group_modes(src, 0, 2)
    )
    row = block % (cfg.page_size // BLOCK) if const_expr(cfg.page_size > BLOCK) else 0
    copies = 9 // cfg.pieces // boxes
    arm(cfg, s, stage)
    for group in cutlass.range_constexpr(cfg.pieces):
        for part in cutlass.range(BLOCK // rows, unroll=1):
            turn = (part if const_expr(cfg.by_rows) else group) + block
            mine = turn % 2 == rank if const_expr(cfg.cluster == 2) else True
            if mine:
                page = cute.arch.shuffle_sync(pages, part)
                for box in cutlass.range_constexpr(group * copies, (group + 1) * copies):
                    source, target = gK[None, row, box, page], sK[None, stage, box, part]
                    landed = s.full + stage * len(GROUPS) + group
                    if const_expr(cfg.cluster == 2):
                        cute.copy(
                            g.tma_kv, source, target, tma_bar_ptr=landed,
                            mcast_mask=Int16(3), cache_policy=Int64(EVICT_FIRST),
                        )  # fmt: skip
                    else:
                        cute.copy(
                            g.tma_kv, source, target, tma_bar_ptr=landed,
                            cache_policy=Int64(EVICT_FIRST),
                        )  # fmt: skip


@cute.jit
def block_pages(cfg: cutlass.Constexpr[Config], g: Globals, work, block, page, lane):
    """Pages of a block, one a lane, where what the table says counts: not past kv_len."""
    first = block * BLOCK + (lane % (BLOCK // cfg.box_rows)) * cfg.box_rows
    if first >= work.kv_len:
        page = Int32(NO_PAGE)
    return page


@cute.jit
def start(first):
    """Nothing filled yet. A fresh barrier passes a wait on parity 1."""
    return Feed(first, Int32(QUERY), Int32(0), Int32(0), Int32(0), Int32(0), Int32(7))


@cute.jit
def fill(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, feed: Feed, last, rank, lane):
    """Fill the next slot of the ring, or pass over it where a work tile ends inside a round.

    The record of a work tile stands before its query is asked for.
    """
    index, kind, block, end = feed.index, feed.kind, feed.block, feed.end
    page, stage, phases = feed.page, feed.stage, feed.phases
    if index < last:
        if kind != SKIP:
            work = read_work(g, s, index)
            cute.arch.mbarrier_wait(s.empty + stage, (phases >> stage) & 1)
            phases = phases ^ (1 << stage)
            if kind == QUERY:
                load_q(cfg, g, s, index)
                kind = Int32(KV)
                block, end = work.begin, work.end
                page = s.records[FIRST_PAGE + lane % 4, index % RECORDS]
            else:
                checked = block_pages(cfg, g, work, block, page, lane)
                stamp_round(cfg, g, end - block, 0)
                load_tile(cfg, g, s, block, stage, checked, rank)
                stamp_round(cfg, g, end - block, 1)
                block = block + 1
                if block == end:
                    kind = Int32(SKIP)
                else:
                    # looked at when the next slot is filled: its latency is nobody's
                    page = first_pages(cfg, g, work.request, block, lane)
        stage = stage + 1
        if stage == STAGES:
            stage = Int32(0)
            if kind == SKIP:
                kind = Int32(QUERY)
                index = index + 1
    return Feed(index, kind, block, end, page, stage, phases)
