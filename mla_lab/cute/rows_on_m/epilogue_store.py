"""Stores of result rows from accumulator fragments."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.fp8 import put_two
from ..common.ptx_sm90 import pick, ptx
from .params import LATENT, Cta, Work


def inverse_sum(total: Float32):
    """1 / a row sum: 0 of an empty row, NaN of NaN."""
    return pick(total <= 0.0, Float32(0.0), cute.arch.rcp_approx(total))


def swap_lanes(keep_second, x, y, offset):
    """Exchange with the lane at `offset`: each keeps one of (x, y) and gets the other's."""
    got = cute.arch.shuffle_sync_bfly(pick(keep_second, x, y), offset=offset)
    return pick(keep_second, got, x), pick(keep_second, y, got)


def store_where(left: Int32, least: int, pointer: cute.Pointer, offset: int, words) -> None:
    """16 bytes of global memory, `offset` bytes behind an aligned pointer, if `left` > `least`."""
    ptx(
        f"{{ .reg .pred p; setp.gt.s32 p, {{$r0}}, {least};"
        f"@p st.global.v4.b32 [{{$r1}} + {offset}], {{ {{$r2}}, {{$r3}}, {{$r4}}, {{$r5}} }}; }}",
        left,
        pointer,
        *words,
    )


@cute.jit
def store_rows(cta: Cta, acc: cute.Tensor, work: Work, row, column, lane):
    """Rows `row` and `row + 8` of the thread from `column` on, in 16-byte stores: a transposition
    inside each quad gives every lane eight neighbouring columns. No branch stands between the
    stores, whose addresses differ by constants."""
    element = cta.cfg.out_element
    half = cute.make_rmem_tensor_like(acc, element)
    half.store(acc.load().to(element))
    words = cute.recast_tensor(half, Int32)
    odd, upper = (lane & 1) == 1, (lane & 2) == 2
    left = work.num_rows - work.first_row - row
    offset = (work.global_row + row) * LATENT + column + 8 * (lane % 4)
    at = cta.g.mO.iterator + cute.assume(offset, divby=8)
    for i in cutlass.range_constexpr(cute.size(acc) // 16):
        for h in cutlass.range_constexpr(2):
            a = [words[2 * (4 * i + x) + h] for x in range(4)]
            a[0], a[1] = swap_lanes(odd, a[0], a[1], 1)
            a[2], a[3] = swap_lanes(odd, a[2], a[3], 1)
            a[0], a[2] = swap_lanes(upper, a[0], a[2], 2)
            a[1], a[3] = swap_lanes(upper, a[1], a[3], 2)
            store_where(left, 8 * h, at, 64 * i + 8 * h * LATENT * 2, a)


@cute.jit
def store_lse(cta: Cta, work: Work, row, lane, values):
    """Natural lse of the thread's two rows, where the request has them and an lse is wanted."""
    mLSE = cta.g.mLSE
    if (lane % 4 == 0) & (cute.size(mLSE) > 0):
        for h in cutlass.range_constexpr(2):
            if work.first_row + row + 8 * h < work.num_rows:
                mLSE[work.global_row + row + 8 * h] = values[h]


@cute.jit
def store_row_lse(cta: Cta, work: Work, row, value):
    """Natural lse of one row, under the same conditions."""
    mLSE = cta.g.mLSE
    if (cute.size(mLSE) > 0) & (work.first_row + row < work.num_rows):
        mLSE[work.global_row + row] = value


@cute.jit
def store_pair(cta: Cta, work: Work, row, column, low, high):
    """Two neighbouring columns of a row."""
    if work.first_row + row < work.num_rows:
        offset = (work.global_row + row) * LATENT + column
        put_two(cta.cfg.out_element, cta.g.mO, offset, low, high)
