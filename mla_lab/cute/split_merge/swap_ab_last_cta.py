"""The last of a row tile's workers adds all partials, in split order, each rank its share."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import with_sink
from ..common.fp8 import put_two
from ..common.ptx_sm90 import LN2, fresh_thread, vec4
from ..swap_ab_sm90.epilogue_store import (
    GROUP,
    NUM_SPLITS,
    OUT_ROW,
    ROW,
    ROWS,
    SLOT,
    SPLIT,
    wants_lse,
)
from ..swap_ab_sm90.params import CONSUMERS, LATENT_DIM, Shape
from ..swap_ab_sm90.shared_storage import Global, Shared

ALL = 1
#: partials whose loads are in flight together
BATCH = 8


@cute.jit
def merge_share(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, tail: cute.Tensor, more: cute.Tensor,
    rank: Int32,
):  # fmt: skip
    """Count this CTA in; if it is the last of its rank, merge and leave the counter at zero."""
    tid = fresh_thread()
    counter = g.counters.iterator + (more[GROUP] * c.cluster + rank)
    cute.arch.barrier(barrier_id=ALL, number_of_threads=CONSUMERS)
    if tid == 0:
        before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        cute.arch.store(s.flag, before)
    cute.arch.barrier(barrier_id=ALL, number_of_threads=CONSUMERS)
    if cute.arch.load(s.flag, Int32) == more[NUM_SPLITS] - 1:
        if tid == 0:
            cute.arch.store(counter, Int32(0), sem="relaxed", scope="gpu")
        columns = LATENT_DIM // c.parts
        quads = 2 * c.pairs * columns // 4
        for r in cutlass.range((quads + CONSUMERS - 1) // CONSUMERS, unroll=1):
            quad = r * CONSUMERS + tid
            if quad < quads:
                local = quad // (columns // 4)
                col = quad % (columns // 4) * 4
                row = 2 * (local // 2 * c.cluster + rank) + local % 2
                if const_expr(c.parts > 1):
                    row = 2 * (rank // c.parts) + local
                    col = col + rank % c.parts * columns
                merge_quad(c, g, tail, more[SLOT] - more[SPLIT], more[NUM_SPLITS], row, col)


@cute.jit
def merge_quad(
    c: cutlass.Constexpr[Shape], g: Global, tail: cute.Tensor, slot: Int32, splits: Int32,
    row: Int32, col: Int32,
):  # fmt: skip
    """Four columns of a row over all splits; a warp shares the row, so lane k weighs split k."""
    lane = fresh_thread() % 32
    acc = cute.make_rmem_tensor(4, Float32)
    acc.fill(0.0)
    top = Float32(-1.0e30)
    total = Float32(0.0)
    for start in cutlass.range(0, splits, 32, unroll=1):
        value = Float32(-1.0e30)
        if start + lane < splits:
            value = g.partial_lse[slot + start + lane, row] * Float32(1.4426950408889634)
        peak = cute.arch.fmax(top, value)
        for bit in cutlass.range_constexpr(5):
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=1 << bit))
        weight = cute.math.exp2(value - peak, fastmath=True) if value > -1.0e30 else Float32(0.0)
        fade = cute.math.exp2(top - peak, fastmath=True)
        for e in cutlass.range_constexpr(4):
            acc[e] = acc[e] * fade
        share = weight
        for bit in cutlass.range_constexpr(5):
            share = share + cute.arch.shuffle_sync_bfly(share, offset=1 << bit)
        total = total * fade + share
        top = peak
        for b in cutlass.range(0, cutlass.min(Int32(32), splits - start), BATCH, unroll=1):
            part = cute.make_rmem_tensor((4, BATCH), Float32)
            for k in cutlass.range_constexpr(BATCH):
                at = slot + start + cutlass.min(b + k, splits - start - 1)
                place = (at * c.rows + row) * LATENT_DIM + col
                cute.autovec_copy(vec4(g.partial_out.iterator + place), part[None, k])
            for k in cutlass.range_constexpr(BATCH):
                # weights are 0 past the last split
                w = cute.arch.shuffle_sync(weight, (b + k) & 31)
                for e in cutlass.range_constexpr(4):
                    acc[e] = acc[e] + w * part[e, k]
    if row < tail[ROWS]:
        whole = with_sink(c, g, total, top, tail[ROW] + row)
        inverse = cute.arch.rcp_approx(whole) if total > 0.0 else Float32(0.0)
        at = (tail[OUT_ROW] + row) * LATENT_DIM + col
        if const_expr(c.eight):
            for e in cutlass.range_constexpr(0, 4, 2):
                low, high = acc[e] * inverse * g.out_scale, acc[e + 1] * inverse * g.out_scale
                put_two(c.out_dtype, g.out, at + e, low, high)
        else:
            result = cute.make_rmem_tensor(4, c.out_dtype)
            for e in cutlass.range_constexpr(4):
                result[e] = (acc[e] * inverse * g.out_scale).to(c.out_dtype)
            pointer = (g.out.iterator + at).align(8)
            cute.autovec_copy(result, cute.make_tensor(pointer, cute.make_layout(4)))
        if const_expr(c.lse):
            if (col == 0) & wants_lse(g):
                value = (top + cute.math.log2(total, fastmath=True)) * Float32(LN2)
                g.lse[tail[OUT_ROW] + row] = value if total > 0.0 else -Float32.inf
