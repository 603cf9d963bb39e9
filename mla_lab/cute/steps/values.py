"""Step 68: O = P V. The weights stay in registers; V is the first 128 columns of the K tile, read
as its transpose, in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from mla_lab.cute.steps.empty_kernel import consumer_registers, producer_registers
from mla_lab.cute.steps.one_barrier import THREADS
from mla_lab.cute.steps.online_softmax import (
    Rows,
    close_rows,
    mask_scores,
    softmax_tile,
    start_rows,
    store_lse,
)
from mla_lab.cute.steps.page_load import PageCopy, page_copy, page_of
from mla_lab.cute.steps.scores import (
    K_STEP,
    ScoreOperands,
    init_query,
    load_query,
    make_query,
    place_of,
    score_operands,
    score_tile,
)
from mla_lab.cute.steps.shape import BOX, LATENT, ROWS, TILE, WARP_GROUP, WIDTH
from mla_lab.cute.steps.stage_ring import (
    STAGES,
    Ring,
    fill_stage,
    full_parity,
    init_ring,
    make_ring,
    release_stage,
    stage_of,
)


@dataclass(frozen=True)
class ValueOperands:
    """P in registers, descriptors of V (.., .., k-step, stage), and the accumulator of 64 x 128."""

    weights: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor


def transposed_layout():
    """The ring's bytes as V^T: (columns, tokens, stages), the columns of a box contiguous."""
    return cute.make_layout(
        ((BOX, LATENT // BOX), TILE, STAGES),
        stride=((1, TILE * BOX), BOX, TILE * WIDTH),
    )


def values_mma():
    """The product of 64 x 128 outputs: P from registers, V with its columns along a row."""
    return sm90.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        (1, 1, 1),
        (ROWS, LATENT),
        a_source=warpgroup.OperandSource.RMEM,
    )


def rescale_rows(out, factors):
    """Multiply the accumulator registers of a thread's two rows by their factors."""
    for i in range(cute.size(out)):
        out[i] = out[i] * factors[i // 2 % 2]


def value_operands(ring: Ring) -> ValueOperands:
    """Descriptors once for all tiles, P's registers, and an accumulator of zeros."""
    mma = values_mma()
    view = cute.make_tensor(ring.tiles.iterator, transposed_layout())
    operands = ValueOperands(
        cute.make_rmem_tensor(mma.partition_shape_A((ROWS, TILE)), BFloat16),
        mma.make_fragment_B(mma.get_slice(0).partition_B(view)),
        cute.make_rmem_tensor(mma.partition_shape_C((ROWS, LATENT)), Float32),
    )
    operands.out.fill(0.0)
    return operands


@cute.jit
def add_values(operands: ValueOperands, scores: cute.Tensor, stage):
    """O += P V of the tile in `stage`. A weight's register as an accumulator is its register as an
    operand."""
    for i in cutlass.range_constexpr(cute.size(scores)):
        operands.weights[i] = scores[i].to(BFloat16)
    product = cute.make_mma_atom(values_mma().op)
    product.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for k in cutlass.range_constexpr(TILE // K_STEP):
        weights, v = operands.weights[None, None, k], operands.v[None, None, k, stage]
        cute.gemm(product, operands.out, weights, v, operands.out)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def attend_tile(
    scores: ScoreOperands, values: ValueOperands, rows: Rows, ring: Ring, t, thread, visible,
    scale_log2: Float32,
):  # fmt: skip
    """Scores, weights and values of tile `t` of the ring."""
    cute.arch.mbarrier_wait(ring.full + stage_of(t), full_parity(t))
    score_tile(scores, stage_of(t))
    mask_scores(scores.scores, thread, visible)
    rescale_rows(values.out, softmax_tile(scores.scores, rows, scale_log2))
    add_values(values, scores.scores, stage_of(t))
    release_stage(ring, t)


def store_out(values: ValueOperands, rows: Rows, out: cute.Tensor, thread):
    """Divide by the row sums, and write."""
    rescale_rows(values.out, [cute.arch.rcp_approx(rows.total[half]) for half in range(2)])
    for i in range(cute.size(values.out)):
        out[place_of(i, thread)] = values.out[i].to(BFloat16)


@cute.kernel
def decode_one(
    copy_q: PageCopy, copy_kv: PageCopy, block_table: cute.Tensor, out: cute.Tensor,
    lse: cute.Tensor, seq_len: Int32, scale_log2: Float32,
):  # fmt: skip
    """One CTA: warp 0 loads, warp group 1 attends."""
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
        scores, values = score_operands(query, ring), value_operands(ring)
        rows, lane = start_rows(), thread - WARP_GROUP
        cute.arch.mbarrier_wait(query.full, 0)
        for t in cutlass.range(tiles, unroll=1):
            visible = seq_len - t * TILE
            attend_tile(scores, values, rows, ring, t, lane, visible, scale_log2)
        close_rows(rows)
        store_lse(rows, lse, lane)
        store_out(values, rows, out, lane)


@cute.jit
def launch(
    q: cute.Tensor, cache: cute.Tensor, block_table: cute.Tensor, out: cute.Tensor,
    lse: cute.Tensor, seq_len: Int32, scale_log2: Float32, stream: Any,
):  # fmt: skip
    """q: bf16 [1, 64, 192]. cache: bf16 [pages, 64, 192]. block_table: int32 [tiles].
    out: bf16 [64, 128]. lse: fp32 [64]. seq_len: tokens, at least 1; the rest of the last page
    is finite, since 0 x NaN is NaN. scale_log2: the softmax scale times log2(e)."""
    decode_one(page_copy(q), page_copy(cache), block_table, out, lse, seq_len, scale_log2).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
    )
