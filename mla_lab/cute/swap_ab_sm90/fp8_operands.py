"""e4m3 MMA operands: what both products need beyond the 16-bit design.

The KV tile is nine boxes of 64 tokens x 64 bytes (64-byte swizzle). S^T = K Q^T reads it directly,
both operands K-major. wgmma takes e4m3 K-major only: V^T, whose K is the token, goes through
registers, and nothing is transposed in shared memory.

    one box, 16 columns of it per warp        ldmatrix.x4.trans.b16       prmt
    token  0 .. 7   | dv 0 1 | dv 2 3 | ...   lane 4g + q gets of m0:     row g   of V^T: dv 2g
    token  8 .. 15  | dv 0 1 | dv 2 3 | ...     token 2q:     dv 2g 2g+1    t2q t2q+8 t2q+1 t2q+9
    token 16 .. 23  | ...                       token 2q + 1: dv 2g 2g+1  row g+8 of V^T: dv 2g+1
    token 24 .. 31  | ...                     m1: the same, tokens + 8      t2q t2q+8 t2q+1 t2q+9

So K runs, in every 16 tokens, over 0 8 1 9 2 10 .. 7 15. P has this order without a shuffle: a
lane's scores of a row are those of tokens g and g + 8, two bytes that go to shared memory together,
and `stmatrix.trans` moves two bytes as one element:

    P[row][64 tokens] of 64 bytes, on the rope box: byte 16 w + 2 g + h is token 16 w + g + 8 h

Accumulator rows g and g + 8 of a warp are latent columns 2g and 2g + 1 (16 bits: g and g + 8).

P is exp2(score - m) with m eight (log2) below the row max, so at most 256 of e4m3's 448. m is what
row sums, lse, sinks and merges refer to, so the power of two needs no correction. Weights keep
digits down to 2^-18 of the row's largest. A row sum is that of the rounded weights, by which the
result is divided. (With hi and lo, under a bf16 query: see `query_hi_lo`.)

wgmma accumulates e4m3 products with about 14 bits and drops what an accumulator has below them at
each step. So a tile's O^T (two k-steps) is a product of its own and is promoted: added to the
others in fp32, by the same instruction that rescales them.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int16, Int32
from cutlass.cute.nvgpu import warpgroup

from ..common.fp8 import join_two, load_step
from . import query_hi_lo as hi_lo
from .mma import WarpGroup, uniform
from .params import BOX, O_SLICES, TILE_KV, V_BOXES, Traits
from .shared_storage import Shared, p_view

#: log2 of the weight of a row's maximum
P_LOG2 = 8.0
#: tokens of one wgmma, wgmmas of a tile
K_STEP = 32
K_STEPS = TILE_KV // K_STEP
BOX_BYTES = TILE_KV * BOX


def sum_two(pair: Int16) -> Float32:
    """Sum of two packed e4m3 values."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 h; .reg .b16 a, b; .reg .f32 x, y; cvt.rn.f16x2.e4m3x2 h, {$r0}; "
        "mov.b32 {a, b}, h; cvt.f32.f16 x, a; cvt.f32.f16 y, b; add.f32 {$w0}, x, y; }",
        write_only_types=[Float32],
        read_only_args=[pair],
    )


def store_p(c: Traits, s: Shared, wg: WarpGroup, weights: cute.Tensor, stage: Any) -> None:
    """P of a warp's 16 tokens to its stage's rope box; `weights` as `exp2_tile` leaves them: the
    word of 8 rows at 4 j, or fp32."""
    base = Int32(s.sKV.iterator.toint()) + (stage * c.k_bytes + V_BOXES * BOX_BYTES)
    if c.hi_lo:
        store_p_hi_lo(c, wg, base, weights)
        return
    words = cute.recast_tensor(weights, Int32)
    store_words(c, wg, base, [words[4 * j] for j in range(c.rows // 8)])


def store_p_hi_lo(
    c: Traits, wg: WarpGroup, base: Int32, weights: cute.Tensor, scales: Any = None
) -> None:
    """hi and lo of fp32 weights, times `scales` of the thread's two tokens, to `base`."""
    words: list[list[Int32]] = [[], []]
    for j in range(c.rows // 8):
        pairs = []
        for e in range(2):
            pair = [weights[4 * j + e], weights[4 * j + 2 + e]]
            if scales:
                pair = [x * scale for x, scale in zip(pair, scales, strict=True)]
            pairs.append(hi_lo.split_two(*pair))
        for term in range(2):
            words[term].append(join_two(pairs[0][term], pairs[1][term]))
    store_words(c, wg, base, words[0] + words[1])


def store_words(c: Traits, wg: WarpGroup, base: Int32, words: list[Int32]) -> None:
    """stmatrix of one word per 8 rows: a warp's 16 tokens of the P that begins at `base`."""
    count = min(c.mma_n // 8, 4)
    row = wg.lane % (8 * count)
    base = base + row * BOX + ((wg.warp ^ ((row >> 1) & 3)) << 4)
    numbers = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
    for j in range(0, c.mma_n // 8, count):
        cute.arch.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [{{$r0}}+{j * 8 * BOX}], "
            f"{{ {numbers} }};",
            read_only_args=[base, *words[j : j + count]],
        )


def v_slices(c: Traits, s: Shared, wg: WarpGroup, stage: Any) -> list[Int32]:
    """Addresses of V of token `lane`, for each 64-column slice of this warp group."""
    warp, lane = wg.warp, wg.lane
    base = Int32(s.sKV.iterator.toint()) + (stage * c.k_bytes + wg.idx * O_SLICES * BOX_BYTES)
    if c.box == BOX:
        base = base + lane * BOX + ((warp ^ ((lane >> 1) & 3)) << 4)
        return [base + m * BOX_BYTES for m in range(O_SLICES)]
    # two slices per box
    base = base + lane * c.box + ((warp ^ (lane & 7)) << 4)
    return [(base ^ (64 * (m % 2))) + m // 2 * (2 * BOX_BYTES) for m in range(O_SLICES)]


def issue_pv(c: Traits, s: Shared, wg: WarpGroup, stage: Any) -> None:
    """V^T P^T of one tile for this warp group's 256 columns; `promote_tile` adds it to O^T, or
    where it does not, each slice is added here as soon as it is complete."""
    bases, pv, sP = v_slices(c, s, wg, stage), wg.mma.pv, p_view(s, c)
    for m in range(O_SLICES):
        a = cute.make_rmem_tensor_like(wg.tOrV)
        words = cute.recast_tensor(a, Int32)
        for k in range(K_STEPS):
            load_step(bases[m], k * K_STEP * c.box, words, 4 * k)
        if c.kv_656:
            group = uniform(sP[None, None, 2 * wg.idx + m // 2, stage], 64)
        else:
            group = uniform(sP[None, None, stage], c.box * c.bytes)
        tOrP = pv.make_fragment_B(pv.get_slice(0).partition_B(group))
        at = m % c.o_slices_in_flight * (c.mma_n // 2)
        acc = cute.make_tensor(wg.tile_O.iterator + at, wg.slice_layout)
        atom = cute.make_mma_atom(wg.mma.pv.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for k in range(K_STEPS):
            cute.gemm(atom, acc, a[None, None, k], tOrP[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        if c.promote_after_tile:
            continue
        warpgroup.commit_group()
        if m + 1 >= c.o_slices_in_flight:
            warpgroup.wait_group(c.o_slices_in_flight - 1)
            promote_slice(c, wg, m + 1 - c.o_slices_in_flight)
    if c.promote_after_tile:
        warpgroup.commit_group()
    else:
        for m in range(O_SLICES + 1 - c.o_slices_in_flight, O_SLICES):
            warpgroup.wait_group(O_SLICES - 1 - m)
            promote_slice(c, wg, m)


def promote_slice(c: Traits, wg: WarpGroup, m: int) -> None:
    """Slice m: O^T <- O^T x rescale + the tile's O^T, in fp32."""
    half = c.rows // 2
    at = m % c.o_slices_in_flight * (c.mma_n // 2)
    for x in range(half):
        part = wg.tile_O[at + x]
        if c.hi_lo:
            part = part + wg.tile_O[at + half + x] * Float32(hi_lo.LOW)
        if c.kv_656:
            part = part * wg.pv_scale[m // 2]
        wg.tOrO[m * half + x] = wg.tOrO[m * half + x] * wg.rescale[2 * (x // 4) + x % 2] + part


def promote_tile(c: Traits, wg: WarpGroup) -> None:
    """All slices, once the tile's PV is complete."""
    if c.promote_after_tile:
        for m in range(O_SLICES):
            promote_slice(c, wg, m)
