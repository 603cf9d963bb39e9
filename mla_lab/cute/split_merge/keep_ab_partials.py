"""Layout of the partials of a split row tile, and their store from accumulators.

A partial lies in its slot in accumulator order, so that every access is 512 B in a row of a warp, a
*strip*; except for the `OwnStrips` of a CTA, which it merges itself and keeps in shared memory. A
thread holds two columns of rows r and r + 8 of each *unit*, 16 rows x 8 columns; 256 units are the
64 rows of a CTA, [warp][warp group][col8 of 32]. A strip is fp16 [lane][2 units][4].

Row values of 16 rows follow the strips in `partial_out`: the lse, and one scale for each half of
the columns, in the order r, r + 8 of a thread. A 16-bit value times its scale is the normalised
output: 11 bits of it, whatever the range of V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..common.ptx_sm90 import add, butterfly, discard_line, fresh_thread, pack2, ptx
from ..rows_on_m.mask import rows_of
from ..rows_on_m.params import BLOCK, LATENT, PV_BARRIER, Cta, Work
from .fp16_range import scales_within

UNITS, UNITS_PER_STRIP = 256, 2
#: words of row values of 16 rows: the lse, and a scale for each half of the columns
ROW_WORDS = 48
#: the PV warp groups
WARPS = 8
THREADS = PV_BARRIER.threads
#: bounds of the sum of a thread's 64 magnitudes of a row, between which the row is stored in fp16
#: as it is: the greatest one is finite, and at least 2**-4, so that those down to 2**-10 of it keep
#: 11 bits
LEAST_BOUND, GREATEST_BOUND = 4.0, 65504.0
#: fp32 words of the slot of 64 rows; its strips take the first half
REGION = BLOCK * LATENT


def merging_warp(cfg: Any, thread: Int32) -> Int32:
    """Number of a warp among the `WARPS` that merge; where others run their code ahead
    (`keep_ab_cooperative`), of that one whose way it takes."""
    warp = thread // 32
    return warp % WARPS if cfg.warms_code else warp


@dataclass(frozen=True)
class OwnStrips:
    """Strips [first, first + count) of its own partial that a CTA keeps in shared memory."""

    first: Int32
    count: Int32
    address: Int32  # of the first


@cute.jit
def discard_strip(cta: Cta, first: Int32, splits: Int32):
    """A strip that all lanes have read, fp32 word `first` of `partial_out` in split 0, and those of
    the other splits. Four lanes take the four lines of a split's strip."""
    lane = cute.arch.lane_idx()
    line = cta.g.mO_partial.iterator + (first + 32 * (lane % 4))
    for split in cutlass.range(lane // 4, splits, 8, unroll=1):
        discard_line(line + split * (REGION * cta.cfg.cluster))


@cute.jit
def discard_strips(cta: Cta, first: Int32, log2_strips: Int32, splits: Int32):
    """As `discard_strip`, of 2**log2_strips strips that follow each other."""
    lane = cute.arch.lane_idx()
    line = cta.g.mO_partial.iterator + (first + 32 * (lane % 4))
    for i in cutlass.range(lane // 4, splits << log2_strips, 8, unroll=1):
        split = i >> log2_strips
        strip = i - (split << log2_strips)
        discard_line(line + (split * (REGION * cta.cfg.cluster) + 128 * strip))


def words_at(pointer, count):
    """`count` fp32 words of global memory at an aligned address, which is taken as it is."""
    aligned = cute.make_ptr(
        Float32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=4 * count
    )
    return cute.make_tensor(aligned, cute.make_layout(count))


def store_two(pointer, values):
    """Two fp32 to global memory at an 8-byte aligned address."""
    v = cute.make_rmem_tensor(2, Float32)
    v[0], v[1] = values
    cute.autovec_copy(v, words_at(pointer, 2))


def row_bounds(acc):
    """The sums of magnitudes of the thread's two rows: they bound the greatest ones at the full
    rate of fp32 additions."""
    rows, bounds = rows_of(acc), []
    for h in range(2):
        even, odd = Float32(0), Float32(0)
        for c in range(0, cute.size(acc) // 2, 2):
            even = even + cute.math.absf(rows[h, c])
            odd = odd + cute.math.absf(rows[h, c + 1])
        bounds.append(even + odd)
    return bounds


@cute.jit
def fp16_scales(acc: cute.Tensor, inverse):
    """The factors that normalise the thread's two rows in fp16: `inverse`, where all rows of the
    warp are in its range as they are. Otherwise `acc` is multiplied by powers of two that take
    each row into the range, and `inverse` divided by them."""
    bounds = row_bounds(acc)
    down = cute.make_rmem_tensor(2, Float32)
    down[0], down[1] = inverse
    inside = [(x >= LEAST_BOUND) & (x <= GREATEST_BOUND) for x in bounds]
    if cute.arch.vote_any_sync(~(inside[0] & inside[1])):
        rows = rows_of(acc)
        for h in cutlass.range_constexpr(2):
            up, back = scales_within(butterfly(add, bounds[h]))
            down[h] = down[h] * back
            for c in cutlass.range_constexpr(cute.size(acc) // 2):
                rows[h, c] = rows[h, c] * up
    return [down[0], down[1]]


def strips_kept(own: OwnStrips, first) -> Int32:
    """Which of a warp's sixteen strips from `first` on are own ones: a bit each."""
    begin, end = (
        cutlass.min(cutlass.max(x - first, Int32(0)), Int32(16))
        for x in (own.first, own.first + own.count)
    )
    return (Int32(1) << end) - (Int32(1) << begin)


@cute.jit
def store_strip(i: cutlass.Constexpr[int], words: cute.Tensor, dst: cute.Pointer, near, kept):
    """Strip i of a warp: to shared memory at `near` if it is one of the own ones, to the slot
    otherwise."""
    ptx(
        f"{{ .reg .pred p; .reg .b32 bit; and.b32 bit, {{$r0}}, {1 << i}; setp.ne.b32 p, bit, 0;"
        f"@p st.shared.v4.b32 [{{$r1}} + {512 * i}], {{ {{$r3}}, {{$r4}}, {{$r5}}, {{$r6}} }};"
        f"@!p st.global.v4.b32 [{{$r2}} + {512 * i}], {{ {{$r3}}, {{$r4}}, {{$r5}}, {{$r6}} }}; }}",
        kept,
        near,
        dst,
        *(words[e] for e in range(4)),
    )


@cute.jit
def store_fragment(
    cta: Cta, wg, acc: cute.Tensor, work: Work, inverse, lse, own: OwnStrips, scales: Any = None
):
    """A thread's 32 units to its slot or its own strips, and the row values; `inverse` of a row
    normalises it, or `scales`, if `fp16_scales` has made them."""
    tid, lane = fresh_thread(), cute.arch.lane_idx()
    warp = tid >> 5 & 3
    w = cute.arch.make_warp_uniform(warp)
    region = cta.g.mO_partial.iterator + (work.slot * cta.cfg.cluster + cta.rank) * REGION
    rows = region + (REGION // 2 + ROW_WORDS * w + 2 * (lane // 4))
    if const_expr(scales is None):
        scales = fp16_scales(acc, inverse)
    if lane % 4 == 0:
        store_two(rows + 16 * (1 + wg), scales)
    if (wg == 0) & (lane % 4 == 0):
        store_two(rows, lse)
    count = cute.size(acc) // (4 * UNITS_PER_STRIP)
    dst = region + ((w * 2 + wg) * count * 128 + lane * 4)
    # in a general register, where one instruction makes a predicate of a bit
    first = (warp * 2 + wg) * count
    near = own.address + (first - own.first) * 512 + lane * 16
    kept = strips_kept(own, first)
    if own.count > 0:  # both warp groups have read the ring
        PV_BARRIER.sync()
    for i in cutlass.range_constexpr(count):
        words = cute.make_rmem_tensor(4, Int32)
        for e in cutlass.range_constexpr(4):
            words[e] = pack2(acc[8 * i + 2 * e], acc[8 * i + 2 * e + 1], Float16)
        store_strip(i, words, dst, near, kept)


def unpack(v):
    """fp32 of a tensor of fp16."""
    wide = cute.make_rmem_tensor(cute.size(v), Float32)
    wide.store(v.load().to(Float32))
    return wide


def read_pair(pointer):
    """Two neighbouring values of a partial as fp32, from shared or global memory."""
    words = cute.make_rmem_tensor(2, Float32)  # a tensor of one has no stride to recast
    words.fill(0.0)
    words[0] = pointer.load()
    return unpack(cute.recast_tensor(words, Float16))


def pair_place(pair):
    """Unit (in the share), place among 16 row values and first column (of 8) of a pair."""
    lane, unit, half = pair >> 2 & 31, (pair >> 7) * 2 + (pair >> 1 & 1), pair & 1
    return unit, 2 * (lane >> 2) + half, 2 * (lane & 3)


def row_of(unit, place):
    """Row of a CTA's 64 that a place among the row values of a unit belongs to."""
    return 16 * (unit >> 6) + (place >> 1) + 8 * (place & 1)
