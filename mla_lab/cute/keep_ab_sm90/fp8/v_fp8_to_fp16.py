"""V^T as operand A of a 16-bit MMA: e4m3 converted to fp16 in registers, for fp16 weights.

`ldmatrix.trans` returns the columns of V two by two (`swap_ab_sm90`); operand A of a 16-bit MMA
takes two tokens of one column:

    a word of ldmatrix, lane 4g + q   columns 2g 2g+1 of token 2q, then of token 2q + 1
    prmt                              tokens 2q 2q+1 of column 2g, then of column 2g + 1
    cvt, each half                    two fp16: row g, and row g + 8 of V^T

Tokens keep their order, and columns lie in the accumulators as those of e4m3 do. fp16 represents
every e4m3 number. 16-bit MMAs take twice the time of e4m3 ones, as two terms of weights would, but
the tensor core accumulates them in fp32, and a weight has 11 bits.

    P[row][64 tokens]   two boxes of 32 tokens, 64 bytes wide and swizzled: in the rope box of the
                        tile's stage, and in `sP_rest`
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float16, Int32
from cutlass.cute.nvgpu import warpgroup

from ...common.ptx_sm90 import ptx
from ...rows_on_m.params import Cta
from ..params import BOX, ROPE_BOX
from . import kv_656

#: tokens of one k-step of a 16-bit MMA, k-steps of a box of P, boxes of P
STEP_TOKENS, BOX_STEPS, P_BOXES = 16, 2, 2
#: bytes between places where a box of P may begin, and the number of places from the ring on
PLACE, PLACES = 1024, 224


def p_operand(cta: Cta):
    """Operand B, a box of P: (.., .., k-step, place), with `p_exchange` (.., .., k-step, stage)."""
    pv = cta.mma.pv
    if cta.cfg.p_exchange:
        return pv.make_fragment_B(pv.get_slice(0).partition_B(cta.s.sP))
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Float16)
    box = cute.tile_to_shape(atom, (64, 32), (0, 1))
    layout = cute.append(box.outer, cute.make_layout(PLACES, stride=PLACE // 2))
    sP = cute.make_tensor(cute.recast_ptr(cta.s.sKV.iterator, box.inner, Float16), layout)
    return pv.make_fragment_B(pv.get_slice(0).partition_B(sP))


def ldmatrix_v(base: Int32, offset: int):
    """Two words: V of 64 columns and 16 tokens, transposed."""
    return ptx(
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 { {$w0}, {$w1} }, "
        f"[{{$r0}}+{offset}];",
        base,
        out=[Int32] * 2,
    )


def to_fp16(word: Int32):
    """Four e4m3 to two words of two fp16 each: two tokens of row g of V^T, and of row g + 8."""
    return ptx(
        "{ .reg .b32 x; .reg .b16 a, b; prmt.b32 x, {$r0}, 0, 0x3120; mov.b32 {a, b}, x; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, a; cvt.rn.f16x2.e4m3x2 {$w1}, b; }",
        word,
        out=[Int32] * 2,
    )


def p_places(cta: Cta, stage: Int32, p_stage: Int32):
    """Indices of `p_operand` of both boxes of a tile's P."""
    cfg, s = cta.cfg, cta.s
    if cfg.p_exchange:
        return p_stage, p_stage
    first = ROPE_BOX * (BOX // PLACE) + stage * (cfg.stage_bytes // PLACE)
    if cfg.kv_656:
        return first, first + BOX // PLACE
    rest = (Int32(s.sP_rest.iterator.toint()) - Int32(s.sKV.iterator.toint())) // PLACE
    return first, rest + stage * (BOX // PLACE)


def issue_pv_fp16(cta: Cta, f, base: Int32, stage: Int32, p_stage: Int32):
    """O^T += V^T P^T of one tile, whose V begins for this lane at `base`, by steps of 64 columns
    and 16 tokens. Operand A of `v_steps_held` steps is held.

    The words of the next step are loaded under the MMA of this one: while shared memory is busy a
    load takes longer than the MMA.
    """
    cfg, mma = cta.cfg, cta.mma
    shape = cute.make_layout(mma.pv.partition_shape_C((64, cfg.rows)))
    atom = cute.make_mma_atom(mma.pv.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    places = p_places(cta, stage, p_stage)
    scales = kv_656.lane_factors(cta.s, stage) if cfg.kv_656 else None
    # two slices have the same scales
    pairs, halves = (cfg.slices // 2, 2) if cfg.kv_656 else (cfg.slices, 1)
    steps = [
        (box, n * halves + half, k)
        for box in range(P_BOXES)
        for n in range(pairs)
        for k in range(BOX_STEPS)
        for half in range(halves)
    ]

    def fetch(i):
        box, m, k = steps[i]
        words = ldmatrix_v(base, box * (BOX // 2) + m * BOX + k * (STEP_TOKENS * 64))
        if cfg.kv_656 and m % 2 == 0:
            return words, kv_656.two_factors(scales, m // 2, BOX_STEPS * box + k)
        return words, None

    words, factors = fetch(0)
    for i, (box, m, k) in enumerate(steps):
        a = f.tOrV[i % cfg.v_steps_held]
        if i >= cfg.v_steps_held:
            warpgroup.wait_group(cfg.v_steps_held - 1)
        to = cute.recast_tensor(a, Int32)
        for n in range(2):
            to[2 * n], to[2 * n + 1] = (
                kv_656.to_fp16(words[n], factors[n]) if cfg.kv_656 else to_fp16(words[n])
            )
        if i + 1 < len(steps):
            words, more = fetch(i + 1)
            factors = more or factors
        tile = cute.make_tensor(f.tOrO.iterator + cfg.rows // 2 * m, shape)
        warpgroup.fence()
        step = BOX_STEPS * box + k if cfg.p_exchange else k
        cute.gemm(atom, tile, a[None, None, 0], f.tOrP[None, None, step, places[box]], tile)
        warpgroup.commit_group()
