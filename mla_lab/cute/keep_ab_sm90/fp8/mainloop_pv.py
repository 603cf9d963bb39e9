"""Mainloop of a PV warp group over fp8: O^T += V^T P^T for 256 columns; then the epilogue.

V^T goes from shared memory through registers (`swap_ab_sm90`), by steps of 64 columns, a slice, and
32 tokens. The registers of a step are free once its MMA has finished.

    flat index of O^T: rows / 2 * slice + 4 * row8 + 2 * h + e
    column   64 * slice + 16 * warp + 2 * (lane / 4) + h       row   8 * row8 + 2 * (lane % 4) + e

With `p_exchange` a warp group has 128 columns of all 128 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ....plan.promotion import PROMOTED_TILES
from ...common.feature_operands import with_scales
from ...common.fp8 import load_step
from ...common.pipeline import PipelineState, StagePhases
from ...common.ptx_sm90 import LN2, fresh_thread, load2, pack2, ptx
from ...rows_on_m.epilogue_store import inverse_sum, store_pair, store_row_lse
from ...rows_on_m.params import BLOCK, Cta, Work
from ...rows_on_m.profile import profile_event, profile_tile
from ...rows_on_m.work_records import read_work
from ...split_merge.keep_ab_cooperative import count_partial
from ...split_merge.keep_ab_partials import REGION, ROW_WORDS, words_at
from ..params import BOX, ROPE_BOX
from ..release import release_stage
from . import kv_656, v_fp8_to_fp16
from .p_exchange_2cta import p_state
from .params import Q_STAGES, STEP
from .promotion import kv_tiles, promote, rescale_promoted, start_factors

#: log2 of the factor of fp16 partials: no result passes 448, the greatest V
PARTIAL_LOG2 = 7
#: two rescale factors of 1
NO_RESCALE = 0x3C003C00


@dataclass(frozen=True)
class Fragments:
    """Operand B, the accumulator, registers of operand A of the steps that are held."""

    tOrP: cute.Tensor
    tOrO: cute.Tensor
    tOrV: list[cute.Tensor]
    v_at: Any  # shared-memory address of the lane's row of V in stage 0


@dataclass(frozen=True)
class PvState:
    """The next tile: its stage, and the phase of its P.

    `counter` holds the parity of the ring's current pass; with a bf16 query, whose stages do not
    all take part in a pass, one parity bit per stage; with `p_exchange` the number of tiles so far.
    """

    stage: Int32
    counter: Int32


def p_of(cta: Cta, state: PvState) -> PipelineState:
    """Consumer state of the tile's P."""
    if cta.cfg.p_exchange:
        return p_state(state.counter)
    if cta.cfg.query_hi_lo:
        phase = StagePhases(state.counter).phase(state.stage)
        return PipelineState(state.stage, phase)
    return PipelineState(state.stage, state.counter)


@cute.jit
def next_in_ring(cta: Cta, stage):
    """The stage after `stage`."""
    return stage + 1 if stage + 1 < cta.cfg.stages else Int32(0)


def advance(cta: Cta, state: PvState) -> PvState:
    """After one more tile."""
    if cta.cfg.p_exchange:
        counter = state.counter + 1
        return PvState(next_in_ring(cta, state.stage), counter)
    if cta.cfg.query_hi_lo:
        counter = StagePhases(state.counter).flip(state.stage).bits
        return PvState(next_in_ring(cta, state.stage), counter)
    after = PipelineState(state.stage, state.counter).advance(cta.cfg.stages)
    return PvState(after.index, after.phase)


def p_after(cta: Cta, state: PvState) -> PipelineState:
    """Consumer state of the next tile's P."""
    if cta.cfg.p_exchange:
        return p_state(state.counter + 1)
    if cta.cfg.query_hi_lo:
        stage = next_in_ring(cta, state.stage)
        return PipelineState(stage, StagePhases(state.counter).phase(stage))
    return PipelineState(state.stage, state.counter).advance(cta.cfg.stages)


@cute.jit
def skip_query(cta: Cta, stage):
    """The stage after those that a query passes through."""
    stage = stage + Q_STAGES
    if stage >= cta.cfg.stages:
        stage = stage - cta.cfg.stages
    return stage


def two_factors(cta: Cta, p_stage, row):
    """Rescale factors of rows `row` and `row + 1`, an even one, in one word."""
    at = Int32(cta.s.sRescale.iterator.toint()) + (p_stage * cta.cfg.rows + row) * 2
    return cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=4).load()


def halves_to_fp32(word):
    """Two fp16 of a word as fp32."""
    return ptx(
        "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }",
        word,
        out=[Float32] * 2,
    )


@cute.jit
def rescale_o(cta: Cta, acc: cute.Tensor, p_stage):
    """O^T times its rows' factors, where a row max has moved."""
    cfg, quad = cta.cfg, fresh_thread() & 3
    for j in cutlass.range_constexpr(cfg.rows // 8):
        f = halves_to_fp32(two_factors(cta, p_stage, 8 * j + 2 * quad))
        for x in cutlass.range_constexpr(4 * cfg.slices):
            at = cfg.rows // 2 * (x // 4) + 4 * j + x % 4
            acc[at] = acc[at] * f[x % 2]


def first_slice(cta: Cta):
    """The first of this warp group's slices, of eight."""
    group = fresh_thread() >> 7
    return ((cta.rank * 2 if cta.cfg.p_exchange else 0) + group) * cta.cfg.slices


def first_column(cta: Cta, tid):
    """The first of a thread's columns."""
    return first_slice(cta) * 64 + 16 * ((tid >> 5) & 3) + 2 * ((tid & 31) >> 2)


def make_fragments(cta: Cta) -> Fragments:
    """Operand B once for all tiles, and registers."""
    cfg, pv = cta.cfg, cta.mma.pv
    if cfg.query_hi_lo:
        tOrP = v_fp8_to_fp16.p_operand(cta)
        shape, element = pv.partition_shape_A((64, v_fp8_to_fp16.STEP_TOKENS)), Float16
    else:
        sP = cute.local_tile(cta.s.sKV, (64, 64), (0, ROPE_BOX, None))
        tOrP = pv.make_fragment_B(pv.get_slice(0).partition_B(sP))
        shape, element = pv.partition_shape_A((64, STEP)), cfg.element
    acc = cute.make_rmem_tensor(cfg.rows // 2 * cfg.slices, Float32)
    held = [cute.make_rmem_tensor(shape, element) for _ in range(cfg.v_steps_held)]
    # token `lane` of 32, 16 bytes of the warp's columns of a slice
    tid = fresh_thread()
    chunk = ((tid >> 5) & 3) ^ ((tid >> 1) & 3)
    first = first_slice(cta) * BOX
    v_at = Int32(cta.s.sKV.iterator.toint()) + first + (tid & 31) * 64 + (chunk << 4)
    return Fragments(tOrP, acc, held, v_at)


def issue_pv(cta: Cta, f: Fragments, base, stage):
    """O^T += V^T P^T of one tile in e4m3, by steps of 64 columns and 32 tokens."""
    pv, held = cta.mma.pv, cta.cfg.v_steps_held
    shape = cute.make_layout(pv.partition_shape_C((64, 64)))
    atom = cute.make_mma_atom(pv.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for i in range(2 * cta.cfg.slices):
        m, k, a = i // 2, i % 2, f.tOrV[i % held]
        if i >= held:
            warpgroup.wait_group(held - 1)
        load_step(base, m * BOX + k * STEP * 64, cute.recast_tensor(a, Int32), 0)
        tile = cute.make_tensor(f.tOrO.iterator + 32 * m, shape)
        warpgroup.fence()
        cute.gemm(atom, tile, a[None, None, 0], f.tOrP[None, None, k, stage], tile)
        warpgroup.commit_group()


@cute.jit
def gemm_pv(cta: Cta, f: Fragments, stage, p_stage, after: PipelineState):
    """O^T, times its rows' factors, + V^T P^T of one tile. Returns whether P is full in state
    `after`."""
    row = 2 * (fresh_thread() & 31)
    moved = two_factors(cta, p_stage, row) != NO_RESCALE
    if const_expr(cta.cfg.p_exchange):
        moved = moved | (two_factors(cta, p_stage, row + BLOCK) != NO_RESCALE)
    if cute.arch.vote_any_sync(moved):
        rescale_o(cta, f.tOrO, p_stage)
        if const_expr(cta.cfg.promotes):
            rescale_promoted(cta, p_stage)
    base = f.v_at + stage * cta.cfg.stage_bytes
    if const_expr(cta.cfg.query_hi_lo):
        v_fp8_to_fp16.issue_pv_fp16(cta, f, base, stage, p_stage)
    else:
        issue_pv(cta, f, base, stage)
    ready = cta.s.p_pipe.consumer_try_wait(after)
    if const_expr(cta.cfg.p_exchange):
        ready = ready & cta.s.p_written.test_for(after)
    warpgroup.wait_group(0)
    return ready


@cute.jit
def wait_for_p(cta: Cta, p: PipelineState):
    """Wait until P and the rescale factors of a tile are full."""
    if const_expr(cta.cfg.p_exchange):
        cta.s.p_written.wait_for(p)
    cta.s.p_pipe.consumer_wait(p)


@cute.jit
def arrive_all(cta: Cta, barrier: cute.Pointer):
    """One arrival per thread, and with `p_exchange` one per warp at the other CTA."""
    cute.arch.mbarrier_arrive(barrier)
    if const_expr(cta.cfg.p_exchange):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier, 1 - cta.rank)


def inverse_sums(cta: Cta, j):
    """1 / row sum of a thread's two rows of 8, 0 for an empty row. Read where they are needed:
    sixteen would be too many registers."""
    sums = load2(cta.s.sRowSum.iterator + (8 * j + 2 * (fresh_thread() & 3)))
    return [inverse_sum(x) for x in (sums[0], sums[1])]


@cute.jit
def store_partial_stats(region, tid, lse, down):
    """The lse and the scale of 64 rows, in a partial's order: r, r + 8 side by side."""
    if tid < BLOCK:
        at = tid // 16 * 16 + 2 * (tid & 7) + ((tid >> 3) & 1)
        words = region + (REGION // 2 + tid // 16 * (ROW_WORDS - 16) + at)
        words.store(lse)
        for half in cutlass.range_constexpr(2):
            (words + 16 * (1 + half)).store(down)


@cute.jit
def store_strips(cta: Cta, acc, work: Work, lse, index):
    """A partial in the layout of `keep_ab_partials`: four lanes of a row hold its 8-column unit."""
    cfg, tid = cta.cfg, fresh_thread()
    w, lane = (tid >> 5) & 3, tid & 31
    begin = first_slice(cta)
    partials = cta.g.mO_partial.iterator
    region = partials + (work.slot * cfg.cluster + cta.rank) * REGION
    up, down = Float32(2.0**PARTIAL_LOG2), Float32(2.0**-PARTIAL_LOG2)
    if const_expr(cfg.kv_656):
        up, down = kv_656.partial_scales(cta.s, index, PARTIAL_LOG2)
    base = region
    for i16 in cutlass.range_constexpr(cfg.rows // 16):
        i = i16 % 4
        if const_expr(cfg.p_exchange and i == 0):
            base = partials + (work.slot * cfg.cluster + i16 // 4) * REGION
        inverse = [inverse_sums(cta, 2 * i16), inverse_sums(cta, 2 * i16 + 1)]
        for e in cutlass.range_constexpr(2):
            f0, f1 = inverse[0][e] * up, inverse[1][e] * up
            to_lane = (2 * (lane & 3) + e) * 4 + ((lane >> 2) & 3)
            for m in cutlass.range_constexpr(cfg.slices):
                x = cfg.rows // 2 * m + 8 * i16 + e
                a = [acc[x] * f0, acc[x + 2] * f0, acc[x + 4] * f1, acc[x + 6] * f1]
                strip = 32 * i + 4 * (begin + m) + w
                v = cute.make_rmem_tensor(2, Int32)
                v[0], v[1] = (pack2(a[2 * n], a[2 * n + 1], Float16) for n in range(2))
                dst = base + (strip * 128 + to_lane * 4 + (lane >> 4) * 2)
                cute.autovec_copy(cute.recast_tensor(v, Float32), words_at(dst, 2))
    store_partial_stats(region, tid, lse, down)


@cute.jit
def store_result(cta: Cta, acc, work: Work, lse):
    """Rows of the result, in full 32-byte sectors where its elements have 16 bits."""
    cfg, tid = cta.cfg, fresh_thread()
    column = first_column(cta, tid)
    out_scale = with_scales(cfg, cta.g).out_scale
    # rows count from this CTA's first one
    first = 2 * (tid & 3)
    if const_expr(cfg.p_exchange):
        first = first - cta.rank * BLOCK
    for j in cutlass.range_constexpr(cfg.rows // 8):
        inverse = inverse_sums(cta, j)
        for e in cutlass.range_constexpr(2):
            f = inverse[e] * out_scale
            row = 8 * j + first + e
            for m in cutlass.range_constexpr(cfg.slices):
                x = cfg.rows // 2 * m + 4 * j + e
                store_pair(cta, work, row, column + 64 * m, acc[x] * f, acc[x + 2] * f)
    if tid < BLOCK:
        store_row_lse(cta, work, tid, lse)


@cute.jit
def epilogue(cta: Cta, acc: cute.Tensor, index):
    """Divide by the row sums; write the result, or the partial."""
    cfg, s = cta.cfg, cta.s
    tid = fresh_thread()  # held through the loop, it and what follows would take registers
    work = read_work(cta.g, s, index)
    row = tid & (BLOCK - 1)
    if const_expr(cfg.p_exchange):
        row = row + cta.rank * BLOCK
    lse = s.sRowMax[row]  # with features the lse itself
    if const_expr(not cfg.features):
        lse = (lse + cute.math.log2(s.sRowSum[row], fastmath=True)) * Float32(LN2)
    if work.slot >= 0:
        store_strips(cta, acc, work, lse, index)
        count_partial(cta, work)
    else:
        store_result(cta, acc, work, lse)
    arrive_all(cta, s.stats_read.base)


@cute.jit
def pv_tile(cta: Cta, f: Fragments, state: PvState, left):
    """PV of one tile whose P is full, with `left` tiles to come including it. Returns whether the
    next tile's P is full."""
    p = p_of(cta, state)
    profile_tile(cta.cfg, cta.g, left, "PV begun")
    after = p_after(cta, state)
    ready = gemm_pv(cta, f, state.stage, p.index, after)
    profile_tile(cta.cfg, cta.g, left, "PV done")
    profile_tile(cta.cfg, cta.g, left, "PV done, ns")
    arrive_all(cta, cta.s.p_pipe.empty.at(p.index))
    if const_expr(not cta.cfg.gather):  # V has been read by all lanes
        cute.arch.sync_warp()
    release_stage(cta, state.stage, cute.arch.lane_idx())
    return ready


@cute.jit
def run_tiles(cta: Cta, f: Fragments, state: PvState, index):
    """O^T of a work tile from zeros: PV of its tiles, as P is committed. Returns the state behind
    them."""
    f.tOrO.fill(0.0)
    left, opened, ready = Int32(1), Boolean(False), Boolean(False)
    while left > 0:
        left = cute.arch.make_warp_uniform(left)
        state = PvState(cute.arch.make_warp_uniform(state.stage), state.counter)
        if not ready:
            wait_for_p(cta, p_of(cta, state))
        if not opened:  # behind P of its first tile, the record is written
            work = read_work(cta.g, cta.s, index)
            left = cute.arch.make_warp_uniform(work.end - work.begin)
            opened = Boolean(True)
        ready = pv_tile(cta, f, state, left)
        left = left - 1
        state = advance(cta, state)
    return state


@cute.jit
def run_promoted_tiles(cta: Cta, f: Fragments, state: PvState, index):
    """As `run_tiles`, with O^T promoted every `PROMOTED_TILES` KV tiles (`promotion`)."""
    wait_for_p(cta, p_of(cta, state))
    left, ready = kv_tiles(cta, index), Boolean(True)
    while left > 0:
        f.tOrO.fill(0.0)
        more = Boolean(True)
        while more:
            left = cute.arch.make_warp_uniform(left)
            state = PvState(cute.arch.make_warp_uniform(state.stage), state.counter)
            if not ready:
                wait_for_p(cta, p_of(cta, state))
            ready = pv_tile(cta, f, state, left)
            left = left - 1
            state = advance(cta, state)
            more = (left & (PROMOTED_TILES - 1)) != 0
        promote(cta, f.tOrO, index, left)
    return state


@cute.jit
def mainloop_pv(cta: Cta):
    """Per work tile: V^T P^T tile by tile as P is committed."""
    cfg, g = cta.cfg, cta.g
    f = make_fragments(cta)
    first, last = cta.plan.first, cta.plan.last
    arrive_all(cta, cta.s.stats_read.base)
    if const_expr(cfg.promotes):
        start_factors(cta)
    state = PvState(Int32(0), Int32(0))
    for index in cutlass.range(first, last, unroll=1):
        if const_expr(cfg.query_hi_lo):
            state = PvState(skip_query(cta, state.stage), state.counter)
        if const_expr(cfg.promotes):
            state = run_promoted_tiles(cta, f, state, index)
        else:
            state = run_tiles(cta, f, state, index)
        profile_event(cfg, g, "last PV")
        epilogue(cta, f.tOrO, index)
        profile_event(cfg, g, "partial written")
