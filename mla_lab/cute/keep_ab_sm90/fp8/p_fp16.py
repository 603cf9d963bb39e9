"""fp16 weights from the scores of a bf16 query (`query_hi_lo`), and their store to shared memory.

A thread's pairs of neighbouring tokens are what stmatrix stores: tokens keep their order. A CTA on
its own stores P to the rope box of the tile's stage and to `sP_rest`; with `p_exchange`, P goes to
its own stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ...common.pipeline import PipelineState
from ...common.ptx_sm90 import float_bits, fresh_thread, pack2, stmatrix_x4
from ...rows_on_m.mask import first_row, rows_of
from ...rows_on_m.params import SPARSE, Cta
from ..mainloop_qk_softmax import RowState, store_row_values, thread_row_max
from ..params import BOX, ROPE_BOX
from . import kv_656
from .mainloop_qk_softmax import matrix_row, nothing, raise_row_max
from .p_exchange_2cta import own_p, own_rows
from .params import P_STAGE, WEIGHT_LOG2

#: a bit that fp16 weights of 2 and more, infinity and NaN have, in both halves of a word
TWO = 0x40004000
#: log2 of the sum of a thread's weights of a row and tile up to which none of them passes fp16
SUM_LOG2 = 14.0


@dataclass(frozen=True)
class Tile:
    """The KV tile whose weights are computed."""

    stage: Any
    p: PipelineState  # with `p_exchange` of its P
    unit: Any = None  # bits of its unit, None if they are still to be loaded


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


def places_of_p(cta: Cta, tile: Tile):
    """Addresses of the lane's row of P for tokens 0 to 31 and for the others."""
    if cta.cfg.p_exchange:
        first = matrix_row(own_p(cta.s)) + tile.p.index * P_STAGE
        return first, first + P_STAGE // 2
    first = matrix_row(Int32(cta.s.sKV.iterator.toint()) + ROPE_BOX * BOX)
    first = first + tile.stage * cta.cfg.stage_bytes
    if cta.cfg.kv_656:
        return first, first + BOX
    return first, matrix_row(Int32(cta.s.sP_rest.iterator.toint())) + tile.stage * BOX


def row_max_may_move(cta: Cta, bits, sums):
    """True in a warp where a row max may have to move. Of few keys, a weight of 2 or more tells it;
    of many, whose smallest weights count and which therefore begin higher (`weight_log2`), a sum of
    a thread's 16 weights of a row, before one of them passes fp16."""
    if cta.cfg.gather == SPARSE:
        return cute.arch.vote_any_sync((bits & Int32(TWO)) != 0)
    return cute.arch.vote_any_sync(cute.arch.fmax(sums[0], sums[1]) > Float32(2.0**SUM_LOG2))


def store_weights(cta: Cta, acc, scale, row_max, sums, places, on_word: Callable):
    """All weights of a tile to its P; sums <- their sums. Returns `row_max_may_move`."""
    bits = Int32(0)
    sums.fill(0.0)

    def add(h, x):
        sums[h] = sums[h] + x

    for step in range(4):
        words = weights_of_step(acc, scale, row_max, step, on_word, add)
        for word in words:
            bits = bits | word
        stmatrix_x4(places[step // 2] ^ (32 * (step % 2)), 0, words)
    return row_max_may_move(cta, bits, sums)


def below(cta: Cta, rows: RowState, lift):
    """The row maxes without the unit's logarithm: what is subtracted from the scores."""
    return [rows.row_max[h] - lift for h in range(2)] if cta.cfg.kv_656 else rows.row_max


def unit_of_tile(cta: Cta, tile: Tile):
    """log2 of the tile's unit, and 1 / unit."""
    if not cta.cfg.kv_656:
        return Float32(0.0), Float32(1.0)
    bits = kv_656.load_unit(cta.s, tile.stage) if tile.unit is None else tile.unit
    return kv_656.unit_of(bits)


@cute.jit
def online_softmax_step(
    cta: Cta, acc, scale, rows: RowState, tile: Tile, on_word: cutlass.Constexpr[Callable]
):
    """fp16 weights relative to a row max that rarely moves, to shared memory. Calls `on_word` with
    the number of each finished word."""
    cfg, stage = cta.cfg, tile.stage
    lift, inverse = (Float32(0.0), Float32(1.0))
    if const_expr(cfg.kv_656):
        lift, inverse = kv_656.unit_of(float_bits((cta.s.kv_656.units + stage).load()))
    low = below(cta, rows, lift)
    over = cute.arch.fmax(
        thread_row_max(acc, 0) * scale[0] - low[0], thread_row_max(acc, 1) * scale[1] - low[1]
    )
    tid = fresh_thread()
    lane, row = tid & 31, first_row(tid)
    rescale = cta.s.sRescale[None, stage]
    if cute.arch.vote_any_sync(over > Float32(WEIGHT_LOG2 + cfg.rescale_log2)):
        raise_row_max(cta, scale, acc, rows, rescale, row, lane, lift)
    else:
        store_row_values(rescale, row, lane, (Float16(1.0), Float16(1.0)))
    places, low = places_of_p(cta, tile), below(cta, rows, lift)
    for step in cutlass.range_constexpr(4):
        sums: list[Any] = []

        def keep(h, x, sums=sums):
            sums.append(x)

        words = weights_of_step(acc, scale, low, step, on_word, keep)
        for h in cutlass.range_constexpr(2):
            total = sums[h] + sums[2 + h]
            total = total * inverse if const_expr(cfg.kv_656) else total
            rows.row_sum[h] = rows.row_sum[h] + total
        stmatrix_x4(places[step // 2] ^ (32 * (step % 2)), 0, words)


def rescale_of(cta: Cta, tile: Tile):
    """Rescale factors of O before the tile's PV, by row."""
    if cta.cfg.p_exchange:
        return own_rows(cta.s).sRescale[None, tile.p.index]
    return cta.s.sRescale[None, tile.stage]


@cute.jit
def optimistic_softmax_step(
    cta: Cta, acc, scale, rows: RowState, tile: Tile, on_word: cutlass.Constexpr[Callable]
):
    """As `online_softmax_step`, but the weights are computed before it is known whether a row max
    moves: they tell, so that the greatest scores of other tiles are never searched."""
    lift, inverse = unit_of_tile(cta, tile)
    places = places_of_p(cta, tile)
    sums = cute.make_rmem_tensor(2, Float32)
    moves = store_weights(cta, acc, scale, below(cta, rows, lift), sums, places, on_word)
    tid = fresh_thread()
    lane, row, rescale = tid & 31, first_row(tid), rescale_of(cta, tile)
    if moves:
        raise_row_max(cta, scale, acc, rows, rescale, row, lane, lift)
        store_weights(cta, acc, scale, below(cta, rows, lift), sums, places, nothing)
    else:
        store_row_values(rescale, row, lane, (Float16(1.0), Float16(1.0)))
    for h in cutlass.range_constexpr(2):
        total = sums[h] * inverse if const_expr(cta.cfg.kv_656) else sums[h]
        rows.row_sum[h] = rows.row_sum[h] + total


def softmax_step(cta: Cta, acc, scale, rows: RowState, tile: Tile, on_word: Callable):
    """Weights of a tile, to its P."""
    if cta.cfg.optimistic:
        optimistic_softmax_step(cta, acc, scale, rows, tile, on_word)
    else:
        online_softmax_step(cta, acc, scale, rows, tile, on_word)
