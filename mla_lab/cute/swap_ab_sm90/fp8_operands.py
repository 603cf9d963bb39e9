"""Products of e4m3: what the two need beyond the 16-bit design.

The K tile is nine boxes of 64 tokens x 64 bytes (swizzle of 64 bytes). S^T = K Q^T reads it as it
lies, both operands K-major. e4m3 has no other major: V^T, whose K is the token, goes to the matrix
unit through registers, and nothing is transposed in shared memory.

    one box, 16 columns of it a warp          ldmatrix.x4.trans.b16       prmt
    token  0 .. 7   | dv 0 1 | dv 2 3 | ...   lane 4g + q gets of m0:     row g   of V^T: dv 2g
    token  8 .. 15  | dv 0 1 | dv 2 3 | ...     token 2q:     dv 2g 2g+1    t2q t2q+8 t2q+1 t2q+9
    token 16 .. 23  | ...                       token 2q + 1: dv 2g 2g+1  row g+8 of V^T: dv 2g+1
    token 24 .. 31  | ...                     m1: the same, tokens + 8      t2q t2q+8 t2q+1 t2q+9

So K runs, in every 16 tokens, over 0 8 1 9 2 10 .. 7 15. That is how P lies for nothing: a lane's
scores of a row are those of tokens g and g + 8, two bytes that go to shared memory together, and
`stmatrix.trans` takes two bytes as one element:

    P[row][64 tokens] of 64 bytes, on the rope box: byte 16 w + 2 g + h is token 16 w + g + 8 h

Accumulator rows g and g + 8 of a warp are columns 2g and 2g + 1 (16-bit builds: g and g + 8).

P is exp2(score - m) with m eight below the running maximum, so at most 256 of e4m3's 448: a power
of two costs nothing, since m is what sums, lse, sinks and merges refer to. Smaller weights are
exact in fp32 until here, and kept down to 2^-18 of the row's largest. A row's sum is that of the
rounded weights, by which its result is divided. (Of two terms, under a bf16 query: see
`split`.)

The matrix unit adds e4m3 products with about 14 bits, and loses what an accumulator has below
them at each step. So a tile's O^T (two steps) is a product of its own, added to the others in fp32
by the instruction that rescales them anyhow (option promote, the default).
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int16, Int32
from cutlass.cute.nvgpu import warpgroup

from ..common.fp8 import join_two, load_step
from . import query_hi_lo as split
from .params import BOX, SLICES, TILE_KV, VALUE_BOXES, Shape
from .shared_storage import Shared

#: log2 of the weight of a row's maximum
P_LOG2 = 8.0
#: tokens of one k-step of the matrix unit, and of a tile's
STEP = 32
STEPS = TILE_KV // STEP
BOX_BYTES = TILE_KV * BOX


def sum_two(pair: Int16) -> Float32:
    """The sum of two e4m3 values."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 h; .reg .b16 a, b; .reg .f32 x, y; cvt.rn.f16x2.e4m3x2 h, {$r0}; "
        "mov.b32 {a, b}, h; cvt.f32.f16 x, a; cvt.f32.f16 y, b; add.f32 {$w0}, x, y; }",
        write_only_types=[Float32],
        read_only_args=[pair],
    )


def publish(
    c: Shape, s: Shared, weights: cute.Tensor, stage: Any, warp: Int32, lane: Int32
) -> None:
    """P of a warp's 16 tokens to its stage's rope box, of weights that are `late.weigh`'s: of 8
    rows the word lies at 4 j, or they are fp32."""
    base = Int32(s.k.iterator.toint()) + (stage * c.k_bytes + VALUE_BOXES * BOX_BYTES)
    if c.terms > 1:
        put_terms(c, base, weights, None, warp, lane)
        return
    words = cute.recast_tensor(weights, Int32)
    put_weights(c, base, [words[4 * j] for j in range(c.rows // 8)], warp, lane)


def put_terms(
    c: Shape, base: Int32, weights: cute.Tensor, scales: Any, warp: Int32, lane: Int32
) -> None:
    """Both terms of fp32 weights, which `scales` of a thread's two tokens multiply, to `base`."""
    words: list[list[Int32]] = [[], []]
    for j in range(c.rows // 8):
        pairs = []
        for e in range(2):
            pair = [weights[4 * j + e], weights[4 * j + 2 + e]]
            if scales:
                pair = [x * scale for x, scale in zip(pair, scales, strict=True)]
            pairs.append(split.split_two(*pair))
        for term in range(2):
            words[term].append(join_two(pairs[0][term], pairs[1][term]))
    put_weights(c, base, words[0] + words[1], warp, lane)


def put_weights(c: Shape, base: Int32, words: list[Int32], warp: Int32, lane: Int32) -> None:
    """A word for every 8 rows: a warp's 16 tokens of P, which begins at `base`."""
    count = min(c.width // 8, 4)
    row = lane % (8 * count)
    base = base + row * BOX + ((warp ^ ((row >> 1) & 3)) << 4)
    numbers = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
    for j in range(0, c.width // 8, count):
        cute.arch.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [{{$r0}}+{j * 8 * BOX}], "
            f"{{ {numbers} }};",
            read_only_args=[base, *words[j : j + count]],
        )


def slices_at(c: Shape, wg: int, s: Shared, stage: Any, warp: Int32, lane: Int32) -> list[Int32]:
    """Where this lane reads V of token `lane` and of each 64-column slice of this warpgroup."""
    base = Int32(s.k.iterator.toint()) + (stage * c.k_bytes + wg * SLICES * BOX_BYTES)
    if c.box == BOX:
        base = base + lane * BOX + ((warp ^ ((lane >> 1) & 3)) << 4)
        return [base + m * BOX_BYTES for m in range(SLICES)]
    # two slices a box
    base = base + lane * c.box + ((warp ^ (lane & 7)) << 4)
    return [(base ^ (64 * (m % 2))) + m // 2 * (2 * BOX_BYTES) for m in range(SLICES)]


def load_slice(c: Shape, base: Int32, a: cute.Tensor) -> None:
    """V^T of a slice, 64 columns x 64 tokens, to the registers of operand A."""
    words = cute.recast_tensor(a, Int32)
    for k in range(STEPS):
        load_step(base, k * STEP * c.box, words, 4 * k)


def issue_values(
    c: Shape, wg: int, s: Shared, op: Any, f: Any, factor: cute.Tensor, stage: Any, warp: Int32,
    lane: Int32,
) -> None:  # fmt: skip
    """V^T P^T of one tile for this warpgroup's 256 columns, on top of O^T, or for `land` to add.

    At 64 rows there are registers for one slice beside O^T, and each is added at once.
    """
    bases = slices_at(c, wg, s, stage, warp, lane)
    half = c.width // 2
    if not c.promote:
        rescale(f.acc_o, factor, half)
    into = f.part if c.promote else f.acc_o
    for m in range(SLICES):
        a = cute.make_rmem_tensor_like(f.v)
        load_slice(c, bases[m], a)
        p = f.p[None, None, None, 2 * wg + m // 2, None] if c.scaled else f.p
        at = m % c.parts_apart if c.promote else m
        acc = cute.make_tensor(into.iterator + at * half, f.slice)
        atom = cute.make_mma_atom(op)
        atom.set(warpgroup.Field.ACCUMULATE, not c.promote)
        warpgroup.fence()
        for k in range(STEPS):
            cute.gemm(atom, acc, a[None, None, k], p[None, None, k, stage], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        if c.lands_late:
            continue
        warpgroup.commit_group()
        if m + 1 >= c.parts_apart:
            warpgroup.wait_group(c.parts_apart - 1)
            land_slice(c, f, factor, m + 1 - c.parts_apart)
    if c.lands_late:
        warpgroup.commit_group()
    else:
        for m in range(SLICES + 1 - c.parts_apart, SLICES):
            warpgroup.wait_group(SLICES - 1 - m)
            land_slice(c, f, factor, m)


def rescale(acc: cute.Tensor, factor: cute.Tensor, half: int) -> None:
    """O^T times its rows' factors."""
    for x in range(cute.size(acc)):
        acc[x] = acc[x] * factor[2 * (x % half // 4) + x % 2]


def land_slice(c: Shape, f: Any, factor: cute.Tensor, m: int) -> None:
    """O^T of slice m <- O^T x factor + the tile's, in fp32."""
    half = c.rows // 2
    at = m % c.parts_apart * (c.width // 2)
    for x in range(half):
        part = f.part[at + x]
        if c.terms > 1:
            part = part + f.part[at + half + x] * Float32(split.LOW)
        if c.scaled:
            part = part * f.units[m // 2]
        f.acc_o[m * half + x] = f.acc_o[m * half + x] * factor[2 * (x // 4) + x % 2] + part


def land(c: Shape, f: Any, factor: cute.Tensor) -> None:
    """All slices, once the tile's product is there."""
    if c.eight and c.promote and c.lands_late:
        for m in range(SLICES):
            land_slice(c, f, factor, m)
