"""Merge by the last CTA of a row tile to finish: all partials, in split order, each rank its rows.
Of ranks that share a row pair the last one merges all of its columns.

No CTA waits for another, so that a grid may be larger than the card: the gathered builds use it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import with_sink
from ..common.fp8 import put_two
from ..common.ptx_sm90 import LOG2E, NO_SCORE, UPWARD, add, butterfly, fresh_thread, vec4
from .swap_ab_cooperative import arrivals_of, counter_of
from .swap_ab_fragments import (
    CONSUMER_THREADS,
    CONSUMERS,
    LATENT_DIM,
    inverse_of,
    natural_lse,
    wants_lse,
)

#: partials whose loads are in flight together
BATCH = 8


@cute.jit
def merge_if_last(c: cutlass.Constexpr, g: Any, s: Any, r: Any):
    """Count this CTA; if it is the last of `counter_of`, merge and leave the counter at zero."""
    tid = fresh_thread()
    counter = counter_of(c, g, r)
    CONSUMERS.sync()
    if tid == 0:
        before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        cute.arch.store(s.arrival, before)
    CONSUMERS.sync()
    if cute.arch.load(s.arrival, Int32) == arrivals_of(c, r) - 1:
        if tid == 0:
            cute.arch.store(counter, Int32(0), sem="relaxed", scope="gpu")
        quads = 2 * c.row_pairs * LATENT_DIM // 4
        for i in cutlass.range((quads + CONSUMER_THREADS - 1) // CONSUMER_THREADS, unroll=1):
            quad = i * CONSUMER_THREADS + tid
            if quad < quads:
                local = quad // (LATENT_DIM // 4)
                col = quad % (LATENT_DIM // 4) * 4
                row = 2 * (local // 2 * c.cluster + r.rank) + local % 2
                if const_expr(c.column_parts > 1):
                    row = 2 * (r.rank // c.column_parts) + local
                merge_four(c, g, r, row, col)


@cute.jit
def merge_four(c: cutlass.Constexpr, g: Any, r: Any, row: Int32, col: Int32):
    """Four columns of a row over all splits, 32 at a time; a warp shares the row, so lane k
    computes the weight of split k."""
    lane = fresh_thread() % 32
    first = r.partial - r.split
    splits = r.num_splits
    acc = cute.make_rmem_tensor(4, Float32)
    acc.fill(0.0)
    top = Float32(NO_SCORE)
    total = Float32(0.0)
    for start in cutlass.range(0, splits, 32, unroll=1):
        value = Float32(NO_SCORE)
        if start + lane < splits:
            value = g.mLSE_partial[first + start + lane, row] * Float32(LOG2E)
        new = butterfly(cute.arch.fmax, cute.arch.fmax(top, value), UPWARD)
        # a split without keys weighs nothing, one with a NaN is NaN
        weight = Float32(0.0) if value <= NO_SCORE else cute.math.exp2(value - new, fastmath=True)
        rescale = cute.math.exp2(top - new, fastmath=True)
        for e in cutlass.range_constexpr(4):
            acc[e] = acc[e] * rescale
        total = total * rescale + butterfly(add, weight, UPWARD)
        top = new
        for b in cutlass.range(0, cutlass.min(Int32(32), splits - start), BATCH, unroll=1):
            part = cute.make_rmem_tensor((4, BATCH), Float32)
            for k in cutlass.range_constexpr(BATCH):
                at = first + start + cutlass.min(b + k, splits - start - 1)
                place = (at * c.rows + row) * LATENT_DIM + col
                cute.autovec_copy(vec4(g.mO_partial.iterator + place), part[None, k])
            for k in cutlass.range_constexpr(BATCH):
                # weights are 0 past the last split
                one = cute.arch.shuffle_sync(weight, (b + k) & 31)
                for e in cutlass.range_constexpr(4):
                    acc[e] = acc[e] + one * part[e, k]
    if row < r.rows:
        store_four(c, g, r, acc, row, col, top, total)


@cute.jit
def store_four(
    c: cutlass.Constexpr, g: Any, r: Any, acc: cute.Tensor, row: Int32, col: Int32,
    top: Float32, total: Float32,
):  # fmt: skip
    """Four columns of an output row, divided by its sum and its sink; the lse with column 0."""
    whole = with_sink(c, g, total, top, r.row + row)
    inverse = inverse_of(whole, total)
    at = (r.out_row + row) * LATENT_DIM + col
    if const_expr(c.fp8):
        for e in cutlass.range_constexpr(0, 4, 2):
            low, high = acc[e] * inverse * g.out_scale, acc[e + 1] * inverse * g.out_scale
            put_two(c.out_dtype, g.mO, at + e, low, high)
    else:
        result = cute.make_rmem_tensor(4, c.out_dtype)
        for e in cutlass.range_constexpr(4):
            result[e] = (acc[e] * inverse * g.out_scale).to(c.out_dtype)
        pointer = (g.mO.iterator + at).align(8)
        cute.autovec_copy(result, cute.make_tensor(pointer, cute.make_layout(4)))
    if (col == 0) & wants_lse(g):
        g.mLSE[r.out_row + row] = natural_lse(top, total)
