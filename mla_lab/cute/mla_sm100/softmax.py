"""The softmax warp group: S from tensor memory, online softmax, P to shared memory, O rescaled
where a row max moves, and the epilogue.

Thread t has row t % 64 and half t / 64: of S's 128 tokens, and of O's 512 columns. Row maxes are
common to both threads of a row, row sums are of the own half until the epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import not_zero, orient_scores, scale_now
from ..common.fp8 import join_two, round_two
from ..common.ptx_sm90 import NO_SCORE, float_of_exponent, pack2, pick, ptx
from ..common.ptx_sm100 import fence_after, fence_before, load_columns, store_columns, wait_stores
from ..rows_on_m.params import BLOCK, OUTSIDE, RECORDS
from ..rows_on_m.work_records import read_work
from .epilogue import epilogue
from .mask import apply_mask, open_until
from .params import (
    K_ELEMENTS,
    O_COLUMN,
    ROWS,
    S_COLUMNS,
    SOFTMAX_BARRIER,
    SOFTMAX_THREADS,
    TILE,
    V_BOXES,
    V_CHUNKS,
    V_COLUMNS,
    V_TOKENS,
    Cta,
)
from .producer import tiles_of
from .query_terms import split_sum, store_query_terms

#: columns of O that are rescaled at a time
O_STEP = 32


@dataclass(frozen=True)
class RowState:
    """A thread's row: what weights are relative to (log2 units), and the sum of its half."""

    row_max: Float32
    row_sum: Float32


def lane_base(cta: Cta, thread):
    """Tensor-memory address of the warp's 32 lanes."""
    return cta.tmem + ((thread & 96) << 16)


def greatest(scores):
    """Greatest of a thread's scores."""
    tops = [cute.arch.fmax(scores[i], scores[i + 1]) for i in range(0, S_COLUMNS, 2)]
    while len(tops) > 1:
        tops = [cute.arch.fmax(a, b) for a, b in zip(tops[::2], tops[1::2], strict=True)]
    return tops[0]


@cute.jit
def any_thread(condition):
    """Nonzero if the condition holds in any of the 128 threads."""
    return ptx(
        "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; "
        "bar.red.or.pred q, {$r1}, {$r2}, p; selp.s32 {$w0}, 1, 0, q; }",
        pick(condition, Int32(1), Int32(0)),
        Int32(SOFTMAX_BARRIER.barrier_id),
        Int32(SOFTMAX_THREADS),
        out=Int32,
    )


@cute.jit
def exchange(cta: Cta, thread, value):
    """The value of the thread with the row's other half; by all 128 threads."""
    s = cta.s
    s.sExchange[thread] = value
    SOFTMAX_BARRIER.sync()
    return s.sExchange[thread ^ ROWS]


@cute.jit
def moved_max(cta: Cta, state: RowState, top):
    """(row max, factor): a power of two by which O and the row sum fall; the first row max is
    exactly the score."""
    weight = Float32(cta.cfg.weight_log2)
    rise, steps = top - state.row_max - weight, Float32(0.0)
    row_max = state.row_max
    if rise > Float32(cta.cfg.rescale_log2):
        steps = cute.math.ceil(rise)
        row_max = pick(row_max == Float32(NO_SCORE), top - weight, row_max + steps)
    exponent = Int32(cute.arch.fmin(steps, Float32(254.0)))
    return row_max, float_of_exponent(cutlass.max(127 - exponent, Int32(0)))


@cute.jit
def rescale(cta: Cta, thread, factor):
    """O's row times `factor`, in the warps that have one below 1; PV of earlier tiles is done."""
    if cute.arch.vote_any_sync(factor != Float32(1.0)):
        base = lane_base(cta, thread) + O_COLUMN
        for step in cutlass.range(V_COLUMNS // O_STEP, unroll=1):
            values = load_columns(base + step * O_STEP, O_STEP)
            store_columns(base + step * O_STEP, [v * factor for v in values])
        wait_stores()


def weights(cta: Cta, scores, scale, row_max):
    """Weights in place of scores; returns their sum. P is rounded, the sum is of what was not."""
    totals = [Float32(0.0)] * 4
    for c in range(S_COLUMNS):
        scores[c] = cute.math.exp2(scores[c] * scale - row_max, fastmath=True)
        totals[c % 4] = totals[c % 4] + scores[c]
    return (totals[0] + totals[1]) + (totals[2] + totals[3])


def packed_terms(cta: Cta, p):
    """The words of each term of P: 64 weights."""
    cfg = cta.cfg
    if cfg.item == 2:
        return [[pack2(p[c], p[c + 1], cfg.element) for c in range(0, S_COLUMNS, 2)]]
    if cfg.terms == 1:
        halves = [[round_two(p[c], p[c + 1]) for c in range(0, S_COLUMNS, 2)]]
    else:
        pairs = [split_sum(p[c], p[c + 1]) for c in range(0, S_COLUMNS, 2)]
        halves = [[pair[i] for pair in pairs] for i in range(2)]
    return [[join_two(h[i], h[i + 1]) for i in range(0, len(h), 2)] for h in halves]


def swizzled_chunk(cta: Cta, row, chunk: int):
    """Where 16-byte chunk `chunk` of a row of 64 elements lies in the row."""
    bits = row & 7 if cta.cfg.span == 128 else (row >> 1) & 3
    return (bits ^ chunk) << 4


def store_chunk(address, words) -> None:
    """16 bytes to shared memory."""
    ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", address, *words)


def store_p(cta: Cta, thread, p) -> None:
    """The thread's 64 weights to its box of P."""
    cfg = cta.cfg
    row = thread % ROWS
    base = Int32(cta.s.sP.iterator.toint()) + thread // ROWS * (ROWS * cfg.span) + row * cfg.span
    for term, words in enumerate(packed_terms(cta, p)):
        for chunk in range(cfg.span // 16):
            at = base + term * cfg.p_elements * cfg.item + swizzled_chunk(cta, row, chunk)
            store_chunk(at, words[4 * chunk : 4 * chunk + 4])


@cute.jit
def zero_v_tail(cta: Cta, work, block, tile, thread):
    """Zero the V rows past kv_len up to the end of their chunk: an unread page may hold NaN, and
    0 x NaN is NaN in the tensor core. TMA has zeroed the chunks that follow."""
    cfg, s = cta.cfg, cta.s
    tail = cutlass.max(work.kv_len - block * BLOCK, Int32(0))
    if (tail < TILE) & (tail % V_TOKENS != 0):
        for chunk in cutlass.range_constexpr(V_CHUNKS):
            s.v_pipe.full.wait(chunk, tile & 1)
        base = Int32(s.sKV.iterator.toint()) + K_ELEMENTS * cfg.item
        last = (tail + V_TOKENS - 1) // V_TOKENS * V_TOKENS
        pieces = V_COLUMNS * cfg.item // 16
        zero = [Int32(0)] * 4
        for i in cutlass.range(tail * pieces + thread, last * pieces, SOFTMAX_THREADS, unroll=1):
            token, piece = i // pieces, i % pieces
            box, chunk = piece // (cfg.span // 16), piece % (cfg.span // 16)
            atom = (token // 8 * V_BOXES + box) * cfg.atom_bytes
            store_chunk(base + atom + token % 8 * cfg.span + chunk * 16, zero)


@cute.jit
def softmax_tile(cta: Cta, work, state: RowState, scale, until, thread, block, tile):
    """One tile: returns the row's state behind it. All arrive once P is stored and O rescaled."""
    cfg, s = cta.cfg, cta.s
    row = thread % ROWS
    row_max, row_sum = state.row_max, state.row_sum
    s.s_full.wait(tile & 1, (tile >> 1) & 1)
    fence_after()
    scores = cute.make_rmem_tensor(S_COLUMNS, Float32)
    loaded = load_columns(lane_base(cta, thread) + S_COLUMNS * (tile & 1), S_COLUMNS)
    for c in cutlass.range_constexpr(S_COLUMNS):
        scores[c] = loaded[c]
    apply_mask(cta, scores, work, row, until, block * BLOCK + thread // ROWS * BLOCK)
    scale = orient_scores(cfg, scores, scale)
    top, factor = greatest(scores) * scale, Float32(1.0)
    above = top - row_max > Float32(cfg.weight_log2 + cfg.rescale_log2)
    if any_thread(above) != 0:
        top = cute.arch.fmax(top, exchange(cta, thread, top))
        row_max, factor = moved_max(cta, state, top)
        row_sum = row_sum * factor
    row_sum = row_sum + weights(cta, scores, scale, row_max)
    if tile > 0:
        s.o_full.wait(0, (tile - 1) & 1)
    if block > work.begin:
        fence_after()
        rescale(cta, thread, factor)
    store_p(cta, thread, scores)
    if block + 2 >= work.end:
        zero_v_tail(cta, work, block, tile, thread)
    cute.arch.fence_view_async_shared()
    fence_before()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        s.p_full.arrive(0, 0)
    return RowState(row_max, row_sum)


@cute.jit
def softmax(cta: Cta):
    """All work tiles."""
    g, s = cta.g, cta.s
    thread, _, _ = cute.arch.thread_idx()
    tile = Int32(0)
    for index in cutlass.range(cta.plan.first, cta.plan.last, unroll=1):
        s.work_full.wait(index % RECORDS, (index // RECORDS) & 1)
        work = read_work(g, s, index)
        scale = scale_now(cta.cfg, g)
        if const_expr(cta.cfg.terms == 2):
            s.q_pipe.empty.wait(0, (index & 1) ^ 1)
            scale = scale * store_query_terms(cta, work, thread)
            if const_expr(cta.cfg.scales):
                scale = not_zero(scale)
        until = open_until(cta, work, thread % ROWS)
        row_sum = pick(work.kv_len == OUTSIDE, Float32.nan, Float32(0.0))
        state = RowState(Float32(NO_SCORE), row_sum)
        for t in cutlass.range(tiles_of(work), unroll=1):
            block = work.begin + 2 * t
            state = softmax_tile(cta, work, state, scale, until, thread, block, tile)
            tile = tile + 1
        s.o_full.wait(0, (tile - 1) & 1)
        fence_after()
        total = state.row_sum + exchange(cta, thread, state.row_sum)
        epilogue(cta, work, thread, lane_base(cta, thread) + O_COLUMN, state.row_max, total)
