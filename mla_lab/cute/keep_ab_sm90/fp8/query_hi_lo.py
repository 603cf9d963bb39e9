"""QK-softmax mainloop of a bf16 query over e4m3: Q as a sum of two e4m3 numbers, fp16 weights.

    x = hi + lo      hi = e4m3(x), lo = e4m3(x - hi)

Four significant bits each. lo is not scaled, so that both terms go into the same accumulator. A row
of Q is scaled by a power of two that takes its greatest element to 128 .. 256: elements from 1/4 on
are exact, smaller ones are off by at most 2^-10, while bf16's own rounding of the greatest is 1/4.
The scale is divided out of the scores.

Q arrives as it is stored, through two stages of the ring, in 18 boxes of 64 rows by 32 columns: one
k-step, of 64 bytes per row. A thread splits what it will hold of operand A

    rows g, g + 8 (g = lane / 4)     columns 4q .. 4q+3, 16 + 4q .. 16 + 4q + 3 (q = lane % 4)

by two k-steps at a time: lo goes to shared memory, as does hi of the last boxes; hi of the others
takes the place of the boxes that it is made of, and goes from there to registers. The loop is not
unrolled: its code runs once a work tile, and in a decode step, where other kernels run between two
launches, each 10 KB of such code cost a launch 1 us or more (`data/notes/kernel_attempts.jsonl`).

Scores are sums of `qk_parts` column parts, added in fp32, because the tensor core keeps 14 bits of
what it adds. The first part of QK(t + 1) runs under softmax(t).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...common.feature_operands import magnitude, not_zero, with_scales, with_sign
from ...common.pipeline import PipelineState, StagePhases
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
from ...rows_on_m.profile import profile_tile
from ...rows_on_m.work_records import read_work
from ..mainloop_qk_softmax import RowState, TileContext, release_kv
from ..params import BOX
from . import kv_656
from .mainloop_qk_softmax import (
    finish_rows,
    load_matrices,
    mask_scores,
    matrix_row,
    nothing,
    tile_context,
)
from .p_exchange_2cta import p_state
from .p_fp16 import online_softmax_step, optimistic_softmax_step
from .params import Q_ARRIVAL_BOXES, Q_STAGES, STEP, Fp8Config

#: biased fp32 exponents: of a row's greatest element after scaling, of infinity
SCALED_TOP, INFINITE = 127 + 7, 255
#: MMAs of QK(t + 1) issued before the weights of tile t are computed; one more follows each word
FIRST = 6
#: words of weights per thread
WORDS = 16
#: boxes of one stage of Q
ARRIVED = Q_ARRIVAL_BOXES // Q_STAGES


@dataclass(frozen=True)
class Fragments:
    """Operands of QK; scores of one tile, and of a part of the next one."""

    tSrQ: cute.Tensor  # hi in registers
    tSrQ_tail: Any  # hi of the last boxes, descriptors; None if all are in registers
    tSrQ_low: cute.Tensor  # lo, descriptors
    tSrK: cute.Tensor  # descriptors
    rope: Any  # kv_656: descriptors of the ropes of Q and K
    tSrS: cute.Tensor
    part: cute.Tensor


@dataclass(frozen=True)
class LoopState:
    """What a step of the mainloop passes to the next one."""

    state: PipelineState
    p_phases: StagePhases  # of p_pipe.empty: queries pass through a stage that do not turn it
    previous: Int32  # stage of the tile whose weights come next
    left: Int32  # tiles whose scores are still to come
    ready: Boolean  # the keys of the tile at `state` have landed
    p_free: Boolean  # p_exchange: the next P stage is free


def split_four(words, scale):
    """Both terms of four bf16 numbers times `scale`."""
    halves = "".join(
        f" shl.b32 p, {{$r{i}}}, 16; and.b32 h, {{$r{i}}}, 0xFFFF0000; mov.b32 x, p; mov.b32 y, h;"
        " mul.f32 x, x, {$r2}; mul.f32 y, y, {$r2}; cvt.rn.f16x2.f32 p, y, x;"
        f" cvt.rn.satfinite.e4m3x2.f16x2 h{i}, p; cvt.rn.f16x2.e4m3x2 h, h{i};"
        f" sub.rn.f16x2 p, p, h; cvt.rn.satfinite.e4m3x2.f16x2 l{i}, p;"
        for i in range(2)
    )
    return ptx(
        "{ .reg .b32 p, h; .reg .f32 x, y; .reg .b16 h0, h1, l0, l1;" + halves + " mov.b32 {$w0}, "
        "{h0, h1}; mov.b32 {$w1}, {l0, l1}; }",
        *words,
        scale,
        out=[Int32] * 2,
    )


def max_magnitudes(top, address, offset):
    """The greatest magnitudes so far, in both halves of a word, and those of 16 bytes of bf16; NaN
    is greatest."""
    return ptx(
        "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [{$r1}+" + str(offset) + "];"
        " and.b32 a, a, 0x7FFF7FFF; and.b32 b, b, 0x7FFF7FFF; and.b32 c, c, 0x7FFF7FFF;"
        " and.b32 d, d, 0x7FFF7FFF; max.u16x2 a, a, b; max.u16x2 c, c, d; max.u16x2 a, a, c;"
        " mov.b32 b, {$r0}; max.u16x2 {$w0}, a, b; }",
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


def load_words(address, offset):
    """Two words of shared memory."""
    return ptx(
        f"ld.shared.v2.b32 {{ {{$w0}}, {{$w1}} }}, [{{$r0}}+{offset}];", address, out=[Int32] * 2
    )


@cute.jit
def max_exponents(cta: Cta, stages):
    """Biased exponents of the greatest elements of a thread's two rows of Q."""
    cfg, tid = cta.cfg, fresh_thread()
    # any 16 bytes of a row: the four lanes of the quad read all of them
    at = Int32(cta.s.sKV.iterator.toint()) + first_row(tid) * 64 + ((tid & 3) << 4)
    first, second = (at + stage * cfg.stage_bytes for stage in stages)
    tops = cute.make_rmem_tensor(2, Int32)
    tops.fill(0)
    # the rope of 656-byte tokens, the last boxes of the second stage, is not split
    split = cfg.steps - ARRIVED
    for box in cutlass.range(split, unroll=1):
        for h in cutlass.range_constexpr(2):
            for base in (first, second):
                tops[h] = max_magnitudes(tops[h], base + box * BOX, 512 * h)
    exponents = []
    for h in cutlass.range_constexpr(2):
        top, rope = tops[h], Int32(0)
        for box in cutlass.range_constexpr(split, ARRIVED):
            top = max_magnitudes(top, first, box * BOX + 512 * h)
            rope = max_magnitudes(rope, second, box * BOX + 512 * h)
        exponent = butterfly(cutlass.max, max_of_halves(top)) >> 7
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


def row_factors(cta: Cta, stages):
    """Factors of the thread's two rows: powers of two, of the sign of a scale in memory."""
    up = [
        bits_float((127 + SCALED_TOP - cutlass.max(x, Int32(SCALED_TOP - 126))) << 23)
        for x in max_exponents(cta, stages)
    ]
    if not cta.cfg.scales:
        return up
    scale = with_scales(cta.cfg, cta.g).scale_log2
    return [with_sign(x, scale) for x in up]


@cute.jit
def split_steps(cta: Cta, f: Fragments, up, stages):
    """Both terms of Q times the factors `up` of the thread's rows. A warp reads and writes its own
    rows alone."""
    cfg, s = cta.cfg, cta.s
    tid = fresh_thread()
    base = Int32(s.sKV.iterator.toint())
    at = base + place_in_box(first_row(tid), tid & 3)
    hi_at, low_at = matrix_row(base), matrix_row(Int32(s.sQ_low.iterator.toint()))
    tail_at = hi_at
    if const_expr(cfg.q_steps < cfg.steps):
        tail_at = matrix_row(Int32(s.sQ_tail.iterator.toint()))
    # two k-steps at a time: a box of hi, and one of lo
    for pair in cutlass.range(cfg.steps // 2, unroll=1):
        boxes = [arrived_box(cfg, stages, 2 * pair + odd) for odd in (0, 1)]
        got = [[load_words((at + box) ^ (32 * far), 512 * h) for far in (0, 1) for h in (0, 1)]
               for box in boxes]  # fmt: skip
        cute.arch.sync_warp()  # hi takes the place of the first of the two
        to = hi_at + boxes[0]
        if const_expr(cfg.q_steps < cfg.steps):
            to = pick(2 * pair < cfg.q_steps, to, tail_at + (pair - cfg.q_steps // 2) * BOX)
        for odd in cutlass.range_constexpr(2):
            terms = [split_four(got[odd][i], up[i % 2]) for i in range(4)]
            stmatrix_x4(to ^ (32 * odd), 0, [hi for hi, _ in terms])
            stmatrix_x4((low_at + pair * BOX) ^ (32 * odd), 0, [lo for _, lo in terms])
    cute.arch.sync_warp()
    words = cute.recast_tensor(f.tSrQ, Int32)
    for k in cutlass.range_constexpr(cfg.q_steps):
        stage, box = stages[k // 2 * 2 // ARRIVED], k // 2 * 2 % ARRIVED
        got = load_matrices((hi_at + stage * cfg.stage_bytes) ^ (32 * (k % 2)), box * BOX)
        for i in cutlass.range_constexpr(4):
            words[4 * k + i] = got[i]


@cute.jit
def split_query(cta: Cta, f: Fragments, scale, stages):
    """Both terms of Q, from two stages, to registers and shared memory; `scale` <- of the scores of
    the thread's two rows, base-2 units."""
    cfg, s = cta.cfg, cta.s
    up = row_factors(cta, stages)
    # the MMAs of the query before have finished in all warps
    s.q_pipe.empty.arrive(0)
    s.q_pipe.empty.wait(0, 0)
    split_steps(cta, f, up, stages)
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
    # four warps arrive for the eight PV warps
    for stage in stages:
        for _ in range(2):
            release_kv(cta, stage, cute.arch.lane_idx())


@cute.jit
def wait_for_keys(cta: Cta, loop: LoopState):
    """Wait until the tile's keys have landed, unless it is known. Returns the flipped phases."""
    s, state = cta.s, loop.state
    if not loop.ready:
        s.kv_pipe.consumer_wait(state)
        if const_expr(not cta.cfg.p_exchange):
            # implied by the producer's wait; each thread waits itself, as racecheck follows threads
            s.p_pipe.producer_acquire(loop.p_phases.state(state.index))
        if const_expr(cta.cfg.kv_656):
            s.kv_656.ready.wait_for(loop.p_phases.state(state.index).opposite())
    if const_expr(cta.cfg.gather and not cta.cfg.kv_656):
        # tokens were not written through the async proxy, which MMAs read through; of 656 bytes
        # the scale warp's fence lies in between
        cute.arch.fence_view_async_shared()
    return loop.p_phases.flip(state.index)


def try_keys(cta: Cta, state: PipelineState, p_phases: StagePhases):
    """True if they have landed. Tested early, because the result takes 100 clocks, by test_wait: a
    try_wait may suspend the thread."""
    s, cfg = cta.s, cta.cfg
    ready = s.kv_pipe.consumer_try_wait(state)
    if not cfg.p_exchange:
        ready = ready & s.p_pipe.producer_try_acquire(p_phases.state(state.index))
    if cfg.kv_656:
        ready = ready & s.kv_656.ready.test_for(p_phases.state(state.index).opposite())
    return ready


def mma_steps(cfg: Fp8Config, part: int) -> list[tuple[int, int]]:
    """(term, k-step) of the MMAs of a column part. Those of the second term, which are small, come
    first; with `p_exchange` all of them in part 0, which runs under the softmax."""
    steps = range(*(n * cfg.steps // cfg.qk_parts for n in (part, part + 1)))
    if cfg.p_exchange:
        low = [(1, k) for k in range(cfg.steps)] if part == 0 else []
        return low + [(0, k) for k in steps]
    return [(term, k) for term in (1, 0) for k in steps]


def ahead(cfg: Fp8Config) -> int:
    """MMAs of part 0 issued before the weights: with kv_656 all eight."""
    return len(mma_steps(cfg, 0)) if cfg.kv_656 else FIRST


def issue_part(cta: Cta, f: Fragments, acc, part: int, stage, first: int = 0, last=None):
    """MMAs `first` to `last` - 1 of a part; with the last of all the commit. Nothing writes their
    operands in between, so one fence suffices; each would delay the weights."""
    cfg, mma = cta.cfg, cta.mma
    rs, ss = cute.make_mma_atom(mma.qk_rs.op), cute.make_mma_atom(mma.qk.op)
    found = mma_steps(cfg, part)
    last = len(found) if last is None else last
    if first == 0:
        warpgroup.fence()
    for i in range(first, last):
        term, k = found[i]
        keys = f.tSrK[None, None, k, stage]
        for atom in (rs, ss):
            atom.set(warpgroup.Field.ACCUMULATE, i > 0)
        if term:
            cute.gemm(ss, acc, f.tSrQ_low[None, None, k], keys, acc)
        elif k < cfg.q_steps:
            cute.gemm(rs, acc, f.tSrQ[None, None, k], keys, acc)
        else:
            cute.gemm(ss, acc, f.tSrQ_tail[None, None, k - cfg.q_steps, 0], keys, acc)
    if first < last == len(found):
        warpgroup.commit_group()


def mma_per_word(cta: Cta, f: Fragments, stage) -> Callable[[int], None]:
    """`on_word` that issues one MMA of part 0, from `ahead` on."""

    def on_word(word):
        at = ahead(cta.cfg) + word
        if at < len(mma_steps(cta.cfg, 0)):
            cute.arch.sync_warp()  # otherwise the compiler moves the MMAs together again
            issue_part(cta, f, f.part, 0, stage, at, at + 1)

    return on_word


def move_here(x):
    """The same number by an opaque move: a plain copy could be placed while an MMA writes it."""
    return ptx("mov.b32 {$w0}, {$r0};", x, out=Float32)


def add_here(x, y):
    """The sum by an opaque addition."""
    return ptx("add.f32 {$w0}, {$r0}, {$r1};", x, y, out=Float32)


@cute.jit
def commit_p_if(cta: Cta, stage, exists):
    """Commit P of the previous tile, if there is one."""
    if exists:
        cta.s.p_pipe.producer_commit(stage)


def finish_parts(cta: Cta, f: Fragments, stage, previous, exists, test: Callable):
    """Scores <- part 0, which is under way, and the others; P of the tile `previous`, if it
    `exists`, is committed after `qk_parts_before_p` of them. Returns `test()`, called under the
    last part."""
    cfg, scores, part = cta.cfg, f.tSrS, f.part
    warpgroup.wait_group(0)
    for n in range(cfg.qk_parts):
        if n:
            issue_part(cta, f, part, n, stage)
            ready = test()
            warpgroup.wait_group(0)
        if n == min(cfg.qk_parts_before_p, cfg.qk_parts - 1):
            commit_p_if(cta, previous, exists)
        for x in range(cute.size(scores)):
            scores[x] = add_here(scores[x], part[x]) if n else move_here(part[x])
    return ready


def finish_parts_exchange(cta: Cta, f: Fragments, stage, test: Callable):
    """As `finish_parts`, with `p_exchange`: part 1 goes to the scores themselves, whose weights are
    stored, beside the end of part 0."""
    scores, part = f.tSrS, f.part
    issue_part(cta, f, scores, 1, stage)
    for n in range(2, cta.cfg.qk_parts + 1):
        warpgroup.wait_group(0)
        for x in range(cute.size(scores)):
            scores[x] = add_here(scores[x], part[x])
        if n < cta.cfg.qk_parts:
            issue_part(cta, f, part, n, stage)
            ready = test()
    return ready


def finish_parts_656(cta: Cta, f: Fragments, stage, previous, exists, test: Callable):
    """As `finish_parts`, for 656-byte tokens: each part times its tokens' scales. QK of the rope
    goes to the scores themselves, beside part 1."""
    cfg, scores, part = cta.cfg, f.tSrS, f.part
    for n in range(cfg.qk_parts):
        if n == 1:
            kv_656.issue_rope(cta.mma, f.rope, scores, stage)
        if n:
            issue_part(cta, f, part, n, stage)
        ready = test() if n + 1 == cfg.qk_parts else None
        scales = kv_656.load_scales(cta, n, stage)
        warpgroup.wait_group(0)
        if n == min(cfg.qk_parts_before_p, cfg.qk_parts - 1):
            commit_p_if(cta, previous, exists)
        kv_656.add_scaled(scores, part, scales, n)
    return ready


def make_fragments(cta: Cta) -> Fragments:
    """Descriptors once for all tiles, and registers."""
    cfg, s, mma = cta.cfg, cta.s, cta.mma
    tSrK = mma.qk.make_fragment_B(mma.qk.get_slice(0).partition_B(s.sKV))
    tSrQ = cute.make_rmem_tensor(mma.qk_rs.partition_shape_A((64, cfg.q_steps * STEP)), cfg.element)
    tSrQ_tail = None
    if cfg.q_steps < cfg.steps:
        tSrQ_tail = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.sQ_tail))
    rope = kv_656.rope_operands(s, mma) if cfg.kv_656 else None
    tSrQ_low = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.sQ_low))
    shape = mma.qk_rs.partition_shape_C((64, 64))
    scores, part = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
    return Fragments(tSrQ, tSrQ_tail, tSrQ_low, tSrK, rope, scores, part)


@cute.jit
def softmax_under_part(
    cta: Cta, f: Fragments, rows: RowState, scale, tile: TileContext, loop: LoopState, number
):
    """Weights of the previous tile, number `number` of the CTA, while part 0 of the tile at
    `loop.state` runs."""
    cfg, s, stage = cta.cfg, cta.s, loop.state.index
    on_word = mma_per_word(cta, f, stage)
    profile_tile(cfg, cta.g, loop.left, "QK done")
    mask_scores(cta, f.tSrS, tile, loop.previous, loop.left + 1)
    if const_expr(cfg.p_exchange):
        if not loop.p_free:
            s.p_pipe.producer_acquire(p_state(number).opposite())
        p_stage = p_state(number).index
        optimistic_softmax_step(cta, f.tSrS, scale, rows, p_stage, on_word)
        cute.arch.fence_view_async_shared()
        s.p_written.arrive(p_stage)
        issue_part(cta, f, f.part, 0, stage, FIRST + WORDS)
    else:
        online_softmax_step(cta, f.tSrS, scale, rows, loop.previous, on_word)
        cute.arch.fence_view_async_shared()
    profile_tile(cfg, cta.g, loop.left, "P stored")


@cute.jit
def qk_tile(
    cta: Cta, f: Fragments, rows: RowState, scale, tile: TileContext, loop: LoopState, number, tiles
):
    """Scores of the tile at `loop.state`, one of `tiles` of the work tile. Unless it is the first,
    the weights of the previous one, number `number` of the CTA, are computed here."""
    cfg, state = cta.cfg, loop.state
    p_phases = wait_for_keys(cta, loop)
    issue_part(cta, f, f.part, 0, state.index, 0, ahead(cfg))
    if loop.left < tiles:
        softmax_under_part(cta, f, rows, scale, tile, loop, number)
    else:
        issue_part(cta, f, f.part, 0, state.index, ahead(cfg))
    after = state.advance(cfg.stages)

    def test():
        keys = try_keys(cta, after, p_phases)
        following = p_state(number + 1).opposite()
        return keys, cta.s.p_pipe.producer_try_acquire(following) if cfg.p_exchange else keys

    if const_expr(cfg.p_exchange):
        ready, p_free = finish_parts_exchange(cta, f, state.index, test)
    else:
        finish = finish_parts_656 if cfg.kv_656 else finish_parts
        ready, p_free = finish(cta, f, state.index, loop.previous, loop.left < tiles, test)
    left = loop.left - 1
    after = state.advance(cfg.stages)
    return LoopState(after, p_phases, state.index, left, ready, p_free)


@cute.jit
def finish_work_tile(
    cta: Cta, f: Fragments, rows: RowState, scale, tile: TileContext, previous, number
):
    """P of the last tile, number `number` of the CTA, and the row statistics for the epilogue."""
    s, p_stage = cta.s, p_state(number).index
    # read again: held through the loop, it would take registers
    work = read_work(cta.g, s, tile.index)
    mask_scores(cta, f.tSrS, tile, previous, Int32(1))
    if const_expr(cta.cfg.p_exchange):
        s.p_pipe.producer_acquire(p_state(number).opposite())
        optimistic_softmax_step(cta, f.tSrS, scale, rows, p_stage, nothing)
        finish_rows(cta, work, previous, rows, tile.index)
        s.p_written.arrive(p_stage)
    else:
        online_softmax_step(cta, f.tSrS, scale, rows, previous, nothing)
        finish_rows(cta, work, previous, rows, tile.index)
        s.p_pipe.producer_commit(previous)


@cute.jit
def mainloop_qk_softmax_hi_lo(cta: Cta):
    """Per work tile: Q split, then part 0 of QK(t + 1) issued, softmax(t) under it, P(t) stored,
    the other parts."""
    cfg, s = cta.cfg, cta.s
    w = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % 128 // 32)
    f = make_fragments(cta)
    scale, row_max, row_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
    rows = RowState(row_max, row_sum, row_max)
    state, p_phases = PipelineState.start(), StagePhases(Int32((1 << cfg.stages) - 1))
    count = Int32(0)  # of the CTA's tiles before this work tile
    for index in cutlass.range(cta.plan.first, cta.plan.last, unroll=1):
        state = state.uniform()
        s.kv_pipe.consumer_wait(state)
        second = state.advance(cfg.stages)
        s.kv_pipe.consumer_wait(second)
        split_query(cta, f, scale, (state.index, second.index))
        state = second.advance(cfg.stages)
        tile, tiles = tile_context(cta, rows, index, w)
        state = state.uniform()
        # so that no older value is held in these registers
        f.tSrS.fill(0.0)
        f.part.fill(0.0)
        loop = LoopState(state, p_phases, state.index, tiles, Boolean(False), Boolean(False))
        while loop.left > 0:
            loop = LoopState(
                loop.state.uniform(), loop.p_phases.uniform(), loop.previous, loop.left,
                loop.ready, loop.p_free,
            )  # fmt: skip
            number = count + (tiles - loop.left - 1)
            loop = qk_tile(cta, f, rows, scale, tile, loop, number, tiles)
        state, p_phases = loop.state, loop.p_phases
        count = count + tiles
        finish_work_tile(cta, f, rows, scale, tile, loop.previous, count - 1)
