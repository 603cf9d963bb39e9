"""The two consumer warpgroups: own tiles alternate, each keeps 256 columns of O^T.

Tiles of a work tile belong to the warpgroups in turn; the owner computes scores and P, both add
V^T P^T for their half of the columns (`rounds`). Each has code of its own up to there; a work
tile's end and the merges are one code for both, which is fetched once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..common.ptx_sm90 import load4
from ..common.self_schedule import may_be_split, plan_of, split_words
from ..split_merge.swap_ab_cluster_reduce import announce
from ..split_merge.swap_ab_cooperative import merge_shares
from ..split_merge.swap_ab_ll import merge_mail
from . import fp8_operands as fp8
from . import mainloop_fp8 as late
from . import query_hi_lo as split
from .epilogue import finish, publish_totals
from .epilogue_store import NUM_SPLITS
from .mainloop_bf16 import (
    FIRST,
    SCORES,
    SECOND,
    VALUES,
    Fragments,
    Registers,
    Span,
    fragments,
    own_tile,
    registers,
    release,
    take,
)
from .params import Shape
from .shared_storage import Global, Products, Shared, first_owner, stamp, statistics
from .tile_scheduler import merge_record


@cute.jit
def attend(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], g: Global, s: Shared,
    mma: Products, f: Fragments, w: Span, warp: Int32, lane: Int32,
):  # fmt: skip
    """All tiles of one work tile into acc_o and total, published under the last product."""
    own = late.own_tile if const_expr(c.eight) else own_tile
    f.acc_o.fill(0.0)
    f.total.fill(0.0)
    start = (wg + first_owner(c, w.done)) % 2
    if w.mine <= start:
        # no own tile: this warpgroup reads no Q
        cute.arch.mbarrier_arrive(s.q_empty)
    if const_expr(c.static_stage or not c.grid or wg == 0):
        if start == 0 and w.mine > 0:
            own(c, wg, FIRST, g, s, mma, f, w, Int32(0), warp, lane)
    begin = 2 - start
    if const_expr(c.values_first and c.grid and wg == 1):
        # one work tile, and tile 1 is this warpgroup's
        if w.mine > 1:
            own(c, wg, SECOND, g, s, mma, f, w, Int32(1), warp, lane)
        begin = Int32(3)
    order = VALUES if const_expr(c.values_first) else SCORES
    for k in cutlass.range(begin, w.mine, 2, unroll=1):
        own(c, wg, order, g, s, mma, f, w, k, warp, lane)
    if w.mine > 0 and (w.mine - 1) % 2 != start:
        stage = (w.done + w.mine - 1) % c.stages
        if const_expr(c.static_stage):
            stage = 1 - wg
        if const_expr(c.eight):
            late.take_last(c, wg, s, mma, f, stage, w.done + w.mine - 1, warp, lane)
        else:
            take(c, wg, s, mma, f, lane, stage, w.done + w.mine - 1)
        publish_totals(c, wg, s, f.total, warp, lane)
        warpgroup.wait_group(0)
        fp8.land(c, f, f.factor)
        release(c, s, stage)
    if w.mine == 0:
        publish_totals(c, wg, s, f.total, warp, lane)


@cute.jit
def consume(c: cutlass.Constexpr[Shape], g: Global, s: Shared, mma: Products, rank: Int32):
    """Walk the work records until the producer's END; then the shares of the merges."""
    r = registers(c, mma)
    cute.arch.mbarrier_wait(s.q_full, 0)
    mine = cute.arch.make_warp_uniform(cute.arch.load(s.work, Int32))
    if const_expr(c.grid):
        if const_expr(c.pair > 1):
            if mine < 0:
                cute.arch.cluster_arrive_relaxed()
        if mine >= 0:
            work_tile(c, g, s, mma, r, mine, Int32(0), Int32(0), rank)
            if const_expr(c.fused_merge == 2):
                tail, more = load4(s.work + 4), load4(s.work + 8)
                if more[NUM_SPLITS] > 1:
                    merge_shares(c, g, s, tail, more, rank, Int32(0))
            if const_expr(c.fused_merge == 3):
                tail, more = load4(s.work + 4), load4(s.work + 8)
                if more[NUM_SPLITS] > 1:
                    merge_mail(c, g, s, tail, more)
    else:
        turn = Int32(0)
        done = Int32(0)
        while mine >= 0:
            work_tile(c, g, s, mma, r, mine, done, turn, rank)
            turn = turn + 1
            done = done + mine
            cute.arch.mbarrier_wait(s.q_full, turn & 1)
            mine = cute.arch.make_warp_uniform(cute.arch.load(s.work, Int32))
        if const_expr(c.fused_merge == 2):
            merges = Int32(0)
            plan = plan_of(s.plan[cute.arch.lane_idx()])
            for at in cutlass.range(plan.last, unroll=1):
                if may_be_split(plan, at):
                    words = split_words(g.tiles, plan, at)
                    if cute.arch.shuffle_sync(words, 5) > 1:
                        tail, more = merge_record(c, g, words)
                        merge_shares(c, g, s, tail, more, rank, merges)
                        merges = merges + 1


@cute.jit
def work_tile(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, mma: Products, r: Registers, mine: Int32,
    done: Int32, turn: Int32, rank: Int32,
):  # fmt: skip
    """One work tile, from its record to its result or partial."""
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    thread = tid % 128
    warp = cute.arch.make_warp_uniform(thread // 32)
    wg = cute.arch.make_warp_uniform(tid // 128)
    head = load4(s.work)
    tail = load4(s.work + 4)
    more = load4(s.work + 8)
    w = Span(mine, head[1], head[2], head[3], tail[0], done, tail[1], tail[2] if c.skip else None)
    if const_expr(c.cluster > 1 and not c.aliased):
        announce(c, s)
    if const_expr(c.terms > 1):
        split.split_query(c, s, turn)
    if wg == 0:
        attend(c, 0, g, s, mma, fragments(c, 0, s, mma, thread, r), w, warp, lane)
    else:
        attend(c, 1, g, s, mma, fragments(c, 1, s, mma, thread, r), w, warp, lane)
    if const_expr(c.pair > 1):
        # the last arrival at a peer is behind us; the kernel waits for the peers' at its end
        cute.arch.cluster_arrive_relaxed()
    stamp(c, s, 3)
    last = statistics(c, (mine + 1 + first_owner(c, done)) % 2, done + mine - 1)
    finish(c, wg, g, s, r.acc_o, mine, last, tail, more, turn, rank)
