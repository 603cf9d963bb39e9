"""e4m3 query and cache: what the two products need beyond the 16-bit design.

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
rounded weights, by which its result is divided.

The matrix unit adds e4m3 products with about 14 bits, and loses what an accumulator has below
them at each step. So a tile's O^T (two steps) is a product of its own, added to the others in fp32
by the instruction that rescales them anyhow (option promote, the default).
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int16, Int32
from cutlass.cute.nvgpu import warpgroup

from .config import BOX, TILE_KV, VALUE_BOXES, Shape
from .storage import Shared

#: log2 of the weight of a row's maximum
P_LOG2 = 8.0
#: tokens of one k-step of the matrix unit, and of a tile's
STEP = 32
STEPS = TILE_KV // STEP
#: 64-column slices of a warpgroup's half of O^T
SLICES = VALUE_BOXES // 2
BOX_BYTES = TILE_KV * BOX
#: bytes of two words that are row g, and row g + 8 of V^T
ORDERS = (0x6240, 0x7351)


def round_two(low: Float32, high: Float32) -> Int16:
    """Two values as e4m3, saturating; `low` in the low byte."""
    return cute.arch.inline_ptx(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Int16],
        read_only_args=[low, high],
    )


def sum_two(pair: Int16) -> Float32:
    """The sum of two e4m3 values."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 h; .reg .b16 a, b; .reg .f32 x, y; cvt.rn.f16x2.e4m3x2 h, {$r0}; "
        "mov.b32 {a, b}, h; cvt.f32.f16 x, a; cvt.f32.f16 y, b; add.f32 {$w0}, x, y; }",
        write_only_types=[Float32],
        read_only_args=[pair],
    )


def join(low: Int16, high: Int16) -> Int32:
    """Two halves as a word."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, { {$r0}, {$r1} };", write_only_types=[Int32], read_only_args=[low, high]
    )


def publish(c: Shape, s: Shared, acc: cute.Tensor, stage: Any, warp: Int32, lane: Int32) -> None:
    """P of a warp's 16 tokens to its stage's rope box. Of 8 rows the word lies at 4 j of `acc`."""
    words = cute.recast_tensor(acc, Int32)
    base = Int32(s.k.iterator.toint()) + (stage * c.tile_bytes + VALUE_BOXES * BOX_BYTES)
    count = min(c.rows // 8, 4)
    row = lane % (8 * count)
    base = base + row * BOX + ((warp ^ ((row >> 1) & 3)) << 4)
    numbers = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
    for j in range(0, c.rows // 8, count):
        cute.arch.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [{{$r0}}+{j * 8 * BOX}], "
            f"{{ {numbers} }};",
            read_only_args=[base, *(words[4 * (j + i)] for i in range(count))],
        )


def load_slice(base: Int32, m: int, a: cute.Tensor) -> None:
    """V^T of slice m, 64 columns x 64 tokens, to the registers of operand A."""
    words = cute.recast_tensor(a, Int32)
    for k in range(STEPS):
        m0, m1, m2, m3 = cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, "
            f"[{{$r0}}+{m * BOX_BYTES + k * STEP * BOX}];",
            write_only_types=[Int32] * 4,
            read_only_args=[base],
        )
        for i, (x, y) in enumerate(((m0, m1), (m2, m3))):
            for e, order in enumerate(ORDERS):
                words[4 * k + 2 * i + e] = cute.arch.prmt(x, y, order)


def issue_values(
    c: Shape, wg: int, s: Shared, op: Any, f: Any, factor: cute.Tensor, stage: Any, warp: Int32,
    lane: Int32,
) -> None:  # fmt: skip
    """V^T P^T of one tile for this warpgroup's 256 columns, on top of O^T, or for `land` to add.

    At 64 rows there are registers for one slice beside O^T, and each is added at once.
    """
    base = Int32(s.k.iterator.toint()) + (stage * c.tile_bytes + wg * SLICES * BOX_BYTES)
    base = base + lane * BOX + ((warp ^ ((lane >> 1) & 3)) << 4)
    half = c.rows // 2
    if not c.promote:
        rescale(f.acc_o, factor, half)
    into = f.part if c.promote else f.acc_o
    for m in range(SLICES):
        a = cute.make_rmem_tensor_like(f.v)
        load_slice(base, m, a)
        at = m % c.parts_apart if c.promote else m
        acc = cute.make_tensor(into.iterator + at * half, f.slice)
        atom = cute.make_mma_atom(op)
        atom.set(warpgroup.Field.ACCUMULATE, not c.promote)
        warpgroup.fence()
        for k in range(STEPS):
            cute.gemm(atom, acc, a[None, None, k], f.p[None, None, k, stage], acc)
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
    for x in range(half):
        part = f.part[m % c.parts_apart * half + x]
        f.acc_o[m * half + x] = f.acc_o[m * half + x] * factor[2 * (x // 4) + x % 2] + part


def land(c: Shape, f: Any, factor: cute.Tensor) -> None:
    """All slices, once the tile's product is there."""
    if c.eight and c.promote and c.lands_late:
        for m in range(SLICES):
            land_slice(c, f, factor, m)


def put_two(c: Shape, out: cute.Tensor, at: Int32, low: Float32, high: Float32) -> None:
    """Two neighbouring columns of the result, from element `at` on, an even one."""
    if c.out_dtype.width == 8:
        pointer = cute.recast_ptr((out.iterator + at).align(2), dtype=Int16)
        cute.arch.store(pointer, round_two(low, high))
    else:
        pair = cute.make_rmem_tensor(2, c.out_dtype)
        pair[0], pair[1] = low.to(c.out_dtype), high.to(c.out_dtype)
        pointer = (out.iterator + at).align(4)
        cute.autovec_copy(pair, cute.make_tensor(pointer, cute.make_layout(2)))
