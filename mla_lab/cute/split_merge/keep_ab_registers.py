"""Sums of a merge share of few partials, loaded from global memory to registers.

A warp takes 32 columns of 16 rows from each of up to eight splits at a time, 64 columns from up to
four, or 128 from two, by the same instructions: its eight loads of two strips are those of eight
splits, twice those of four, or four times those of two. All of them are in flight before the first
is used; row values are loaded last, because the compiler would schedule their uses, with a wait,
before loads that follow. Each thread computes the weights of its own two rows, so that no warp
waits for another. Shares of more partials go through shared memory (`keep_ab_cooperative`): their
weights are too many for one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..common.feature_operands import with_scales, with_sink
from ..common.ptx_sm90 import LN2, LOG2E, pick, ptx
from ..rows_on_m.epilogue_store import store_pair, store_row_lse, store_rows
from ..rows_on_m.params import Cta, Work
from .keep_ab_combine import MergeShare
from .keep_ab_partials import (
    REGION,
    ROW_WORDS,
    WARPS,
    OwnStrips,
    discard_strips,
    merging_warp,
    unpack,
)

#: the most splits summed here; up to half as many a warp takes two `PAIR`s of strips, of two four
FEW_SPLITS, PAIR = 8, 2


def load_row_values(cta: Cta, share, strip):
    """(lse, scale) of the thread's two rows in each split; past the last one -inf and 0."""
    lane = cute.arch.lane_idx()
    at = share.region + REGION // 2 + ROW_WORDS * (strip >> 5) + 2 * (lane // 4)
    rows = cta.g.mO_partial.iterator + at
    scales = rows + 16 * (1 + (strip >> 4 & 1))
    return [row_values(rows, scales, share.splits, i, cta.cfg.cluster) for i in range(FEW_SPLITS)]


def row_values(rows, scales, splits, split: int, cluster: int):
    """Those of one split, past the L1."""
    behind = split * REGION * cluster * 4
    found = ptx(
        f"{{ .reg .pred p; setp.gt.s32 p, {{$r2}}, {split}; mov.b32 {{$w0}}, 0fff800000;"
        "mov.b32 {$w1}, 0fff800000; mov.b32 {$w2}, 0f00000000; mov.b32 {$w3}, 0f00000000;"
        f"@p ld.relaxed.gpu.global.v2.f32 {{{{$w0}}, {{$w1}}}}, [{{$r0}} + {behind}];"
        f"@p ld.relaxed.gpu.global.v2.f32 {{{{$w2}}, {{$w3}}}}, [{{$r1}} + {behind}]; }}",
        rows,
        scales,
        splits,
        out=[Float32] * 4,
    )
    return found[:2], found[2:]


@dataclass(frozen=True)
class Strips:
    """Where a thread finds two strips of some splits: split i lies i partials behind `far`, if it
    is below `splits`; the own one, number `own`, at `near` in shared memory."""

    far: cute.Pointer
    near: Int32
    splits: Int32
    own: Int32


def load_strips(cta: Cta, share, own, split_idx, strip, pairs):
    """Two strips of eight splits, four strips of four, or eight strips of two, zeros past the last
    split; the `own` strips, of split `split_idx`, from shared memory. `pairs` of strips: 1, 2 or
    4."""
    lane = cute.arch.lane_idx()
    stride = REGION * cta.cfg.cluster
    far = cta.g.mO_partial.iterator + (share.region + 128 * strip + 4 * lane)
    near = own.address + (strip - share.first) * 512 + lane * 16
    mine = pick(own.count > 0, split_idx, Int32(-1))
    parts = []
    for quarter in range(FEW_SPLITS // 2):
        pair, split = quarter_of(quarter, pairs)
        at = Strips(
            far + (pair * (128 * PAIR) + split * stride),
            near + pair * (512 * PAIR),
            share.splits - split,
            mine - split,
        )
        parts += [load_two(at, i, stride) for i in range(2)]
    return parts


def quarter_of(quarter: int, pairs: Int32):
    """The pair of strips and the first split of a quarter of the loads."""
    pair = pick(pairs == 4, Int32(quarter), pick(pairs == 2, Int32(quarter // 2), Int32(0)))
    split = pick(pairs == 2, Int32(2 * (quarter % 2)), Int32(2 * quarter))
    return pair, pick(pairs == 4, Int32(0), split)


def load_two(at: Strips, split: int, stride: int):
    """Two strips of one split, 16 bytes each: of global memory, of shared memory, or zeros."""
    far = [split * stride * 4 + 512 * c for c in range(PAIR)]
    zeros = "".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(4 * PAIR))
    words = [", ".join(f"{{$w{4 * c + e}}}" for e in range(4)) for c in range(PAIR)]
    loads = "".join(
        f"@p ld.relaxed.gpu.global.v4.b32 {{{words[c]}}}, [{{$r0}} + {far[c]}];"
        f"@q ld.shared.v4.b32 {{{words[c]}}}, [{{$r1}} + {512 * c}];"
        for c in range(PAIR)
    )
    found = ptx(
        f"{{ .reg .pred p, q; setp.eq.s32 q, {{$r3}}, {split};"
        f"setp.gt.and.s32 p, {{$r2}}, {split}, !q; {zeros} {loads} }}",
        at.far,
        at.near,
        at.splits,
        at.own,
        out=[Int32] * (4 * PAIR),
    )
    return [found[4 * c : 4 * c + 4] for c in range(PAIR)]


@cute.jit
def row_factors(cta: Cta, g, work: Work, values, row, strip):
    """Factors of the thread's two rows in each split; writes their lse, once. `g` has the scales
    resolved."""
    lane = cute.arch.lane_idx()
    factors = []
    for h in cutlass.range_constexpr(2):
        lses = [value[0][h] for value in values]
        top = lses[0]
        for lse in lses[1:]:
            top = cute.arch.fmax(top, lse)
        top = pick(top == -Float32.inf, Float32(0.0), top)
        weights = [cute.math.exp2((lse - top) * Float32(LOG2E), fastmath=True) for lse in lses]
        total = weights[0]
        for weight in weights[1:]:
            total = total + weight
        whole = with_sink(cta.cfg, g, total, top * Float32(LOG2E), work.first_row + row + 8 * h)
        inverse = pick(total > 0.0, cute.arch.rcp_approx(whole), Float32(0.0)) * g.out_scale
        factors.append([v[1][h] * (f * inverse) for v, f in zip(values, weights, strict=True)])
        if ((strip & 31) | (lane & 3)) == 0:
            lse = top + cute.math.log2(total, fastmath=True) * Float32(LN2)
            store_row_lse(cta, work, row + 8 * h, lse)
    return factors


def warp_strips(cta: Cta, share, width):
    """The first strip of a warp that takes `width` strips at a time, and the end of the share's."""
    tid, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(merging_warp(cta.cfg, tid))
    return share.first + w * width, share.first + share.count


def weigh_strip(cta: Cta, g, work: Work, share, strip):
    """Row and column of the thread in a strip, and its `row_factors`."""
    values = load_row_values(cta, share, strip)
    row, column = 16 * (strip >> 5) + cute.arch.lane_idx() // 4, (strip & 31) * 16
    return row, column, row_factors(cta, g, work, values, row, strip)


@cute.jit
def add_strips(acc: cute.Tensor, factors: cute.Tensor, parts: cute.Tensor) -> None:
    """`acc` plus two strips of each split of `parts`, times the `factors` of the thread's rows."""
    for i in cutlass.range_constexpr(cute.size(parts, mode=[2])):
        for c in cutlass.range_constexpr(PAIR):
            v = unpack(cute.recast_tensor(parts[None, c, i], Float16))
            for e in cutlass.range_constexpr(8):
                acc[8 * c + e] = acc[8 * c + e] + factors[e // 2 % 2, i] * v[e]


@cute.jit
def store_strips(cta: Cta, acc: cute.Tensor, work: Work, row, column):
    """The sums of two strips, from `column` on."""
    lane = cute.arch.lane_idx()
    if const_expr(cta.cfg.out_element.width == 16):
        store_rows(cta, acc, work, row, column, lane)
    else:
        for e in cutlass.range_constexpr(0, 16, 2):
            at = column + e // 4 * 8 + 2 * (lane % 4)
            store_pair(cta, work, row + 8 * (e // 2 % 2), at, acc[e], acc[e + 1])


@cute.jit
def sum_in_registers(cta: Cta, work: Work, share: MergeShare, own: OwnStrips):
    """This CTA's share, of up to `FEW_SPLITS` partials, in split order; a whole number of the
    strips that a warp takes (`merge_share`)."""
    cfg, g = cta.cfg, with_scales(cta.cfg, cta.g)
    half = FEW_SPLITS // 2
    splits = cute.arch.make_warp_uniform(share.splits)
    log2_pairs = pick(splits <= half, Int32(1), Int32(0))
    log2_pairs = pick(splits <= half // 2, Int32(2), log2_pairs)
    pairs = Int32(1) << log2_pairs
    width = pairs * PAIR
    first, end = warp_strips(cta, share, width)
    for strip in cutlass.range(first, end, WARPS * width, unroll=1):
        if const_expr(cfg.fp8):  # whose PV warp groups lack a register
            strip = cute.arch.make_warp_uniform(strip)
        parts = load_strips(cta, share, own, work.split_idx, strip, pairs)
        row, column, factors = weigh_strip(cta, g, work, share, strip)
        parts = [pieces_of(parts[i : i + 2]) for i in range(0, FEW_SPLITS, 2)]
        now, behind, later, last = parts
        weights = [factors_of(factors, i, 2) for i in range(0, FEW_SPLITS, 2)]
        acc = cute.make_rmem_tensor(8 * PAIR, Float32)
        acc.fill(0.0)
        turns = pick(pairs == half, Int32(half), Int32(2))
        # one copy of the code for all turns: it runs once a launch, and is fetched for that
        for turn in cutlass.range(turns, unroll=1):
            add_strips(acc, weights[0], now)
            if pairs < half:
                add_strips(acc, weights[1], behind)
            if (pairs > 1) | (turn == 1):
                store_strips(cta, acc, work, row, column)
                acc.fill(0.0)
                column = column + 16 * PAIR
            if (pairs == half) & (turn & 1 == 0):
                now.store(behind.load())
            else:  # other strips, or the splits from the fifth on
                now.store(later.load())
                behind.store(last.load())
            if pairs == 1:
                weights[0].store(weights[2].load())
                weights[1].store(weights[3].load())
        if const_expr(not cfg.pieces):  # whose slots others fill in the same launch
            cute.arch.sync_warp()  # all lanes have read the strips
            discard_strips(cta, share.region + 128 * strip, log2_pairs + 1, splits)


def pieces_of(parts):
    """Words of the strips of some splits in one tensor, [4, PAIR, splits]."""
    found = cute.make_rmem_tensor((4, PAIR, len(parts)), Int32)
    for i, part in enumerate(parts):
        for c in range(PAIR):
            for e in range(4):
                found[e, c, i] = part[c][e]
    return found


def factors_of(factors, first: int, count: int):
    """Factors of the thread's two rows in `count` splits from `first` on, [2, splits]."""
    found = cute.make_rmem_tensor((2, count), Float32)
    for h in range(2):
        for i in range(count):
            found[h, i] = factors[h][first + i]
    return found
