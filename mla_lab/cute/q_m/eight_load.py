"""The load role of the e4m3 kernel: Q in a place of its own, KV tiles into a ring of five stages.

The first warp of the first accumulate group calls `fill` once a tile, when that tile's slot has
come free, and up to five times when a work tile begins: it looks ahead as far as the next work
tile's end, no further, so that it never waits for who waits for it. In a cluster of two, the CTAs
take turns with thirds of a tile and multicast each to both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from .eight_storage import BOX, BOXES, STAGE, STAGES, EightConfig, EightShared
from .load import block_pages
from .storage import BLOCK, EVICT_FIRST, FIRST_PAGE, RECORDS, Globals
from .work import first_pages, read_work, stamp_round


@dataclass(frozen=True)
class EightFeed:
    """Where the ring's filling stands; `block` == `end`: the next slot begins a work tile."""

    index: Int32
    block: Int32
    end: Int32
    page: Int32  # lane i: the i-th page of the next block
    stage: Int32
    phase: Int32
    room: Int32  # free slots


def start(first: Int32) -> EightFeed:
    """Nothing filled yet. A fresh barrier passes a wait on parity 1."""
    return EightFeed(
        first, Int32(0), Int32(0), Int32(0), Int32(0), Int32(1), Int32(STAGES)
    )


@cute.jit
def arm(barrier: cute.Pointer):
    """Expect the bytes of 64 rows, by who has written the record."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, STAGE)


@cute.jit
def load_q(cfg: cutlass.Constexpr[EightConfig], g: Globals, s: EightShared, index, first):
    """This CTA's 64 query rows, once the attend group has those of the work tile before."""
    cute.arch.mbarrier_wait(s.q_empty, ((index - first) & 1) ^ 1)
    work = read_work(g, s, index)
    dst = cute.make_tensor(
        s.q.iterator, cute.make_layout((BLOCK, (64, BOXES)), stride=(64, (1, BOX)))
    )
    src = cute.local_tile(
        cute.domain_offset((work.global_row, (0, 0)), g.q), (BLOCK, (64, BOXES)), (0, 0)
    )
    to, of = cpasync.tma_partition(
        g.tma_q, 0, cute.make_layout(1), cute.group_modes(dst, 0, 2), cute.group_modes(src, 0, 2)
    )
    arm(s.q_full)
    cute.copy(g.tma_q, of, to, tma_bar_ptr=s.q_full)


@cute.jit
def load_tile(
    cfg: cutlass.Constexpr[EightConfig], g: Globals, s: EightShared, block, stage, pages, rank
):
    """KV tile `block` into `stage`; in a pair, this CTA's turns of its thirds."""
    rows, boxes = cfg.box_rows, cfg.boxes_per_copy
    parts, copies = BLOCK // rows, BOXES // boxes
    dst = cute.make_tensor(
        s.kv.iterator,
        cute.make_layout(
            ((rows, (64, boxes)), STAGES, copies, parts),
            stride=((64, (1, BOX)), STAGE, boxes * BOX, rows * 64),
        ),
    )
    src = cute.local_tile(g.kv, (rows, (64, boxes)), (None, None, None))
    to, of = cpasync.tma_partition(
        g.tma_kv, 0, cute.make_layout(1), dst, cute.group_modes(src, 0, 2)
    )
    row = block % (cfg.page_size // BLOCK) if const_expr(cfg.page_size > BLOCK) else 0
    arm(s.full + stage)
    for third in cutlass.range_constexpr(min(copies, 3)):
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


@cute.jit
def fill(
    cfg: cutlass.Constexpr[EightConfig], g: Globals, s: EightShared, feed: EightFeed, first, ahead,
    rank, lane,
):  # fmt: skip
    """Fill the next slot where there is room, and its work tile comes before `ahead`; the records
    of those stand."""
    index, block, end, page = feed.index, feed.block, feed.end, feed.page
    stage, phase, room = feed.stage, feed.phase, feed.room
    if (room > 0) & (index < ahead):
        work = read_work(g, s, index)
        if block == end:
            load_q(cfg, g, s, index, first)
            block, end = work.begin, work.end
            page = s.records[FIRST_PAGE + lane % 4, index % RECORDS]
        cute.arch.mbarrier_wait(s.empty + stage, phase)
        checked = block_pages(cfg, g, work, block, page, lane)
        stamp_round(cfg, g, end - block, 0)
        load_tile(cfg, g, s, block, stage, checked, rank)
        stamp_round(cfg, g, end - block, 1)
        block = block + 1
        if block == end:
            index = index + 1
        else:
            # looked at when the next slot is filled: its latency is nobody's
            page = first_pages(cfg, g, work.request, block, lane)
        room = room - 1
        stage = stage + 1
        if stage == STAGES:
            stage = Int32(0)
            phase = phase ^ 1
    return EightFeed(index, block, end, page, stage, phase, room)


def give_back(feed: EightFeed) -> EightFeed:
    """One slot more is free."""
    return replace(feed, room=feed.room + 1)
