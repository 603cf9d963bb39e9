"""A bf16 query over a cache of eight bits: two e4m3 numbers in place of one of bf16.

Nothing of the cache is widened. Both products take its bytes as they are, and what meets them is a
sum of two e4m3 numbers, of four significant bits each, which a tile's columns hold apart:

    x = hi + lo / 16      hi = e4m3(x), lo = e4m3(16 (x - hi))

    Q in shared memory            S^T = K Q^T          P in shared memory       V^T P^T
    row 0 .. R-1    hi of row r   columns 0 .. R-1     row 0 .. R-1    hi       columns 0 .. R-1
    row R .. 2R-1   lo of row r   columns R .. 2R-1    row R .. 2R-1   lo       columns R .. 2R-1

Tokens, and columns of V, lie along M, so columns r and R + r of a product are two accumulators of
one thread, x and x + R / 2, and are added where they are read. With 16 query rows the products
have 32 columns: they read shared memory as often as with 16.

A bf16 number has 8 significant bits. What hi leaves is at most 8 units of its last place, which
lo has exactly: Q is exact while hi and lo are normal numbers. A row is scaled by a power of two
that takes its greatest element to 128 .. 256; elements below 2^-13 of that are off by 2^-22 of it.
The scale goes back into the scores with `unit`. Weights are off by at most 2^-8 of themselves, as
those of bf16. (Of fp16's 11 bits lo would keep four of the seven that hi leaves: where scores are
large, results are off by several times what torch is, so that no fp16 query is split.)

The query arrives as it is stored, in boxes of 64 columns that the consumers split in place, each
row's by 256 / R neighbouring lanes: R x 128 bytes of a box are 2 R rows of 64 bytes.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32
from cutlass.cute.nvgpu import warpgroup

from ..common.fp8 import join_two
from ..common.ptx_sm90 import load2
from .mma import K_BYTES
from .params import BOX, CONSUMERS, TILE_KV, Shape
from .shared_storage import Products, Shared

#: what one of lo counts for
LOW = 1.0 / 16.0
#: lanes of a box's row, 16 bytes each
LANES = 8
#: exponents, as fp32 has them: of a row's greatest element when it is scaled, of infinity
TOP, INFINITE = 127 + 7, 255


def split_two(low: Float32, high: Float32) -> tuple[Int16, Int16]:
    """Two numbers of magnitudes up to 256 as hi and lo, `low` in the low bytes."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 p, h, k; cvt.rn.f16x2.f32 p, {$r1}, {$r0};"
        " cvt.rn.satfinite.e4m3x2.f16x2 {$w0}, p; cvt.rn.f16x2.e4m3x2 h, {$w0};"
        " mov.b32 k, 0x4C004C00; sub.rn.f16x2 p, p, h; mul.rn.f16x2 p, p, k;"
        " cvt.rn.satfinite.e4m3x2.f16x2 {$w1}, p; }",
        write_only_types=[Int16, Int16],
        read_only_args=[low, high],
    )


def unpack_two(word: Int32) -> tuple[Float32, Float32]:
    """Two numbers of bf16."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xFFFF0000;",
        write_only_types=[Float32] * 2,
        read_only_args=[word],
    )


def as_float(bits: Int32) -> Float32:
    """The same 32 bits."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )


def greatest(bits: Int32, word: tuple[Float32, Float32]) -> Int32:
    """The greater of `bits` and of two numbers' magnitudes, as bits of fp32; NaN is greatest."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 a, b; and.b32 a, {$r1}, 0x7FFFFFFF; and.b32 b, {$r2}, 0x7FFFFFFF;"
        " max.s32 a, a, b; max.s32 {$w0}, a, {$r0}; }",
        write_only_types=[Int32],
        read_only_args=[bits, *word],
    )


def read16(address: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Four words of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def write8(address: Int32, words: Any) -> None:
    """Two words to shared memory."""
    cute.arch.inline_ptx(
        "st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *words]
    )


@cute.jit
def split_query(c: cutlass.Constexpr[Shape], s: Shared, turn: Int32):
    """The rows of Q, as they arrived, into both their terms; by all consumers. Work tile `turn`
    may have no keys: then what becomes of the rows does not matter."""
    tid, _, _ = cute.arch.thread_idx()
    lanes = CONSUMERS // c.rows
    parts = lanes // LANES
    row, part, chunk = tid // lanes, tid % lanes // LANES, tid % LANES
    base = Int32(s.q.iterator.toint())
    source = base + row * (2 * BOX) + ((chunk ^ (row % 8)) << 4)
    words, top, boxes = [], Int32(0), c.columns // BOX
    for i in cutlass.range_constexpr(-(-boxes // parts)):
        box = cutlass.min(part + parts * i, boxes - 1)
        words.append(read16(source + box * (c.rows * 2 * BOX)))
        for n in cutlass.range_constexpr(4):
            top = greatest(top, unpack_two(words[i][n]))
    for n in cutlass.range_constexpr(lanes.bit_length() - 1):
        top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=1 << n))
    exponent = cutlass.max(top >> 23, Int32(TOP - 126))
    scale = as_float((127 + TOP - exponent) << 23)
    unit = as_float((exponent + 127 - TOP) << 23)
    if tid % lanes == 0:
        s.unit[row] = unit if exponent < INFINITE else Float32.inf
    cute.arch.mbarrier_arrive(s.q_read)
    cute.arch.mbarrier_wait(s.q_read, turn & 1)
    for i in cutlass.range_constexpr(-(-boxes // parts)):
        box = part + parts * i
        if box < boxes:
            target = query_place(c, base, row, box, chunk)
            high, low = [], []
            for n in cutlass.range_constexpr(4):
                x, y = unpack_two(words[i][n])
                hi, lo = split_two(x * scale, y * scale)
                high.append(hi)
                low.append(lo)
            write8(target, [join_two(high[0], high[1]), join_two(high[2], high[3])])
            target = target + c.rows * c.box
            write8(target, [join_two(low[0], low[1]), join_two(low[2], low[3])])
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(s.q_split)
    cute.arch.mbarrier_wait(s.q_split, turn & 1)


def query_place(c: Shape, base: Int32, row: Int32, box: Int32, chunk: Int32) -> Int32:
    """Where eight columns of hi lie: K-major rows of 64 bytes, or of 128, swizzled."""
    if c.box == 2 * BOX:
        at = base + (box >> 1) * (c.width * c.box) + row * c.box + (chunk & 1) * 8
        return at + ((((box & 1) * 4 + (chunk >> 1)) ^ (row & 7)) << 4)
    at = base + box * (c.width * BOX) + row * BOX
    return at + (((chunk >> 1) ^ ((row >> 1) & 3)) << 4) + (chunk & 1) * 8


def add_parts(
    c: Shape, s: Shared, mma: Products, f: Any, stage: Any, phase: Any, factors: Any = None
) -> list[Float32]:
    """Sums of both terms of a tile's scores. A part of the columns is a few k-steps, since the
    matrix unit has 14 bits of what it adds to; `score_sets` parts are on their way together.

    factors: called behind the first products, what to multiply a part's element x by.
    """
    parts, sets, half = c.score_parts, c.score_sets, c.rows // 2
    shape = cute.make_layout(mma.s.partition_shape_C((TILE_KV, c.width)))
    steps, arrival = c.columns // K_BYTES // parts, c.group * c.box // K_BYTES
    sums, by = [Float32(0.0)] * half, None
    for n in range(parts + sets):
        at = n % sets * c.width // 2
        if n >= sets:
            if n == sets and factors:
                by = factors()
            warpgroup.wait_group(min(sets, parts + sets - n) - 1)
            for x in range(half):
                both = f.acc_s[at + x] + f.acc_s[at + half + x] * Float32(LOW)
                sums[x] = sums[x] + (both * by(x, n - sets) if by else both)
            warpgroup.fence()
        if n >= parts:
            continue
        acc = cute.make_tensor(f.acc_s.iterator + at, shape)
        atom = cute.make_mma_atom(mma.s.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for k in range(n * steps, (n + 1) * steps):
            if k % arrival == 0:
                cute.arch.mbarrier_wait(s.full + stage * c.groups + k // arrival, phase)
                if c.gather and not c.scaled:
                    cute.arch.fence_view_async_shared()
            cute.gemm(atom, acc, f.k[None, None, k, stage], f.q[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
    return sums


def put_scores(c: Shape, s: Shared, f: Any, sums: list[Float32], lane: Int32, rope: bool) -> None:
    """Scores <- sums in the units of their rows, beside the rope's where that is apart."""
    scores = cute.make_tensor(f.rest.iterator, cute.make_layout(c.rows // 2))
    for j in range(c.rows // 8):
        unit = load2(s.unit.iterator + 8 * j + 2 * (lane % 4))
        for x in range(4 * j, 4 * j + 4):
            score = sums[x] * unit[x % 2]
            scores[x] = score + scores[x] if rope else score


def add_scores(
    c: Shape, s: Shared, mma: Products, f: Any, stage: Any, phase: Any, lane: Int32
) -> None:
    """Scores of a tile of e4m3."""
    put_scores(c, s, f, add_parts(c, s, mma, f, stage, phase), lane, rope=False)
