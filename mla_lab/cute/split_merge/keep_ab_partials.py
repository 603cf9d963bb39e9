"""Partials of a split row tile: what lies where, and how accumulators get there.

A partial lies in its slot as the accumulators hold it, so that every access is 512 B in a row of
a warp, a *strip*; but for the strips `Kept` by a CTA that merges them itself. A thread holds two
columns of rows `r` and `r + 8` of each *unit*, 16 rows by 8 columns; 256 units are the 64 rows of
a CTA, [warp][group][col8 of 32].

    partials  strip                             row values of 16 rows, beside them
    32        fp32 [lane][4], a unit            lse, in `partial_lse`
    16        fp16 [lane][2 units][4]           lse, two scales: after the strips, in `partial_out`

Row values stand in the order r, r + 8 of a thread. A 16-bit value times its scale, a power of two
for each row and half of the columns, is the normalised output: 11 bits of it, whatever V's range.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..common.ptx_sm90 import add, load2, pack2
from ..keep_ab_sm90.mainloop_qk_softmax import quad
from ..keep_ab_sm90.params import BLOCK, LATENT, Config, Globals, Work

UNITS = 256
#: the accumulate groups, and the named barrier at which they meet
WARPS = 8
THREADS = 32 * WARPS
MERGE_BARRIER = 2
#: fp32 words of 64 rows of a partial
REGION = BLOCK * LATENT
#: biased exponents: the least of a row's bound, and what 2**15 has
LEAST, HIGHEST = 31, 142


@dataclass(frozen=True)
class Kept:
    """Strips [first, first + count) of its own partial that a CTA leaves in shared memory."""

    first: Int32
    count: Int32
    address: Int32  # of the first


def units_per_strip(cfg):
    """8-column units that 512 B of a partial hold."""
    return 2 if cfg.partials == 16 else 1


def row_words(cfg):
    """Words beside the strips of 16 rows: the lse; with 16 bits, a scale for each half too."""
    return 48 if cfg.partials == 16 else 16


def words_at(pointer, count):
    """`count` fp32 words of global memory at an aligned place."""
    return cute.make_tensor(pointer.align(4 * count), cute.make_layout(count))


def from_exponent(exponent):
    """The power of two of a biased exponent."""
    bits = cute.make_rmem_tensor(1, Int32)
    bits[0] = exponent << 23
    return cute.recast_tensor(bits, Float32)[0]


def row_scale(acc, half, inverse):
    """Powers of two that take a thread's row into the range of fp16, and back.

    The sum of magnitudes bounds the greatest of them, at the full rate of fp32 additions.
    """
    even, odd = Float32(0), Float32(0)
    for j in range(cute.size(acc) // 4):
        even = even + cute.math.absf(acc[4 * j + 2 * half])
        odd = odd + cute.math.absf(acc[4 * j + 2 * half + 1])
    bound = cute.make_rmem_tensor(1, Float32)
    bound[0] = quad(add, even + odd) * inverse
    exponent = cutlass.max((cute.recast_tensor(bound, Int32)[0] >> 23) & 255, LEAST)
    return from_exponent(127 + HIGHEST - 1 - exponent), from_exponent(127 - HIGHEST + 1 + exponent)


@cute.jit
def store_strip(i: cutlass.Constexpr[int], v: cute.Tensor, dst: cute.Pointer, near, place, count):
    """The i-th strip of a warp: near where it is one of those kept, else into the slot."""
    words = cute.recast_tensor(v, Int32)
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .u32 at;"
        f"add.u32 at, {{$r0}}, {i}; setp.lt.u32 p, at, {{$r1}};"
        f"@p st.shared.v4.b32 [{{$r2}} + {512 * i}], {{ {{$r4}}, {{$r5}}, {{$r6}}, {{$r7}} }};"
        f"@!p st.global.v4.b32 [{{$r3}} + {512 * i}], {{ {{$r4}}, {{$r5}}, {{$r6}}, {{$r7}} }}; }}",
        read_only_args=[place, count, near, dst, words[0], words[1], words[2], words[3]],
    )


@cute.jit
def store_fragment(
    cfg: cutlass.Constexpr[Config],
    wg,
    g: Globals,
    acc: cute.Tensor,
    work: Work,
    rank,
    inverse,
    lse,
    kept: Kept,
):
    """A thread's 32 units, times `inverse` of their row, into its slot or the strips `kept`, with
    the row values."""
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    w = cute.arch.make_warp_uniform((tid % 128) // 32)
    slot = work.slot * cfg.cluster + rank
    region = g.partial_out.iterator + slot * REGION
    if const_expr(cfg.partials == 16):
        rows = region + (REGION // 2 + 48 * w + 2 * (lane // 4))
        down0, up0 = row_scale(acc, 0, inverse[0])
        down1, up1 = row_scale(acc, 1, inverse[1])
        f = (inverse[0] * down0, inverse[1] * down1)
        if lane % 4 == 0:
            v = cute.make_rmem_tensor(2, Float32)
            v[0], v[1] = up0, up1
            cute.autovec_copy(v, words_at(rows + 16 * (1 + wg), 2))
    else:
        rows = g.partial_lse.iterator + (slot * BLOCK + 16 * w + 2 * (lane // 4))
        f = inverse
    if (wg == 0) & (lane % 4 == 0):
        v = cute.make_rmem_tensor(2, Float32)
        v[0], v[1] = lse[0], lse[1]
        cute.autovec_copy(v, words_at(rows, 2))
    units = units_per_strip(cfg)
    count = cute.size(acc) // (4 * units)
    dst = region + ((w * 2 + wg) * count * 128 + lane * 4)
    place = (w * 2 + wg) * count - kept.first
    near = kept.address + place * 512 + lane * 16
    if kept.count > 0:  # both groups have read the ring
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=THREADS)
    for i in cutlass.range_constexpr(count):
        a = [acc[4 * units * i + e] * f[e // 2 % 2] for e in range(4 * units)]
        v = cute.make_rmem_tensor(4, Int32 if const_expr(cfg.partials == 16) else Float32)
        for e in cutlass.range_constexpr(4):
            v[e] = pack2(a[2 * e], a[2 * e + 1], Float16) if const_expr(units == 2) else a[e]
        store_strip(i, v, dst, near, place, kept.count)


def unpack(v):
    """fp32 of a tensor of fp16, or fp32 as they are."""
    wide = cute.make_rmem_tensor(cute.size(v), Float32)
    wide.store(v.load().to(Float32))
    return wide


def read_pair(cfg, pointer):
    """Two neighbouring values of a partial as fp32, from shared or global memory."""
    if const_expr(cfg.partials == 16):
        words = cute.make_rmem_tensor(2, Float32)  # a tensor of one has no stride to recast
        words.fill(0.0)
        words[0] = pointer.load()
        return unpack(cute.recast_tensor(words, Float16))
    return load2(pointer)


def pair_place(cfg, pair):
    """Unit (in the share), place among 16 row values and first column (of 8) of a pair."""
    if const_expr(cfg.partials == 16):
        lane, unit, half = pair // 4 % 32, pair // 128 * 2 + pair // 2 % 2, pair % 2
    else:
        lane, unit, half = pair // 2 % 32, pair // 64, pair % 2
    return unit, 2 * (lane // 4) + half, 2 * (lane % 4)
