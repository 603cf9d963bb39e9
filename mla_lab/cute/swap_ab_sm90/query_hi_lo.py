"""A bf16 query over an 8-bit cache: two e4m3 numbers, hi and lo, in place of one of bf16.

The cache is not converted: both MMAs read its bytes. Their other operand, Q or P, is the sum of two
e4m3 numbers of four significant bits each, in separate columns of the product:

    x = hi + lo / 16      hi = e4m3(x), lo = e4m3(16 (x - hi))

    Q in shared memory            S^T = K Q^T          P in shared memory       V^T P^T
    row 0 .. R-1    hi of row r   columns 0 .. R-1     row 0 .. R-1    hi       columns 0 .. R-1
    row R .. 2R-1   lo of row r   columns R .. 2R-1    row R .. 2R-1   lo       columns R .. 2R-1

Tokens, and columns of V, lie along M, so columns r and R + r of a product are two accumulators of
one thread, x and x + R / 2, and are added where they are read. With 16 query rows the MMAs have
N = 32: they read shared memory as often as with 16.

A bf16 number has 8 significant bits. hi leaves at most 8 units of the last place, which lo holds
exactly: Q is exact while hi and lo are normal numbers. A row is scaled by a power of two that takes
its largest element to 128 .. 256; elements below 2^-13 of that are off by 2^-22 of it. `sQ_scale`
takes the scale out of the scores. Weights are off by at most 2^-8 of themselves, as those of bf16.
(Of fp16's 11 bits lo would keep four of the seven that hi leaves: where scores are large, results
are off by several times torch's error, so that no fp16 query is split.)

The query arrives as it is stored, in boxes of 64 columns that the consumers split in place, each
row's by 256 / R neighbouring lanes: R x 128 bytes of a box become 2 R rows of 64 bytes.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32
from cutlass.cute.nvgpu import warpgroup

from ..common.fp8 import join_two
from ..common.pipeline import PipelineState
from ..common.ptx_sm90 import bits_float, butterfly, load2
from .mma import K_STEP_BYTES, WarpGroup, operands
from .params import BOX, CONSUMER_THREADS, TILE_KV, Traits
from .shared_storage import Shared, stage_full

#: factor of lo
LOW = 1.0 / 16.0
#: lanes of a box's row, 16 bytes each
LANES = 8
#: biased fp32 exponents: of a row's largest element after scaling, of infinity
ROW_EXPONENT, INFINITE = 127 + 7, 255


def split_two(low: Float32, high: Float32) -> tuple[Int16, Int16]:
    """hi and lo of two numbers of magnitude up to 256, `low` in the low bytes."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 p, h, k; cvt.rn.f16x2.f32 p, {$r1}, {$r0};"
        " cvt.rn.satfinite.e4m3x2.f16x2 {$w0}, p; cvt.rn.f16x2.e4m3x2 h, {$w0};"
        " mov.b32 k, 0x4C004C00; sub.rn.f16x2 p, p, h; mul.rn.f16x2 p, p, k;"
        " cvt.rn.satfinite.e4m3x2.f16x2 {$w1}, p; }",
        write_only_types=[Int16, Int16],
        read_only_args=[low, high],
    )


def unpack_two(word: Int32) -> tuple[Float32, Float32]:
    """Two packed bf16 numbers as fp32."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xFFFF0000;",
        write_only_types=[Float32] * 2,
        read_only_args=[word],
    )


def max_magnitude(bits: Int32, word: tuple[Float32, Float32]) -> Int32:
    """Maximum of `bits` and two numbers' magnitudes, as fp32 bits; NaN is the largest."""
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
def split_query(c: cutlass.Constexpr[Traits], s: Shared, work_tile: Int32):
    """Both consumer warp groups: the rows of Q, as they arrived, into hi and lo. Work tile number
    `work_tile` may have no KV tiles: then Q holds anything, and nobody reads it."""
    tid, _, _ = cute.arch.thread_idx()
    lanes = CONSUMER_THREADS // c.rows
    parts = lanes // LANES
    row, part, chunk = tid // lanes, tid % lanes // LANES, tid % LANES
    base = Int32(s.sQ.iterator.toint())
    source = base + row * (2 * BOX) + ((chunk ^ (row % 8)) << 4)
    words, top, boxes = [], Int32(0), c.columns // BOX
    for i in cutlass.range_constexpr(-(-boxes // parts)):
        box = cutlass.min(part + parts * i, boxes - 1)
        words.append(read16(source + box * (c.rows * 2 * BOX)))
        for n in cutlass.range_constexpr(4):
            top = max_magnitude(top, unpack_two(words[i][n]))
    top = butterfly(cutlass.max, top, tuple(1 << n for n in range(lanes.bit_length() - 1)))
    exponent = cutlass.max(top >> 23, Int32(ROW_EXPONENT - 126))
    scale = bits_float((127 + ROW_EXPONENT - exponent) << 23)
    inverse = bits_float((exponent + 127 - ROW_EXPONENT) << 23)
    if tid % lanes == 0:
        s.sQ_scale[row] = inverse if exponent < INFINITE else Float32.inf
    s.q_loaded.arrive(0)
    s.q_loaded.wait(0, work_tile & 1)
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
    s.q_split.arrive(0)
    s.q_split.wait(0, work_tile & 1)


def query_place(c: Traits, base: Int32, row: Int32, box: Int32, chunk: Int32) -> Int32:
    """Address of eight columns of hi: K-major rows of 64 bytes, or of 128, swizzled."""
    if c.box == 2 * BOX:
        at = base + (box >> 1) * (c.mma_n * c.box) + row * c.box + (chunk & 1) * 8
        return at + ((((box & 1) * 4 + (chunk >> 1)) ^ (row & 7)) << 4)
    at = base + box * (c.mma_n * BOX) + row * BOX
    return at + (((chunk >> 1) ^ ((row >> 1) & 3)) << 4) + (chunk & 1) * 8


def qk_sums(
    c: Traits, s: Shared, wg: WarpGroup, state: PipelineState, factors: Any = None
) -> list[Float32]:
    """S^T of one tile, hi + lo, before `sQ_scale`. `qk_parts` column ranges of a few k-steps are
    added up in fp32, since wgmma keeps 14 bits; `qk_parts_in_flight` of them run together.

    factors: called under the first MMAs; gives the factor of element x of column range n.
    """
    parts, sets, half = c.qk_parts, c.qk_parts_in_flight, c.rows // 2
    shape = cute.make_layout(wg.mma.qk.partition_shape_C((TILE_KV, c.mma_n)))
    steps = c.columns // K_STEP_BYTES // parts
    arrival = c.boxes_per_barrier * c.box // K_STEP_BYTES
    sums, by = [Float32(0.0)] * half, None
    sK = s.sKV[None, None, state.index]
    tSrK, tSrQ = operands(wg.mma.qk, sK, s.sQ, c.box * c.bytes)
    for n in range(parts + sets):
        at = n % sets * c.mma_n // 2
        if n >= sets:
            if n == sets and factors:
                by = factors()
            warpgroup.wait_group(min(sets, parts + sets - n) - 1)
            for x in range(half):
                both = wg.tSrS[at + x] + wg.tSrS[at + half + x] * Float32(LOW)
                sums[x] = sums[x] + (both * by(x, n - sets) if by else both)
            warpgroup.fence()
        if n >= parts:
            continue
        acc = cute.make_tensor(wg.tSrS.iterator + at, shape)
        atom = cute.make_mma_atom(wg.mma.qk.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for k in range(n * steps, (n + 1) * steps):
            if k % arrival == 0:
                stage_full(c, s, state.index).wait(k // arrival, state.phase)
                if c.gathered and not c.kv_656:
                    cute.arch.fence_view_async_shared()
            cute.gemm(atom, acc, tSrK[None, None, k], tSrQ[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
    return sums


def store_scores(c: Traits, s: Shared, wg: WarpGroup, sums: list[Float32]) -> None:
    """scores <- sums x sQ_scale; of 656-byte tokens plus the rope's product, which they hold."""
    scores = cute.make_tensor(wg.scores.iterator, cute.make_layout(c.rows // 2))
    for j in range(c.rows // 8):
        scale = load2(s.sQ_scale.iterator + 8 * j + 2 * (wg.lane % 4))
        for x in range(4 * j, 4 * j + 4):
            score = sums[x] * scale[x % 2]
            scores[x] = score + scores[x] if c.kv_656 else score


def qk(c: Traits, s: Shared, wg: WarpGroup, state: PipelineState) -> None:
    """Scores of a tile of e4m3. The caller fences."""
    store_scores(c, s, wg, qk_sums(c, s, wg, state))
