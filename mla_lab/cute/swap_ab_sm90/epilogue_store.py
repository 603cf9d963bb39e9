"""Results and partials straight from the accumulators of O^T (one CTA per worker)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.ptx_sm90 import pack2, transpose_8x8
from ..split_merge import SplitMerge
from ..split_merge.swap_ab_fragments import natural_lse, partial_words, store_two, wants_lse
from .online_softmax import thread_row
from .params import LATENT_DIM, O_SLICES, Traits
from .shared_storage import Globals, Record


@cute.jit
def store_lse(
    c: cutlass.Constexpr[Traits], g: Globals, r: Record, row: Int32, top: Float32, total: Float32
):
    """lse of one row, to the caller or beside the partial."""
    value = natural_lse(top, total)
    if r.num_splits > 1:
        g.mLSE_partial[r.partial, row] = value
    elif (row < r.rows) & wants_lse(g):
        g.mLSE[r.out_row + row] = value


@cute.jit
def store_accumulators(
    c: cutlass.Constexpr[Traits], wg: Int32, g: Globals, tOrO: cute.Tensor, inverse: cute.Tensor,
    r: Record, warp: Int32, lane: Int32,
):  # fmt: skip
    """tOrO x inverse row sums: to the output rows, or all rows in fp32 to the partial."""
    partial, num_splits = r.partial, r.num_splits
    if const_expr(c.split_merge == SplitMerge.LL):
        # partials are sent by `swap_ab_ll`
        store_result(c, wg, g, tOrO, inverse, r, warp, lane)
    elif num_splits > 1:
        if const_expr(c.split_merge == SplitMerge.COOPERATIVE and not c.pieces):
            store_fragments(c, wg, g, tOrO, inverse, partial, warp, lane)
        else:
            store_rows(c, wg, g, tOrO, inverse, partial, warp, lane)
    else:
        store_result(c, wg, g, tOrO, inverse, r, warp, lane)


@cute.jit
def store_rows(
    c: cutlass.Constexpr[Traits], wg: Int32, g: Globals, tOrO: cute.Tensor, inverse: cute.Tensor,
    partial: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """A row-major partial; the 8 lanes of a row store one full 32-byte sector."""
    half = c.rows // 2
    for x in cutlass.range_constexpr(cute.size(tOrO)):
        i = 2 * (x % half // 4) + x % 2
        col = wg * 256 + x // half * 64 + x % 4 // 2 * c.o_half_cols
        at = col + 16 * warp + lane // 4 * c.o_row_cols
        g.mO_partial[partial, thread_row(i, lane), at] = tOrO[x] * inverse[i]


@cute.jit
def store_fragments(
    c: cutlass.Constexpr[Traits], wg: Int32, g: Globals, tOrO: cute.Tensor, inverse: cute.Tensor,
    partial: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """A partial of fragments, for the cooperative merge: full 128-byte lines."""
    for j in cutlass.range_constexpr(c.rows // 8):
        for sl in cutlass.range_constexpr(O_SLICES):
            fragment = (4 * j + lane % 4) * 256 + wg * 128 + sl * 32 + warp * 8 + lane // 4
            value = cute.make_rmem_tensor(4, Float32)
            for e in cutlass.range_constexpr(4):
                value[e] = tOrO[sl * (c.rows // 2) + 4 * j + e] * inverse[2 * j + e % 2]
            cute.autovec_copy(value, partial_words(c, g, partial, Int32(0), fragment))


def store_result(
    c: Traits, wg: Int32, g: Globals, tOrO: cute.Tensor, inverse: cute.Tensor, r: Record,
    warp: Int32, lane: Int32,
) -> None:  # fmt: skip
    """The output rows, in full 32-byte sectors."""
    store = store_result_fp8 if c.fp8 else store_result_bf16
    store(c, wg, g, tOrO, inverse, r, warp, lane)


@cute.jit
def store_result_bf16(
    c: cutlass.Constexpr[Traits], wg: Int32, g: Globals, tOrO: cute.Tensor, inverse: cute.Tensor,
    r: Record, warp: Int32, lane: Int32,
):  # fmt: skip
    """A lane holds neighbouring rows: transpose 8 x 8 blocks, then exchange within the quad so
    that lane q of it stores columns 4 q .. 4 q + 3 of sixteen."""
    out_row, rows = r.out_row, r.rows
    half = c.rows // 2
    quad = lane % 4
    for j in cutlass.range_constexpr(c.rows // 8):
        row = 8 * j + lane // 4
        for sl in cutlass.range_constexpr(O_SLICES):
            words = []
            for h in cutlass.range_constexpr(2):
                x = sl * half + 4 * j + 2 * h
                scale0 = inverse[2 * j] * g.out_scale
                scale1 = inverse[2 * j + 1] * g.out_scale
                pair = pack2(tOrO[x] * scale0, tOrO[x + 1] * scale1, c.out_dtype)
                words.append(transpose_8x8(pair))
            # lane q: chunk q of columns 0..7 and of 8..15; wanted: chunks 2q and 2q + 1 of all 8
            low = quad < 2
            keep = words[0] if low else words[1]
            give = words[1] if low else words[0]
            other = cute.arch.shuffle_sync_bfly(give, offset=2)
            first = keep if low else other
            second = other if low else keep
            even = quad % 2 == 0
            give2 = second if even else first
            got = cute.arch.shuffle_sync_bfly(give2, offset=1)
            pair_out = cute.make_rmem_tensor(2, Int32)
            pair_out[0] = first if even else got
            pair_out[1] = got if even else second
            if row < rows:
                col = wg * 256 + sl * 64 + 16 * warp + 4 * quad
                pointer = (g.mO.iterator + ((out_row + row) * LATENT_DIM + col)).align(8)
                words_out = cute.recast_ptr(pointer, dtype=Int32)
                cute.autovec_copy(pair_out, cute.make_tensor(words_out, cute.make_layout(2)))


def store_result_fp8(
    c: Traits, wg: Int32, g: Globals, tOrO: cute.Tensor, inverse: cute.Tensor, r: Record,
    warp: Int32, lane: Int32,
) -> None:  # fmt: skip
    """Accumulator rows g and g + 8 are neighbouring columns: a lane stores them as they are."""
    out_row, rows = r.out_row, r.rows
    for i in range(c.rows // 4):
        row = thread_row(i, lane)
        scale = inverse[i] * g.out_scale
        for sl in range(O_SLICES):
            x = sl * (c.rows // 2) + 4 * (i // 2) + i % 2
            col = wg * 256 + sl * 64 + 16 * warp + lane // 4 * 2
            inside, at = row < rows, out_row + row
            store_two(c, g, inside, at, col, tOrO[x] * scale, tOrO[x + 2] * scale)
