"""Cooperative merge: the counter of a split row tile, and the weights of its partials.

A counter of a row tile belongs to one rank's row pairs or, in clusters of more CTAs than row pairs,
to the ranks that share a row pair: the first of them stores the lse that the others read. It counts
the arrivals 1 .. n of all CTAs of n / `column_parts` splits that write there, then, from n on, the
CTAs that have seen all arrivals; step 2 n takes it back to 0. A CTA waits for n or more, and cannot
miss it, since its own step is one of the 2 n. No CTA waits before its own last arrival, and the
launch is cooperative, so that all of them run.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import sink_of
from ..common.ptx_sm90 import LN2, LOG2E, WARP, add, butterfly, count_up, fresh_thread, vec2
from .swap_ab_fragments import (
    CONSUMER_THREADS,
    CONSUMERS,
    MAX_SPLITS,
    fragment_place,
    fragments_per_row_pair,
    row_pair_of,
    wants_lse,
    weight_table,
)


def counter_of(c: Any, g: Any, r: Any) -> cute.Pointer:
    """The counter of this rank's row pairs."""
    pairs = r.rank // c.column_parts if c.column_parts > 1 else r.rank
    return g.counters.iterator + (r.group * c.cluster + pairs)


def arrivals_of(c: Any, r: Any) -> Int32:
    """CTAs that arrive at `counter_of`."""
    return r.num_splits * c.column_parts if c.column_parts > 1 else r.num_splits


@cute.jit
def arrive(c: cutlass.Constexpr, g: Any, r: Any):
    """After a barrier of all consumers: release the partial that they have written."""
    if fresh_thread() == 0:
        count_up(counter_of(c, g, r), 2 * arrivals_of(c, r) - 1, "release")


@cute.jit
def wait_for_partials(c: cutlass.Constexpr, g: Any, r: Any):
    """Wait until all splits have arrived; then count this CTA as one that has seen it."""
    if fresh_thread() == 0:
        counter = counter_of(c, g, r)
        seen = Int32(0)
        while seen < arrivals_of(c, r):
            seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        count_up(counter, 2 * arrivals_of(c, r) - 1, "relaxed")
    CONSUMERS.sync()


@cute.jit
def slice_weights(c: cutlass.Constexpr, g: Any, s: Any, r: Any, m: Any):
    """Weights of all splits for the row pairs of the slice `m`, a pair per warp at a time; the CTA
    that has a pair's first fragment stores the lse."""
    tid = fresh_thread()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid % CONSUMER_THREADS // 32)
    pairs = row_pair_of(c, m.end - 1) - row_pair_of(c, m.begin) + 1
    for p in cutlass.range(warp, pairs, CONSUMER_THREADS // 32, unroll=1):
        first = (row_pair_of(c, m.begin) + p) * fragments_per_row_pair(c)
        row, _ = fragment_place(c, first, r.rank)
        values = cute.make_rmem_tensor((2, MAX_SPLITS // 32), Float32)
        values.fill(-Float32.inf)
        for k in cutlass.range_constexpr(MAX_SPLITS // 32):
            if 32 * k + lane < m.num_splits:
                at = (m.partial + 32 * k + lane) * c.rows + row
                cute.autovec_copy(vec2(g.mLSE_partial.iterator + at), values[None, k])
        own_lse = first >= m.begin
        if const_expr(c.column_parts > 1):
            own_lse = own_lse & (r.rank % c.column_parts == 0)
        for e in cutlass.range_constexpr(2):
            sink = sink_of(c, g, r.row + row + e)
            lse = row_weights(c, values[e, None], m.num_splits, weight_table(s, p) + e, sink, lane)
            if own_lse & (lane == 0) & (row + e < r.rows) & wants_lse(g):
                g.mLSE[r.out_row + row + e] = lse


@cute.jit
def row_weights(
    c: cutlass.Constexpr, values: cute.Tensor, splits: Int32, table: cute.Pointer, sink: Float32,
    lane: Int32,
):  # fmt: skip
    """From the splits' natural lse to weights in `table` (every second word); the row's lse."""
    top = Float32(-Float32.inf)
    for k in cutlass.range_constexpr(MAX_SPLITS // 32):
        top = cute.arch.fmax(top, values[k])
    top = butterfly(cute.arch.fmax, top, WARP)
    shift = Float32(0.0) if top == -Float32.inf else top
    total = Float32(0.0)
    for k in cutlass.range_constexpr(MAX_SPLITS // 32):
        values[k] = cute.math.exp2((values[k] - shift) * Float32(LOG2E), fastmath=True)
        total = total + values[k]
    total = butterfly(add, total, WARP)
    whole = total
    if const_expr(c.features):
        whole = total + cute.math.exp2(sink - shift * Float32(LOG2E), fastmath=True)
    inverse = cute.arch.rcp_approx(whole) if total > 0.0 else Float32(0.0)
    for k in cutlass.range_constexpr(MAX_SPLITS // 32):
        if 32 * k + lane < splits:
            cute.arch.store(table + (32 * k + lane) * 2, values[k] * inverse)
    return shift + cute.math.log2(total, fastmath=True) * Float32(LN2)
