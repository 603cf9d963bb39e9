"""LL merge: partials without counters or fences, after NCCL's LL protocol. Every word is its own
flag.

Grid mode, one CTA per worker. mO_partial and mLSE_partial are zero between launches, as counters
are elsewhere. A sender never writes the word 0: it writes -0.0 for +0.0. A reader polls its words
until none of them is 0 and leaves zeros behind; each word has one reader. So a partial crosses L2
once, with neither fence nor flag: words are relaxed, and none orders another. The zeros are stored
with the policy evict_last, so that in a step the next layer's launch finds the lines in L2, and the
weights between do not drive them out, which would write them to memory.

Fragments are fp16, times a power of two for each CTA, before the division by the row sum. The
statistics of a row pair, (m, l, m, l) with m the row max in log2 and l the sum, are scaled alike:
(m + k, l / 2**k, O / 2**k) is the same partial as (m, l, O), so that the merge has no scales. They
go ahead of the fragments, as one message of 16 bytes to each CTA whose slice touches the pair.
Slice d touches pair p in a staircase, so d + p names a message: that of (partial, d + p) is row
partial * (num_splits + row pairs) + d + p of mLSE_partial.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64

from ..common.ptx_sm90 import (
    EVICT_LAST,
    NO_SCORE,
    bits_float,
    float_bits,
    float_of_exponent,
    load4,
    pack2,
    pick,
    ptx,
    read4_relaxed,
    write4_lasting,
    write4_relaxed,
)
from .fp16_range import HIGHEST, exponent_within
from .swap_ab_fragments import (
    fragments_per_row_pair,
    fragments_per_split,
    partial_words,
)

#: the word that stands for +0.0, or for two of fp16
MINUS_ZERO = -(1 << 31)
#: where the greatest magnitude is about 2**CENTRE statistics are sent as they are: fragments would
#: have it just below 2**15
CENTRE = 3
BACK = 2.0 ** (CENTRE - (HIGHEST - 1 - 127))
#: four words that have not arrived
EMPTY = (0, 0, 0, 0)


@cute.jit
def nonzero_word(bits: Int32):
    """`bits` of fp32 or of two fp16, never 0."""
    return bits if bits != 0 else Int32(MINUS_ZERO)


def missing(words: cute.Tensor, k: int) -> Any:
    """True while one of the k-th four words has not arrived."""
    return (words[0, k] == 0) | (words[1, k] == 0) | (words[2, k] == 0) | (words[3, k] == 0)


def poll(words: cute.Tensor, k: int, source: cute.Pointer) -> None:
    """Read the k-th four words once."""
    got = read4_relaxed(source)
    for e in range(4):
        words[e, k] = got[e]


def poll_where(left: Int32, least: Int32, source: cute.Pointer, words: cute.Tensor) -> None:
    """`words`, read once if `left` > `least` and they have not arrived."""
    got = ptx(
        "{ .reg .pred p; mov.b32 {$w0}, {$r3}; mov.b32 {$w1}, {$r4}; mov.b32 {$w2}, {$r5};"
        "mov.b32 {$w3}, {$r6}; setp.eq.s32 p, {$r3}, 0; setp.eq.or.s32 p, {$r4}, 0, p;"
        "setp.eq.or.s32 p, {$r5}, 0, p; setp.eq.or.s32 p, {$r6}, 0, p;"
        "setp.gt.and.s32 p, {$r0}, {$r1}, p;"
        "@p ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r2}]; }",
        left,
        least,
        source,
        *(words[e] for e in range(4)),
        out=[Int32] * 4,
    )
    for e in range(4):
        words[e] = got[e]


def clear_where(left: Int32, least: Int32, to: cute.Pointer) -> None:
    """Four zeros if `left` > `least`; L2 keeps their line (see above)."""
    ptx(
        "{ .reg .pred p; .reg .b32 z; mov.b32 z, 0; setp.gt.s32 p, {$r0}, {$r1};"
        "@p st.relaxed.gpu.global.L2::cache_hint.v4.b32 [{$r2}], {z, z, z, z}, {$r3}; }",
        left,
        least,
        to,
        Int64(EVICT_LAST),
    )


@cute.jit
def publish_bound(
    c: cutlass.Constexpr, s: Any, tOrO: cute.Tensor, wg: Int32, warp: Int32, lane: Int32
):
    """The greatest finite magnitude in a warp's accumulators, for all to take the same power of
    two."""
    top = greatest_magnitude(tOrO)
    if top == Float32.inf:  # beside which the others would vanish
        top = greatest_magnitude(tOrO, finite=True)
    # as integers magnitudes have the same order
    bits = Int32(cute.arch.warp_redux_sync(float_bits(top), "max"))
    if lane == 0:
        s.sRowSum[c.rows, 4 * wg + warp] = bits_float(bits)


def greatest_magnitude(tOrO: cute.Tensor, finite: bool = False) -> Float32:
    """Of a thread's accumulators; with `finite`, of those that are neither infinite nor NaN."""
    tops = [Float32(0.0)] * 4
    for x in range(cute.size(tOrO)):
        value = cute.math.absf(tOrO[x])
        if finite:
            value = pick(value < Float32.inf, value, Float32(0.0))
        tops[x % 4] = cute.arch.fmax(tops[x % 4], value)
    return greatest_of_four(tops)


def greatest_of_four(values: Any) -> Float32:
    """The greatest of four numbers, one that is NaN left out."""
    low, high = cute.arch.fmax(values[0], values[1]), cute.arch.fmax(values[2], values[3])
    return cute.arch.fmax(low, high)


def bound_exponent(c: Any, s: Any) -> Int32:
    """The biased exponent of the greatest finite magnitude in all accumulators of the CTA."""
    at = s.sRowSum.iterator + c.rows * 8
    tops = [greatest_of_four(load4(at + 4 * i)) for i in range(2)]
    return exponent_within(cute.arch.fmax(*tops))


def scaled_stats(values: cute.Tensor, exponent: Int32) -> cute.Tensor:
    """(m, l, m, l) of a row pair, k = the exponent of the bound less that of 2**CENTRE."""
    k = exponent - (127 + CENTRE)
    for e in range(2):
        values[2 * e] = values[2 * e] + Float32(k)
        values[2 * e + 1] = values[2 * e + 1] * float_of_exponent(127 - k)
    return values


@cute.jit
def send_fragments(
    c: cutlass.Constexpr, wg: Int32, g: Any, tOrO: cute.Tensor, exponent: Int32, partial: Int32,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """The accumulators of O^T as a partial of fragments, below 2**15 in magnitude."""
    half, factor = c.rows // 2, float_of_exponent(127 + HIGHEST - 1 - exponent)
    for j in cutlass.range_constexpr(c.rows // 8):
        for both in cutlass.range_constexpr(2):
            fragment = (4 * j + lane % 4) * 128 + wg * 64 + both * 32 + warp * 8 + lane // 4
            words = cute.make_rmem_tensor(4, Int32)
            for e in cutlass.range_constexpr(4):
                x = (2 * both + e // 2) * half + 4 * j + e % 2 * 2
                two = pack2(tOrO[x] * factor, tOrO[x + 1] * factor, Float16)
                words[e] = nonzero_word(two)
            write4_relaxed(partial_words(c, g, partial, Int32(0), fragment).iterator, words)


def message_at(c: Any, g: Any, partial: Int32, number: Int32) -> cute.Pointer:
    """Message `number` = slice + row pair of a partial."""
    return g.mLSE_partial.iterator + (partial * (g.num_splits + c.row_pairs) + number) * 4


@cute.jit
def send_stats(
    c: cutlass.Constexpr, g: Any, r: Any, values: cute.Tensor, pair: Int32, lane: Int32
):  # fmt: skip
    """(m, l, m, l) of a row pair, to every CTA whose slice touches it; by one warp."""
    words = cute.make_rmem_tensor(4, Int32)
    for e in cutlass.range_constexpr(4):
        words[e] = nonzero_word(values[e].bitcast(Int32))
    size = fragments_per_split(c.fragments, r.num_splits)
    for start in cutlass.range(0, r.num_splits, 32, unroll=1):
        to = start + lane
        begin = to * size
        end = cutlass.min(begin + size, Int32(c.fragments))
        touches = (to < r.num_splits) & (begin < (pair + 1) * fragments_per_row_pair(c))
        if touches & (end > pair * fragments_per_row_pair(c)):
            write4_relaxed(message_at(c, g, r.partial, to + pair), words)


@cute.jit
def take_stats(
    c: cutlass.Constexpr, g: Any, r: Any, values: cute.Tensor, pair: Int32, split: Int32
):  # fmt: skip
    """A row pair's message of `split` and every 32nd behind it in the columns of `values` (past the
    last split: no score), with zeros left in its place. (Polling for fragments meanwhile was
    slower: it delays the L2 accesses of the others.)"""
    partial = r.partial - r.split
    number = r.split + pair
    words = cute.recast_tensor(values, Int32)
    words.fill(0)
    waiting = Int32(1)
    while waiting != 0:
        waiting = Int32(0)
        for k in cutlass.range_constexpr(cute.size(values, mode=[1])):
            left = r.num_splits - split
            poll_where(
                left, 32 * k, message_at(c, g, partial + split + 32 * k, number), words[None, k]
            )
        for k in cutlass.range_constexpr(cute.size(values, mode=[1])):
            lacking = (split + 32 * k < r.num_splits) & missing(words, k)
            waiting = Int32(1) if lacking else waiting
    cute.arch.sync_warp()
    for k in cutlass.range_constexpr(cute.size(values, mode=[1])):
        if split + 32 * k < r.num_splits:
            write4_lasting(message_at(c, g, partial + split + 32 * k, number), EMPTY)
        else:
            for e in cutlass.range_constexpr(2):
                values[2 * e, k] = Float32(NO_SCORE)
                values[2 * e + 1, k] = Float32(0.0)
