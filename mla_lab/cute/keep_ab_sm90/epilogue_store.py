"""Accumulator fragments to rows of the result."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..common.fp8 import put_two
from .mainloop_qk_softmax import select
from .params import LATENT, Config, Globals, Work


@cute.jit
def exchange(take_second, x, y, offset):
    """Trade with the lane at `offset`: it gets the one that this lane does not keep."""
    got = cute.arch.shuffle_sync_bfly(select(take_second, x, y), offset=offset)
    return select(take_second, got, x), select(take_second, y, got)


@cute.jit
def store_rows(
    cfg: cutlass.Constexpr[Config], g: Globals, acc: cute.Tensor, work: Work, row, column, lane
):
    """Rows `row` and `row + 8` of the thread, from `column` on, in 16-byte stores.

    A transposition inside each quad gives every lane eight columns in a row.
    """
    half = cute.make_rmem_tensor_like(acc, cfg.out_element)
    half.store(acc.load().to(cfg.out_element))
    words = cute.recast_tensor(half, Int32)
    r1 = (lane & 1) == 1
    r2 = (lane & 2) == 2
    for i in cutlass.range_constexpr(cute.size(acc) // 16):
        for h in cutlass.range_constexpr(2):
            a = [words[2 * (4 * i + x) + h] for x in range(4)]
            a[0], a[1] = exchange(r1, a[0], a[1], 1)
            a[2], a[3] = exchange(r1, a[2], a[3], 1)
            a[0], a[2] = exchange(r2, a[0], a[2], 2)
            a[1], a[3] = exchange(r2, a[1], a[3], 2)
            v = cute.make_rmem_tensor(4, Int32)
            for x in cutlass.range_constexpr(4):
                v[x] = a[x]
            if work.first_row + row + 8 * h < work.num_rows:
                offset = (work.global_row + row + 8 * h) * LATENT + column + 8 * (lane % 4)
                at = g.out.iterator + (cute.assume(offset, divby=8) + 32 * i)
                cute.autovec_copy(
                    cute.recast_tensor(v, cfg.out_element),
                    cute.make_tensor(at, cute.make_layout(8)),
                )


@cute.jit
def store_lse(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, row, lane, a, b):
    """Natural lse of the thread's two rows, where the request has them and somebody wants it."""
    if const_expr(cfg.lse):
        if (lane % 4 == 0) & (cute.size(g.lse) > 0):
            if work.first_row + row < work.num_rows:
                g.lse[work.global_row + row] = a
            if work.first_row + row + 8 < work.num_rows:
                g.lse[work.global_row + row + 8] = b


@cute.jit
def store_row_lse(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, row, value):
    """Natural lse of one row, where the request has it and somebody wants it."""
    if const_expr(cfg.lse):
        if (cute.size(g.lse) > 0) & (work.first_row + row < work.num_rows):
            g.lse[work.global_row + row] = value


@cute.jit
def store_pair(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, row, column, a, b):
    """Two neighbouring columns of a row."""
    if work.first_row + row < work.num_rows:
        offset = (work.global_row + row) * LATENT + column
        put_two(cfg.out_element, g.out, offset, a, b)
