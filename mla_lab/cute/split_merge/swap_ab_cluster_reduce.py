"""Reduction inside a cluster: every CTA pushes each peer the peer's part of the rows.

A part is `row_pairs` row pairs by 512 / `column_parts` columns, in fragments as the accumulators
hold them, so that the sender shuffles nothing. Receivers add the CTAs in rank order: equal inputs
give equal bits.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import with_sink
from ..common.pipeline import PipelineState
from ..common.ptx_sm90 import (
    NO_SCORE,
    add,
    butterflies,
    div_pow2,
    fresh_thread,
    load2,
    load4,
    push4,
    vec2,
)
from . import SplitMerge
from .swap_ab_fragments import (
    CONSUMER_THREADS,
    fragment_column,
    fragment_place,
    inverse_of,
    natural_lse,
    partial_words,
    row_pair_of,
    store_fragment,
    wants_lse,
)


@cute.jit
def release_partials(c: cutlass.Constexpr, s: Any):
    """One arrival per warp at every CTA: this one's partials of its peers may be overwritten."""
    cute.arch.sync_warp()
    lane = cute.arch.lane_idx()
    if lane < c.cluster:
        s.peers.consumer_release(0, lane)


@cute.jit
def send_partial(
    c: cutlass.Constexpr, wg: Int32, s: Any, tOrO: cute.Tensor, stats: cute.Tensor, r: Any
):  # fmt: skip
    """Push (m, l, m, l) of each row pair and the raw accumulators to the pairs' owners."""
    active_ctas = r.active_ctas
    tid = fresh_thread()
    lane = tid % 32
    if const_expr(c.partials_on_ring):
        release_partials(c, s)
    if tid == 0:
        # from each CTA with KV tiles: its fragments and statistics
        s.peers.producer_expect_tx(0, active_ctas * ((c.fragments + c.row_pairs) * 16))
    s.peers.producer_acquire(PipelineState(0, r.index & 1))
    if r.num_tiles > 0:
        if tid < max(c.rows // 2, c.cluster):
            owner = tid % c.cluster
            pair = tid // c.cluster
            words = cute.recast_tensor(stats, Int32)
            to = s.peer_stats + (r.rank * c.row_pairs + pair) * 4
            push4(to, (words[0], words[1], words[2], words[3]), s.peers.full.at(0), owner)
        words = cute.recast_tensor(tOrO, Int32)
        place = tid % 128 // 32 * 8 + lane // 4
        for j in cutlass.range_constexpr(c.rows // 8):
            pair = 4 * j + lane % 4
            for sl in cutlass.range_constexpr(4):
                if const_expr(c.column_parts == 1):
                    owner = pair % c.cluster
                    fragment = pair // c.cluster * 256 + wg * 128 + sl * 32 + place
                else:
                    slices = 8 // c.column_parts
                    owner = pair * c.column_parts + div_pow2(wg * 4 + sl, slices)
                    fragment = ((wg * 4 + sl) & (slices - 1)) * 32 + place
                x = sl * (c.rows // 2) + 4 * j
                to = s.peer_partials + (r.rank * c.fragments + fragment) * 4
                four = (words[x], words[x + 1], words[x + 2], words[x + 3])
                push4(to, four, s.peers.full.at(0), owner)


@cute.jit
def reduce_partials(c: cutlass.Constexpr, g: Any, s: Any, r: Any):
    """Add the active CTAs' partials of this CTA's rows and store the result or a partial."""
    tid = fresh_thread()
    s.peers.consumer_wait(PipelineState(0, r.index & 1))
    for i in cutlass.range_constexpr((c.fragments + CONSUMER_THREADS - 1) // CONSUMER_THREADS):
        fragment = i * CONSUMER_THREADS + tid
        if const_expr(c.fragments % CONSUMER_THREADS == 0) or fragment < c.fragments:
            reduce_fragment(c, g, s, r, fragment)
    if const_expr(c.partials_on_ring):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            s.ring_drained.arrive(0)


@cute.jit
def cta_weights(
    c: cutlass.Constexpr, g: Any, s: Any, r: Any, row: Int32, pair: Int32, warp: Int32, lane: Int32
):  # fmt: skip
    """Weights of the CTAs for both rows of a pair, fp32 [cluster][2], lane k stores those of CTA k;
    and the rows' maxima (log2) and sums of exponentials."""
    m0 = Float32(NO_SCORE)
    m1 = Float32(NO_SCORE)
    l0 = Float32(0.0)
    l1 = Float32(0.0)
    if lane < r.active_ctas:
        v = load4(s.peer_stats + (lane * c.row_pairs + pair) * 4)
        m0 = v[0]
        l0 = v[1]
        m1 = v[2]
        l1 = v[3]
    lanes = tuple(1 << bit for bit in range(5) if 1 << bit < c.cluster)
    tops = butterflies(cute.arch.fmax, [m0, m1], lanes)
    w0 = cute.math.exp2(m0 - tops[0], fastmath=True)
    w1 = cute.math.exp2(m1 - tops[1], fastmath=True)
    sums = butterflies(add, [w0 * l0, w1 * l1], lanes)
    whole0, whole1 = sums
    if const_expr(c.features):
        if r.num_splits == 1:
            whole0 = with_sink(c, g, sums[0], tops[0], r.row + row)
            whole1 = with_sink(c, g, sums[1], tops[1], r.row + row + 1)
    inv0, inv1 = inverse_of(whole0, sums[0]), inverse_of(whole1, sums[1])
    table = s.cta_weights + warp * c.cluster * 2
    cute.arch.sync_warp()
    if lane < c.cluster:
        two = cute.make_rmem_tensor(2, Float32)
        two[0] = w0 * inv0
        two[1] = w1 * inv1
        cute.autovec_copy(two, vec2(table + lane * 2))
    cute.arch.sync_warp()
    return table, tops, sums


@cute.jit
def reduce_fragment(c: cutlass.Constexpr, g: Any, s: Any, r: Any, fragment: Int32):
    """One thread's two columns of two rows; a warp's fragments share the row pair."""
    tid = fresh_thread()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid // 32)
    active_ctas = r.active_ctas
    pair = row_pair_of(c, fragment)
    row, place = fragment_place(c, fragment, r.rank)
    table, tops, sums = cta_weights(c, g, s, r, row, pair, warp, lane)
    acc = cute.make_rmem_tensor(4, Float32)
    acc.fill(0.0)
    for k in cutlass.range_constexpr(c.cluster):
        if k < active_ctas:
            x = load4(s.peer_partials + (k * c.fragments + fragment) * 4)
            weight = load2(table + k * 2)
            for e in cutlass.range_constexpr(4):
                acc[e] = acc[e] + weight[e % 2] * x[e]
    col = fragment_column(c, place)
    if r.num_splits > 1:
        if const_expr(c.split_merge == SplitMerge.COOPERATIVE):
            cute.autovec_copy(acc, partial_words(c, g, r.partial, r.rank, fragment))
        else:
            for e in cutlass.range_constexpr(4):
                at = col + e // 2 * c.o_half_cols
                g.mO_partial[r.partial, row + e % 2, at] = acc[e]
    else:
        store_fragment(c, g, r.out_row, acc, r.rows, row, col, lane)
    if place == 0:
        store_pair_lse(g, r, row, tops, sums)


@cute.jit
def store_pair_lse(g: Any, r: Any, row: Int32, tops: list, sums: list):
    """The natural lse of both rows of a pair, to the caller or beside the partial."""
    value0, value1 = natural_lse(tops[0], sums[0]), natural_lse(tops[1], sums[1])
    if r.num_splits > 1:
        g.mLSE_partial[r.partial, row] = value0
        g.mLSE_partial[r.partial, row + 1] = value1
    else:
        if (row < r.rows) & wants_lse(g):
            g.mLSE[r.out_row + row] = value0
        if (row + 1 < r.rows) & wants_lse(g):
            g.mLSE[r.out_row + row + 1] = value1
