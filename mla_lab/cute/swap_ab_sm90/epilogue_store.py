"""Results and partials straight from the O^T accumulators (one CTA a worker)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ..common.fp8 import put_two
from ..common.ptx_sm90 import LN2, pack2, transpose_8x8, vec4
from . import online_softmax as sx
from .params import LATENT_DIM, Shape
from .shared_storage import Global

#: names of the record's words 4..7 and 8..11, as the consumers hold them
ROW, OUT_ROW, ROWS, ACTIVE = range(4)
SLOT, GROUP, NUM_SPLITS, SPLIT = range(4)


def wants_lse(g: Global):
    """Whether the caller takes an lse; where not, its tensor has no element."""
    return cute.size(g.lse) > 0


@cute.jit
def write_lse(
    c: cutlass.Constexpr[Shape], g: Global, row: Int32, peak: Float32, total: Float32,
    tail: cute.Tensor, more: cute.Tensor,
):  # fmt: skip
    """lse of one row, to the caller or beside the partial."""
    value = (peak + cute.math.log2(total, fastmath=True)) * Float32(LN2)
    value = value if total > 0.0 else -Float32.inf
    if more[NUM_SPLITS] > 1:
        g.partial_lse[more[SLOT], row] = value
    elif const_expr(c.lse):
        if (row < tail[ROWS]) & wants_lse(g):
            g.lse[tail[OUT_ROW] + row] = value


@cute.jit
def write_fragments(
    c: cutlass.Constexpr[Shape], wg: Int32, g: Global, acc: cute.Tensor,
    inverse: cute.Tensor, tail: cute.Tensor, slot: Int32, num_splits: Int32,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """acc / total: to the output rows, or all rows in fp32 to the partial's slot."""
    if const_expr(c.fused_merge == 3):
        # partials went by mail
        write_result(c, wg, g, acc, inverse, tail[OUT_ROW], tail[ROWS], warp, lane)
    elif num_splits > 1:
        if const_expr(c.fused_merge == 2):
            write_units(c, wg, g, acc, inverse, slot, warp, lane)
        else:
            write_partial(c, wg, g, acc, inverse, slot, warp, lane)
    else:
        write_result(c, wg, g, acc, inverse, tail[OUT_ROW], tail[ROWS], warp, lane)


@cute.jit
def write_partial(
    c: cutlass.Constexpr[Shape], wg: Int32, g: Global, acc: cute.Tensor,
    inverse: cute.Tensor, slot: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """Scalar stores: the 8 lanes of a row write one full 32-byte sector."""
    half = c.rows // 2
    for x in cutlass.range_constexpr(cute.size(acc)):
        i = 2 * (x % half // 4) + x % 2
        col = wg * 256 + x // half * 64 + x % 4 // 2 * c.second
        at = col + 16 * warp + lane // 4 * c.step
        g.partial_out[slot, sx.row_of(i, lane), at] = acc[x] * inverse[i]


@cute.jit
def write_units(
    c: cutlass.Constexpr[Shape], wg: Int32, g: Global, acc: cute.Tensor,
    inverse: cute.Tensor, slot: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """The fragments as they are, 16 bytes each, for `share`: full 128-byte lines."""
    for j in cutlass.range_constexpr(c.rows // 8):
        for sl in cutlass.range_constexpr(4):
            unit = (4 * j + lane % 4) * 256 + wg * 128 + sl * 32 + warp * 8 + lane // 4
            value = cute.make_rmem_tensor(4, Float32)
            for e in cutlass.range_constexpr(4):
                value[e] = acc[sl * (c.rows // 2) + 4 * j + e] * inverse[2 * j + e % 2]
            cute.autovec_copy(value, unit_words(c, g, slot, Int32(0), unit))


def unit_words(c: Shape, g: Global, slot: Int32, rank: Int32, unit: Int32) -> cute.Tensor:
    """Where a unit of a rank's share of a partial lies, when `share` merges: slot by slot, rank by
    rank, in the order of the units."""
    at = ((slot * c.cluster + rank) * c.units + unit) * 4
    return vec4(g.partial_out.iterator + at)


def write_result(
    c: Shape, wg: Int32, g: Global, acc: cute.Tensor, inverse: cute.Tensor, out_row: Int32,
    rows: Int32, warp: Int32, lane: Int32,
) -> None:  # fmt: skip
    """The result's rows, in full 32-byte sectors."""
    write = write_columns if c.eight else write_rows
    write(c, wg, g, acc, inverse, out_row, rows, warp, lane)


@cute.jit
def write_rows(
    c: cutlass.Constexpr[Shape], wg: Int32, g: Global, acc: cute.Tensor,
    inverse: cute.Tensor, out_row: Int32, rows: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """Where a lane has neighbouring rows: transpose 8x8 blocks in registers, then within the
    quad."""
    half = c.rows // 2
    quad = lane % 4
    for j in cutlass.range_constexpr(c.rows // 8):
        row = 8 * j + lane // 4
        for sl in cutlass.range_constexpr(4):
            words = []
            for h in cutlass.range_constexpr(2):
                x = sl * half + 4 * j + 2 * h
                scale0 = inverse[2 * j] * g.out_scale
                scale1 = inverse[2 * j + 1] * g.out_scale
                pair = pack2(acc[x] * scale0, acc[x + 1] * scale1, c.out_dtype)
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
                cute.autovec_copy(pair_out, out_words(g, out_row + row, col))


def write_columns(
    c: Shape, wg: Int32, g: Global, acc: cute.Tensor, inverse: cute.Tensor, out_row: Int32,
    rows: Int32, warp: Int32, lane: Int32,
) -> None:  # fmt: skip
    """Where accumulator rows g and g + 8 are neighbouring columns (e4m3)."""
    for i in range(c.rows // 4):
        row = sx.row_of(i, lane)
        scale = inverse[i] * g.out_scale
        for sl in range(4):
            x = sl * (c.rows // 2) + 4 * (i // 2) + i % 2
            col = wg * 256 + sl * 64 + 16 * warp + lane // 4 * 2
            store_row(c, g, row < rows, out_row + row, col, acc[x] * scale, acc[x + 2] * scale)


@cute.jit
def store_row(
    c: cutlass.Constexpr[Shape], g: Global, there: Boolean, row: Int32, col: Int32, low: Float32,
    high: Float32,
):  # fmt: skip
    """Two neighbouring columns of a result's row."""
    if there:
        put_two(c.out_dtype, g.out, row * LATENT_DIM + col, low, high)


def unit_place(c: Shape, unit: Int32, rank: Int32) -> tuple[Int32, Int32]:
    """First row of a unit of rank `rank`'s share, and its place among the pair's 256."""
    if c.parts > 1:
        return 2 * (rank // c.parts), unit + rank % c.parts * c.units
    return 2 * (unit // 256 * c.cluster + rank), unit % 256


def column(c: Shape, place: Int32) -> Int32:
    """First column of a unit; the second is `Shape.second` further."""
    return place // 32 * 64 + place % 32 // 8 * 16 + place % 8 * c.step


def store_unit(
    c: Shape, g: Global, acc: cute.Tensor, out_row: Int32, rows: Int32, row: Int32, col: Int32,
    lane: Int32,
) -> None:  # fmt: skip
    """Two columns of two rows of the result: `acc` by column, then by row."""
    if not c.eight:
        store_pairs(c, g, acc, out_row, rows, row, col, lane)
        return
    for e in range(2):
        low, high = acc[e] * g.out_scale, acc[2 + e] * g.out_scale
        store_row(c, g, row + e < rows, out_row + row + e, col, low, high)


@cute.jit
def store_pairs(
    c: cutlass.Constexpr[Shape], g: Global, acc: cute.Tensor, out_row: Int32, rows: Int32,
    row: Int32, col: Int32, lane: Int32,
):  # fmt: skip
    """Neighbour lanes hold neighbour columns: even ones take the first row, odd the second."""
    even = lane % 2 == 0
    mine_row = row + lane % 2
    for h in cutlass.range_constexpr(2):
        give = acc[2 * h + 1] if even else acc[2 * h]
        keep = acc[2 * h] if even else acc[2 * h + 1]
        got = cute.arch.shuffle_sync_bfly(give, offset=1)
        pair = cute.make_rmem_tensor(2, c.out_dtype)
        first = keep if even else got
        second = got if even else keep
        pair[0] = (first * g.out_scale).to(c.out_dtype)
        pair[1] = (second * g.out_scale).to(c.out_dtype)
        if mine_row < rows:
            at = (out_row + mine_row) * LATENT_DIM + (col - lane % 2) + 8 * h
            pointer = (g.out.iterator + at).align(4)
            cute.autovec_copy(pair, cute.make_tensor(pointer, cute.make_layout(2)))


def out_words(g: Global, row: Int32, col: Int32) -> cute.Tensor:
    """Four output elements (8 bytes) as two words."""
    pointer = (g.out.iterator + (row * LATENT_DIM + col)).align(8)
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), cute.make_layout(2))
