"""Sums of a merge share of few partials, loaded from global memory to registers.

A warp takes 32 columns of 16 rows from each of up to eight splits at a time, or 64 columns from up
to four, by the same instructions: its eight loads of two strips are those of eight splits, or twice
those of four. All of them are in flight before the first is used; row values are loaded last,
because the compiler would schedule their uses, with a wait, before loads that follow. Each thread
computes the weights of its own two rows, so that no warp waits for another. Shares of more partials
go through shared memory (`keep_ab_cooperative`): their weights are too many for one thread.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..common.feature_operands import with_scales, with_sink
from ..common.ptx_sm90 import LN2, LOG2E, pick, ptx
from ..rows_on_m.epilogue_store import store_pair, store_row_lse, store_rows
from ..rows_on_m.params import Cta, Work
from .keep_ab_combine import MergeShare
from .keep_ab_partials import REGION, ROW_WORDS, WARPS, OwnStrips, unpack

#: the most splits summed here; up to `FEW_SPLITS` // 2 a warp takes two `PAIR`s of strips
FEW_SPLITS, PAIR = 8, 2


def load_pair(pointer):
    """Two fp32 of global memory, past the L1."""
    return ptx("ld.relaxed.gpu.global.v2.f32 {{$w0}, {$w1}}, [{$r0}];", pointer, out=[Float32] * 2)


def load_piece(far, near, there):
    """16 bytes: of global memory where `there` is 1, of shared memory where it is 2, else zeros."""
    return ptx(
        "{ .reg .pred p, q; setp.eq.s32 p, {$r2}, 1; setp.eq.s32 q, {$r2}, 2;"
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0;"
        "@p ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
        "@q ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r1}]; }",
        far,
        near,
        there,
        out=[Int32] * 4,
    )


def load_row_values(cta: Cta, share, strip):
    """(lse, scale) of the thread's two rows in each split; past the last one, its own again."""
    lane = cute.arch.lane_idx()
    at = share.region + REGION // 2 + ROW_WORDS * (strip // 32) + 2 * (lane // 4)
    half = 16 * (1 + strip // 16 % 2)
    found = []
    for i in range(FEW_SPLITS):
        split = cutlass.min(share.splits - 1, i)
        rows = cta.g.mO_partial.iterator + (at + split * (REGION * cta.cfg.cluster))
        found.append((load_pair(rows), load_pair(rows + half)))
    return found


def load_strips(cta: Cta, share, own, split_idx, strip, wide):
    """Two strips of each of eight splits, zeros past the last one, or (where `wide`) of four, and
    then the two strips behind these; the `own` strips, of split `split_idx`, from shared memory."""
    lane = cute.arch.lane_idx()
    near = own.address + (strip - share.first) * 512 + lane * 16
    far = cta.g.mO_partial.iterator + (share.region + 128 * strip + 4 * lane)
    stride, half = REGION * cta.cfg.cluster, FEW_SPLITS // 2
    found = []
    for i in range(FEW_SPLITS):
        split, behind, ahead = Int32(i), Int32(i * stride), Int32(0)
        if i >= half:
            split = pick(wide, Int32(i - half), split)
            behind = pick(wide, Int32((i - half) * stride + 128 * PAIR), behind)
            ahead = pick(wide, Int32(512 * PAIR), ahead)
        there = pick(split < share.splits, Int32(1), Int32(0))
        there = pick((split == split_idx) & (own.count > 0), Int32(2), there)
        source, kept = far + behind, near + ahead
        found.append([load_piece(source + 128 * c, kept + 512 * c, there) for c in range(PAIR)])
    return found


@cute.jit
def row_factors(cta: Cta, g, work: Work, values, row, strip):
    """Factors of the thread's two rows in each split; writes their lse, once. `g` has the scales
    resolved."""
    lane = cute.arch.lane_idx()
    factors = []
    for h in cutlass.range_constexpr(2):
        lses = [
            pick(i < work.num_splits, value[0][h], Float32(-Float32.inf))
            for i, value in enumerate(values)
        ]
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
        if (strip % 32 == 0) & (lane % 4 == 0):
            lse = top + cute.math.log2(total, fastmath=True) * Float32(LN2)
            store_row_lse(cta, work, row + 8 * h, lse)
    return factors


@cute.jit
def add_strips(acc: cute.Tensor, factors, parts) -> None:
    """`acc` plus two strips of each split of `parts`, times the `factors` of the thread's rows."""
    for i in cutlass.range_constexpr(len(parts)):
        for c in cutlass.range_constexpr(PAIR):
            words = cute.make_rmem_tensor(4, Int32)
            for e in cutlass.range_constexpr(4):
                words[e] = parts[i][c][e]
            v = unpack(cute.recast_tensor(words, Float16))
            for e in cutlass.range_constexpr(8):
                acc[8 * c + e] = acc[8 * c + e] + factors[e // 2 % 2][i] * v[e]


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
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    half = FEW_SPLITS // 2
    wide = share.splits <= half
    width = pick(wide, Int32(2 * PAIR), Int32(PAIR))
    end = share.first + share.count
    w = cute.arch.make_warp_uniform(tid // 32)
    for strip in cutlass.range(share.first + w * width, end, WARPS * width, unroll=1):
        if const_expr(cfg.fp8):  # whose PV warp groups lack a register
            strip = cute.arch.make_warp_uniform(strip)
        parts = load_strips(cta, share, own, work.split_idx, strip, wide)
        values = load_row_values(cta, share, strip)
        row = 16 * (strip // 32) + lane // 4
        column = strip % 32 * 16
        factors = row_factors(cta, g, work, values, row, strip)
        acc = cute.make_rmem_tensor(8 * PAIR, Float32)
        acc.fill(0.0)
        add_strips(acc, [f[:half] for f in factors], parts[:half])
        if wide:
            store_strips(cta, acc, work, row, column)
            acc.fill(0.0)
        # with up to four splits, sums of their other strips; else of the other splits
        others = [[pick(wide, f[i], f[half + i]) for i in range(half)] for f in factors]
        add_strips(acc, others, parts[half:])
        store_strips(cta, acc, work, row, column + pick(wide, Int32(16 * PAIR), Int32(0)))
