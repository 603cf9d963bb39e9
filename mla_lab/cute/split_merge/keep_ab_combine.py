"""Adding up a share of a merge: whole strips by a warp, or pairs of columns by a thread."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..common.feature_operands import with_scales, with_sink
from ..common.ptx_sm90 import load2, load4
from ..keep_ab_sm90.epilogue_store import store_pair, store_row_lse, store_rows
from ..keep_ab_sm90.mainloop_qk_softmax import select
from ..keep_ab_sm90.params import BLOCK, LN2, Config, Globals, Work
from .keep_ab_partials import (
    REGION,
    THREADS,
    WARPS,
    pair_place,
    read_pair,
    row_words,
    units_per_strip,
    unpack,
)

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Share:
    """Strips [first, first + count) of a CTA's 64 rows, and where their partials lie."""

    first: Int32
    count: Int32
    splits: Int32
    group: Int32  # of 16 rows: that of the first strip
    groups: Int32
    region: Int32  # fp32 words of partial_out before split 0
    rows: Int32  # its first row in partial_lse
    values: Int32  # shared memory address of strips [split][strip]
    weights: Int32  # and of row values [split][16-row group], one more 16 B a split
    pitch: Int32  # bytes of a split there


def smem(address, dtype, count):
    """Pointer to shared memory at an aligned address."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=4 * count)


def factors_at(cfg, share, unit):
    """Address of a unit's 16 factors of split 0."""
    words = (unit // 64 - share.group) * row_words(cfg)
    if const_expr(cfg.partials == 16):
        words = words + 16 * (1 + unit // 32 % 2)
    return share.weights + words * 4


@cute.jit
def combine_strips(
    cfg: cutlass.Constexpr[Config],
    count: cutlass.Constexpr[int],
    g: Globals,
    work: Work,
    share: Share,
):
    """`count` strips of 16 rows by a warp at a time, partials in split order."""
    tid, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(tid // 32)
    lane = cute.arch.lane_idx()
    units = units_per_strip(cfg)
    for strip in cutlass.range(count * w, share.count, count * WARPS, unroll=1):
        unit = (share.first + strip) * units
        factors = factors_at(cfg, share, unit) + (lane // 4) * 8
        values = share.values + strip * 512 + lane * 16
        acc = cute.make_rmem_tensor(4 * units * count, Float32)
        acc.fill(0.0)
        for i in cutlass.range(0, share.splits, unroll=4):
            f = load2(smem(factors + i * share.pitch, Float32, 2))
            for c in cutlass.range_constexpr(count):
                at = values + (i * share.count + c) * 512
                words = load4(smem(at, Float32, 4))
                if const_expr(cfg.partials == 16):
                    v = unpack(cute.recast_tensor(words, Float16))
                else:
                    v = words
                for e in cutlass.range_constexpr(4 * units):
                    x = 4 * units * c + e
                    acc[x] = acc[x] + f[e // 2 % 2] * v[e]
        row = 16 * (unit // 64) + lane // 4
        column = unit % 64 * 8
        if const_expr(units * count == 4 and cfg.out_element.width == 16):
            store_rows(cfg, g, acc, work, row, column, lane)
        else:
            for u in cutlass.range_constexpr(units * count):
                for h in cutlass.range_constexpr(2):
                    store_pair(
                        cfg, g, work, row + 8 * h, column + 8 * u + 2 * (lane % 4),
                        acc[4 * u + 2 * h], acc[4 * u + 2 * h + 1],
                    )  # fmt: skip


@cute.jit
def combine_pairs(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, share: Share):
    """Two columns of a row by a thread at a time, partials in split order."""
    tid, _, _ = cute.arch.thread_idx()
    units = units_per_strip(cfg)
    for pair in cutlass.range(tid, share.count * (64 * units), THREADS, unroll=1):
        unit, place, column = pair_place(cfg, pair)
        unit = unit + share.first * units
        factors = factors_at(cfg, share, unit) + place * 4
        values = share.values + pair * (8 // units)
        a, b = Float32(0), Float32(0)
        for i in cutlass.range(0, share.splits, unroll=8):
            f = smem(factors + i * share.pitch, Float32, 1).load()
            v = read_pair(cfg, smem(values + i * share.count * 512, Float32, 2 // units))
            a = a + f * v[0]
            b = b + f * v[1]
        row = 16 * (unit // 64) + place // 2 + 8 * (place % 2)
        store_pair(cfg, g, work, row, unit % 64 * 8 + column, a, b)


def far_load(pointer):
    """An fp32 of global memory, past the L1: another SM wrote it."""
    return cute.arch.load(pointer, Float32, cop="cg")


@cute.jit
def combine_far(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, share: Share):
    """As `combine_pairs`, from global memory: for shares that shared memory does not hold."""
    g = with_scales(cfg, g)
    tid, _, _ = cute.arch.thread_idx()
    units = units_per_strip(cfg)
    stride = REGION * cfg.cluster
    for pair in cutlass.range(tid, share.count * (64 * units), THREADS, unroll=1):
        unit, place, column = pair_place(cfg, pair)
        unit = unit + share.first * units
        values = g.partial_out.iterator + (share.region + 128 * share.first + pair * (2 // units))
        if const_expr(cfg.partials == 16):
            rows = g.partial_out.iterator + (share.region + REGION // 2 + unit // 64 * 48 + place)
            scales = rows + 16 * (1 + unit // 32 % 2)
            rows_stride = stride
        else:
            rows = g.partial_lse.iterator + (share.rows + unit // 64 * 16 + place)
            rows_stride = BLOCK * cfg.cluster
        top = Float32(-Float32.inf)
        for i in cutlass.range(0, share.splits, unroll=4):
            top = cute.arch.fmax(top, far_load(rows + i * rows_stride))
        top = select(top == -Float32.inf, Float32(0.0), top)
        total, a, b = Float32(0), Float32(0), Float32(0)
        for i in cutlass.range(0, share.splits, unroll=4):
            lse = far_load(rows + i * rows_stride)
            f = cute.math.exp2((lse - top) * Float32(LOG2E), fastmath=True)
            total = total + f
            if const_expr(cfg.partials == 16):
                f = f * far_load(scales + i * stride)
            v = read_pair(cfg, values + i * stride)
            a = a + f * v[0]
            b = b + f * v[1]
        row = 16 * (unit // 64) + place // 2 + 8 * (place % 2)
        whole = with_sink(cfg, g, total, top * Float32(LOG2E), work.first_row + row)
        inverse = select(total > 0.0, cute.arch.rcp_approx(whole), Float32(0.0)) * g.out_scale
        store_pair(cfg, g, work, row, unit % 64 * 8 + column, a * inverse, b * inverse)
        if (unit % 64 == 0) & (column == 0):
            lse = top + cute.math.log2(total, fastmath=True) * Float32(LN2)
            store_row_lse(cfg, g, work, row, lse)
