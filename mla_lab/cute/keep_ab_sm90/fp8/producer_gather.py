"""The producer warps that fetch tokens one by one: sparse calls, and pages of any size.

Each CTA fetches all tokens of its tiles as they are stored (`cp.async`, 16 bytes each) to where the
TMA boxes of other calls lie. Two warps take 32 tokens of a tile each. A lane looks up one token;
then eight lanes copy a token, four tokens at a time, by pieces of 128 bytes: a lane the same 16
bytes of every second box, whose places differ by constants. Of e4m3, four of them copy the ninth
box; of 656 bytes all eight copy the rope, and last each lane the scales of its own token.

    tokens of    copies   boxes                                       chunk c of row t lies at
    e4m3         36       9 of 64 bytes                               c ^ (t / 2 % 4)
    656 bytes    41       8 of 64 bytes; the rope's row of 128 bytes  c ^ (t % 8)

Pieces of 128 bytes touch fewer lines and sectors than those of one box do (tokens begin at
multiples of 16 bytes): 1.1 % of a call of 64 requests, 128 heads and 2,048 of 656 bytes (H200,
2026-11-28, `data/notes/kernel_attempts.jsonl`). Of
eight neighbouring lanes four write an even row of one box and four an odd row of the other, which
are different banks.

Missing tokens arrive as zeros, their scales too; a bit a token (`Fp8Shared.valid`) masks their
scores. The table entry of a token is loaded a tile before the token.

Arrivals of kv_pipe.full: all lanes of both warps, and the first lane of each once more: for a tile,
behind the store of its word of bits; for a stage that the query passes through, where the first
warp's expects the bytes of TMA. The copies do not write through the async proxy, which MMAs read
through: a thread that issues MMAs fences behind the full barrier.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ...common.barriers import NamedBarrier
from ...common.kv_656 import ROPE_BEGIN, SCALES_BEGIN
from ...common.pipeline import PipelineState
from ...rows_on_m.params import BLOCK, Cta
from ...rows_on_m.work_records import read_work, record
from ..params import BOX, ROPE_BOX
from ..token_fetch import copy16, load_entry, token_offset
from .params import GATHER_WARPS, Q_STAGES, ROPE
from .producer import load_query, load_query_through_ring

#: a record is written, by the first of the two warps
RECORD_BARRIER = NamedBarrier(3, 64)
#: tokens of a tile that a warp fetches, at once and in all
AT_ONCE, WARP_TOKENS = 4, 32


@cute.jit
def copy_tokens(cta: Cta, offset: Int64, half: Int32, stage: Int32):
    """The warp's 32 tokens of a tile into a stage; a lane has the offset of one of them."""
    cfg, lane = cta.cfg, cute.arch.lane_idx()
    # of four tokens and of two boxes
    row = ((lane >> 3) & 2) + ((lane >> 2) & 1)
    chunk, right = lane & 3, ((lane >> 3) ^ (lane >> 2)) & 1
    ring = Int32(cta.s.sKV.iterator.toint()) + stage * cfg.stage_bytes + half * (WARP_TOKENS * 64)
    low, high = Int32(offset & Int64(0xFFFFFFFF)), Int32(offset >> Int64(32))
    column = right * 64 + chunk * 16
    values = ring + right * BOX + row * 64 + ((chunk ^ (row >> 1)) << 4)
    rope = ring + half * (WARP_TOKENS * 64) + (ROPE_BOX * BOX + row * 128) + (column ^ (row << 4))
    for k in cutlass.range_constexpr(WARP_TOKENS // AT_ONCE):
        there = Int64(cute.arch.shuffle_sync(high, row + AT_ONCE * k))
        below = Int64(Uint32(cute.arch.shuffle_sync(low, row + AT_ONCE * k)))
        size = Int32(16) if there >= Int64(0) else Int32(0)
        at = cutlass.max((there << Int64(32)) | below, Int64(0))
        source = (cta.g.cache.iterator + (at + Int64(column))).align(16)
        to = (values ^ (32 * (k % 2))) + k * (AT_ONCE * 64)
        for pair in cutlass.range_constexpr(cfg.boxes // 2):
            copy16(to + 2 * pair * BOX, source, 128 * pair, size)
        if const_expr(cfg.boxes % 2 == 1):
            if right == 0:
                copy16(to + (cfg.boxes - 1) * BOX, source, 64 * (cfg.boxes - 1), size)
        if const_expr(cfg.kv_656):
            copy16((rope ^ (64 * (k % 2))) + k * (AT_ONCE * 128), source, ROPE_BEGIN, size)
    if const_expr(cfg.kv_656):
        size = Int32(16) if offset >= Int64(0) else Int32(0)
        source = (cta.g.cache.iterator + cutlass.max(offset, Int64(0))).align(16)
        scales = ring - half * (WARP_TOKENS * 48) + (ROPE_BOX * BOX + ROPE) + lane * 16
        copy16(scales, source, SCALES_BEGIN, size)


@cute.jit
def arrive_with_query(cta: Cta, state: PipelineState, half: Int32):
    """The arrivals at the stages of the query, beside the one of the lane that expects its bytes.
    Returns the state behind them."""
    pipe = cta.s.kv_pipe
    for _ in cutlass.range_constexpr(Q_STAGES):
        pipe.producer_acquire(state)
        pipe.producer_commit(state.index)
        if (half == 1) & (cute.arch.lane_idx() == 0):
            pipe.producer_commit(state.index)
        state = state.advance(cta.cfg.stages)
    return state


@cute.jit
def begin_work_tile(cta: Cta, index: Int32, state: PipelineState, half: Int32):
    """The record and the query of a work tile, by the first warp. Returns the state behind the
    stages that the query passes through."""
    cfg, g, s = cta.cfg, cta.g, cta.s
    number = index - cta.plan.first
    if half == 0:
        if const_expr(cfg.query_hi_lo):
            s.kv_pipe.producer_acquire(state)
        else:
            s.q_pipe.empty.wait(0, (number & 1) ^ 1)
        record(cfg, g, s, cta.plan, index, cta.rank)
        if const_expr(cfg.query_hi_lo):
            load_query_through_ring(cta, read_work(g, s, index), state)
        else:
            load_query(cta, read_work(g, s, index), number)
    RECORD_BARRIER.sync()
    if const_expr(cfg.query_hi_lo):
        state = arrive_with_query(cta, state, half)
    return state


@cute.jit
def producer_gather(cta: Cta, warp: Int32):
    """Per work tile: its record and its query, by the first warp; then its tiles, by both.

    Records are free as `producer` says. Both warps have read one when the next is written: the
    tiles between need the arrivals of both.
    """
    cfg, g, s, plan = cta.cfg, cta.g, cta.s, cta.plan
    lane, half = cute.arch.lane_idx(), (warp - GATHER_WARPS[0]) >> 1
    state = PipelineState.start(1)
    for index in cutlass.range(plan.first, plan.last, unroll=1):
        state = begin_work_tile(cta, index, state.uniform(), half)
        work = read_work(g, s, index)
        token = work.begin * BLOCK + half * WARP_TOKENS + lane
        entry = load_entry(cta, work, token)
        for _ in cutlass.range(work.begin, work.end, unroll=1):
            state = state.uniform()
            offset = token_offset(cta, work, token, entry)
            token = token + BLOCK
            # used only for the next stage, so the load latency is hidden
            entry = load_entry(cta, work, token)
            valid = Int32(cute.arch.vote_ballot_sync(offset >= Int64(0)))
            s.kv_pipe.producer_acquire(state)
            copy_tokens(cta, offset, half, state.index)
            if lane == 0:
                s.valid[half, state.index] = valid
                s.kv_pipe.producer_commit(state.index)
            cute.arch.cp_async_mbarrier_arrive_noinc(s.kv_pipe.full.at(state.index))
            state = state.advance(cfg.stages)
