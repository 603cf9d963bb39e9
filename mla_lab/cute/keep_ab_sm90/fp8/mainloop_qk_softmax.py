"""The attend role of the e4m3 kernel: S = Q K^T with most of Q in registers, softmax, P.

P lies on the rope box of its tile's stage, rows of 64 bytes with the tokens in the order in which
V^T comes out of `ldmatrix` (see swap_ab's `fp8`): in every 16 tokens 0 8 1 9 2 10 .. 7 15. Of a row
and 16 tokens a thread's four weights are neighbours there, one word:

    thread q of a quad holds tokens 2q 2q+1 (col8 even), 2q+8 2q+9 (col8 odd)
    bytes 4q .. 4q+3        tokens 2q  2q+8  2q+1  2q+9
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...common.feature_operands import with_scales
from ...common.fp8 import join_two, round_two
from ...common.ptx_sm90 import fresh_thread
from ..mainloop_qk_softmax import (
    announce,
    open_rows,
    publish_pair,
    publish_sums,
    quad,
    row_top,
    select,
)
from ..mask import hide, open_positions, own_row
from ..params import BLOCK, Globals, Mmas
from ..tile_scheduler import Plan, read_work, stamp_round
from .params import BOX, Q_STEPS, ROPE_BOX, STAGE, STEPS, Transposed, TransposedShared, next_stage

#: words of weights a thread
WORDS = 8
#: k-steps of QK(t + 1) issued ahead of the weights of tile t; one follows each word of weights, and
#: from `LATE` on they follow the row sums. The matrix unit takes a few ahead of its time; who
#: issues all 18 at once waits 500 to 800 clocks for it, with the weights still to make
FIRST, LATE = 4, 14

#: what takes a byte from 0x7E on, and none before, to its high bit: four weights at once
TO_HIGH_BIT, HIGH_BITS = 0x02020202, 0x80808080


def row_address(base, matrix_row, matrix_chunk):
    """Where a lane's row of an 8 x 8 matrix of 16-bit elements lies in a warp's 16 rows of a box,
    if its matrices have these halves of rows and 16-byte chunks."""
    tid = fresh_thread()
    row = ((tid >> 1) & 48) + 8 * ((tid >> matrix_row) & 1) + (tid & 7)
    chunk = ((tid >> matrix_chunk) & 1) ^ ((row >> 1) & 3)
    return base + row * 64 + (chunk << 4)


def take_q(s: TransposedShared, r_q: cute.Tensor):
    """Q to registers, but for its last two boxes."""
    words = cute.recast_tensor(r_q, Int32)
    base = row_address(Int32(s.q.iterator.toint()), 3, 4)
    for odd in range(2):
        at = base ^ (32 * odd)
        for k in range(odd, Q_STEPS, 2):
            got = cute.arch.inline_ptx(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, "
                f"[{{$r0}}+{k // 2 * BOX}];",
                write_only_types=[Int32] * 4,
                read_only_args=[at],
            )
            for i in range(4):
                words[4 * k + i] = got[i]


def store_p(address, stage, words):
    """P into the stage's rope box, 32 tokens a step; `words` by 16 tokens, then half."""
    for step in range(2):
        cute.arch.inline_ptx(
            "{ .reg .b32 at; xor.b32 at, {$r0}, " + str(step << 5) + "; add.u32 at, at, {$r1};"
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [at], { {$r2}, {$r3}, {$r4}, {$r5} }; }",
            read_only_args=[
                address,
                Int32(stage * STAGE),
                *(words[4 * step + i] for i in range(4)),
            ],
        )


@cute.jit
def clear_rows(cfg: cutlass.Constexpr[Transposed], s: TransposedShared, stage, first, thread):
    """Zero the V rows of a tile from row `first` on: an unread slot may hold NaN, and 0 x NaN is
    NaN in the matrix unit. The swizzle permutes within a row of 64 bytes."""
    zero = cute.make_rmem_tensor(4, Int32)
    zero.fill(0)
    base = cute.make_ptr(Int32, s.kv.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
    for i in cutlass.range(first * 4 + thread, BLOCK * 4, 128, unroll=1):
        for box in cutlass.range_constexpr(ROPE_BOX):
            at = (base + (stage * cfg.stage_bytes + box * BOX) // 4 + i * 4).align(16)
            cute.autovec_copy(zero, cute.make_tensor(at, cute.make_layout(4)))


def sum_word(word):
    """The sums of two pairs of four e4m3 values, as two fp16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, {$r0}; cvt.rn.f16x2.e4m3x2 x, a; "
        "cvt.rn.f16x2.e4m3x2 y, b; add.f16x2 {$w0}, x, y; }",
        write_only_types=[Int32],
        read_only_args=[word],
    )


def add_halves(x, y):
    """Two sums of two fp16."""
    return cute.arch.inline_ptx(
        "add.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[x, y]
    )


def whole(x):
    """Both fp16 of a word, added in fp32."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 a, b; .reg .f32 x, y; mov.b32 {a, b}, {$r0}; cvt.f32.f16 x, a; "
        "cvt.f32.f16 y, b; add.f32 {$w0}, x, y; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


@cute.jit
def raise_maxima(
    cfg: cutlass.Constexpr[Transposed], scale, acc, row_max, row_sum, factor, row, lane, lift=0.0
):
    """New maxima for rows with a score too far above the old one, and what becomes of O; rare.

    The new one is the score itself, so that the weight of the greatest is a power of two, without
    rounding: where few keys count, that is the error. Factors are rounded to fp16, for O and sums
    alike: it moves the weights of all keys before by the same 2**-12. Maxima are `lift` above the
    scores (see `groups`).
    """
    fade = cute.make_rmem_tensor(2, Float16)
    for h in cutlass.range_constexpr(2):
        mx = quad(cute.arch.fmax, row_top(acc, h)) * scale[h] + (lift - Float32(cfg.weight_log2))
        new = select(mx - row_max[h] > Float32(cfg.lazy_log2), mx, row_max[h])
        down = cute.math.exp2(row_max[h] - new, fastmath=True)
        fade[h] = down.to(Float16)
        row_max[h] = new
        # with `lift` it may be too small for fp16, and the sum no less
        row_sum[h] = row_sum[h] * (down if const_expr(cfg.scaled) else fade[h].to(Float32))
    publish_pair(factor, row, lane, fade[0], fade[1])


def saturated(p):
    """Whether a weight is e4m3's greatest, 0x7E, or no number."""
    bits = Int32(0)
    for i in range(cute.size(p)):
        bits = bits | (p[i] + TO_HIGH_BIT)
    return (bits & Int32(HIGH_BITS - 2**32)) != 0


def nothing(word):
    """Between words, where there is nothing to do."""


def round_weights(scale, acc, row_max, p, between):
    """Weights of e4m3, four a word: by 16 tokens, then half. The scores stay as they are.
    `between` is called with the number of each word that is done."""
    for i in range(cute.size(acc) // 8):
        for h in range(2):
            x = 8 * i + 2 * h
            a, b, c, d = (
                cute.math.exp2(acc[at] * scale - row_max[h], fastmath=True)
                for at in (x, x + 4, x + 1, x + 5)
            )
            p[2 * i + h] = join_two(round_two(a, b), round_two(c, d))
            between(2 * i + h)


@cute.jit
def weigh(
    cfg: cutlass.Constexpr[Transposed],
    g: Globals,
    s: TransposedShared,
    acc,
    p,
    row_max,
    row_sum,
    factor,
    between: cutlass.Constexpr,
):
    """p <- weights against a maximum that moves rarely.

    They are made before it is known whether it moves: a weight that has become the greatest number
    says so, and no other tile's greatest scores are looked for.
    """
    scale = g.scale_log2
    if const_expr(cfg.scales):
        scale = s.scale[cute.arch.make_warp_uniform(fresh_thread() >> 5) & 3]
    round_weights(scale, acc, row_max, p, between)
    tid = fresh_thread()
    lane, row = tid & 31, own_row(tid)
    if cute.arch.vote_any_sync(saturated(p)):
        raise_maxima(cfg, (scale, scale), acc, row_max, row_sum, factor, row, lane)
        round_weights(scale, acc, row_max, p, nothing)
    else:
        publish_pair(factor, row, lane, Float16(1.0), Float16(1.0))


def add_sums(p, row_sum):
    """Row sums of the rounded weights, 16 of them in fp16, of which none passes 7000."""
    for h in range(2):
        sums = [sum_word(p[2 * i + h]) for i in range(4)]
        total = add_halves(add_halves(sums[0], sums[1]), add_halves(sums[2], sums[3]))
        row_sum[h] = row_sum[h] + whole(total)


@cute.jit
def open_qk(s: TransposedShared, stage, phase, there=False):
    """Until the keys of a tile are there and nobody reads its stage; `there`: it has been asked."""
    if not there:
        cute.arch.mbarrier_wait(s.full + stage, phase)
        # the loader has waited for as much; thread by thread a race checker knows it too
        cute.arch.mbarrier_wait(s.seen + stage, phase ^ 1)
    warpgroup.fence()


def keys_there(s: TransposedShared, stage, phase):
    """Whether they are. Asked early: an answer takes 100 clocks, and a wait is two of them."""
    full = cute.arch.mbarrier_test_wait(s.full + stage, phase)
    return full & cute.arch.mbarrier_test_wait(s.seen + stage, phase ^ 1)


def issue_qk(mma: Mmas, frags, acc, turn, stage, first, last):
    """k-steps `first` to `last` - 1 of a tile, the last of them all with the group's end."""
    r_q, r_tail, r_k = frags
    rs, ss = cute.make_mma_atom(mma.qk_rs.op), cute.make_mma_atom(mma.qk.op)
    ss.set(warpgroup.Field.ACCUMULATE, True)
    for k in range(first, last):
        rs.set(warpgroup.Field.ACCUMULATE, k > 0)
        if k < Q_STEPS:
            cute.gemm(rs, acc, r_q[None, None, k], r_k[None, None, k, stage], acc)
        else:
            q_k = r_tail[None, None, k - Q_STEPS, turn]
            cute.gemm(ss, acc, q_k, r_k[None, None, k, stage], acc)
    if last == STEPS:
        warpgroup.commit_group()


@cute.jit
def attend_tile(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, mma: Mmas, frags, scores,
    p, row_max, row_sum, p_at, stages, phase, there, turn, index, beyond, blocks,
):  # fmt: skip
    """The first of two `scores`, of a tile that is not the work tile's last, become P, announced.
    The second, of the tile after it, are issued by parts meanwhile: see `FIRST`."""
    stage, ahead = stages
    open_qk(s, ahead, phase, there)
    issue_qk(mma, frags, scores[1], turn, ahead, 0, FIRST)
    stamp_round(cfg, g, blocks, 3)
    hide(cfg, g, s, scores[0], index, beyond, blocks)

    def between(word):
        cute.arch.sync_warp()  # else the compiler brings the parts together again
        at = FIRST + word
        issue_qk(mma, frags, scores[1], turn, ahead, at, at + 1)

    weigh(cfg, g, s, scores[0], p, row_max, row_sum, s.factor[None, stage], between)
    store_p(p_at, stage, p)
    issue_qk(mma, frags, scores[1], turn, ahead, FIRST + WORDS, LATE)
    add_sums(p, row_sum)  # while the stores are on their way: the fence waits for them
    cute.arch.fence_view_async_shared()
    announce(s, stage)
    stamp_round(cfg, g, blocks, 4)
    issue_qk(mma, frags, scores[1], turn, ahead, LATE, STEPS)


@cute.jit
def attend(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, mma: Mmas, plan: Plan, rank
):
    """Per work tile: Q to registers, then QK(t + 1) issued, softmax(t) under it, P(t) out.

    Scores of two tiles are held, in turn."""
    tid, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(tid % 128 // 32)
    r_k = mma.qk_rs.make_fragment_B(mma.qk_rs.get_slice(0).partition_B(s.kv))
    r_q = cute.make_rmem_tensor(mma.qk_rs.partition_shape_A((64, Q_STEPS * 32)), cfg.element)
    r_tail = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.q_tail))
    frags = (r_q, r_tail, r_k)
    shape = mma.qk_rs.partition_shape_C((64, 64))
    scores = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
    p_at = row_address(Int32(s.kv.iterator.toint()) + ROPE_BOX * BOX, 3, 4)
    p = cute.make_rmem_tensor(WORDS, Int32)
    row_max = cute.make_rmem_tensor(2, Float32)
    row_sum = cute.make_rmem_tensor(2, Float32)
    if const_expr(cfg.scales):
        # held in a register, or asked for in each tile, it would be one too many
        s.scale[w] = with_scales(cfg, g).scale_log2
        cute.arch.sync_warp()
    stage, phase = Int32(0), Int32(0)
    for index in cutlass.range(plan.first, plan.last, unroll=1):
        cute.arch.mbarrier_wait(s.q_full, (index - plan.first) & 1)
        kept = cute.arch.make_warp_uniform((index - plan.first) & 1)
        take_q(s, r_q)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(s.q_empty)
        work = read_work(g, s, index)
        open_rows(cfg, g, work, Int32(0), row_max, row_sum, row_max)
        beyond = cute.arch.make_warp_uniform(open_positions(cfg, g, work, 16 * w))
        blocks = cute.arch.make_warp_uniform(work.end - work.begin)
        stage = cute.arch.make_warp_uniform(stage)
        open_qk(s, stage, phase)
        issue_qk(mma, frags, scores[0], kept, stage, 0, STEPS)
        warpgroup.wait_group(0)
        there = Boolean(False)
        while blocks > 2:
            for turn in cutlass.range_constexpr(2):
                stage = cute.arch.make_warp_uniform(stage)
                ahead, phase = next_stage(stage, phase)
                attend_tile(
                    cfg, g, s, mma, frags, (scores[turn], scores[1 - turn]), p, row_max, row_sum,
                    p_at, (stage, ahead), phase, there, kept, index, beyond, blocks,
                )  # fmt: skip
                after, then = next_stage(ahead, phase)
                there = keys_there(s, after, then)
                warpgroup.wait_group(0)
                stage = ahead
                blocks = blocks - 1
        if blocks == 2:
            ahead, phase = next_stage(stage, phase)
            attend_tile(
                cfg, g, s, mma, frags, scores, p, row_max, row_sum, p_at, (stage, ahead), phase,
                there, kept, index, beyond, blocks,
            )  # fmt: skip
            warpgroup.wait_group(0)
            stage = ahead
            for i in cutlass.range_constexpr(cute.size(scores[0])):
                scores[0][i] = scores[1][i]
        # again: held through the loop they would cost registers
        work = read_work(g, s, index)
        hide(cfg, g, s, scores[0], index, beyond, Int32(1))
        weigh(cfg, g, s, scores[0], p, row_max, row_sum, s.factor[None, stage], nothing)
        store_p(p_at, stage, p)
        add_sums(p, row_sum)
        thread = fresh_thread() & 127
        tail = work.kv_len - (work.end - 1) * BLOCK
        if tail < BLOCK:
            clear_rows(cfg, s, stage, cutlass.max(tail, Int32(0)), thread)
        cute.arch.mbarrier_wait(s.free, (index - plan.first) & 1)
        publish_sums(cfg, g, s, work, row_max, row_sum, own_row(thread), thread & 31)
        cute.arch.fence_view_async_shared()
        announce(s, stage)
        stage, phase = next_stage(stage, phase)
