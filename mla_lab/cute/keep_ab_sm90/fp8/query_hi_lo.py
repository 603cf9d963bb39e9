"""A bf16 query over e4m3: Q as a sum of two e4m3 numbers, P of fp16.

    x = hi + lo      hi = e4m3(x), lo = e4m3(x - hi)

Four significant bits each. lo is not scaled, so that both go into the same accumulator. A row of Q
is scaled by a power of two that takes its greatest element to 128 .. 256: elements from 1/4 on are
exact, those below are off by at most 2^-10, beside which bf16's own rounding of the greatest is
1/4. The scale goes back into the scores.

Q arrives as it is stored, through two stages of the ring, in 18 boxes of 64 rows by 32 columns: one
k-step, of 64 bytes a row. A thread splits what it will hold of operand A

    rows g, g + 8 (g = lane / 4)     columns 4q .. 4q+3, 16 + 4q .. 16 + 4q + 3 (q = lane % 4)

and keeps hi, but for two boxes; lo and these go to shared memory.

Scores are sums of `score_parts` parts of the columns, added in fp32, since the matrix unit has 14
bits of what it adds to. The first part of QK(t + 1) runs under softmax(t).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...common.feature_operands import with_scales
from ...common.ptx_sm90 import fresh_thread
from ..mainloop_qk_softmax import announce, open_rows, publish_sums, quad, release
from ..mask import hide, open_positions, own_row
from ..params import BLOCK, Globals, Mmas
from ..tile_scheduler import Plan, read_work, stamp_round
from . import kv_656 as groups
from .mainloop_qk_softmax import clear_rows, nothing, row_address
from .p_exchange_2cta import await_place, own_rows, place_free, slot_of
from .p_fp16 import store_four, weigh, weigh_at_once
from .params import BOX, Q_ARRIVAL_BOXES, Q_STAGES, STEP, Transposed, TransposedShared, next_stage

#: exponents, as fp32 has them: of a row's greatest element when it is scaled, of infinity
TOP, INFINITE = 127 + 7, 255
#: boxes of a stage of Q, and k-steps that are read before the first of them is written
#: products of QK(t + 1) issued ahead of the weights of tile t, see `attend`; one follows each word
FIRST = 6
#: words of weights a thread
WORDS = 16
ARRIVED, READ_AHEAD = Q_ARRIVAL_BOXES // Q_STAGES, 3


def split_four(words, scale):
    """Both terms of four numbers of bf16 times `scale`."""
    halves = "".join(
        f" shl.b32 p, {{$r{i}}}, 16; and.b32 h, {{$r{i}}}, 0xFFFF0000; mov.b32 x, p; mov.b32 y, h;"
        " mul.f32 x, x, {$r2}; mul.f32 y, y, {$r2}; cvt.rn.f16x2.f32 p, y, x;"
        f" cvt.rn.satfinite.e4m3x2.f16x2 h{i}, p; cvt.rn.f16x2.e4m3x2 h, h{i};"
        f" sub.rn.f16x2 p, p, h; cvt.rn.satfinite.e4m3x2.f16x2 l{i}, p;"
        for i in range(2)
    )
    return cute.arch.inline_ptx(
        "{ .reg .b32 p, h; .reg .f32 x, y; .reg .b16 h0, h1, l0, l1;" + halves + " mov.b32 {$w0}, "
        "{h0, h1}; mov.b32 {$w1}, {l0, l1}; }",
        write_only_types=[Int32, Int32],
        read_only_args=[*words, scale],
    )


def as_float(bits):
    """The same 32 bits."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )


def as_bits(value):
    """The same 32 bits."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def greater(top, address, offset):
    """The greatest magnitudes so far, of two numbers side by side, and those of 16 bytes of bf16;
    NaN is greatest."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [{$r1}+" + str(offset) + "];"
        " and.b32 a, a, 0x7FFF7FFF; and.b32 b, b, 0x7FFF7FFF; and.b32 c, c, 0x7FFF7FFF;"
        " and.b32 d, d, 0x7FFF7FFF; max.u16x2 a, a, b; max.u16x2 c, c, d; max.u16x2 a, a, c;"
        " mov.b32 b, {$r0}; max.u16x2 {$w0}, a, b; }",
        write_only_types=[Int32],
        read_only_args=[top, address],
    )


def read8(address, offset):
    """Two words of shared memory."""
    return cute.arch.inline_ptx(
        f"ld.shared.v2.b32 {{ {{$w0}}, {{$w1}} }}, [{{$r0}}+{offset}];",
        write_only_types=[Int32, Int32],
        read_only_args=[address],
    )


def greatest(cfg: Transposed, s: TransposedShared, stages):
    """Exponents of the greatest elements of a thread's two rows."""
    tid = fresh_thread()
    # whichever 16 bytes of a row a lane of the quad reads: the four read them all
    at = Int32(s.kv.iterator.toint()) + own_row(tid) * 64 + ((tid & 3) << 4)
    tops = [Int32(0)] * (4 if cfg.scaled else 2)
    for n, stage in enumerate(stages):
        base = at + stage * cfg.stage_bytes
        for box in range(ARRIVED):
            for h in range(2):
                # a rope that is not split
                i = h + 2 * (n * ARRIVED + box >= cfg.steps)
                tops[i] = greater(tops[i], base, box * BOX + 512 * h)
    exponents = []
    for top in tops:
        top = cute.arch.inline_ptx(
            "{ .reg .b32 a, b; and.b32 a, {$r0}, 0xFFFF; shr.u32 b, {$r0}, 16; "
            "max.u32 {$w0}, a, b; }",
            write_only_types=[Int32],
            read_only_args=[top],
        )
        exponents.append(quad(cutlass.max, top) >> 7)
    if cfg.scaled:
        return [cutlass.max(exponents[h], exponents[2 + h] - groups.ROPE_ABOVE) for h in range(2)]
    return exponents


def place_in_box(row, q):
    """Where columns 4q .. 4q + 3 of a row lie in a box of Q, in bytes; those 16 further on lie 32
    bytes off, by exclusive or."""
    return row * 64 + (((q >> 1) ^ ((row >> 1) & 3)) << 4) + ((q & 1) << 3)


@cute.jit
def split_query(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, r_q: cute.Tensor, scale,
    stages,
):  # fmt: skip
    """Both terms of Q, as it lies in two stages, to registers and shared memory; `scale` <- of the
    scores of a thread's two rows, base-2 units."""
    words = cute.recast_tensor(r_q, Int32)
    up = [
        as_float((127 + TOP - cutlass.max(exponent, Int32(TOP - 126))) << 23)
        for exponent in greatest(cfg, s, stages)
    ]
    # the products of the query before have ended in all warps
    cute.arch.mbarrier_arrive(s.q_empty)
    cute.arch.mbarrier_wait(s.q_empty, 0)
    tid = fresh_thread()
    g_row, q = own_row(tid), tid & 3
    at = Int32(s.kv.iterator.toint()) + place_in_box(g_row, q)
    low_at = row_address(Int32(s.q_low.iterator.toint()), 3, 4)
    if const_expr(cfg.q_steps < cfg.steps):
        tail_at = row_address(Int32(s.q_tail.iterator.toint()), 3, 4)
    for first in cutlass.range_constexpr(0, cfg.steps, READ_AHEAD):
        last = min(first + READ_AHEAD, cfg.steps)
        got = [
            [read8((at + stages[k // ARRIVED] * cfg.stage_bytes) ^ (32 * far),
                   (k % ARRIVED) * BOX + 512 * h) for far in (0, 1) for h in (0, 1)]
            for k in range(first, last)
        ]  # fmt: skip
        for k in cutlass.range_constexpr(first, last):
            terms = [split_four(got[k - first][i], up[i % 2]) for i in range(4)]
            odd = 32 * (k % 2)
            store_four(low_at ^ odd, k // 2 * BOX, [low for _, low in terms])
            if const_expr(k < cfg.q_steps):
                for i in cutlass.range_constexpr(4):
                    words[4 * k + i] = terms[i][0]
            else:
                store_four(tail_at ^ odd, (k - cfg.q_steps) // 2 * BOX, [high for high, _ in terms])
    if const_expr(cfg.scaled):
        groups.keep_rope(cfg, s, stages, up)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(s.q_empty)
    cute.arch.mbarrier_wait(s.q_empty, 1)
    bare = with_scales(cfg, g).scale_log2
    for h in cutlass.range_constexpr(2):
        # one over `up`, but infinite where an element was, or NaN
        unit = as_float(Int32(254 << 23) - as_bits(up[h]))
        scale[h] = (unit if unit < Float32(2.0 ** (INFINITE - TOP)) else Float32.inf) * bare
    # the four warps stand in for the eight that accumulate
    for stage in stages:
        for _ in range(2):
            release(cfg, s, stage, cute.arch.lane_idx())


@cute.jit
def await_keys(cfg: cutlass.Constexpr[Transposed], s: TransposedShared, stage, phase, uses, there):
    """Until the tile's keys are there, unless it is known. `uses` holds the parity of `seen`, one
    bit a stage: queries pass through a stage that do not turn it."""
    if not there:
        cute.arch.mbarrier_wait(s.full + stage, phase)
        if const_expr(not cfg.crossed):
            # the loader has waited for as much; thread by thread a race checker knows it too
            cute.arch.mbarrier_wait(s.seen + stage, (uses >> stage) & 1)
        if const_expr(cfg.scaled):
            cute.arch.mbarrier_wait(s.more.ready + stage, ((uses >> stage) & 1) ^ 1)
    return uses ^ (1 << stage)


def keys_there(cfg: Transposed, s: TransposedShared, stage, phase, uses):
    """Whether they are, asked early: an answer takes 100 clocks. (To try a wait would be to stand
    still where nothing has to be waited for.)"""
    there = cute.arch.mbarrier_test_wait(s.full + stage, phase)
    if not cfg.crossed:
        there = there & cute.arch.mbarrier_test_wait(s.seen + stage, (uses >> stage) & 1)
    if cfg.scaled:
        turn = ((uses >> stage) & 1) ^ 1
        there = there & cute.arch.mbarrier_test_wait(s.more.ready + stage, turn)
    return there


def products(cfg, part):
    """(term, k-step) of a part of the columns: the second term's, which are small, come first; in a
    pair all of them with the first part, the longest: it has the softmax to run under."""
    steps = range(*(n * cfg.steps // cfg.score_parts for n in (part, part + 1)))
    if cfg.crossed:
        low = [(1, k) for k in range(cfg.steps)] if part == 0 else []
        return low + [(0, k) for k in steps]
    return [(term, k) for term in (1, 0) for k in steps]


def ahead(cfg):
    """Products of the first part issued ahead of the weights: all eight where there are no more."""
    return len(products(cfg, 0)) if cfg.scaled else FIRST


def issue_part(cfg, mma, frags, acc, part, stage, first=0, last=None):
    """Products `first` to `last` - 1 of a part, the last of them all with the group's end. Between
    them nobody writes what they use: one fence is enough, and each would hold up the weights."""
    r_q, r_tail, r_low, r_k = frags
    rs, ss = cute.make_mma_atom(mma.qk_rs.op), cute.make_mma_atom(mma.qk.op)
    found = products(cfg, part)
    last = len(found) if last is None else last
    if first == 0:
        warpgroup.fence()
    for i in range(first, last):
        term, k = found[i]
        keys = r_k[None, None, k, stage]
        for atom in (rs, ss):
            atom.set(warpgroup.Field.ACCUMULATE, i > 0)
        if term:
            cute.gemm(ss, acc, r_low[None, None, k], keys, acc)
        elif k < cfg.q_steps:
            cute.gemm(rs, acc, r_q[None, None, k], keys, acc)
        else:
            cute.gemm(ss, acc, r_tail[None, None, k - cfg.q_steps, 0], keys, acc)
    if first < last == len(found):
        warpgroup.commit_group()


def one_a_word(cfg, mma, frags, acc, stage):
    """What issues one product of the first part with each word of weights, from `FIRST` on."""

    def between(word):
        at = ahead(cfg) + word
        if at < len(products(cfg, 0)):
            cute.arch.sync_warp()  # else the compiler brings them together again
            issue_part(cfg, mma, frags, acc, 0, stage, at, at + 1)

    return between


def moved(x):
    """The same number, moved here: a plain copy may be made while products are under way."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def added(x, y):
    """The sum, made here."""
    return cute.arch.inline_ptx(
        "add.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


@cute.jit
def announce_if(s: TransposedShared, stage, there):
    """P of the tile before, if there is one."""
    if there:
        announce(s, stage)


def take_scores(cfg, s, mma, frags, scores, part, stage, before, there, ask):
    """Scores <- the first part, which is under way, and the others; P of the tile `before`, if
    `there` is one, is announced after `go` of them. Returns what `ask` says under the last."""
    warpgroup.wait_group(0)
    for n in range(cfg.score_parts):
        if n:
            issue_part(cfg, mma, frags, part, n, stage)
            said = ask()
            warpgroup.wait_group(0)
        if n == min(cfg.go, cfg.score_parts - 1):
            announce_if(s, before, there)
        for x in range(cute.size(scores)):
            scores[x] = added(scores[x], part[x]) if n else moved(part[x])
    return said


def take_parts(cfg, mma, frags, scores, part, stage, ask):
    """As `take_scores`, of a pair: the second part goes to the scores themselves, whose weights are
    made, beside the end of the first."""
    issue_part(cfg, mma, frags, scores, 1, stage)
    for n in range(2, cfg.score_parts + 1):
        warpgroup.wait_group(0)
        for x in range(cute.size(scores)):
            scores[x] = added(scores[x], part[x])
        if n < cfg.score_parts:
            issue_part(cfg, mma, frags, part, n, stage)
            said = ask()
    return said


def take_groups(cfg, s, mma, frags, ropes, scores, part, stage, before, there, ask):
    """As `take_scores`, of tokens of 656 bytes: each part times its tokens' scales. The rope's
    product goes to the scores themselves, beside the second part."""
    for n in range(cfg.score_parts):
        if n == 1:
            groups.issue_rope(mma, ropes, scores, stage)
        if n:
            issue_part(cfg, mma, frags, part, n, stage)
        said = ask() if n + 1 == cfg.score_parts else None
        early = groups.read_scales(cfg, s, n, stage, range(cfg.early))
        warpgroup.wait_group(0)
        if n == min(cfg.go, cfg.score_parts - 1):
            announce_if(s, before, there)
        groups.add_scaled(scores, part, early, 0, n)
        late = groups.read_scales(cfg, s, n, stage, range(cfg.early, 4))
        groups.add_scaled(scores, part, late, cfg.early, n)
    return said


@cute.jit
def attend_split(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, mma: Mmas, plan: Plan, rank
):
    """Per work tile: Q split, then of QK(t + 1) the first part issued, softmax(t) under it, P(t)
    out, the other parts."""
    tid, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(tid % 128 // 32)
    r_k = mma.qk.make_fragment_B(mma.qk.get_slice(0).partition_B(s.kv))
    r_q = cute.make_rmem_tensor(mma.qk_rs.partition_shape_A((64, cfg.q_steps * STEP)), cfg.element)
    r_tail = None
    if const_expr(cfg.q_steps < cfg.steps):
        r_tail = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.q_tail))
    ropes = groups.rope_operands(s, mma) if const_expr(cfg.scaled) else None
    r_low = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.q_low))
    frags = (r_q, r_tail, r_low, r_k)
    shape = mma.qk_rs.partition_shape_C((64, 64))
    scores, part = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
    scale, row_max, row_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
    stage, phase, uses = Int32(0), Int32(0), Int32((1 << cfg.stages) - 1)
    tile = Int32(0)  # of all; the work tile's first
    for index in cutlass.range(plan.first, plan.last, unroll=1):
        stage = cute.arch.make_warp_uniform(stage)
        cute.arch.mbarrier_wait(s.full + stage, phase)
        second, phase = next_stage(stage, phase, cfg.stages)
        cute.arch.mbarrier_wait(s.full + second, phase)
        split_query(cfg, g, s, r_q, scale, (stage, second))
        stage, phase = next_stage(second, phase, cfg.stages)
        work = read_work(g, s, index)
        open_rows(cfg, g, work, Int32(0), row_max, row_sum, row_max)
        beyond = cute.arch.make_warp_uniform(open_positions(cfg, g, work, 16 * w))
        blocks = cute.arch.make_warp_uniform(work.end - work.begin)
        stage = cute.arch.make_warp_uniform(stage)
        # so that nothing is kept in them until here
        scores.fill(0.0)
        part.fill(0.0)
        before, left = stage, blocks
        there, free = Boolean(False), Boolean(False)
        while left > 0:
            stage = cute.arch.make_warp_uniform(stage)
            uses = cute.arch.make_warp_uniform(uses)
            # of the tile whose weights are made
            number = tile + (blocks - left - 1)
            uses = await_keys(cfg, s, stage, phase, uses, there)
            issue_part(cfg, mma, frags, part, 0, stage, 0, ahead(cfg))
            between = one_a_word(cfg, mma, frags, part, stage)
            if left < blocks:
                stamp_round(cfg, g, left, 3)
                hide(cfg, g, s, scores, index, beyond, left + 1)
                if const_expr(cfg.crossed):
                    if not free:
                        await_place(s, number)
                    slot, _ = slot_of(number)
                    weigh_at_once(cfg, s, scores, scale, row_max, row_sum, slot, between)
                    cute.arch.fence_view_async_shared()
                    cute.arch.mbarrier_arrive(s.p_own + slot)
                    issue_part(cfg, mma, frags, part, 0, stage, FIRST + WORDS)
                else:
                    weigh(cfg, s, scores, scale, row_max, row_sum, before, between)
                    cute.arch.fence_view_async_shared()
                stamp_round(cfg, g, left, 4)
            else:
                issue_part(cfg, mma, frags, part, 0, stage, ahead(cfg))
            after, turn = next_stage(stage, phase, cfg.stages)

            def ask(after=after, turn=turn, uses=uses, number=number):
                keys = keys_there(cfg, s, after, turn, uses)
                return keys, place_free(s, number + 1) if cfg.crossed else keys

            if const_expr(cfg.scaled):
                there, free = take_groups(
                    cfg, s, mma, frags, ropes, scores, part, stage, before, left < blocks, ask
                )
            elif const_expr(cfg.crossed):
                there, free = take_parts(cfg, mma, frags, scores, part, stage, ask)
            else:
                there, free = take_scores(
                    cfg, s, mma, frags, scores, part, stage, before, left < blocks, ask
                )
            before = stage
            left = left - 1
            stage, phase = next_stage(stage, phase, cfg.stages)
        # again: held through the loop they would cost registers
        work = read_work(g, s, index)
        tile = tile + blocks
        slot, _ = slot_of(tile - 1)
        hide(cfg, g, s, scores, index, beyond, Int32(1))
        if const_expr(cfg.crossed):
            await_place(s, tile - 1)
            weigh_at_once(cfg, s, scores, scale, row_max, row_sum, slot, nothing)
        else:
            weigh(cfg, s, scores, scale, row_max, row_sum, before, nothing)
        thread = fresh_thread() & 127
        tail = work.kv_len - (work.end - 1) * BLOCK
        if tail < BLOCK:
            clear_rows(cfg, s, before, cutlass.max(tail, Int32(0)), thread)
        cute.arch.mbarrier_wait(s.free, (index - plan.first) & 1)
        to = own_rows(s) if const_expr(cfg.crossed) else s
        publish_sums(cfg, g, to, work, row_max, row_sum, own_row(thread), thread & 31)
        cute.arch.fence_view_async_shared()
        if const_expr(cfg.crossed):
            cute.arch.mbarrier_arrive(s.p_own + slot)
        else:
            announce(s, before)
