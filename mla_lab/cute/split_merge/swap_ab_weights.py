"""Weights of the partials that a CTA merges, out of the statistics (m, l) of each row, m in log2.

One warp takes a row pair, a lane every 32nd split. A loop takes 32 * `COLUMNS` splits at a time: in
code that runs once a launch, warps wait for instructions longer than for their results.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import sink_of
from ..common.ptx_sm90 import NO_SCORE, WARP, add, butterflies, fresh_thread, ptx, vec2
from . import SplitMerge
from . import swap_ab_cooperative as cooperative
from . import swap_ab_ll as ll
from .swap_ab_fragments import (
    CONSUMER_THREADS,
    fragment_place,
    fragments_per_row_pair,
    inverse_of,
    natural_lse,
    row_pair_of,
    wants_lse,
    weight_table,
)

#: statistics of a lane at a time: those of 64 splits together
COLUMNS = 2


@cute.jit
def slice_weights(c: cutlass.Constexpr, g: Any, s: Any, r: Any, m: Any):
    """Weights of all splits for the row pairs of the slice `m`, a pair per warp at a time."""
    tid = fresh_thread()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid % CONSUMER_THREADS // 32)
    pairs = row_pair_of(c, m.end - 1) - row_pair_of(c, m.begin) + 1
    for p in cutlass.range(warp, pairs, CONSUMER_THREADS // 32, unroll=1):
        pair_weights(c, g, s, r, m, p, lane)


@cute.jit
def pair_weights(
    c: cutlass.Constexpr, g: Any, s: Any, r: Any, m: Any, p: Int32, lane: Int32
):  # fmt: skip
    """Weights of all splits for the p-th row pair of the slice `m`, by one warp; the CTA that has
    the pair's first fragment stores the lse."""
    pair = row_pair_of(c, m.begin) + p
    table = weight_table(s, p) + 2 * lane
    tops, sums = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    tops.fill(NO_SCORE)
    sums.fill(0.0)
    splits = r.num_splits
    if const_expr(m.live is not True):  # without splits once, for its code
        splits = cutlass.max(splits, 1)
    for base in cutlass.range(0, splits, 32 * COLUMNS, unroll=1):
        add_stats(c, g, r, table + 2 * base, tops, sums, pair, base + lane)
    highest = [reference_of(tops[e]) for e in range(2)]
    parts = [sums[e] * cute.math.exp2(tops[e] - highest[e], fastmath=True) for e in range(2)]
    parts = butterflies(add, parts, WARP)
    first, _ = fragment_place(c, pair * fragments_per_row_pair(c), r.rank)
    owns = (pair * fragments_per_row_pair(c) >= m.begin) & (lane == 0) & wants_lse(g)
    if const_expr(c.column_parts > 1):
        owns = owns & (r.rank % c.column_parts == 0)
    inverses = []
    for e in cutlass.range_constexpr(2):
        whole = parts[e]
        if const_expr(c.features):
            sink = sink_of(c, g, r.row + first + e)
            whole = whole + cute.math.exp2(sink - highest[e], fastmath=True)
        inverse = inverse_of(whole, parts[e])
        if const_expr(c.split_merge == SplitMerge.LL):
            inverse = inverse * ll.BACK
        inverses.append(inverse)
        if owns & (first + e < r.rows):
            g.mLSE[r.out_row + first + e] = natural_lse(highest[e], parts[e])
    for split in cutlass.range(lane, r.num_splits, 32, unroll=1):
        two, at = cute.make_rmem_tensor(2, Float32), vec2(table + 2 * (split - lane))
        cute.autovec_copy(at, two)
        for e in cutlass.range_constexpr(2):
            two[e] = cute.math.exp2(two[e] - highest[e], fastmath=True) * inverses[e]
        cute.autovec_copy(two, at)


def reference_of(top: Float32) -> Float32:
    """The greatest `top` of the lanes, in all of them: what exponents are taken relative to. One
    reduction of integers is five steps of shuffles less; in the order of floats they are the bits,
    those of negative numbers but the sign inverted."""
    return ptx(
        "{ .reg .s32 k, s; mov.b32 k, {$r0}; shr.s32 s, k, 31; and.b32 s, s, 0x7fffffff;"
        "xor.b32 k, k, s; redux.sync.max.s32 k, k, 0xffffffff; shr.s32 s, k, 31;"
        "and.b32 s, s, 0x7fffffff; xor.b32 k, k, s; mov.b32 {$w0}, k; }",
        top,
        out=Float32,
    )


@cute.jit
def add_stats(
    c: cutlass.Constexpr, g: Any, r: Any, table: cute.Pointer, tops: cute.Tensor,
    sums: cute.Tensor, pair: Int32, split: Int32,
):  # fmt: skip
    """The lane's greatest m of both rows, and the sum of l relative to it, with those of `split`
    and every 32nd behind it; their m go to `table`."""
    values = cute.make_rmem_tensor((4, COLUMNS), Float32)
    protocol = ll.take_stats if c.split_merge == SplitMerge.LL else cooperative.load_stats
    protocol(c, g, r, values, pair, split)
    for e in cutlass.range_constexpr(2):
        top = tops[e]
        for k in cutlass.range_constexpr(COLUMNS):
            top = cute.arch.fmax(top, values[2 * e, k])
        total = sums[e] * cute.math.exp2(tops[e] - top, fastmath=True)
        for k in cutlass.range_constexpr(COLUMNS):
            weight = cute.math.exp2(values[2 * e, k] - top, fastmath=True)
            total = total + weight * values[2 * e + 1, k]
        tops[e], sums[e] = top, total
    for k in cutlass.range_constexpr(COLUMNS):
        if split + 32 * k < r.num_splits:
            two = cute.make_rmem_tensor(2, Float32)
            two[0], two[1] = values[0, k], values[2, k]
            cute.autovec_copy(two, vec2(table + 64 * k))
