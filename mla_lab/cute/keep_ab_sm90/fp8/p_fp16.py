"""fp16 weights from the scores of a bf16 query (`query_hi_lo`), and their store to shared memory.

A thread's pairs of neighbouring tokens are what stmatrix stores: tokens keep their order. A CTA on
its own stores P to the rope box of the tile's stage and to `sP_rest`; with `p_exchange`, P goes to
its own stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ...common.ptx_sm90 import float_bits, fresh_thread, pack2, stmatrix_x4
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


def places_of_p(cta: Cta, stage, p_stage):
    """Addresses of the lane's row of P for tokens 0 to 31 and for the others."""
    if cta.cfg.p_exchange:
        first = matrix_row(own_p(cta.s)) + p_stage * P_STAGE
        return first, first + P_STAGE // 2
    first = matrix_row(Int32(cta.s.sKV.iterator.toint()) + ROPE_BOX * BOX)
    first = first + stage * cta.cfg.stage_bytes
    if cta.cfg.kv_656:
        return first, first + BOX
    return first, matrix_row(Int32(cta.s.sP_rest.iterator.toint())) + stage * BOX


def store_weights(cta: Cta, acc, scale, row_max, sums, places, on_word: Callable):
    """All weights of a tile to its P; sums <- their sums. Returns the OR of their bits."""
    bits = Int32(0)
    sums.fill(0.0)

    def add(h, x):
        sums[h] = sums[h] + x

    for step in range(4):
        words = weights_of_step(acc, scale, row_max, step, on_word, add)
        for word in words:
            bits = bits | word
        stmatrix_x4(places[step // 2] ^ (32 * (step % 2)), 0, words)
    return bits


def below(cta: Cta, rows: RowState, lift):
    """The row maxes without the unit's logarithm: what is subtracted from the scores."""
    return [rows.row_max[h] - lift for h in range(2)] if cta.cfg.kv_656 else rows.row_max


def unit_of_tile(cta: Cta, stage, bits):
    """log2 of the unit of the tile in a stage, and 1 / unit. `bits`: the unit's, or None if they
    are still to be loaded."""
    if not cta.cfg.kv_656:
        return Float32(0.0), Float32(1.0)
    return kv_656.unit_of(kv_656.load_unit(cta.s, stage) if bits is None else bits)


@cute.jit
def online_softmax_step(
    cta: Cta, acc, scale, rows: RowState, stage, on_word: cutlass.Constexpr[Callable]
):
    """fp16 weights relative to a row max that rarely moves, to shared memory. Calls `on_word` with
    the number of each finished word."""
    cfg, s = cta.cfg, cta.s
    lift, inverse = (Float32(0.0), Float32(1.0))
    if const_expr(cfg.kv_656):
        lift, inverse = kv_656.unit_of(float_bits((s.kv_656.units + stage).load()))
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


@cute.jit
def optimistic_softmax_step(
    cta: Cta, acc, scale, rows: RowState, stage, p_stage,
    on_word: cutlass.Constexpr[Callable], unit: Any = None,
):  # fmt: skip
    """As `online_softmax_step`, but the weights are computed before it is known whether a row max
    moves: no weight may pass 2, so that one bit of all weights tells, and the greatest scores of
    other tiles are never searched. `unit`: see `unit_of_tile`."""
    lift, inverse = unit_of_tile(cta, stage, unit)
    places = places_of_p(cta, stage, p_stage)
    sums = cute.make_rmem_tensor(2, Float32)
    bits = store_weights(cta, acc, scale, below(cta, rows, lift), sums, places, on_word)
    tid = fresh_thread()
    lane, row = tid & 31, first_row(tid)
    if const_expr(cta.cfg.p_exchange):
        rescale = own_rows(cta.s).sRescale[None, p_stage]
    else:
        rescale = cta.s.sRescale[None, stage]
    if cute.arch.vote_any_sync((bits & Int32(TWO)) != 0):
        raise_row_max(cta, scale, acc, rows, rescale, row, lane, lift)
        store_weights(cta, acc, scale, below(cta, rows, lift), sums, places, nothing)
    else:
        store_row_values(rescale, row, lane, (Float16(1.0), Float16(1.0)))
    for h in cutlass.range_constexpr(2):
        total = sums[h] * inverse if const_expr(cta.cfg.kv_656) else sums[h]
        rows.row_sum[h] = rows.row_sum[h] + total


def softmax_step(
    cta: Cta, acc, scale, rows: RowState, stage, p_stage, on_word: Callable, unit: Any = None
):
    """Weights of the tile in `stage`, to P of its stage, or of `p_stage` with `p_exchange`."""
    if cta.cfg.optimistic:
        optimistic_softmax_step(cta, acc, scale, rows, stage, p_stage, on_word, unit)
    else:
        online_softmax_step(cta, acc, scale, rows, stage, on_word)
