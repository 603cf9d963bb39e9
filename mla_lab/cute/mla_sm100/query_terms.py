"""A 16-bit query over e4m3: Q and P as sums of two e4m3 numbers, in the same accumulator.

    x = hi + lo      hi = e4m3(x), lo = e4m3(x - hi)

As in `swap_ab_sm90.query_hi_lo`, which keeps 16 lo in columns of its own; here both terms are
added by the MMA, so lo is not scaled: it is off by at most 2^-10, of a row whose largest element is
128 to 256. The softmax warp group reads the query from global memory, two lanes a row.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32

from ..common.fp8 import join_two
from ..common.ptx_sm90 import bits_float, butterfly, ptx
from ..rows_on_m.params import HEAD
from ..swap_ab_sm90.query_hi_lo import (
    INFINITE,
    ROW_EXPONENT,
    max_magnitude,
    unpack_two,
    write8,
)
from .params import ROWS, SOFTMAX_BARRIER, Cta

#: rows of smaller elements are not raised further: the inverse times a small scale stays above 0
LEAST_EXPONENT = 40
#: 16-byte pieces of a query row, and words of one
PIECES, WORDS = HEAD // 8, 4


def split_sum(low: Float32, high: Float32) -> tuple[Int16, Int16]:
    """hi and lo of two numbers of magnitude up to 448, `low` in the low bytes."""
    return ptx(
        "{ .reg .b32 p, h; cvt.rn.f16x2.f32 p, {$r1}, {$r0};"
        " cvt.rn.satfinite.e4m3x2.f16x2 {$w0}, p; cvt.rn.f16x2.e4m3x2 h, {$w0};"
        " sub.rn.f16x2 p, p, h; cvt.rn.satfinite.e4m3x2.f16x2 {$w1}, p; }",
        low,
        high,
        out=[Int16, Int16],
    )


@cute.jit
def read_piece(cta: Cta, work, row, piece):
    """Four words of a query row; zeros past the request's last one."""
    words = cute.make_rmem_tensor(WORDS, Int32)
    words.fill(0)
    if work.first_row + row < work.num_rows:
        offset = cute.assume((work.global_row + row) * HEAD + piece * 8, divby=8)
        pointer = cute.recast_ptr((cta.g.query.iterator + offset).align(16), dtype=Int32)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(WORDS)), words)
    return words


@cute.jit
def row_exponent(cta: Cta, work, row, lane):
    """Biased exponent of the row's largest magnitude, at least `LEAST_EXPONENT`."""
    top = Int32(0)
    for piece in cutlass.range(lane, PIECES, 2, unroll=4):
        words = read_piece(cta, work, row, piece)
        for i in cutlass.range_constexpr(WORDS):
            top = max_magnitude(top, unpack_two(words[i]))
    return cutlass.max(butterfly(cutlass.max, top, (1,)) >> 23, Int32(LEAST_EXPONENT))


@cute.jit
def store_query_terms(cta: Cta, work, thread):
    """Both terms of the CTA's 64 rows into shared memory. Returns what takes the scale out of the
    scores of row `thread` % 64. Q of the work tile before has been read."""
    cfg, s = cta.cfg, cta.s
    row, lane = thread // 2, thread % 2
    exponent = row_exponent(cta, work, row, lane)
    scale = bits_float((127 + ROW_EXPONENT - exponent) << 23)
    if lane == 0:
        inverse = bits_float((exponent + 127 - ROW_EXPONENT) << 23)
        s.sQ_scale[row] = inverse if exponent < INFINITE else Float32.inf
    base = Int32(s.sQ.iterator.toint()) + row * cfg.span
    for piece in cutlass.range(lane, PIECES, 2, unroll=4):
        words = read_piece(cta, work, row, piece)
        pairs = []
        for i in cutlass.range_constexpr(WORDS):
            x, y = unpack_two(words[i])
            pairs.append(split_sum(x * scale, y * scale))
        chunk = (piece % 8 // 2) ^ ((row >> 1) & 3)
        at = base + piece // 8 * (ROWS * cfg.span) + chunk * 16 + piece % 2 * 8
        for term in cutlass.range_constexpr(2):
            halves = [pair[term] for pair in pairs]
            joined = [join_two(halves[0], halves[1]), join_two(halves[2], halves[3])]
            write8(at + term * cfg.q_elements, joined)
    cute.arch.fence_view_async_shared()
    SOFTMAX_BARRIER.sync()
    if thread == 0:
        s.q_pipe.producer_commit(0)
    return s.sQ_scale[thread % ROWS]
