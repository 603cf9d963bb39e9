"""Step 66: S = Q K^T by wgmma, out of the swizzled tiles that TMA filled.

A warp group multiplies 64 query rows by the 64 tokens of a tile, 192 numbers deep, and writes the
scores of its accumulators.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from mla_lab.cute.steps.empty_kernel import consumer_registers, producer_registers
from mla_lab.cute.steps.one_barrier import THREADS
from mla_lab.cute.steps.page_load import (
    PageCopy,
    load_page,
    page_copy,
    page_of,
    tile_bytes,
    tile_layout,
)
from mla_lab.cute.steps.shape import ROWS, TILE, WARP_GROUP, WIDTH
from mla_lab.cute.steps.stage_ring import (
    Ring,
    fill_stage,
    full_parity,
    init_ring,
    make_ring,
    release_stage,
    stage_of,
)

#: depth of one wgmma of 16-bit numbers
K_STEP = 16


@dataclass(frozen=True)
class Query:
    """Query rows in shared memory (64, 192, 1), and the barrier of their arrival. The one behind
    it, for rows that have been read, is step 69's."""

    tile: cute.Tensor
    full: cute.Pointer


@dataclass(frozen=True)
class ScoreOperands:
    """Descriptors of Q and K (.., .., k-step, stage), and the accumulator of 64 x 64 scores."""

    q: cute.Tensor
    k: cute.Tensor
    scores: cute.Tensor


def scores_mma():
    """The product of 64 x 64 scores: both operands lie with their depth along a row."""
    depth = OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, depth, depth, Float32, (1, 1, 1), (ROWS, TILE)
    )


def multiply(product: cute.MmaAtom, operands: ScoreOperands, stage):
    """Issue all k-steps of a tile: the first one overwrites the accumulator, the others add."""
    product.set(warpgroup.Field.ACCUMULATE, False)
    for k in range(WIDTH // K_STEP):
        q, keys = operands.q[None, None, k, 0], operands.k[None, None, k, stage]
        cute.gemm(product, operands.scores, q, keys, operands.scores)
        product.set(warpgroup.Field.ACCUMULATE, True)


def place_of(register, thread):
    """Row and column of the score in accumulator register `register` of a thread: four registers
    for eight columns, two of row r and two of row r + 8."""
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    return row, 8 * (register // 4) + 2 * (thread % 4) + register % 2


def load_query(copy: PageCopy, query: Query, request):
    """Producer: the 64 rows of a request."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(query.full, tile_bytes())
    load_page(copy, query.tile[None, None, 0], request, query.full)


def make_query(element) -> Query:
    """Shared memory of the query; `init_query` comes next."""
    alloc = cutlass.memory.SmemAllocator()
    layout = tile_layout()
    tile = alloc.allocate_tensor(element, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    return Query(tile, alloc.allocate_array(Int64, 2))


@cute.jit
def init_query(query: Query, warp):
    """One arrival: that of the producer, with the bytes. The fence in `init_ring` publishes it."""
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(query.full, 1)


def score_operands(query: Query, ring: Ring) -> ScoreOperands:
    """Descriptors once for all tiles, and the accumulator."""
    mma = scores_mma()
    whole = mma.get_slice(0)
    return ScoreOperands(
        mma.make_fragment_A(whole.partition_A(query.tile)),
        mma.make_fragment_B(whole.partition_B(ring.tiles)),
        cute.make_rmem_tensor(mma.partition_shape_C((ROWS, TILE)), Float32),
    )


@cute.jit
def score_tile(operands: ScoreOperands, stage):
    """The scores of the tile in `stage`, in the accumulator."""
    warpgroup.fence()
    multiply(cute.make_mma_atom(scores_mma().op), operands, stage)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def store_scores(scores: cute.Tensor, out: cute.Tensor, thread):
    """Each thread writes its accumulator registers to their places in `out` (64, 64)."""
    for i in cutlass.range_constexpr(cute.size(scores)):
        out[place_of(i, thread)] = scores[i]


@cute.kernel
def write_scores(copy_q: PageCopy, copy_kv: PageCopy, block_table: cute.Tensor, out: cute.Tensor):
    """One CTA: warp 0 loads, warp group 1 multiplies."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    query, ring = make_query(BFloat16), make_ring(BFloat16)
    init_query(query, warp)
    init_ring(ring, warp)
    if warp < 4:
        cute.arch.setmaxregister_decrease(producer_registers())
        if warp == 0:
            load_query(copy_q, query, 0)
            for t in cutlass.range(block_table.shape[0], unroll=1):
                fill_stage(copy_kv, ring, t, page_of(block_table, t))
    else:
        cute.arch.setmaxregister_increase(consumer_registers())
        operands = score_operands(query, ring)
        cute.arch.mbarrier_wait(query.full, 0)
        for t in cutlass.range(block_table.shape[0], unroll=1):
            cute.arch.mbarrier_wait(ring.full + stage_of(t), full_parity(t))
            score_tile(operands, stage_of(t))
            release_stage(ring, t)
            columns = cute.local_tile(out, (ROWS, TILE), (0, t))
            store_scores(operands.scores, columns, thread - WARP_GROUP)


@cute.jit
def launch(q: cute.Tensor, cache: cute.Tensor, block_table: cute.Tensor, out: cute.Tensor, stream):
    """q: bf16 [1, 64, 192]. cache: bf16 [pages, 64, 192]. block_table: int32 [tiles].
    out: fp32 [64, 64 tiles]."""
    write_scores(page_copy(q), page_copy(cache), block_table, out).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
    )
