"""Adding up a share of few partials of 16 bits, from where they lie straight to registers.

A warp takes 64 columns of 16 rows at a time (32 of more than four splits). All of its loads are in
flight before the first is waited for; row values are asked for last, since what is made of them
would be scheduled, and wait, before loads that follow. Each thread makes the weights of its own two
rows, so that nobody waits for another warp. (Shares of many partials go by shared memory, see
`merge`: their weights are too many for a thread.)
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..common.feature_operands import with_scales, with_sink
from ..keep_ab_sm90.epilogue_store import store_pair, store_row_lse, store_rows
from ..keep_ab_sm90.mainloop_qk_softmax import select
from ..keep_ab_sm90.params import LN2, Config, Globals, Work
from .keep_ab_combine import LOG2E, Share
from .keep_ab_partials import REGION, WARPS, Kept, unpack

#: up to so many splits, and 16-byte pieces that a thread has in flight: a few strips of each split
FEW_SPLITS, PIECES = 8, 16


def ask_pair(pointer):
    """Two fp32 of global memory, past the L1."""
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32, Float32],
        read_only_args=[pointer],
    )


def ask_piece(far, near, there):
    """16 bytes: of global memory where `there` is 1, of shared memory where it is 2, else zeros."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p, q; setp.eq.s32 p, {$r2}, 1; setp.eq.s32 q, {$r2}, 2;"
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0;"
        "@p ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
        "@q ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r1}]; }",
        write_only_types=[Int32] * 4,
        read_only_args=[far, near, there],
    )


def ask_rows(cfg, splits, g, share, strip):
    """(lse, scale) of the thread's two rows in each split; past the last one, its own again."""
    lane = cute.arch.lane_idx()
    at = share.region + REGION // 2 + 48 * (strip // 32) + 2 * (lane // 4)
    half = 16 * (1 + strip // 16 % 2)
    found = []
    for i in range(splits):
        split = cutlass.min(share.splits - 1, i)
        rows = g.partial_out.iterator + (at + split * (REGION * cfg.cluster))
        found.append((ask_pair(rows), ask_pair(rows + half)))
    return found


def ask_strips(cfg, splits, g, share, kept, own, strip):
    """`PIECES` // `splits` strips of each split, zeros past the last; those of this CTA's own
    partial from where it has kept them."""
    lane = cute.arch.lane_idx()
    near = kept.address + (strip - share.first) * 512 + lane * 16
    far = g.partial_out.iterator + (share.region + 128 * strip + 4 * lane)
    found = []
    for i in range(splits):
        there = select(i < share.splits, Int32(1), Int32(0))
        there = select((i == own) & (kept.count > 0), Int32(2), there)
        pieces = [
            ask_piece(far + (i * REGION * cfg.cluster + 128 * c), near + 512 * c, there)
            for c in range(PIECES // splits)
        ]
        found.append(pieces)
    return found


@cute.jit
def weigh_rows(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, values, row, strip):
    """Factors of the thread's two rows in each split; their lse is written, once."""
    lane = cute.arch.lane_idx()
    factors = []
    for h in cutlass.range_constexpr(2):
        lses = [
            select(i < work.num_splits, value[0][h], Float32(-Float32.inf))
            for i, value in enumerate(values)
        ]
        top = lses[0]
        for lse in lses[1:]:
            top = cute.arch.fmax(top, lse)
        top = select(top == -Float32.inf, Float32(0.0), top)
        weights = [cute.math.exp2((lse - top) * Float32(LOG2E), fastmath=True) for lse in lses]
        total = weights[0]
        for weight in weights[1:]:
            total = total + weight
        whole = with_sink(cfg, g, total, top * Float32(LOG2E), work.first_row + row + 8 * h)
        inverse = select(total > 0.0, cute.arch.rcp_approx(whole), Float32(0.0)) * g.out_scale
        factors.append([v[1][h] * (f * inverse) for v, f in zip(values, weights, strict=True)])
        if (strip % 32 == 0) & (lane % 4 == 0):
            lse = top + cute.math.log2(total, fastmath=True) * Float32(LN2)
            store_row_lse(cfg, g, work, row + 8 * h, lse)
    return factors


@cute.jit
def combine_few(
    cfg: cutlass.Constexpr[Config],
    splits: cutlass.Constexpr[int],
    g: Globals,
    work: Work,
    share: Share,
    kept: Kept,
):
    """This CTA's share, of up to `splits` partials, in split order; whole numbers of what a warp
    takes (see `merge.share_of`)."""
    g = with_scales(cfg, g)
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    width = PIECES // splits
    end = share.first + share.count
    w = cute.arch.make_warp_uniform(tid // 32)
    for strip in cutlass.range(share.first + w * width, end, WARPS * width, unroll=1):
        if const_expr(cfg.transposed):  # which is a register short
            strip = cute.arch.make_warp_uniform(strip)
        parts = ask_strips(cfg, splits, g, share, kept, work.split_idx, strip)
        values = ask_rows(cfg, splits, g, share, strip)
        row = 16 * (strip // 32) + lane // 4
        factors = weigh_rows(cfg, g, work, values, row, strip)
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
                store_rows(cfg, g, acc, work, row, column, lane)
            else:
                for e in cutlass.range_constexpr(0, 16, 2):
                    at = column + e // 4 * 8 + 2 * (lane % 4)
                    store_pair(cfg, g, work, row + 8 * (e // 2 % 2), at, acc[e], acc[e + 1])
