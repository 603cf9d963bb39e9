"""The accumulate role: O = P V for one half of the latent, then the epilogue and the merge."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..common.feature_operands import with_scales
from ..common.ptx_sm90 import fresh_thread
from ..split_merge.keep_ab_cooperative import arrive, kept_strips, merge, share_of
from ..split_merge.keep_ab_partials import store_fragment
from .epilogue_store import store_lse, store_rows
from .mainloop_qk_softmax import power, release, select
from .params import BLOCK, LATENT, LN2, SKIPPED, STAGES, Config, Globals, Mmas, Shared
from .producer import fill, start
from .tile_scheduler import Plan, may_be_split, read_work, record, stamp, stamp_round

HALF = LATENT // 2


def scale_rows(acc, f0, f1):
    """Scale the thread's two rows."""
    for j in range(cute.size(acc) // 4):
        for e in range(2):
            acc[4 * j + e] = acc[4 * j + e] * f0
            acc[4 * j + 2 + e] = acc[4 * j + 2 + e] * f1


def partial_rows(g, slot_row, column, lane):
    """This thread's accumulator positions in a partial: (parity, half, col8)."""
    offset = cute.assume(slot_row * LATENT + column + 2 * (lane % 4), divby=2)
    return cute.make_tensor(
        g.partial_out.iterator + offset,
        cute.make_layout((2, 2, HALF // 8), stride=(1, 8 * LATENT, 8)),
    )


@cute.jit
def store_partial(
    cfg: cutlass.Constexpr[Config], g: Globals, acc: cute.Tensor, slot_row, column, lane
):
    """The thread's accumulator, in pairs of columns, into its slot."""
    dst = partial_rows(g, slot_row, column, lane)
    for j in cutlass.range_constexpr(cute.size(acc) // 4):
        for h in cutlass.range_constexpr(2):
            v = cute.make_rmem_tensor(2, Float32)
            v[0] = acc[4 * j + 2 * h]
            v[1] = acc[4 * j + 2 * h + 1]
            cute.autovec_copy(v, dst[None, h, j])


@cute.jit
def finish(
    cfg: cutlass.Constexpr[Config],
    g: Globals,
    s: Shared,
    acc: cute.Tensor,
    index,
    last,
    rank,
):
    """Normalise; write the result, or the partial."""
    tid = fresh_thread()  # held through the loop, it and what follows would cost registers
    lane = tid % 32
    wg = cute.arch.make_warp_uniform(tid // 128)
    row = 16 * cute.arch.make_warp_uniform((tid % 128) // 32) + lane // 4
    column = wg * HALF
    work = read_work(g, s, index)
    sum0, sum1 = s.row_sum[row], s.row_sum[row + 8]
    max0, max1 = s.row_max[row], s.row_max[row + 8]
    cute.arch.mbarrier_arrive(s.free)
    lse0 = (max0 + cute.math.log2(sum0, fastmath=True)) * Float32(LN2)
    lse1 = (max1 + cute.math.log2(sum1, fastmath=True)) * Float32(LN2)
    if const_expr(cfg.features):
        lse0, lse1 = max0, max1  # as the attend group has made them
    inv0 = select(sum0 > 0.0, cute.arch.rcp_approx(sum0), Float32(0.0))
    inv1 = select(sum1 > 0.0, cute.arch.rcp_approx(sum1), Float32(0.0))
    if work.slot >= 0:
        if const_expr(cfg.fused_merge):
            kept = kept_strips(cfg, share_of(cfg, s, work, rank), work, index, last)
            store_fragment(cfg, wg, g, acc, work, rank, (inv0, inv1), (lse0, lse1), kept)
            arrive(cfg, g, work, rank)
        else:
            scale_rows(acc, inv0, inv1)
            at = rank * BLOCK + row
            slot_row = work.slot * (BLOCK * cfg.cluster) + at
            store_partial(cfg, g, acc, slot_row, column, lane)
            if (wg == 0) & (lane % 4 == 0):
                g.partial_lse[work.slot, at] = lse0
                g.partial_lse[work.slot, at + 8] = lse1
    else:
        out_scale = with_scales(cfg, g).out_scale
        scale_rows(acc, inv0 * out_scale, inv1 * out_scale)
        store_rows(cfg, g, acc, work, row, column, lane)
        if wg == 0:
            store_lse(cfg, g, work, row, lane, lse0, lse1)


@cute.jit
def add_tile(mma: Mmas, acc: cute.Tensor, r_p, r_v, stage, drop0, drop1):
    """acc <- acc, its two rows halved so many times, + P V of one tile."""
    if cute.arch.vote_any_sync((drop0 | drop1) != 0):
        scale_rows(acc, power(drop0), power(drop1))
    atom = cute.make_mma_atom(mma.pv.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for k in cutlass.range_constexpr(4):
        cute.gemm(atom, acc, r_p[None, None, k, stage], r_v[None, None, k, stage], acc)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def accumulate(
    cfg: cutlass.Constexpr[Config],
    g: Globals,
    s: Shared,
    mma: Mmas,
    plan: Plan,
    rank,
):
    """Per work tile: P V tile by tile as P is announced, filling the ring behind it."""
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    wg = cute.arch.make_warp_uniform(tid // 128)
    w = cute.arch.make_warp_uniform((tid % 128) // 32)
    row = 16 * w + lane // 4
    p_box = cute.local_tile(s.kv, (64, 64), (0, 8, None))
    r_p = mma.pv.make_fragment_A(mma.pv.get_slice(0).partition_A(p_box))
    half = cute.local_tile(s.values, (HALF, BLOCK), (wg, 0, None))
    r_v = mma.pv.make_fragment_B(mma.pv.get_slice(0).partition_B(half))
    acc = cute.make_rmem_tensor(mma.pv.partition_shape_C((64, HALF)), Float32)
    phases = Int32(0)
    first, last = plan.first, plan.last
    feeds = cute.arch.make_warp_uniform(tid // 32) == 0
    feed = start(first)
    if feeds & (first < last):
        record(cfg, g, s, plan, first, rank)
        for _ in cutlass.range(STAGES, unroll=1):
            feed = fill(cfg, g, s, feed, last, rank, lane)
    cute.arch.mbarrier_arrive(s.free)
    for index in cutlass.range(first, last, unroll=1):
        if feeds:
            if index + 1 < last:
                record(cfg, g, s, plan, index + 1, rank)
            feed = fill(cfg, g, s, feed, last, rank, lane)  # the slot that Q gives back
        stage = Int32(1)
        acc.fill(0.0)
        block, count = Int32(0), Int32(1)
        while block < count:
            stage = cute.arch.make_warp_uniform(stage)
            cute.arch.mbarrier_wait(s.p_full + stage, (phases >> stage) & 1)
            phases = phases ^ (1 << stage)
            if block == 0:
                work = read_work(g, s, index)
                count = cute.arch.make_warp_uniform(work.end - work.begin)
            if const_expr(cfg.stamps):
                if (block == 0) & (index == first):
                    stamp(cfg, g, 2)
                stamp_round(cfg, g, count - block, 5)
            drop0, drop1 = Int32(s.drop[row, stage]), Int32(s.drop[row + 8, stage])
            cute.arch.mbarrier_arrive(s.seen + stage)
            if const_expr(cfg.skip):
                if cute.arch.vote_any_sync(drop0 != SKIPPED):
                    add_tile(mma, acc, r_p, r_v, stage, drop0, drop1)
            else:
                add_tile(mma, acc, r_p, r_v, stage, drop0, drop1)
            stamp_round(cfg, g, count - block, 6)
            stamp_round(cfg, g, count - block, 7)
            release(cfg, s, stage, lane)
            if feeds:
                feed = fill(cfg, g, s, feed, last, rank, lane)
            block = block + 1
            stage = stage + 1
            if stage == STAGES:
                stage = Int32(0)
        # the slots that the ring passes over, so that the next Q enters stage 0
        if feeds & (stage > 0):
            for _ in cutlass.range(STAGES - stage, unroll=1):
                feed = fill(cfg, g, s, feed, last, rank, lane)
        stamp(cfg, g, 3)
        finish(cfg, g, s, acc, index, last, rank)
        stamp(cfg, g, 4)
    if const_expr(cfg.fused_merge):
        # the last one first: it has left its share in the ring
        for back in cutlass.range(first + 1, last + 1, unroll=1):
            if may_be_split(plan, first + last - back):
                merge(cfg, g, s, first + last - back, plan, rank, True)
    stamp(cfg, g, 6)
