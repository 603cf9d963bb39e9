"""Q of a bf16 query over e4m3, split into two e4m3 numbers (`query_hi_lo`) on its way from the ring
to registers and shared memory.

Q arrives as it is stored, through two stages of the ring, in 18 boxes of 64 rows by 32 columns: one
k-step, of 64 bytes per row. A thread splits what it will hold of operand A

    rows g, g + 8 (g = lane / 4)     columns 4q .. 4q+3, 16 + 4q .. 16 + 4q + 3 (q = lane % 4)

by two k-steps at a time: lo goes to shared memory, as does hi of the last boxes; hi of the others
takes the place of the boxes that it is made of, and goes from there to registers. The loop is not
unrolled: its code runs once a work tile, and in a decode step, where other kernels run between two
launches, each 10 KB of such code cost a launch 1 us or more (`data/notes/kernel_attempts.jsonl`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...common.feature_operands import magnitude, not_zero, with_scales, with_sign
from ...common.ptx_sm90 import (
    bits_float,
    butterfly,
    float_bits,
    fresh_thread,
    pick,
    ptx,
    stmatrix_x4,
)
from ...rows_on_m.mask import first_row
from ...rows_on_m.params import Cta
from ..params import BOX
from ..release import release_stage
from . import kv_656
from .mainloop_qk_softmax import load_matrices, matrix_row
from .params import Q_ARRIVAL_BOXES, Q_STAGES, Fp8Config

#: biased fp32 exponents: of a row's greatest element after scaling, of infinity
SCALED_TOP, INFINITE = 127 + 7, 255
#: rows of smaller elements are not raised further: the inverse times a small scale stays above 0
LEAST_EXPONENT = 40
#: boxes of one stage of Q
ARRIVED = Q_ARRIVAL_BOXES // Q_STAGES
#: boxes whose loads are in flight together in the search of a row's greatest element
AT_ONCE = 3


def split_four(words, scale):
    """Both terms of four bf16 numbers times the power of two in both halves of `scale`."""
    # a word, taken as fp32, is its upper number: what lies below is less than half a unit of the
    # last of four bits, and is rounded away
    halves = "".join(
        f" mul.rn.bf16x2 x, {{$r{i}}}, {{$r2}}; and.b32 h, x, 0xFFF0FFF0; sub.rn.bf16x2 x, x, h;"
        f" shl.b32 y, h, 16; cvt.rn.satfinite.e4m3x2.f32 h{i}, h, y;"
        f" shl.b32 y, x, 16; cvt.rn.satfinite.e4m3x2.f32 l{i}, x, y;"
        for i in range(2)
    )
    return ptx(
        "{ .reg .b32 x, y, h; .reg .b16 h0, h1, l0, l1;" + halves + " mov.b32 {$w0}, {h0, h1};"
        " mov.b32 {$w1}, {l0, l1}; }",
        *words,
        scale,
        out=[Int32] * 2,
    )


def max_magnitudes(top, address, offset):
    """The greatest magnitudes so far, in both halves of a word, and those of 16 bytes of bf16; NaN
    is greatest."""
    return ptx(
        "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [{$r1}+" + str(offset) + "];"
        " abs.bf16x2 a, a; abs.bf16x2 b, b; abs.bf16x2 c, c; abs.bf16x2 d, d;"
        " max.NaN.bf16x2 a, a, b; max.NaN.bf16x2 c, c, d; max.NaN.bf16x2 a, a, c;"
        " mov.b32 b, {$r0}; max.NaN.bf16x2 {$w0}, a, b; }",
        top,
        address,
        out=Int32,
    )


def max_of_halves(word):
    """The greater of two unsigned 16-bit numbers."""
    return ptx(
        "{ .reg .b32 a, b; and.b32 a, {$r0}, 0xFFFF; shr.u32 b, {$r0}, 16; max.u32 {$w0}, a, b; }",
        word,
        out=Int32,
    )


@cute.jit
def greatest(tops: cute.Tensor, base, boxes: cutlass.Constexpr[int]):
    """`tops` of a thread's two rows and the first `boxes` boxes of a stage, which begin for it at
    `base`."""
    for box in cutlass.range(boxes // AT_ONCE, unroll=1):
        for more in cutlass.range_constexpr(AT_ONCE):
            for h in cutlass.range_constexpr(2):
                at = base + box * (AT_ONCE * BOX)
                tops[h] = max_magnitudes(tops[h], at, more * BOX + 512 * h)
    for box in cutlass.range_constexpr(boxes // AT_ONCE * AT_ONCE, boxes):
        for h in cutlass.range_constexpr(2):
            tops[h] = max_magnitudes(tops[h], base, box * BOX + 512 * h)


@cute.jit
def max_exponents(cta: Cta, states):
    """Biased exponents of the greatest elements of a thread's two rows of Q, which has landed."""
    cfg, tid = cta.cfg, fresh_thread()
    # any 16 bytes of a row: the four lanes of the quad read all of them
    at = Int32(cta.s.sKV.iterator.toint()) + first_row(tid) * 64 + ((tid & 3) << 4)
    first, second = (at + state.index * cfg.stage_bytes for state in states)
    tops = cute.make_rmem_tensor(2, Int32)
    tops.fill(0)
    cta.s.kv_pipe.consumer_wait(states[0])
    greatest(tops, first, ARRIVED)
    cta.s.kv_pipe.consumer_wait(states[1])
    # the rope of 656-byte tokens, the last boxes of the second stage, is not split
    split = cfg.steps - ARRIVED
    greatest(tops, second, split)
    exponents = []
    for h in cutlass.range_constexpr(2):
        rope = Int32(0)
        for box in cutlass.range_constexpr(split, ARRIVED):
            rope = max_magnitudes(rope, second, box * BOX + 512 * h)
        exponent = butterfly(cutlass.max, max_of_halves(tops[h])) >> 7
        if const_expr(cfg.kv_656):
            of_rope = butterfly(cutlass.max, max_of_halves(rope)) >> 7
            exponent = cutlass.max(exponent, of_rope - kv_656.ROPE_ABOVE)
        exponents.append(exponent)
    return exponents


def place_in_box(row, q):
    """Byte offset of columns 4q .. 4q + 3 of a row in a box of Q; those 16 further on lie at this
    XOR 32."""
    return row * 64 + (((q >> 1) ^ ((row >> 1) & 3)) << 4) + ((q & 1) << 3)


def arrived_box(cfg: Fp8Config, stages, step):
    """Byte offset in the ring of the box in which k-step `step` of Q arrived."""
    in_second = step >= ARRIVED
    stage = pick(in_second, stages[1], stages[0])
    return stage * cfg.stage_bytes + (step - pick(in_second, Int32(ARRIVED), Int32(0))) * BOX


def row_factors(cta: Cta, states):
    """Factors of the thread's two rows: powers of two, of the sign of a scale in memory."""
    up = [
        bits_float((127 + SCALED_TOP - cutlass.max(x, Int32(LEAST_EXPONENT))) << 23)
        for x in max_exponents(cta, states)
    ]
    if not cta.cfg.scales:
        return up
    scale = with_scales(cta.cfg, cta.g).scale_log2
    return [with_sign(x, scale) for x in up]


@cute.jit
def split_steps(cta: Cta, tSrQ: cute.Tensor, up, stages):
    """Both terms of Q times the factors `up` of the thread's rows, hi of the first boxes to `tSrQ`.
    A warp reads and writes its own rows alone."""
    cfg, s = cta.cfg, cta.s
    tid = fresh_thread()
    base = Int32(s.sKV.iterator.toint())
    factors = [kv_656.twice_bf16(x) for x in up]
    at = base + place_in_box(first_row(tid), tid & 3)
    hi_at, low_at = matrix_row(base), matrix_row(Int32(s.sQ_low.iterator.toint()))
    tail_at = hi_at
    if const_expr(cfg.q_steps < cfg.steps):
        tail_at = matrix_row(Int32(s.sQ_tail.iterator.toint()))
    # two k-steps at a time: a box of hi, and one of lo
    for pair in cutlass.range(cfg.steps // 2, unroll=1):
        boxes = [arrived_box(cfg, stages, 2 * pair + odd) for odd in (0, 1)]
        places = [(32 * far, 512 * h) for far in (0, 1) for h in (0, 1)]
        got = [[kv_656.load_words((at + box) ^ x, y) for x, y in places] for box in boxes]
        cute.arch.sync_warp()  # hi takes the place of the first of the two
        to = hi_at + boxes[0]
        if const_expr(cfg.q_steps < cfg.steps):
            to = pick(2 * pair < cfg.q_steps, to, tail_at + (pair - cfg.q_steps // 2) * BOX)
        for odd in cutlass.range_constexpr(2):
            terms = [split_four(got[odd][i], factors[i % 2]) for i in range(4)]
            stmatrix_x4(to ^ (32 * odd), 0, [hi for hi, _ in terms])
            stmatrix_x4((low_at + pair * BOX) ^ (32 * odd), 0, [lo for _, lo in terms])
    cute.arch.sync_warp()
    words = cute.recast_tensor(tSrQ, Int32)
    for k in cutlass.range_constexpr(cfg.q_steps):
        stage, box = stages[k // 2 * 2 // ARRIVED], k // 2 * 2 % ARRIVED
        got = load_matrices((hi_at + stage * cfg.stage_bytes) ^ (32 * (k % 2)), box * BOX)
        for i in cutlass.range_constexpr(4):
            words[4 * k + i] = got[i]


@cute.jit
def split_query(cta: Cta, tSrQ: cute.Tensor, scale, states):
    """Both terms of Q, from the stages of two consumer states, to registers and shared memory;
    `scale` <- of the scores of the thread's two rows, base-2 units."""
    cfg, s = cta.cfg, cta.s
    stages = [state.index for state in states]
    up = row_factors(cta, states)
    # the MMAs of the query before have finished in all warps
    s.q_pipe.empty.arrive(0)
    s.q_pipe.empty.wait(0, 0)
    split_steps(cta, tSrQ, up, stages)
    if const_expr(cfg.kv_656):
        kv_656.scale_q_rope(cta, stages, up)
    cute.arch.fence_view_async_shared()
    s.q_pipe.empty.arrive(0)
    s.q_pipe.empty.wait(0, 1)
    scale_log2 = with_scales(cfg, cta.g).scale_log2
    for h in cutlass.range_constexpr(2):
        # 1 / up, but infinite where an element was infinite or NaN
        bits = float_bits(up[h])
        if const_expr(cfg.scales):
            bits = bits & 0x7FFFFFFF
        unit = bits_float(Int32(254 << 23) - bits)
        finite = unit < Float32(2.0 ** (INFINITE - SCALED_TOP))
        scale[h] = (unit if finite else Float32.inf) * scale_log2
        if const_expr(cfg.scales):
            scale[h] = not_zero(magnitude(scale[h]))
    for stage in stages:
        for _ in range(2):
            release_stage(cta, stage, cute.arch.lane_idx())
