"""Mainloop of the QK-softmax warp group: S = Q K^T with Q in registers, online softmax, P to shared
memory.

A thread holds two rows of each accumulator, eight apart; `mask.rows_of` gives their coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ..common.feature_operands import magnitude, orient_query, scale_now, with_sink
from ..common.pipeline import StagePhases
from ..common.ptx_sm90 import (
    LN2,
    NO_SCORE,
    add,
    butterfly,
    float_of_exponent,
    fresh_thread,
    pick,
    ptx,
    stmatrix_x4,
)
from ..rows_on_m.mask import first_row, mask_free_until, rows_of
from ..rows_on_m.params import BLOCK, LATENT, OUTSIDE, Cta, Work
from ..rows_on_m.profile import profile_tile
from ..rows_on_m.work_records import piece_begin, read_work
from .params import Q_STEPS_IN_REGISTERS, QK_SOFTMAX_BARRIER, ROPE_BOX, SKIPPED, STAGE
from .release import release_stage
from .token_fetch import mask_scores


@dataclass(frozen=True)
class Fragments:
    """Operands of QK and accumulators of the warp group."""

    tSrQ: cute.Tensor  # k-steps 0 to 30, in registers
    tSrQ_last: cute.Tensor  # k-step 31, descriptors
    tSrQ_rope: cute.Tensor  # k-steps 32 to 35, descriptors
    tSrS: cute.Tensor  # fp32 scores, then weights
    rP: cute.Tensor  # weights in the element type
    p_at: Any  # shared-memory address of a lane's row of P in stage 0, see `p_address`


@dataclass(frozen=True)
class RowState:
    """Online-softmax state of the thread's two rows, fp32, in base-2 units."""

    row_max: cute.Tensor  # what weights are relative to
    row_sum: cute.Tensor
    seen_max: cute.Tensor  # greatest score so far; only with the option skip


@dataclass(frozen=True)
class TileContext:
    """Values of a work tile that each step of its mainloop reads."""

    index: Int32
    mask_free: Int32  # see `mask_free_until`
    #: a tile is skipped where all scores are below `seen_max` plus this (log2 units); option skip
    skip_below: Any = None


def phase_bits(stages: int) -> tuple[int, int]:
    """Bits of `StagePhases` behind those of kv_pipe.full: p_pipe.empty[0] and the other stages',
    stats_read."""
    return stages, 2 * stages


@cute.jit
def zero_v_tail(cta: Cta, stage, work: Work, thread):
    """Zero the V rows past kv_len in the work tile's last tile: an unread page may hold NaN, and
    0 x NaN is NaN in the tensor core. The swizzle permutes 16-byte pieces within a row."""
    cfg = cta.cfg
    tail = work.kv_len - (work.end - 1) * BLOCK
    if tail < BLOCK:
        first = cutlass.max(tail, Int32(0))
        zero = cute.make_rmem_tensor(4, Int32)
        zero.fill(0)
        base = cute.make_ptr(
            Int32, cta.s.sKV.iterator.toint(), cute.AddressSpace.smem, assumed_align=16
        )
        per_word = 32 // cfg.element.width
        pieces = 16 // per_word  # of a row of 64 elements
        for i in cutlass.range(first * pieces + thread, BLOCK * pieces, 128, unroll=1):
            piece = cfg.word_of_piece(i)
            for box in cutlass.range_constexpr(LATENT // 64):
                start = (stage * cfg.stage_elements + box * cfg.box_stride) // per_word
                at = (base + start + piece).align(16)
                cute.autovec_copy(zero, cute.make_tensor(at, cute.make_layout(4)))


def p_address(cta: Cta):
    """Shared-memory address of a lane's row of P's first 16 columns, in the rope box of stage 0."""
    tid, cfg = fresh_thread(), cta.cfg
    return (
        Int32(cta.s.sKV.iterator.toint())
        + (ROPE_BOX * cfg.box_stride * 2)
        + (((tid >> 4) & 6) + ((tid >> 3) & 1)) * (cfg.rows_stride * 2)
        + ((tid & 7) << 7)
        + ((((tid >> 4) & 1) ^ (tid & 7)) << 4)
    )


def stmatrix_swizzled(address, offset, words, steps: int) -> None:
    """`steps` times four matrices, 32 bytes further on each; `words` are four per step. The swizzle
    is applied at the store: addresses of all steps would take a register each."""
    for j in range(steps):
        ptx(
            "{ .reg .b32 at; xor.b32 at, {$r0}, " + str(j << 5) + "; add.u32 at, at, {$r1};"
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [at], { {$r2}, {$r3}, {$r4}, {$r5} }; }",
            address,
            Int32(offset),
            *(words[4 * j + i] for i in range(4)),
        )


def store_q_last(cta: Cta, fragment):
    """K-step 31 of Q, unswizzled: 8 x 8 matrices of 128 B, rows first."""
    tid = fresh_thread()
    matrix = 2 * (tid % 128 // 32) + ((tid >> 3) & 1) + 8 * ((tid >> 4) & 1)
    address = Int32(cta.s.sQ_last.iterator.toint()) + matrix * 128 + (tid & 7) * 16
    words = cute.recast_tensor(fragment, Int32)
    stmatrix_x4(address, 0, [words[i] for i in range(4)])


def keys_of(cta: Cta, stage):
    """Descriptors of one stage's keys: of a view of the stage alone each is a constant behind the
    first, for the uniform datapath; of a view of the ring each is computed in general registers."""
    qk = cta.mma.qk
    return qk.make_fragment_B(qk.get_slice(0).partition_B(cta.s.sKV[None, None, stage]))


def issue_qk(cta: Cta, f: Fragments, stage, phase, pending: int):
    """All 36 k-steps of a tile; the last `pending` of them form a commit group of their own."""
    rs = cute.make_mma_atom(cta.mma.qk_rs.op)
    rs.set(warpgroup.Field.ACCUMULATE, False)
    ss = cute.make_mma_atom(cta.mma.qk.op)
    ss.set(warpgroup.Field.ACCUMULATE, True)
    tSrK, chunks = keys_of(cta, stage), cta.cfg.kv_chunks
    warpgroup.fence()
    for chunk, (first, last) in enumerate(chunks):
        cta.s.kv_pipe.full.offset(stage * len(chunks)).wait(chunk, phase)
        if cta.cfg.gather:
            # tokens were not written through the async proxy, which MMAs read through
            cute.arch.fence_view_async_shared()
        for k in range(4 * first, 4 * last):
            if pending and k == 36 - pending:
                warpgroup.commit_group()
            keys = tSrK[None, None, k]
            if k < Q_STEPS_IN_REGISTERS:
                cute.gemm(rs, f.tSrS, f.tSrQ[None, None, k], keys, f.tSrS)
                rs.set(warpgroup.Field.ACCUMULATE, True)
            elif k < 32:
                cute.gemm(ss, f.tSrS, f.tSrQ_last[None, None, 0], keys, f.tSrS)
            else:
                cute.gemm(ss, f.tSrS, f.tSrQ_rope[None, None, k - 32], keys, f.tSrS)
    warpgroup.commit_group()


def two_to_minus(exponent):
    """2**-exponent, exact; 0 where fp32 has no normal number for it."""
    return float_of_exponent(cutlass.max(127 - exponent, Int32(0)))


@cute.jit
def store_row_values(t: cute.Tensor, row, lane, values):
    """One value for each of the thread's two rows, by the first lane of the quad."""
    if lane % 4 == 0:
        for h in cutlass.range_constexpr(2):
            t[row + 8 * h] = values[h].to(t.element_type)


def greater(cfg: Any) -> Callable[[Any, Any], Any]:
    """The greater of two scores. With `skip` NaN, so that no tile with one is skipped."""
    return partial(cute.arch.fmax, nan=True) if cfg.skip else cute.arch.fmax


def thread_row_max(acc, h, of_two: Callable[[Any, Any], Any] = cute.arch.fmax):
    """Greatest score of one of the thread's two rows, among the thread's own columns."""
    scores = rows_of(acc)
    top = scores[h, 0]
    for c in range(1, cute.size(acc) // 2):
        top = of_two(top, scores[h, c])
    return top


@cute.jit
def raise_row_max(cta: Cta, scale: Float32, acc, rows: RowState, rescale, row, lane):
    """New row maxes where a score is too far above the old one, and O's rescale exponents; rare.

    The first row max is the score itself, so that the greatest P of few keys is exactly 1; later it
    moves by whole powers of two, so that rescale factors are exact.
    """
    row_max = rows.row_max
    for h in cutlass.range_constexpr(2):
        top = butterfly(cute.arch.fmax, thread_row_max(acc, h, greater(cta.cfg))) * scale
        rise = top - row_max[h]
        steps = Float32(0.0)
        if rise > Float32(cta.cfg.rescale_log2):
            steps = cute.math.ceil(rise)
            row_max[h] = pick(row_max[h] == Float32(NO_SCORE), top, row_max[h] + steps)
        exponent = Int32(cute.arch.fmin(steps, Float32(SKIPPED - 1)))
        rows.row_sum[h] = rows.row_sum[h] * two_to_minus(exponent)
        if lane % 4 == 0:
            rescale[row + 8 * h] = exponent.to(Uint8)


@cute.jit
def online_softmax_step(cta: Cta, scale: Float32, f: Fragments, rows: RowState, rescale):
    """rP <- weights relative to a row max that rarely moves; `rescale` <- O's rescale exponents.

    A row keeps its old max until a score is more than 2**rescale_log2 above it. One vote per warp
    finds that no row of a tile has such a score, without the rows' own maxes.
    """
    row_max, acc = rows.row_max, f.tSrS
    tops = [thread_row_max(acc, h, greater(cta.cfg)) for h in range(2)]
    over = cute.arch.fmax(tops[0] * scale - row_max[0], tops[1] * scale - row_max[1])
    tid = fresh_thread()  # these registers are free until here
    lane, row = tid & 31, first_row(tid)
    if cute.arch.vote_any_sync(over > Float32(cta.cfg.rescale_log2)):
        raise_row_max(cta, scale, acc, rows, rescale, row, lane)
    else:
        store_row_values(rescale, row, lane, (Int32(0), Int32(0)))
    scores = rows_of(acc)
    for h in cutlass.range_constexpr(2):
        total = Float32(0)
        for c in cutlass.range_constexpr(0, cute.size(acc) // 2, 2):
            for e in cutlass.range_constexpr(2):
                scores[h, c + e] = cute.math.exp2(
                    scores[h, c + e] * scale - row_max[h], fastmath=True
                )
            total = total + (scores[h, c] + scores[h, c + 1])
        rows.row_sum[h] = rows.row_sum[h] + total
    for i in cutlass.range_constexpr(cute.size(f.rP)):
        f.rP[i] = acc[i].to(cta.cfg.element)


@cute.jit
def all_threads(condition):
    """Nonzero if the condition holds in all 128 threads. (With a named barrier for parts of warps
    the compiler spills.)"""
    word = pick(cute.arch.vote_all_sync(condition), Int32(1), Int32(0))
    return ptx(
        "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; "
        "bar.red.and.pred q, {$r1}, 128, p; selp.s32 {$w0}, 1, 0, q; }",
        word,
        Int32(QK_SOFTMAX_BARRIER.barrier_id),
        out=Int32,
    )


@cute.jit
def softmax_to_p(cta: Cta, f: Fragments, rows: RowState, tile: TileContext, stage):
    """Softmax of a tile's scores, and P into the rope box of `stage`.

    With the option skip: no P and rescale exponents of `SKIPPED` where no row has a score of at
    least its greatest one so far plus `skip_below`.
    """
    rescale, offset, p_at = cta.s.sRescale[None, stage], stage * (STAGE * 2), f.p_at
    if const_expr(cta.cfg.page_size == 16):
        p_at = p_address(cta)  # held through the loop, it would take a register
    scale = scale_now(cta.cfg, cta.g)
    if const_expr(cta.cfg.scales):
        scale = magnitude(scale)
    if const_expr(not cta.cfg.skip):
        online_softmax_step(cta, scale, f, rows, rescale)
        stmatrix_swizzled(p_at, offset, cute.recast_tensor(f.rP, Int32), 4)
    else:
        of_two = greater(cta.cfg)
        top = [butterfly(of_two, thread_row_max(f.tSrS, h, of_two)) * scale for h in range(2)]
        seen, below = rows.seen_max, tile.skip_below
        if all_threads((top[0] < seen[0] + below) & (top[1] < seen[1] + below)) == 0:
            for h in cutlass.range_constexpr(2):
                seen[h] = cute.arch.fmax(seen[h], top[h])
            online_softmax_step(cta, scale, f, rows, rescale)
            stmatrix_swizzled(p_at, offset, cute.recast_tensor(f.rP, Int32), 4)
        else:
            tid = fresh_thread()
            skipped = (Int32(SKIPPED), Int32(SKIPPED))
            store_row_values(rescale, first_row(tid), tid & 31, skipped)


@cute.jit
def start_rows(cta: Cta, work: Work, row, rows: RowState):
    """Reset the row state for a work tile; the row sums of a request that is `OUTSIDE` are NaN.
    Returns `TileContext.skip_below`; rows past the request's last one never prevent a skip."""
    rows.row_max.fill(NO_SCORE)
    rows.row_sum.fill(pick(work.kv_len == OUTSIDE, Float32.nan, Float32(0.0)))
    below = Float32(0.0)
    if const_expr(cta.cfg.skip):
        below = cute.math.log2(cta.g.skip / work.kv_len.to(Float32), fastmath=True)
        for h in cutlass.range_constexpr(2):
            inside = work.first_row + row + 8 * h < work.num_rows
            rows.seen_max[h] = pick(inside, Float32(NO_SCORE), Float32(-NO_SCORE))
    return below


@cute.jit
def store_row_stats(cta: Cta, to: Any, work: Work, rows: RowState, row, lane):
    """Row sums and row maxes of a work tile, to `to.sRowSum` and `to.sRowMax`. With features, what
    the epilogue has no registers to compute from them: the sum with the sink, where the row tile is
    not split, and the natural lse."""
    sums = [butterfly(add, rows.row_sum[h]) for h in range(2)]
    maxes = [rows.row_max[0], rows.row_max[1]]
    if const_expr(cta.cfg.features):
        for h in cutlass.range_constexpr(2):
            lse = (maxes[h] + cute.math.log2(sums[h], fastmath=True)) * Float32(LN2)
            request_row = work.first_row + row + 8 * h
            sink = with_sink(cta.cfg, cta.g, sums[h], maxes[h], request_row)
            sums[h] = pick(work.slot < 0, sink, sums[h])
            maxes[h] = lse
    store_row_values(to.sRowSum, row, lane, sums)
    store_row_values(to.sRowMax, row, lane, maxes)


def acquire_p(cta: Cta, stage, phases: StagePhases) -> StagePhases:
    """Wait until the rescale exponents of the previous tile in `stage` have been read."""
    bit, _ = phase_bits(cta.cfg.stages)
    phases = phases.flip(bit + stage)
    cta.s.p_pipe.empty.wait(stage, phases.phase(bit + stage))
    return phases


@cute.jit
def load_q_fragments(cta: Cta, f: Fragments):
    """Q from stage 0 to registers; its last latent k-step and its rope to their own place. It has
    the sign of the scale, of which softmax takes the magnitude."""
    element, thread = cta.cfg.element, fresh_thread() % 128
    ld = cute.make_tiled_copy_A(
        cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), element), cta.mma.qk_rs
    ).get_slice(thread)
    st = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), element), cta.mma.qk
    ).get_slice(thread)
    latent = ld.partition_S(cute.local_tile(cta.s.sKV, (64, LATENT), (0, 0, None)))
    rope = ld.partition_S(cute.local_tile(cta.s.sKV, (64, 64), (0, 8, None)))
    tSrQ, spare = ld.retile(f.tSrQ), f.rP
    for k in cutlass.range_constexpr(Q_STEPS_IN_REGISTERS):
        cute.copy(ld, latent[None, None, k, 0], tSrQ[None, None, k])
    orient_query(cta.cfg, cta.g, f.tSrQ, 8 * Q_STEPS_IN_REGISTERS)
    # QK of the previous work tile has finished in every warp before its Q is overwritten
    QK_SOFTMAX_BARRIER.sync()
    cute.copy(ld, latent[None, None, 31, 0], ld.retile(spare)[None, None, 0])
    orient_query(cta.cfg, cta.g, spare, 8)
    store_q_last(cta, spare)
    cute.copy(ld, rope[None, None, None, 0], ld.retile(spare))
    orient_query(cta.cfg, cta.g, spare, 32)
    cute.copy(st, st.retile(spare), st.partition_D(cta.s.sQ_rope))
    cute.arch.fence_view_async_shared()
    QK_SOFTMAX_BARRIER.sync()


def make_fragments(cta: Cta) -> Fragments:
    """Descriptors once for all tiles, and registers."""
    s, mma, element = cta.s, cta.mma, cta.cfg.element
    tSrQ_rope = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.sQ_rope))
    tSrQ_last = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.sQ_last))
    tSrQ, rP = (
        cute.make_rmem_tensor(mma.qk_rs.partition_shape_A((64, width)), element)
        for width in (16 * Q_STEPS_IN_REGISTERS, 64)
    )
    tSrS = cute.make_rmem_tensor(mma.qk.partition_shape_C((64, 64)), Float32)
    return Fragments(tSrQ, tSrQ_last, tSrQ_rope, tSrS, rP, p_address(cta))


@cute.jit
def start_work_tile(cta: Cta, f: Fragments, rows: RowState, index, w, phases: StagePhases):
    """Q to registers, new row state. Returns the context, the number of KV tiles, the phases."""
    s = cta.s
    for chunk in cutlass.range_constexpr(len(cta.cfg.kv_chunks)):
        s.kv_pipe.full.wait(chunk, phases.bits & 1)
    work = read_work(cta.g, s, index)
    load_q_fragments(cta, f)
    thread = fresh_thread() & 127
    for _ in cutlass.range_constexpr(2):
        release_stage(cta, 0, thread & 31)
    below = start_rows(cta, work, first_row(thread), rows)
    mask_free = cute.arch.make_warp_uniform(mask_free_until(cta, work, 16 * w))
    tiles = cute.arch.make_warp_uniform(work.end - work.begin)
    return TileContext(index, mask_free, below), tiles, phases.flip(0)


@cute.jit
def qk_then_softmax(
    cta: Cta, f: Fragments, rows: RowState, tile: TileContext, tiles_left, later,
    stage, previous, phases: StagePhases,
):  # fmt: skip
    """QK and P of the tile in `stage`. P of the tile before, in `previous`, if there is one
    (`later`), is committed when all but `qk_steps_pending` k-steps of QK are done, so that PV does
    not delay QK."""
    profile_tile(cta.cfg, cta.g, tiles_left, "QK issued")
    issue_qk(cta, f, stage, phases.phase(stage), cta.cfg.qk_steps_pending)
    phases = acquire_p(cta, stage, phases.flip(stage))
    warpgroup.wait_group(1)
    if later:
        cta.s.p_pipe.producer_commit(previous)
    warpgroup.wait_group(0)
    profile_tile(cta.cfg, cta.g, tiles_left, "QK done")
    mask_scores(cta, f.tSrS, tile, stage, tiles_left)
    softmax_to_p(cta, f, rows, tile, stage)
    cute.arch.fence_view_async_shared()
    profile_tile(cta.cfg, cta.g, tiles_left, "P stored")
    return phases


@cute.jit
def finish_work_tile(cta: Cta, rows: RowState, index, stage, phases: StagePhases, is_last=True):
    """P of the last tile, which is in `stage`, committed with the row statistics for the
    epilogue. Returns the phases. `is_last`: it is the last tile of the work tile as well, and not
    of a piece ahead of others."""
    work = read_work(cta.g, cta.s, index)  # held through the loop, it would take registers
    thread = fresh_thread() & 127
    if const_expr(not cta.cfg.gather):  # otherwise missing tokens have arrived as zeros
        if const_expr(is_last is True):
            zero_v_tail(cta, stage, work, thread)
        else:
            if is_last:
                zero_v_tail(cta, stage, work, thread)
    _, bit = phase_bits(cta.cfg.stages)
    cta.s.stats_read.wait(0, phases.phase(bit))
    phases = phases.flip(bit)
    store_row_stats(cta, cta.s, work, rows, first_row(thread), thread & 31)
    cute.arch.fence_view_async_shared()
    cta.s.p_pipe.producer_commit(stage)
    return phases


@cute.jit
def attend(
    cta: Cta, f: Fragments, rows: RowState, tile: TileContext, tiles, end, stage,
    phases: StagePhases,
):  # fmt: skip
    """QK and P from the tile that is `tiles` before the end of the work tile, in `stage`, to the
    one before `end`. P of the last one is not committed yet. Returns the next stage, that of the
    last tile, the phases."""
    tiles_left, previous = tiles, Int32(0)
    while tiles_left > end:
        stage, phases = cute.arch.make_warp_uniform(stage), phases.uniform()
        tiles_left = cute.arch.make_warp_uniform(tiles_left)
        previous = cute.arch.make_warp_uniform(previous)
        phases = qk_then_softmax(
            cta, f, rows, tile, tiles_left, tiles_left < tiles, stage, previous, phases
        )
        previous = stage
        stage = pick(stage + 1 == cta.cfg.stages, Int32(0), stage + 1)
        tiles_left = tiles_left - 1
    return stage, previous, phases


@cute.jit
def attend_pieces(
    cta: Cta, f: Fragments, rows: RowState, tile: TileContext, tiles, phases: StagePhases
):
    """A work tile of a batch-invariant call, of `tiles` KV tiles: a piece, or a whole item piece by
    piece, each with row statistics of its own. Returns the phases."""
    stage, piece, left = Int32(1), Int32(0), tiles
    while left > 0:
        work = read_work(cta.g, cta.s, tile.index)
        if piece > 0:
            start_rows(cta, work, first_row(fresh_thread() & 127), rows)
        end = cute.arch.make_warp_uniform(work.end - work.begin - piece_begin(work, piece + 1))
        stage, previous, phases = attend(cta, f, rows, tile, left, end, stage, phases)
        phases = finish_work_tile(cta, rows, tile.index, previous, phases, end == 0)
        piece, left = piece + 1, end
    return phases


@cute.jit
def mainloop_qk_softmax(cta: Cta):
    """Per work tile: Q to registers, then for each KV tile t QK(t), P(t - 1) committed, softmax(t),
    P(t) stored. The loop is one copy for all stages and for first and last tiles: the first pass
    through each copy waits for its code, 1 to 2 us where other kernels have run since the last
    launch."""
    w = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % 128 // 32)
    f = make_fragments(cta)
    row_max, row_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
    seen = cute.make_rmem_tensor(2, Float32) if const_expr(cta.cfg.skip) else row_max
    rows = RowState(row_max, row_sum, seen)
    phases = StagePhases(Int32(0))
    for index in cutlass.range(cta.plan.first, cta.plan.last, unroll=1):
        tile, tiles, phases = start_work_tile(cta, f, rows, index, w, phases)
        if const_expr(cta.cfg.pieces):
            phases = attend_pieces(cta, f, rows, tile, tiles, phases)
        else:
            _, previous, phases = attend(cta, f, rows, tile, tiles, Int32(0), Int32(1), phases)
            phases = finish_work_tile(cta, rows, index, previous, phases)
