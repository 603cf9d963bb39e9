"""Sums of a merge share, in split order: strips by a warp, or pairs of columns by a thread."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from ..common.feature_operands import with_scales, with_sink
from ..common.ptx_sm90 import LN2, LOG2E, load2, load4, pick
from ..rows_on_m.epilogue_store import store_pair, store_row_lse
from ..rows_on_m.params import Cta, Work
from .keep_ab_partials import (
    REGION,
    ROW_WORDS,
    THREADS,
    UNITS_PER_STRIP,
    WARPS,
    merging_warp,
    pair_place,
    read_pair,
    row_of,
    unpack,
)


@dataclass(frozen=True)
class MergeShare:
    """Strips [first, first + count) of a CTA's 64 rows, and where their partials lie."""

    first: Int32
    count: Int32
    splits: Int32
    group: Int32  # 16-row group of the first strip
    groups: Int32
    region: Int32  # fp32 words of partial_out before split 0
    values: Int32  # shared memory address of strips [split][strip]
    weights: Int32  # and of row values [split][16-row group], with 16 B more per split
    pitch: Int32  # bytes of a split there


def smem(address, dtype, count):
    """Pointer to shared memory at an aligned address."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=4 * count)


def factors_at(share, unit):
    """Address of a unit's 16 factors of split 0."""
    words = ((unit >> 6) - share.group) * ROW_WORDS + 16 * (1 + (unit >> 5 & 1))
    return share.weights + words * 4


@cute.jit
def sum_strips(cta: Cta, work: Work, share: MergeShare):
    """One strip of 16 rows by a warp at a time."""
    tid, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(merging_warp(cta.cfg, tid))
    lane = cute.arch.lane_idx()
    for strip in cutlass.range(w, share.count, WARPS, unroll=1):
        unit = (share.first + strip) * UNITS_PER_STRIP
        factors = factors_at(share, unit) + (lane // 4) * 8
        values = share.values + strip * 512 + lane * 16
        acc = cute.make_rmem_tensor(4 * UNITS_PER_STRIP, Float32)
        acc.fill(0.0)
        for i in cutlass.range(0, share.splits, unroll=4):
            f = load2(smem(factors + i * share.pitch, Float32, 2))
            words = load4(smem(values + i * share.count * 512, Float32, 4))
            v = unpack(cute.recast_tensor(words, Float16))
            for e in cutlass.range_constexpr(4 * UNITS_PER_STRIP):
                acc[e] = acc[e] + f[e // 2 % 2] * v[e]
        row = 16 * (unit >> 6) + lane // 4
        column = (unit & 63) * 8
        for u in cutlass.range_constexpr(UNITS_PER_STRIP):
            for h in cutlass.range_constexpr(2):
                at, x = column + 8 * u + 2 * (lane % 4), 4 * u + 2 * h
                store_pair(cta, work, row + 8 * h, at, acc[x], acc[x + 1])


@cute.jit
def sum_pairs(cta: Cta, work: Work, share: MergeShare):
    """Two columns of a row by a thread at a time."""
    tid, _, _ = cute.arch.thread_idx()
    for pair in cutlass.range(tid, share.count * (64 * UNITS_PER_STRIP), THREADS, unroll=1):
        unit, place, column = pair_place(pair)
        unit = unit + share.first * UNITS_PER_STRIP
        factors = factors_at(share, unit) + place * 4
        values = share.values + pair * (8 // UNITS_PER_STRIP)
        a, b = Float32(0), Float32(0)
        for i in cutlass.range(0, share.splits, unroll=8):
            f = smem(factors + i * share.pitch, Float32, 1).load()
            v = read_pair(smem(values + i * share.count * 512, Float32, 1))
            a = a + f * v[0]
            b = b + f * v[1]
        store_pair(cta, work, row_of(unit, place), (unit & 63) * 8 + column, a, b)


def load_l2(pointer):
    """An fp32 of global memory that another SM wrote: past the L1."""
    return cute.arch.load(pointer, Float32, cop="cg")


@cute.jit
def sum_from_global(cta: Cta, work: Work, share: MergeShare):
    """As `sum_pairs`, from global memory: for shares that shared memory cannot hold."""
    cfg, g = cta.cfg, with_scales(cta.cfg, cta.g)
    tid, _, _ = cute.arch.thread_idx()
    partials, stride = g.mO_partial.iterator, REGION * cfg.cluster
    for pair in cutlass.range(tid, share.count * (64 * UNITS_PER_STRIP), THREADS, unroll=1):
        unit, place, column = pair_place(pair)
        unit = unit + share.first * UNITS_PER_STRIP
        values = partials + (share.region + 128 * share.first + pair * (2 // UNITS_PER_STRIP))
        rows = partials + (share.region + REGION // 2 + (unit >> 6) * ROW_WORDS + place)
        scales = rows + 16 * (1 + (unit >> 5 & 1))
        top = Float32(-Float32.inf)
        for i in cutlass.range(0, share.splits, unroll=1):
            top = cute.arch.fmax(top, load_l2(rows + i * stride))
        top = pick(top == -Float32.inf, Float32(0.0), top)
        total, a, b = Float32(0), Float32(0), Float32(0)
        for i in cutlass.range(0, share.splits, unroll=1):
            f = cute.math.exp2((load_l2(rows + i * stride) - top) * Float32(LOG2E), fastmath=True)
            total = total + f
            f = f * load_l2(scales + i * stride)
            v = read_pair(values + i * stride)
            a = a + f * v[0]
            b = b + f * v[1]
        row = row_of(unit, place)
        whole = with_sink(cfg, g, total, top * Float32(LOG2E), work.first_row + row)
        inverse = pick(total > 0.0, cute.arch.rcp_approx(whole), Float32(0.0)) * g.out_scale
        store_pair(cta, work, row, (unit & 63) * 8 + column, a * inverse, b * inverse)
        if ((unit & 63) | column) == 0:
            lse = top + cute.math.log2(total, fastmath=True) * Float32(LN2)
            store_row_lse(cta, work, row, lse)
