"""Mainloop of the QK-softmax warp group over e4m3: S = Q K^T with most of Q in registers, online
softmax, P.

P lies in the rope box of its tile's stage, in rows of 64 bytes, with the tokens in the order in
which V^T comes out of `ldmatrix` (`swap_ab_sm90`): in every 16 tokens 0 8 1 9 2 10 .. 7 15. Of a
row and 16 tokens a thread's four weights are neighbours there, one word:

    thread q of a quad holds tokens 2q 2q+1 (col8 even), 2q+8 2q+9 (col8 odd)
    bytes 4q .. 4q+3        tokens 2q  2q+8  2q+1  2q+9
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...common.feature_operands import orient_scores, with_scales
from ...common.fp8 import join_two, round_two
from ...common.pipeline import PipelineState
from ...common.ptx_sm90 import NO_SCORE, butterfly, fresh_thread, pick, ptx
from ...rows_on_m.mask import first_row, mask_free_until, rows_of
from ...rows_on_m.params import BLOCK, SPARSE, Cta, Work
from ...rows_on_m.profile import profile_tile
from ...rows_on_m.work_records import read_work
from ..mainloop_qk_softmax import (
    RowState,
    TileContext,
    start_rows,
    stmatrix_swizzled,
    store_row_stats,
    store_row_values,
    thread_row_max,
    zero_v_tail,
)
from ..params import BOX, ROPE_BOX
from ..token_fetch import load_valid, mask_scores
from .p_exchange_2cta import own_rows

#: words of weights per thread
WORDS = 8
#: k-steps of QK(t + 1) issued before the weights of tile t are computed; one more follows each word
#: of weights, and those from `LATE` on follow the row sums. The tensor core queues a few; a warp
#: group that issues all 18 at once stalls for 500 to 800 clocks before it can compute weights
FIRST, LATE = 4, 14

#: see `start_at_sink`; from a weight of 2**8 on, scores may rise by 0.75 before the row max moves
SINK_LOG2, SINK_WEIGHT_LOG2 = 8.0, 8.0

#: added to a word, takes each byte from 0x7E on, and no smaller one, to its high bit
TO_HIGH_BIT, HIGH_BITS = 0x02020202, 0x80808080


@dataclass(frozen=True)
class Fragments:
    """Operands of QK, scores of two tiles, weights of one."""

    tSrQ: cute.Tensor  # in registers
    tSrQ_tail: cute.Tensor  # descriptors of the last boxes, (.., .., k-step, turn)
    tSrK: cute.Tensor  # descriptors
    tSrS: list[cute.Tensor]
    rP: cute.Tensor  # words of four weights
    p_at: Any  # shared-memory address of the lane's row of P in stage 0


def matrix_row(base):
    """Address of a lane's row of the 8 x 8 matrices of 16-bit elements in a warp's 16 rows of a
    box: lane bit 3 selects the half of the rows, bit 4 the 16-byte chunk."""
    tid = fresh_thread()
    row = ((tid >> 1) & 48) + 8 * ((tid >> 3) & 1) + (tid & 7)
    chunk = ((tid >> 4) & 1) ^ ((row >> 1) & 3)
    return base + row * 64 + (chunk << 4)


def load_matrices(address, offset):
    """Four 8 x 8 matrices of 16-bit elements, as `matrix_row` addresses them."""
    return ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, "
        f"[{{$r0}}+{offset}];",
        address,
        out=[Int32] * 4,
    )


def load_q_fragments(cta: Cta, tSrQ: cute.Tensor):
    """Q to registers, except for its last boxes."""
    words = cute.recast_tensor(tSrQ, Int32)
    base = matrix_row(Int32(cta.s.sQ.iterator.toint()))
    for odd in range(2):
        at = base ^ (32 * odd)
        for k in range(odd, cta.cfg.q_steps, 2):
            got = load_matrices(at, k // 2 * BOX)
            for i in range(4):
                words[4 * k + i] = got[i]


def sum_word(word):
    """Sums of two pairs of four e4m3 values, as two fp16."""
    return ptx(
        "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, {$r0}; cvt.rn.f16x2.e4m3x2 x, a; "
        "cvt.rn.f16x2.e4m3x2 y, b; add.f16x2 {$w0}, x, y; }",
        word,
        out=Int32,
    )


def add_f16x2(x, y):
    """Sums of two fp16 each."""
    return ptx("add.f16x2 {$w0}, {$r0}, {$r1};", x, y, out=Int32)


def sum_f16x2(x):
    """Both fp16 of a word, added in fp32."""
    return ptx(
        "{ .reg .b16 a, b; .reg .f32 x, y; mov.b32 {a, b}, {$r0}; cvt.f32.f16 x, a; "
        "cvt.f32.f16 y, b; add.f32 {$w0}, x, y; }",
        x,
        out=Float32,
    )


@cute.jit
def raise_row_max(cta: Cta, scale, acc, rows: RowState, rescale, row, lane, lift=0.0):
    """New row maxes where a score is too far above the old one, and O's rescale factors; rare.

    The new row max is the score itself, so that the weight of the greatest is an exact power of
    two: where few keys count, its rounding would be the error. Rescale factors are rounded to fp16,
    for O and row sums alike, which changes the weights of all earlier keys by the same 2**-12. Row
    maxes are `lift` above the scores (`kv_656`).
    """
    cfg, factors = cta.cfg, cute.make_rmem_tensor(2, Float16)
    for h in cutlass.range_constexpr(2):
        top = butterfly(cute.arch.fmax, thread_row_max(acc, h)) * scale[h] + (
            lift - Float32(cfg.weight_log2)
        )
        new = pick(top - rows.row_max[h] > Float32(cfg.rescale_log2), top, rows.row_max[h])
        factor = cute.math.exp2(rows.row_max[h] - new, fastmath=True)
        factors[h] = factor.to(Float16)
        rows.row_max[h] = new
        # with `lift` the factor may be too small for fp16 while the sum is not
        rows.row_sum[h] = rows.row_sum[h] * (
            factor if const_expr(cfg.kv_656) else factors[h].to(Float32)
        )
    store_row_values(rescale, row, lane, (factors[0], factors[1]))


def saturated(p):
    """True if a weight of this thread is e4m3's greatest, 0x7E, or NaN."""
    bits = Int32(0)
    for i in range(cute.size(p)):
        bits = bits | (p[i] + TO_HIGH_BIT)
    return (bits & Int32(HIGH_BITS - 2**32)) != 0


def nothing(word):
    """For `on_word`: no MMA to issue."""


def round_weights(scale, acc, row_max, p, on_word: Callable[[int], None]):
    """Weights of e4m3, four per word: by 16 tokens, then row half. The scores are kept. Calls
    `on_word` with the number of each finished word."""
    scores = rows_of(acc)
    for i in range(cute.size(acc) // 8):
        for h in range(2):
            a, b, c, d = (
                cute.math.exp2(scores[h, 4 * i + at] * scale - row_max[h], fastmath=True)
                for at in (0, 2, 1, 3)
            )
            p[2 * i + h] = join_two(round_two(a, b), round_two(c, d))
            on_word(2 * i + h)


def scale_of_warp(cta: Cta):
    """The scale of the scores in base-2 units, its sign as in memory; read anew at each call."""
    if not cta.cfg.scales:
        return cta.g.scale_log2
    return cta.s.sScale[cute.arch.make_warp_uniform(fresh_thread() >> 5) & 3]


@cute.jit
def online_softmax_step(
    cta: Cta, acc, p, rows: RowState, rescale, on_word: cutlass.Constexpr[Callable]
):
    """p <- weights relative to a row max that rarely moves.

    They are computed before it is known whether it moves: a weight that has become e4m3's greatest
    tells, so that the greatest scores of other tiles are never searched.
    """
    scale = scale_of_warp(cta)
    if const_expr(cta.cfg.scales):
        scale = orient_scores(cta.cfg, acc, scale)
    round_weights(scale, acc, rows.row_max, p, on_word)
    tid = fresh_thread()
    lane, row = tid & 31, first_row(tid)
    if cute.arch.vote_any_sync(saturated(p)):
        raise_row_max(cta, (scale, scale), acc, rows, rescale, row, lane)
        round_weights(scale, acc, rows.row_max, p, nothing)
    else:
        store_row_values(rescale, row, lane, (Float16(1.0), Float16(1.0)))


def add_row_sums(p, rows: RowState):
    """Add the rounded weights to the row sums: 16 of them in fp16, of which none passes 7000."""
    for h in range(2):
        sums = [sum_word(p[2 * i + h]) for i in range(4)]
        total = add_f16x2(add_f16x2(sums[0], sums[1]), add_f16x2(sums[2], sums[3]))
        rows.row_sum[h] = rows.row_sum[h] + sum_f16x2(total)


def start_qk(cta: Cta, state: PipelineState, ready: Any = False):
    """Wait until the keys of a tile have landed and P of its stage is free, unless `ready`."""
    wait_for_keys(cta, state, ready)
    if cta.cfg.gather:
        # tokens were not written through the async proxy, which MMAs read through
        cute.arch.fence_view_async_shared()
    warpgroup.fence()


@cute.jit
def wait_for_keys(cta: Cta, state: PipelineState, ready):
    """See `start_qk`."""
    if not ready:
        cta.s.kv_pipe.consumer_wait(state)
        # implied by the producer's wait; each thread waits itself, as racecheck follows threads
        cta.s.p_pipe.producer_acquire(state.opposite())


def try_keys(cta: Cta, state: PipelineState):
    """True if both hold. Tested early: the result takes 100 clocks, and a wait takes two."""
    full = cta.s.kv_pipe.consumer_try_wait(state)
    return full & cta.s.p_pipe.producer_try_acquire(state.opposite())


def issue_qk(cta: Cta, f: Fragments, acc, q_turn, stage, first, last):
    """k-steps `first` to `last` - 1 of a tile; with the last of all the commit."""
    cfg, mma = cta.cfg, cta.mma
    rs, ss = cute.make_mma_atom(mma.qk_rs.op), cute.make_mma_atom(mma.qk.op)
    ss.set(warpgroup.Field.ACCUMULATE, True)
    for k in range(first, last):
        rs.set(warpgroup.Field.ACCUMULATE, k > 0)
        keys = f.tSrK[None, None, k, stage]
        if k < cfg.q_steps:
            cute.gemm(rs, acc, f.tSrQ[None, None, k], keys, acc)
        else:
            cute.gemm(ss, acc, f.tSrQ_tail[None, None, k - cfg.q_steps, q_turn], keys, acc)
    if last == cfg.steps:
        warpgroup.commit_group()


@cute.jit
def softmax_under_next_qk(
    cta: Cta, f: Fragments, scores, rows: RowState, tile: TileContext, tiles_left,
    states: tuple, ready, q_turn,
):  # fmt: skip
    """P of a tile that is not the work tile's last, from the first of two `scores`; meanwhile QK of
    the next tile, step by step (see `FIRST`), into the second."""
    s, stage, ahead, steps = cta.s, states[0].index, states[1], cta.cfg.steps
    start_qk(cta, ahead, ready)
    issue_qk(cta, f, scores[1], q_turn, ahead.index, 0, FIRST)
    profile_tile(cta.cfg, cta.g, tiles_left, "QK done")
    mask_scores(cta, scores[0], tile, stage, tiles_left)

    def on_word(word):
        cute.arch.sync_warp()  # otherwise the compiler moves the steps together again
        at = FIRST + word
        issue_qk(cta, f, scores[1], q_turn, ahead.index, at, at + 1)

    online_softmax_step(cta, scores[0], f.rP, rows, s.sRescale[None, stage], on_word)
    store_p(cta, f, stage)
    issue_qk(cta, f, scores[1], q_turn, ahead.index, FIRST + WORDS, LATE)
    add_row_sums(f.rP, rows)  # while the stores are under way: the fence waits for them
    cute.arch.fence_view_async_shared()
    s.p_pipe.producer_commit(stage)
    profile_tile(cta.cfg, cta.g, tiles_left, "P stored")
    issue_qk(cta, f, scores[1], q_turn, ahead.index, LATE, steps)


def store_p(cta: Cta, f: Fragments, stage):
    """P to the stage's rope box: 32 tokens a step, words by 16 tokens, then row half."""
    stmatrix_swizzled(f.p_at, stage * cta.cfg.stage_bytes, f.rP, 2)


def make_fragments(cta: Cta) -> Fragments:
    """Descriptors once for all tiles, and registers."""
    s, mma = cta.s, cta.mma
    tSrK = mma.qk_rs.make_fragment_B(mma.qk_rs.get_slice(0).partition_B(s.sKV))
    tSrQ = cute.make_rmem_tensor(
        mma.qk_rs.partition_shape_A((64, cta.cfg.q_steps * 32)), cta.cfg.element
    )
    tSrQ_tail = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.sQ_tail))
    shape = mma.qk_rs.partition_shape_C((64, 64))
    scores = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
    p_at = matrix_row(Int32(s.sKV.iterator.toint()) + ROPE_BOX * BOX)
    return Fragments(tSrQ, tSrQ_tail, tSrK, scores, cute.make_rmem_tensor(WORDS, Int32), p_at)


def tile_context(cta: Cta, rows: RowState, index, w) -> tuple[TileContext, Any]:
    """Resets the row state for a work tile; returns its context and the number of its KV tiles."""
    work = read_work(cta.g, cta.s, index)
    start_rows(cta, work, Int32(0), rows)
    mask_free = cute.arch.make_warp_uniform(mask_free_until(cta, work, 16 * w))
    return TileContext(index, mask_free), cute.arch.make_warp_uniform(work.end - work.begin)


def finish_rows(cta: Cta, work: Work, stage, rows: RowState, index):
    """Behind the last tile's P in `stage`: zero V past kv_len, store the row statistics."""
    thread = fresh_thread() & 127
    if const_expr(not cta.cfg.gather):
        zero_v_tail(cta, stage, work, thread)
    cta.s.stats_read.wait(0, (index - cta.plan.first) & 1)
    to = own_rows(cta.s) if cta.cfg.p_exchange else cta.s
    store_row_stats(cta, to, work, rows, first_row(thread), thread & 31)
    cute.arch.fence_view_async_shared()


@cute.jit
def start_at_sink(cta: Cta, acc, rows: RowState, tile: TileContext, tiles_left, stage):
    """Row maxes of a work tile whose first tokens take most of the attention: of its first 8 keys
    one has a score `SINK_LOG2` above one of the next 8. Later scores rarely move such a row max, so
    that the weight of that key begins at 2**`SINK_WEIGHT_LOG2`, and fewer small weights round to
    zero. A greater score in the first KV tile moves the row max as in any other one."""
    scale = scale_of_warp(cta)
    if all_visible(cta, tile, tiles_left, stage):
        scores = rows_of(acc)
        for h in cutlass.range_constexpr(2):
            first, second = (cute.arch.fmax(scores[h, c], scores[h, c + 1]) for c in (0, 2))
            above = (first - second) * scale > Float32(SINK_LOG2)
            start = pick(above, first * scale - Float32(SINK_WEIGHT_LOG2), Float32(NO_SCORE))
            rows.row_max[h] = butterfly(cute.arch.fmax, start)


def all_visible(cta: Cta, tile: TileContext, tiles_left, stage):
    """Whether each row sees all keys of the KV tile in `stage`, `tiles_left` before the end."""
    if cta.cfg.gather == SPARSE:
        words = load_valid(cta, stage)
        return (words[0] & words[1]) == -1
    return tile.mask_free + tiles_left * BLOCK >= BLOCK


@cute.jit
def start_work_tile(cta: Cta, f: Fragments, rows: RowState, index, w, state: PipelineState):
    """Q to registers, the first tile's scores. Returns the context, the number of KV tiles, which
    half of `sQ_tail` holds this query, the state."""
    number = index - cta.plan.first
    cta.s.q_pipe.full.wait(0, number & 1)
    q_turn = cute.arch.make_warp_uniform(number & 1)
    load_q_fragments(cta, f.tSrQ)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cta.s.q_pipe.consumer_release(0)
    tile, tiles_left = tile_context(cta, rows, index, w)
    state = state.uniform()
    start_qk(cta, state)
    issue_qk(cta, f, f.tSrS[0], q_turn, state.index, 0, cta.cfg.steps)
    warpgroup.wait_group(0)
    start_at_sink(cta, f.tSrS[0], rows, tile, tiles_left, state.index)
    return tile, tiles_left, q_turn, state


@cute.jit
def mainloop_qk_softmax(cta: Cta):
    """Per work tile: Q to registers, then QK(t + 1) issued under softmax(t), P(t) stored. The
    scores of two tiles are held, alternating."""
    cfg, s, stages = cta.cfg, cta.s, cta.cfg.stages
    w = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % 128 // 32)
    f = make_fragments(cta)
    row_max, row_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
    rows = RowState(row_max, row_sum, row_max)
    scores = f.tSrS
    if const_expr(cfg.scales):
        # in a register, or read again in each tile, it would be one value too many
        s.sScale[w] = with_scales(cfg, cta.g).scale_log2
        cute.arch.sync_warp()
    state = PipelineState.start()
    for index in cutlass.range(cta.plan.first, cta.plan.last, unroll=1):
        tile, tiles_left, q_turn, state = start_work_tile(cta, f, rows, index, w, state)
        ready = Boolean(False)
        while tiles_left > 2:
            for turn in cutlass.range_constexpr(2):
                state = state.uniform()
                ahead = state.advance(stages)
                softmax_under_next_qk(
                    cta, f, (scores[turn], scores[1 - turn]), rows, tile, tiles_left,
                    (state, ahead), ready, q_turn,
                )  # fmt: skip
                ready = try_keys(cta, ahead.advance(stages))
                warpgroup.wait_group(0)
                state = ahead
                tiles_left = tiles_left - 1
        if tiles_left == 2:
            ahead = state.advance(stages)
            softmax_under_next_qk(
                cta, f, scores, rows, tile, tiles_left, (state, ahead), ready, q_turn
            )
            warpgroup.wait_group(0)
            state = ahead
            for i in cutlass.range_constexpr(cute.size(scores[0])):
                scores[0][i] = scores[1][i]
        # read again: held through the loop, it would take registers
        work = read_work(cta.g, s, index)
        mask_scores(cta, scores[0], tile, state.index, Int32(1))
        rescale = s.sRescale[None, state.index]
        online_softmax_step(cta, scores[0], f.rP, rows, rescale, nothing)
        store_p(cta, f, state.index)
        add_row_sums(f.rP, rows)
        finish_rows(cta, work, state.index, rows, index)
        s.p_pipe.producer_commit(state.index)
        state = state.advance(stages)
