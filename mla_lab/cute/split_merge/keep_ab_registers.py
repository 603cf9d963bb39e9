"""Sums of a merge share of few partials, loaded from global memory to registers.

A warp takes 64 columns of 16 rows at a time (32 with more than four splits). All of its loads are
in flight before the first is used; row values are loaded last, because the compiler would schedule
their uses, with a wait, before loads that follow. Each thread computes the weights of its own two
rows, so that no warp waits for another. Shares of more partials go through shared memory
(`keep_ab_cooperative`): their weights are too many for one thread.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..common.feature_operands import with_scales, with_sink
from ..common.ptx_sm90 import LN2, LOG2E, pick, ptx
from ..keep_ab_sm90.epilogue_store import store_pair, store_row_lse, store_rows
from ..keep_ab_sm90.params import Cta, Work
from .keep_ab_combine import MergeShare
from .keep_ab_partials import REGION, ROW_WORDS, WARPS, OwnStrips, unpack

#: the most splits summed here, and 16-byte loads that a thread has in flight
FEW_SPLITS, PIECES = 8, 16


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


def load_row_values(cta: Cta, splits, share, strip):
    """(lse, scale) of the thread's two rows in each split; past the last one, its own again."""
    lane = cute.arch.lane_idx()
    at = share.region + REGION // 2 + ROW_WORDS * (strip // 32) + 2 * (lane // 4)
    half = 16 * (1 + strip // 16 % 2)
    found = []
    for i in range(splits):
        split = cutlass.min(share.splits - 1, i)
        rows = cta.g.mO_partial.iterator + (at + split * (REGION * cta.cfg.cluster))
        found.append((load_pair(rows), load_pair(rows + half)))
    return found


def load_strips(cta: Cta, splits, share, own, split_idx, strip):
    """`PIECES` // `splits` strips of each split, zeros past the last split; the `own` strips, of
    split `split_idx`, from shared memory."""
    lane = cute.arch.lane_idx()
    near = own.address + (strip - share.first) * 512 + lane * 16
    far = cta.g.mO_partial.iterator + (share.region + 128 * strip + 4 * lane)
    found = []
    for i in range(splits):
        there = pick(i < share.splits, Int32(1), Int32(0))
        there = pick((i == split_idx) & (own.count > 0), Int32(2), there)
        pieces = [
            load_piece(far + (i * REGION * cta.cfg.cluster + 128 * c), near + 512 * c, there)
            for c in range(PIECES // splits)
        ]
        found.append(pieces)
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
def sum_in_registers(
    cta: Cta, splits: cutlass.Constexpr[int], work: Work, share: MergeShare, own: OwnStrips
):
    """This CTA's share, of up to `splits` partials, in split order; a whole number of the strips
    that a warp takes (`merge_share`)."""
    cfg, g = cta.cfg, with_scales(cta.cfg, cta.g)
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    width = PIECES // splits
    end = share.first + share.count
    w = cute.arch.make_warp_uniform(tid // 32)
    for strip in cutlass.range(share.first + w * width, end, WARPS * width, unroll=1):
        if const_expr(cfg.fp8):  # whose PV warp groups lack a register
            strip = cute.arch.make_warp_uniform(strip)
        parts = load_strips(cta, splits, share, own, work.split_idx, strip)
        values = load_row_values(cta, splits, share, strip)
        row = 16 * (strip // 32) + lane // 4
        factors = row_factors(cta, g, work, values, row, strip)
        for pair in cutlass.range_constexpr(width // 2):
            acc = cute.make_rmem_tensor(16, Float32)
            acc.fill(0.0)
            for i in cutlass.range_constexpr(splits):
                for c in cutlass.range_constexpr(2):
                    words = cute.make_rmem_tensor(4, Int32)
                    for e in cutlass.range_constexpr(4):
                        words[e] = parts[i][2 * pair + c][e]
                    v = unpack(cute.recast_tensor(words, Float16))
                    for e in cutlass.range_constexpr(8):
                        acc[8 * c + e] = acc[8 * c + e] + factors[e // 2 % 2][i] * v[e]
            column = strip % 32 * 16 + 32 * pair
            if const_expr(cfg.out_element.width == 16):
                store_rows(cta, acc, work, row, column, lane)
            else:
                for e in cutlass.range_constexpr(0, 16, 2):
                    at = column + e // 4 * 8 + 2 * (lane % 4)
                    store_pair(cta, work, row + 8 * (e // 2 % 2), at, acc[e], acc[e + 1])
