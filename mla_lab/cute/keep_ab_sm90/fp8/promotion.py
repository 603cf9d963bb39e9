"""Promotion of O^T in e4m3: long work tiles are added up in fp32, in memory.

The tensor core accumulates products of e4m3 with fewer bits than fp32 (`fp8`, Precision). Whenever
a multiple of `PROMOTED_TILES` KV tiles is left of a work tile, both PV warp groups add their
accumulators to the CTA's *promoted* O^T in the workspace and go on from zeros. Behind the last KV
tile they take it back. A work tile of up to `PROMOTED_TILES` KV tiles promotes nothing.

Each CTA has memory for O^T of its rows in the last `num_workers` slots, which hold no partials:
fp32 [32][256 threads][4], a thread's values in the order of its accumulators. The product of each
row's rescale factors since the last promotion lies in shared memory (`Fp8Shared.sPromoted`):
threads 0 to 63 update those of rows 0 to 63, both warp groups read them between two barriers.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....plan.promotion import PROMOTED_TILES
from ...common.ptx_sm90 import fresh_block, fresh_thread, load2, opaque, ptx
from ...rows_on_m.params import BLOCK, PV_BARRIER, RECORDS, Cta
from ...split_merge.keep_ab_partials import REGION, THREADS, words_at

#: fp32 values of a thread that one access moves
VALUES = 4


def kv_tiles(cta: Cta, index: Int32):
    """Number of KV tiles of a work tile, from its record, with nothing held in registers."""
    place = opaque(index) % RECORDS
    tiles = cta.s.records[3, place] - cta.s.records[2, place]
    return cute.arch.make_warp_uniform(tiles)


@cute.jit
def has_promoted(cta: Cta, index: Int32, left: Int32):
    """Whether the work tile has promoted O^T, with `left` KV tiles to come."""
    return left <= ((kv_tiles(cta, index) - 1) & -PROMOTED_TILES)


def own_slot(cta: Cta):
    """Number of this CTA's rows of 64 among those of all slots."""
    g, cluster = cta.g, cta.cfg.cluster
    first = (opaque(g.mO_partial.shape[0]) - g.num_workers) * cluster
    return first + fresh_block()


@cute.jit
def start_factors(cta: Cta):
    """Set the products of the rescale factors to 1."""
    tid = fresh_thread()
    if tid < BLOCK:
        (cta.s.sPromoted.iterator + tid).store(Float32(1.0))


@cute.jit
def rescale_promoted(cta: Cta, p_stage: Int32):
    """Multiply the products by the rescale factors of a tile, before its PV."""
    tid = fresh_thread()
    if tid < BLOCK:
        at = cta.s.sPromoted.iterator + tid
        at.store(at.load() * cta.s.sRescale[tid, p_stage].to(Float32))


@cute.jit
def promote(cta: Cta, acc: cute.Tensor, index: Int32, left: Int32):
    """Behind PV of a tile, with `left` more to come, a multiple of `PROMOTED_TILES`: add the
    accumulators to the promoted O^T; behind the last tile, take it back."""
    again = has_promoted(cta, index, left + 1)
    if again | (left > 0):
        own = cta.g.mO_partial.iterator
        own = own + (own_slot(cta) * REGION + fresh_thread() * VALUES)
        PV_BARRIER.sync()
        add_to_promoted(cta, acc, own, again)
        PV_BARRIER.sync()  # all warps have read the factors, which the next KV tile may change
        if left > 0:
            start_factors(cta)
        else:
            for i in cutlass.range_constexpr(cute.size(acc) // VALUES):
                held = cute.make_tensor(acc.iterator + VALUES * i, cute.make_layout(VALUES))
                cute.autovec_copy(words_at(own + i * (THREADS * VALUES), VALUES), held)


def add_to_promoted(cta: Cta, acc: cute.Tensor, own: cute.Pointer, again):
    """Promoted O^T, times its rows' factors, + the accumulators, which stay; zeros take its place
    where there is none `again`. The four values of an access are two columns of two rows
    (`mainloop_pv`)."""
    rows = cta.s.sPromoted.iterator + 2 * (fresh_thread() & 3)
    for j in range(BLOCK // 8):
        # loads stay behind it: more of them in flight would take registers that others need
        cute.arch.sync_warp()
        factors = load2(rows + 8 * j)
        for m in range(cta.cfg.slices):
            i = BLOCK // 8 * m + j
            place = own + i * (THREADS * VALUES)
            held = load_if(place, again)
            total = cute.make_rmem_tensor(VALUES, Float32)
            for e in range(VALUES):
                total[e] = held[e] * factors[e % 2] + acc[VALUES * i + e]
            cute.autovec_copy(total, words_at(place, VALUES))


def load_if(place: cute.Pointer, condition):
    """Four fp32 of global memory where `condition`, else zeros."""
    return ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
        "mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        "@p ld.global.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}]; }",
        place,
        Int32(condition),
        out=[Float32] * VALUES,
    )
