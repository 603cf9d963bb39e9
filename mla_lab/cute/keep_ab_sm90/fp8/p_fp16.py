"""fp16 weights from the scores of a bf16 query (`query_hi_lo`), and their store to shared memory.

A thread's pairs of neighbouring tokens are what stmatrix stores: tokens keep their order. A CTA on
its own stores P to the rope box of the tile's stage and to `sP_rest`. With `p_exchange`, P goes to
its own stages, and weights are computed before it is known whether a row max moves: no weight may
reach 2, so that one bit of all weights tells, and the greatest scores of other tiles are never
searched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ...common.ptx_sm90 import fresh_thread, pack2, stmatrix_x4
from ...rows_on_m.mask import first_row, rows_of
from ...rows_on_m.params import Cta
from ..mainloop_qk_softmax import RowState, store_row_values, thread_row_max
from ..params import BOX, ROPE_BOX
from . import kv_656
from .mainloop_qk_softmax import matrix_row, nothing, raise_row_max
from .p_exchange_2cta import own_p, own_rows
from .params import P_STAGE, WEIGHT_LOG2

#: a bit that fp16 weights of 2 and more, infinity and NaN have, in both halves of a word
TWO = 0x40004000


def weights_of_step(acc, scale, row_max, step, on_word: Callable, add: Callable):
    """Weights of 16 tokens: four words, by 8 tokens, then row half; `add` is called with the half
    and the sum of each."""
    scores, words = rows_of(acc), []
    for i in range(2 * step, 2 * step + 2):
        for h in range(2):
            a, b = (
                cute.math.exp2(scores[h, 2 * i + e] * scale[h] - row_max[h], fastmath=True)
                for e in range(2)
            )
            add(h, a + b)
            words.append(pack2(a, b, Float16))
            on_word(2 * i + h)
    return words


@cute.jit
def online_softmax_step(
    cta: Cta, acc, scale, rows: RowState, stage, on_word: cutlass.Constexpr[Callable]
):
    """fp16 weights relative to a row max that rarely moves, to shared memory. Calls `on_word` with
    the number of each finished word."""
    cfg, s = cta.cfg, cta.s
    lift, inverse = (
        kv_656.unit_of(s, stage) if const_expr(cfg.kv_656) else (Float32(0.0), Float32(1.0))
    )
    below = [rows.row_max[h] - lift for h in range(2)] if const_expr(cfg.kv_656) else rows.row_max
    over = cute.arch.fmax(
        thread_row_max(acc, 0) * scale[0] - below[0], thread_row_max(acc, 1) * scale[1] - below[1]
    )
    tid = fresh_thread()
    lane, row = tid & 31, first_row(tid)
    rescale = s.sRescale[None, stage]
    if cute.arch.vote_any_sync(over > Float32(WEIGHT_LOG2 + cfg.rescale_log2)):
        raise_row_max(cta, scale, acc, rows, rescale, row, lane, lift)
    else:
        store_row_values(rescale, row, lane, (Float16(1.0), Float16(1.0)))
    first_at = matrix_row(Int32(s.sKV.iterator.toint()) + ROPE_BOX * BOX)
    first_at = first_at + stage * cfg.stage_bytes
    if const_expr(cfg.kv_656):
        rest_at = first_at + BOX
        below = [rows.row_max[h] - lift for h in range(2)]
    else:
        rest_at = matrix_row(Int32(s.sP_rest.iterator.toint())) + stage * BOX
        below = rows.row_max
    for step in cutlass.range_constexpr(4):
        sums: list[Any] = []

        def keep(h, x, sums=sums):
            sums.append(x)

        words = weights_of_step(acc, scale, below, step, on_word, keep)
        for h in cutlass.range_constexpr(2):
            total = sums[h] + sums[2 + h]
            total = total * inverse if const_expr(cfg.kv_656) else total
            rows.row_sum[h] = rows.row_sum[h] + total
        at = first_at if const_expr(step < 2) else rest_at
        stmatrix_x4(at ^ (32 * (step % 2)), 0, words)


def store_weights(cta: Cta, acc, scale, rows: RowState, sums, p_stage, on_word: Callable):
    """All weights of a tile to its P stage; sums <- their sums. Returns the OR of their bits."""
    at = matrix_row(own_p(cta.s)) + p_stage * P_STAGE
    bits = Int32(0)
    sums.fill(0.0)

    def add(h, x):
        sums[h] = sums[h] + x

    for step in range(4):
        words = weights_of_step(acc, scale, rows.row_max, step, on_word, add)
        for word in words:
            bits = bits | word
        stmatrix_x4((at + step // 2 * (P_STAGE // 2)) ^ (32 * (step % 2)), 0, words)
    return bits


@cute.jit
def optimistic_softmax_step(
    cta: Cta, acc, scale, rows: RowState, p_stage, on_word: cutlass.Constexpr[Callable]
):
    """As `online_softmax_step`, with `p_exchange`."""
    sums = cute.make_rmem_tensor(2, Float32)
    bits = store_weights(cta, acc, scale, rows, sums, p_stage, on_word)
    tid = fresh_thread()
    lane, row = tid & 31, first_row(tid)
    rescale = own_rows(cta.s).sRescale[None, p_stage]
    if cute.arch.vote_any_sync((bits & Int32(TWO)) != 0):
        raise_row_max(cta, scale, acc, rows, rescale, row, lane)
        store_weights(cta, acc, scale, rows, sums, p_stage, nothing)
    else:
        store_row_values(rescale, row, lane, (Float16(1.0), Float16(1.0)))
    for h in cutlass.range_constexpr(2):
        rows.row_sum[h] = rows.row_sum[h] + sums[h]
