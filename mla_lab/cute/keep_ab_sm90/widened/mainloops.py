"""Mainloops of the consumers: QK-softmax with the query in shared memory, and PV."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...common.feature_operands import orient_scores, scale_now
from ...common.pipeline import PipelineState
from ...common.ptx_sm90 import fresh_thread
from ...split_merge.keep_ab_cooperative import merge
from ..mainloop_pv import Fragments as PvFragments
from ..mainloop_pv import epilogue, gemm_pv, scale_rows
from ..mainloop_pv import make_fragments as pv_fragments
from ..mainloop_qk_softmax import (
    RowState,
    TileContext,
    p_address,
    release_kv,
    softmax_to_p,
    start_rows,
    store_row_stats,
    two_to_minus,
)
from ..mask import apply_mask, apply_valid, first_row, mask_free_until
from ..params import Cta, Work
from ..tile_scheduler import load_plan, may_be_split, read_work
from .params import PRODUCTS, SPARSE

#: k-steps of 16 columns, and those that may be unfinished when PV of the tile before starts
STEPS, QK_PENDING = 36, 8


@dataclass(frozen=True)
class Fragments:
    """Operands of QK and accumulators of the warp group."""

    tSrQ: cute.Tensor  # descriptors
    tSrK: cute.Tensor  # descriptors of all stages
    tSrS: cute.Tensor  # fp32 scores, then weights
    rP: cute.Tensor  # weights in bf16


def with_plan(cta: Cta) -> Cta:
    """`cta` with its plan read again: held from one use to the next, it would take registers."""
    return replace(cta, plan=load_plan(cta.cfg, cta.s))


def make_fragments(cta: Cta) -> Fragments:
    """Descriptors once for all tiles, and registers."""
    qk = cta.mma.qk
    tSrQ = qk.make_fragment_A(qk.get_slice(0).partition_A(cta.s.sQ))
    tSrK = qk.make_fragment_B(qk.get_slice(0).partition_B(cta.s.sKV))
    tSrS = cute.make_rmem_tensor(qk.partition_shape_C((64, 64)), Float32)
    rP = cute.make_rmem_tensor(cta.mma.qk_rs.partition_shape_A((64, 64)), cta.cfg.element)
    tSrS.fill(0.0)
    return Fragments(tSrQ, tSrK, tSrS, rP)


@cute.jit
def issue_scores(cta: Cta, f: Fragments, state: PipelineState, pending: cutlass.Constexpr[int]):
    """S = Q K^T of the tile in a stage, the last `pending` k-steps as a commit group of their own.
    The rows were stored, and pushed, outside of the async proxy that the products read through:
    each thread fences behind the full barrier."""
    cta.s.kv_pipe.consumer_wait(state)
    cute.arch.fence_view_async_shared()
    if const_expr(cta.cfg.parts & PRODUCTS):
        atom = cute.make_mma_atom(cta.mma.qk.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for k in cutlass.range_constexpr(STEPS):
            if const_expr(pending > 0 and k == STEPS - pending):
                warpgroup.commit_group()
            keys = f.tSrK[None, None, k, state.index]
            cute.gemm(atom, f.tSrS, f.tSrQ[None, None, k], keys, f.tSrS)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()


def wait_scores(cta: Cta, pending: int) -> None:
    """Wait until all but the last `pending` commit groups are done."""
    if cta.cfg.parts & PRODUCTS:
        warpgroup.wait_group(pending)


@cute.jit
def finish_rows(cta: Cta, work: Work, rows: RowState, turn: Int32):
    """Row sums and row maxes of a work tile for the epilogue, which has read the last ones."""
    thread = fresh_thread() & 127
    row = 16 * (thread // 32) + thread % 32 // 4
    cta.s.stats_read.wait(0, turn)
    store_row_stats(cta, cta.s, work, rows, row, thread % 32)


@cute.jit
def weights_of_tile(
    cta: Cta, f: Fragments, rows: RowState, tile: TileContext, left: Int32, p_at, state
):  # fmt: skip
    """P of the tile in a stage, on its rope."""
    if const_expr(cta.cfg.gather == SPARSE):
        apply_valid(f.tSrS, [Int32(cta.s.sValid[h, state.index]) for h in range(2)])
    else:
        apply_mask(cta, f.tSrS, tile.index, tile.mask_free, left)
    # the rescale exponents of the stage's last tile have been read
    cta.s.p_pipe.producer_acquire(state.opposite())
    if const_expr(cta.cfg.parts & PRODUCTS):
        orient_scores(cta.cfg, f.tSrS, scale_now(cta.cfg, cta.g))
        softmax_to_p(cta, f, rows, tile, p_at, state.index)
    cute.arch.fence_view_async_shared()


@cute.jit
def tiles_qk_first(
    cta: Cta, f: Fragments, rows: RowState, tile: TileContext, left: Int32, p_at, state
):  # fmt: skip
    """All tiles of a work tile; P of one is committed when QK of the next is almost done, so that
    PV does not delay it. P of the last one is stored and not committed; returns its stage."""
    state = state.uniform()
    issue_scores(cta, f, state, 0)
    wait_scores(cta, 0)
    while left > 1:
        weights_of_tile(cta, f, rows, tile, left, p_at, state)
        ahead = state.advance(cta.cfg.stages).uniform()
        issue_scores(cta, f, ahead, QK_PENDING)
        wait_scores(cta, 1)
        cta.s.p_pipe.producer_commit(state.index)
        wait_scores(cta, 0)
        state = ahead
        left = left - 1
    weights_of_tile(cta, f, rows, tile, left, p_at, state)
    return state


@cute.jit
def mainloop_qk_softmax(cta: Cta):
    """Per tile: QK, softmax, P. PV of a tile runs beside QK of the next one."""
    cfg, g, s, plan = cta.cfg, cta.g, cta.s, cta.plan
    lane, turn = cute.arch.lane_idx(), Int32(0)
    w = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % 128 // 32)
    f, p_at = make_fragments(cta), p_address(cta)
    row_max, row_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
    rows = RowState(row_max, row_sum, row_max)
    state = PipelineState.start()
    for index in cutlass.range(plan.first, plan.last, unroll=1):
        s.q_pipe.full.wait(0, turn)
        work = read_work(g, s, index)
        below = start_rows(cta, work, 16 * w + lane // 4, rows)
        mask_free = cute.arch.make_warp_uniform(mask_free_until(cta, work, 16 * w))
        tile = TileContext(index, mask_free, below)
        left = cute.arch.make_warp_uniform(work.end - work.begin)
        if const_expr(cfg.qk_first):
            state = tiles_qk_first(cta, f, rows, tile, left, p_at, state)
            with cute.arch.elect_one():
                s.q_pipe.consumer_release(0)
            finish_rows(cta, read_work(g, s, index), rows, turn)
            s.p_pipe.producer_commit(state.index)
            state = state.advance(cfg.stages)
        else:
            while left > 0:
                state = state.uniform()
                issue_scores(cta, f, state, 0)
                wait_scores(cta, 0)
                weights_of_tile(cta, f, rows, tile, left, p_at, state)
                if left == 1:
                    with cute.arch.elect_one():
                        s.q_pipe.consumer_release(0)
                    finish_rows(cta, read_work(g, s, index), rows, turn)
                s.p_pipe.producer_commit(state.index)
                left = left - 1
                state = state.advance(cfg.stages)
        turn = turn ^ 1


@cute.jit
def gemm_pv_by_halves(cta: Cta, f: PvFragments, stage: Int32, exponents: list):
    """`gemm_pv`; each half of the stage's tokens is released when its products are done."""
    if cute.arch.vote_any_sync((exponents[0] | exponents[1]) != 0):
        scale_rows(f.tOrO, [two_to_minus(x) for x in exponents])
    atom = cute.make_mma_atom(cta.mma.pv.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for k in cutlass.range_constexpr(4):
        weights, values = f.tOrP[None, None, k, stage], f.tOrV[None, None, k, stage]
        cute.gemm(atom, f.tOrO, weights, values, f.tOrO)
        if const_expr(k % 2 == 1):
            warpgroup.commit_group()
    for half in cutlass.range_constexpr(2):
        warpgroup.wait_group(1 - half)
        release_kv(cta, 2 * stage + half, cute.arch.lane_idx())


@cute.jit
def mainloop_pv(cta: Cta):
    """Per work tile: PV tile by tile as P is committed, the epilogue; at the end the merges."""
    cfg, g, s, plan = cta.cfg, cta.g, cta.s, cta.plan
    wg = cute.arch.make_warp_uniform(fresh_thread() // 128)
    f = pv_fragments(cta, wg)
    state = PipelineState.start()
    s.stats_read.arrive(0)
    for index in cutlass.range(plan.first, plan.last, unroll=1):
        f.tOrO.fill(0.0)
        block, count = Int32(0), Int32(1)
        while block < count:
            state = state.uniform()
            s.p_pipe.consumer_wait(state)
            if block == 0:
                work = read_work(g, s, index)
                count = cute.arch.make_warp_uniform(work.end - work.begin)
            row = first_row(fresh_thread())
            exponents = [Int32(s.sRescale[row + 8 * h, state.index]) for h in range(2)]
            s.p_pipe.consumer_release(state.index)
            if const_expr(cfg.halves):
                gemm_pv_by_halves(cta, f, state.index, exponents)
            else:
                if const_expr(cfg.parts & PRODUCTS):
                    gemm_pv(cta, f, state.index, exponents)
                release_kv(cta, state.index, cute.arch.lane_idx())
            block = block + 1
            state = state.advance(cfg.stages)
        epilogue(with_plan(cta), f.tOrO, index)
    if const_expr(cfg.cooperative):
        late = with_plan(cta)
        first, last = late.plan.first, late.plan.last
        # the last work tile first: its own strips are in the ring
        for back in cutlass.range(first + 1, last + 1, unroll=1):
            if may_be_split(late.plan, first + last - back):
                merge(late, first + last - back, True)
