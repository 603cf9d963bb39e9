"""Reduction inside a cluster: every CTA pushes each peer its share of the rows.

A share is `pairs` row pairs by 512 / `parts` columns; units are 16 bytes, (column, column + 8) x
(row, row + 1), as they lie in the accumulators, so nothing is shuffled on the sending side.
Receivers add the CTAs in rank order: equal inputs give equal bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import with_sink
from ..common.ptx_sm90 import LN2, fresh_thread, load2, load4, push4, vec2
from ..swap_ab_sm90.epilogue_store import (
    NUM_SPLITS,
    OUT_ROW,
    ROW,
    ROWS,
    SLOT,
    column,
    store_unit,
    unit_place,
    unit_words,
    wants_lse,
)
from ..swap_ab_sm90.params import CONSUMERS, Shape
from ..swap_ab_sm90.shared_storage import Global, Shared


@cute.jit
def announce(c: cutlass.Constexpr[Shape], s: Shared):
    """Tell every CTA of the cluster that this warp no longer needs the exchange's bytes."""
    cute.arch.sync_warp()
    lane = cute.arch.lane_idx()
    if lane < c.cluster:
        cute.arch.mbarrier_arrive(s.free, lane)


@cute.jit
def expect(c: cutlass.Constexpr[Shape], s: Shared, active: Int32):
    """One lane, once a work tile: the bytes that `active` CTAs will push here."""
    share = (c.units + c.pairs) * 16
    cute.arch.mbarrier_arrive_and_expect_tx(s.sent, active * share)


@cute.jit
def send(
    c: cutlass.Constexpr[Shape], wg: Int32, s: Shared, acc: cute.Tensor, peaks: cute.Tensor,
    active: Int32, turn: Int32, mine: Int32, rank: Int32,
):  # fmt: skip
    """Push (m, l) of each row pair and the raw accumulators to the pairs' owners."""
    tid = fresh_thread()
    lane = tid % 32
    if const_expr(c.aliased):
        announce(c, s)
    if tid == 0:
        expect(c, s, active)
    cute.arch.mbarrier_wait(s.free, turn & 1)
    if mine > 0:
        num = max(c.rows // 2, c.cluster)
        if tid < num:
            owner = tid % c.cluster
            at = tid // c.cluster
            w = cute.recast_tensor(peaks, Int32)
            push4(s.peer + (rank * c.pairs + at) * 4, (w[0], w[1], w[2], w[3]), s.sent, owner)
        words = cute.recast_tensor(acc, Int32)
        place = tid % 128 // 32 * 8 + lane // 4
        for j in cutlass.range_constexpr(c.rows // 8):
            pair = 4 * j + lane % 4
            for sl in cutlass.range_constexpr(4):
                if const_expr(c.parts == 1):
                    owner = pair % c.cluster
                    unit = pair // c.cluster * 256 + wg * 128 + sl * 32 + place
                else:
                    per = 8 // c.parts
                    owner = pair * c.parts + (wg * 4 + sl) // per
                    unit = (wg * 4 + sl) % per * 32 + place
                x = sl * (c.rows // 2) + 4 * j
                push4(
                    s.partials + (rank * c.units + unit) * 4,
                    (words[x], words[x + 1], words[x + 2], words[x + 3]),
                    s.sent,
                    owner,
                )


@cute.jit
def reduce_share(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, tail: cute.Tensor, more: cute.Tensor,
    turn: Int32, rank: Int32,
):  # fmt: skip
    """Add the active CTAs' partials of the own share and write result or partial."""
    tid = fresh_thread()
    cute.arch.mbarrier_wait(s.sent, turn & 1)
    for r in cutlass.range_constexpr((c.units + CONSUMERS - 1) // CONSUMERS):
        unit = r * CONSUMERS + tid
        if const_expr(c.units % CONSUMERS == 0):
            reduce_unit(c, g, s, tail, more, unit, rank)
        else:
            if unit < c.units:
                reduce_unit(c, g, s, tail, more, unit, rank)
    if const_expr(c.aliased):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(s.drained)


@cute.jit
def reduce_unit(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, tail: cute.Tensor, more: cute.Tensor,
    unit: Int32, rank: Int32,
):  # fmt: skip
    """One thread's two columns of two rows; a warp's units share the row pair."""
    tid = fresh_thread()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid // 32)
    active = tail[3]
    at = unit // 256
    row, place = unit_place(c, unit, rank)
    # weights of the CTAs: lane k looks at CTA k
    m0 = Float32(-1.0e30)
    m1 = Float32(-1.0e30)
    l0 = Float32(0.0)
    l1 = Float32(0.0)
    if lane < active:
        v = load4(s.peer + (lane * c.pairs + at) * 4)
        m0 = v[0]
        l0 = v[1]
        m1 = v[2]
        l1 = v[3]
    top0 = m0
    top1 = m1
    for bit in cutlass.range_constexpr(5):
        if const_expr(1 << bit < c.cluster):
            top0 = cute.arch.fmax(top0, cute.arch.shuffle_sync_bfly(top0, offset=1 << bit))
            top1 = cute.arch.fmax(top1, cute.arch.shuffle_sync_bfly(top1, offset=1 << bit))
    w0 = cute.math.exp2(m0 - top0, fastmath=True)
    w1 = cute.math.exp2(m1 - top1, fastmath=True)
    sum0 = w0 * l0
    sum1 = w1 * l1
    for bit in cutlass.range_constexpr(5):
        if const_expr(1 << bit < c.cluster):
            sum0 = sum0 + cute.arch.shuffle_sync_bfly(sum0, offset=1 << bit)
            sum1 = sum1 + cute.arch.shuffle_sync_bfly(sum1, offset=1 << bit)
    whole0 = sum0
    whole1 = sum1
    if const_expr(c.features):
        if more[NUM_SPLITS] == 1:
            whole0 = with_sink(c, g, sum0, top0, tail[ROW] + row)
            whole1 = with_sink(c, g, sum1, top1, tail[ROW] + row + 1)
    inv0 = cute.arch.rcp_approx(whole0) if sum0 > 0.0 else Float32(0.0)
    inv1 = cute.arch.rcp_approx(whole1) if sum1 > 0.0 else Float32(0.0)
    table = s.weights + warp * c.cluster * 2
    cute.arch.sync_warp()
    if lane < c.cluster:
        two = cute.make_rmem_tensor(2, Float32)
        two[0] = w0 * inv0
        two[1] = w1 * inv1
        cute.autovec_copy(two, vec2(table + lane * 2))
    cute.arch.sync_warp()
    acc = cute.make_rmem_tensor(4, Float32)
    acc.fill(0.0)
    for k in cutlass.range_constexpr(c.cluster):
        if k < active:
            x = load4(s.partials + (k * c.units + unit) * 4)
            w = load2(table + k * 2)
            for e in cutlass.range_constexpr(4):
                acc[e] = acc[e] + w[e % 2] * x[e]
    col = column(c, place)
    if const_expr(c.fused_merge == 2):
        if more[NUM_SPLITS] > 1:
            cute.autovec_copy(acc, unit_words(c, g, more[SLOT], rank, unit))
        else:
            store_unit(c, g, acc, tail[OUT_ROW], tail[ROWS], row, col, lane)
    elif more[NUM_SPLITS] > 1:
        for e in cutlass.range_constexpr(4):
            g.partial_out[more[SLOT], row + e % 2, col + e // 2 * c.second] = acc[e]
    else:
        store_unit(c, g, acc, tail[OUT_ROW], tail[ROWS], row, col, lane)
    if place == 0:
        value0 = (top0 + cute.math.log2(sum0, fastmath=True)) * Float32(LN2)
        value1 = (top1 + cute.math.log2(sum1, fastmath=True)) * Float32(LN2)
        value0 = value0 if sum0 > 0.0 else -Float32.inf
        value1 = value1 if sum1 > 0.0 else -Float32.inf
        if more[NUM_SPLITS] > 1:
            g.partial_lse[more[SLOT], row] = value0
            g.partial_lse[more[SLOT], row + 1] = value1
        elif const_expr(c.lse):
            if (row < tail[ROWS]) & wants_lse(g):
                g.lse[tail[OUT_ROW] + row] = value0
            if (row + 1 < tail[ROWS]) & wants_lse(g):
                g.lse[tail[OUT_ROW] + row + 1] = value1
