"""Step 67: row max and row sum of all tiles, in registers, tile by tile.

A thread holds 32 columns of two rows of each tile; the four lanes of a quad hold a row together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from mla_lab.cute.common.ptx_sm90 import LN2, NO_SCORE, add, butterfly, pick
from mla_lab.cute.steps.empty_kernel import consumer_registers, producer_registers
from mla_lab.cute.steps.one_barrier import THREADS
from mla_lab.cute.steps.page_load import PageCopy, page_copy, page_of
from mla_lab.cute.steps.scores import (
    init_query,
    load_query,
    make_query,
    place_of,
    score_operands,
    score_tile,
)
from mla_lab.cute.steps.shape import TILE, WARP_GROUP
from mla_lab.cute.steps.stage_ring import (
    fill_stage,
    full_parity,
    init_ring,
    make_ring,
    release_stage,
    stage_of,
)


@dataclass(frozen=True)
class Rows:
    """Running row max, in units of log2, and row sum of a thread's two rows; the sum is of its own
    columns alone."""

    top: cute.Tensor
    total: cute.Tensor


def new_max(old, greatest):
    """The row max after a tile, of the one before and the greatest score of this thread's columns:
    the same in all four lanes of a quad."""
    for lanes in (1, 2):
        greatest = cute.arch.fmax(greatest, cute.arch.shuffle_sync_bfly(greatest, offset=lanes))
    return cute.arch.fmax(old, greatest)


def rescale(old, new):
    """Factor for what was summed relative to the old row max; both in units of log2."""
    return cute.math.exp2(old - new, fastmath=True)


def lse_of(top, total):
    """Natural log of the sum of exponentials, of a row max in units of log2 and a whole row sum."""
    return (top + cute.math.log2(total, fastmath=True)) * LN2


def start_rows() -> Rows:
    """No score yet. The row max is finite, so that no difference is inf - inf."""
    rows = Rows(*(cute.make_rmem_tensor(2, Float32) for _ in range(2)))
    rows.top.fill(NO_SCORE)
    rows.total.fill(0.0)
    return rows


@cute.jit
def mask_scores(scores: cute.Tensor, thread, visible):
    """Columns from `visible` on are no tokens of the request."""
    if visible < TILE:
        for i in cutlass.range_constexpr(cute.size(scores)):
            _, column = place_of(i, thread)
            scores[i] = pick(column < visible, scores[i], -Float32.inf)


def registers_of(half: int, count: int) -> list[int]:
    """Accumulator registers of row r (half 0) or r + 8 (half 1)."""
    return [i for i in range(count) if i // 2 % 2 == half]


@cute.jit
def softmax_tile(scores: cute.Tensor, rows: Rows, scale_log2: Float32):
    """Scores become weights relative to the new row max. Returns the factors of the two rows for
    what was summed before."""
    factors = []
    for half in cutlass.range_constexpr(2):
        mine = registers_of(half, cute.size(scores))
        greatest = scores[mine[0]]
        for i in mine[1:]:
            greatest = cute.arch.fmax(greatest, scores[i])
        old = rows.top[half]
        rows.top[half] = new_max(old, greatest * scale_log2)
        factors.append(rescale(old, rows.top[half]))
        total = rows.total[half] * factors[half]
        for i in mine:
            scores[i] = cute.math.exp2(scores[i] * scale_log2 - rows.top[half], fastmath=True)
            total = total + scores[i]
        rows.total[half] = total
    return factors[0], factors[1]


def close_rows(rows: Rows) -> None:
    """Add the sums of the four lanes of a quad, once, behind the last tile."""
    for half in range(2):
        rows.total[half] = butterfly(add, rows.total[half])


@cute.jit
def store_lse(rows: Rows, lse: cute.Tensor, thread):
    """The first lane of each quad writes its two rows."""
    for half in cutlass.range_constexpr(2):
        row, _ = place_of(2 * half, thread)
        if thread % 4 == 0:
            lse[row] = lse_of(rows.top[half], rows.total[half])


@cute.kernel
def write_lse(
    copy_q: PageCopy, copy_kv: PageCopy, block_table: cute.Tensor, lse: cute.Tensor,
    seq_len: Int32, scale_log2: Float32,
):  # fmt: skip
    """One CTA: warp 0 loads, warp group 1 multiplies and sums."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    query, ring = make_query(BFloat16), make_ring(BFloat16)
    tiles = (seq_len + TILE - 1) // TILE
    init_query(query, warp)
    init_ring(ring, warp)
    if warp < 4:
        cute.arch.setmaxregister_decrease(producer_registers())
        if warp == 0:
            load_query(copy_q, query, 0)
            for t in cutlass.range(tiles, unroll=1):
                fill_stage(copy_kv, ring, t, page_of(block_table, t))
    else:
        cute.arch.setmaxregister_increase(consumer_registers())
        operands, rows = score_operands(query, ring), start_rows()
        cute.arch.mbarrier_wait(query.full, 0)
        for t in cutlass.range(tiles, unroll=1):
            cute.arch.mbarrier_wait(ring.full + stage_of(t), full_parity(t))
            score_tile(operands, stage_of(t))
            release_stage(ring, t)
            mask_scores(operands.scores, thread - WARP_GROUP, seq_len - t * TILE)
            softmax_tile(operands.scores, rows, scale_log2)
        close_rows(rows)
        store_lse(rows, lse, thread - WARP_GROUP)


@cute.jit
def launch(
    q: cute.Tensor, cache: cute.Tensor, block_table: cute.Tensor, lse: cute.Tensor,
    seq_len: Int32, scale_log2: Float32, stream: Any,
):  # fmt: skip
    """q: bf16 [1, 64, 192]. cache: bf16 [pages, 64, 192]. block_table: int32 [tiles].
    lse: fp32 [64]. seq_len: tokens; of none lse is -inf. scale_log2: the softmax scale times
    log2(e)."""
    write_lse(page_copy(q), page_copy(cache), block_table, lse, seq_len, scale_log2).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
    )
