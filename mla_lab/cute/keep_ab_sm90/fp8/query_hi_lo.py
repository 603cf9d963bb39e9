"""QK-softmax mainloop of a bf16 query over e4m3: Q as a sum of two e4m3 numbers, fp16 weights.

    x = hi + lo      hi: x cut to four significant bits, lo: what is left, four bits as well

lo is not scaled, so that both terms go into the same accumulator. A row of Q is scaled by a power
of two that takes its greatest element to 128 .. 256: elements from 1/4 on are exact, those from
2^-6 on are off by at most 2^-10, smaller ones by 2^-9, while bf16's own rounding of the greatest is
1/4. The scale is divided out of the scores.

Q arrives through two stages of the ring and is split there (`query_split`): hi of `q_boxes` boxes
goes to registers, lo and the rest of hi to shared memory.

Scores are sums of `qk_parts` column parts, added in fp32, because the tensor core keeps 14 bits of
what it adds. The first part of QK(t + 1) runs under softmax(t).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...common.pipeline import PipelineState, StagePhases
from ...common.ptx_sm90 import ptx
from ...rows_on_m.params import SPARSE, Cta
from ...rows_on_m.profile import profile_tile
from ...rows_on_m.work_records import read_work
from ..mainloop_qk_softmax import RowState, TileContext
from ..token_fetch import load_valid, mask_scores
from . import kv_656
from .mainloop_qk_softmax import finish_rows, nothing, tile_context
from .p_exchange_2cta import p_state
from .p_fp16 import Tile, softmax_step
from .params import STEP, Fp8Config
from .query_split import split_query

#: MMAs of QK(t + 1) issued before the weights of tile t are computed; one more follows each word
FIRST = 6
#: words of weights per thread
WORDS = 16


@dataclass(frozen=True)
class Fragments:
    """Operands of QK; scores of one tile, and of a part of the next one."""

    tSrQ: cute.Tensor  # hi in registers
    tSrQ_tail: Any  # hi of the last boxes, descriptors; None if all are in registers
    tSrQ_low: cute.Tensor  # lo, descriptors
    tSrK: cute.Tensor  # descriptors
    rope: Any  # kv_656: descriptors of the ropes of Q and K
    tSrS: cute.Tensor
    part: cute.Tensor


@dataclass(frozen=True)
class LoopState:
    """What a step of the mainloop passes to the next one."""

    state: PipelineState
    p_phases: StagePhases  # of p_pipe.empty: queries pass through a stage that do not turn it
    previous: Int32  # stage of the tile whose weights come next
    left: Int32  # tiles whose scores are still to come
    ready: Boolean  # the keys of the tile at `state` have landed
    p_free: Boolean  # p_exchange: the next P stage is free


@cute.jit
def wait_for_keys(cta: Cta, loop: LoopState):
    """Wait until the tile's keys have landed, unless it is known. Returns the flipped phases."""
    s, state = cta.s, loop.state
    if not loop.ready:
        s.kv_pipe.consumer_wait(state)
        if const_expr(not cta.cfg.p_exchange):
            # implied by the producer's wait; each thread waits itself, as racecheck follows threads
            s.p_pipe.producer_acquire(loop.p_phases.state(state.index))
        if const_expr(cta.cfg.kv_656):
            s.kv_656.ready.wait_for(loop.p_phases.state(state.index).opposite())
    if const_expr(cta.cfg.gather and not cta.cfg.kv_656):
        # tokens were not written through the async proxy, which MMAs read through; of 656 bytes
        # the scale warp's fence lies in between
        cute.arch.fence_view_async_shared()
    return loop.p_phases.flip(state.index)


def try_keys(cta: Cta, state: PipelineState, p_phases: StagePhases):
    """True if they have landed. Tested early, because the result takes 100 clocks, by test_wait: a
    try_wait may suspend the thread."""
    s, cfg = cta.s, cta.cfg
    ready = s.kv_pipe.consumer_try_wait(state)
    if not cfg.p_exchange:
        ready = ready & s.p_pipe.producer_try_acquire(p_phases.state(state.index))
    if cfg.kv_656:
        ready = ready & s.kv_656.ready.test_for(p_phases.state(state.index).opposite())
    return ready


def mma_steps(cfg: Fp8Config, part: int) -> list[tuple[int, int]]:
    """(term, k-step) of the MMAs of a column part. Those of the second term, which are small, come
    first; with `p_exchange` all of them in part 0, which runs under the softmax."""
    steps = range(*(n * cfg.steps // cfg.qk_parts for n in (part, part + 1)))
    if cfg.p_exchange:
        low = [(1, k) for k in range(cfg.steps)] if part == 0 else []
        return low + [(0, k) for k in steps]
    return [(term, k) for term in (1, 0) for k in steps]


def ahead(cfg: Fp8Config) -> int:
    """MMAs of part 0 issued before the weights: with kv_656 all eight."""
    return len(mma_steps(cfg, 0)) if cfg.kv_656 else FIRST


def issue_part(cta: Cta, f: Fragments, acc, part: int, stage, first: int = 0, last=None):
    """MMAs `first` to `last` - 1 of a part; with the last of all the commit. Nothing writes their
    operands in between, so one fence suffices; each would delay the weights."""
    cfg, mma = cta.cfg, cta.mma
    rs, ss = cute.make_mma_atom(mma.qk_rs.op), cute.make_mma_atom(mma.qk.op)
    found = mma_steps(cfg, part)
    last = len(found) if last is None else last
    if first == 0:
        warpgroup.fence()
    for i in range(first, last):
        term, k = found[i]
        keys = f.tSrK[None, None, k, stage]
        for atom in (rs, ss):
            atom.set(warpgroup.Field.ACCUMULATE, i > 0)
        if term:
            cute.gemm(ss, acc, f.tSrQ_low[None, None, k], keys, acc)
        elif k < cfg.q_steps:
            cute.gemm(rs, acc, f.tSrQ[None, None, k], keys, acc)
        else:
            cute.gemm(ss, acc, f.tSrQ_tail[None, None, k - cfg.q_steps, 0], keys, acc)
    if first < last == len(found):
        warpgroup.commit_group()


def mma_per_word(cta: Cta, f: Fragments, stage) -> Callable[[int], None]:
    """`on_word` that issues one MMA of part 0, from `ahead` on."""

    def on_word(word):
        at = ahead(cta.cfg) + word
        if at < len(mma_steps(cta.cfg, 0)):
            cute.arch.sync_warp()  # otherwise the compiler moves the MMAs together again
            issue_part(cta, f, f.part, 0, stage, at, at + 1)

    return on_word


def move_here(x):
    """The same number by an opaque move: a plain copy could be placed while an MMA writes it."""
    return ptx("mov.b32 {$w0}, {$r0};", x, out=Float32)


def add_here(x, y):
    """The sum by an opaque addition."""
    return ptx("add.f32 {$w0}, {$r0}, {$r1};", x, y, out=Float32)


@cute.jit
def commit_p_if(cta: Cta, stage, exists):
    """Commit P of the previous tile, if there is one."""
    if exists:
        cta.s.p_pipe.producer_commit(stage)


def finish_parts(cta: Cta, f: Fragments, stage, previous, exists, test: Callable):
    """Scores <- part 0, which is under way, and the others; P of the tile `previous`, if it
    `exists`, is committed after `qk_parts_before_p` of them. Returns `test()`, called under the
    last part."""
    cfg, scores, part = cta.cfg, f.tSrS, f.part
    warpgroup.wait_group(0)
    for n in range(cfg.qk_parts):
        if n:
            issue_part(cta, f, part, n, stage)
            ready = test()
            warpgroup.wait_group(0)
        if n == min(cfg.qk_parts_before_p, cfg.qk_parts - 1):
            commit_p_if(cta, previous, exists)
        for x in range(cute.size(scores)):
            scores[x] = add_here(scores[x], part[x]) if n else move_here(part[x])
    return ready


def finish_parts_exchange(cta: Cta, f: Fragments, stage, test: Callable):
    """As `finish_parts`, with `p_exchange`: part 1 goes to the scores themselves, whose weights are
    stored, beside the end of part 0."""
    scores, part = f.tSrS, f.part
    issue_part(cta, f, scores, 1, stage)
    for n in range(2, cta.cfg.qk_parts + 1):
        warpgroup.wait_group(0)
        for x in range(cute.size(scores)):
            scores[x] = add_here(scores[x], part[x])
        if n < cta.cfg.qk_parts:
            issue_part(cta, f, part, n, stage)
            ready = test()
    return ready


def finish_parts_656(cta: Cta, f: Fragments, stage, previous, exists, test: Callable):
    """As `finish_parts`, for 656-byte tokens: each part times its tokens' scales. QK of the rope
    goes to the scores themselves, beside part 1."""
    cfg, scores, part = cta.cfg, f.tSrS, f.part
    for n in range(cfg.qk_parts):
        if n == 1:
            kv_656.issue_rope(cta.mma, f.rope, scores, stage)
        if n:
            issue_part(cta, f, part, n, stage)
        ready = test() if n + 1 == cfg.qk_parts else None
        scales = kv_656.load_scales(cta, n, stage)
        warpgroup.wait_group(0)
        if n == min(cfg.qk_parts_before_p, cfg.qk_parts - 1):
            commit_p_if(cta, previous, exists)
        kv_656.add_scaled(scores, part, scales, n)
    return ready


def make_fragments(cta: Cta) -> Fragments:
    """Descriptors once for all tiles, and registers."""
    cfg, s, mma = cta.cfg, cta.s, cta.mma
    tSrK = mma.qk.make_fragment_B(mma.qk.get_slice(0).partition_B(s.sKV))
    tSrQ = cute.make_rmem_tensor(mma.qk_rs.partition_shape_A((64, cfg.q_steps * STEP)), cfg.element)
    tSrQ_tail = None
    if cfg.q_steps < cfg.steps:
        tSrQ_tail = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.sQ_tail))
    rope = kv_656.rope_operands(s, mma) if cfg.kv_656 else None
    tSrQ_low = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.sQ_low))
    shape = mma.qk_rs.partition_shape_C((64, 64))
    scores, part = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
    return Fragments(tSrQ, tSrQ_tail, tSrQ_low, tSrK, rope, scores, part)


def load_ahead(cta: Cta, stage, exists):
    """What the softmax of the tile in a stage reads from shared memory where tokens are gathered,
    its bits of valid slots and its unit, None where it needs none. They are loaded before MMAs are
    issued: behind them, and behind copies of tokens, a load takes hundreds of clocks."""
    if cta.cfg.gather != SPARSE:
        return None, None
    unit = kv_656.load_unit(cta.s, stage, exists) if cta.cfg.kv_656 else None
    return load_valid(cta, stage, exists), unit


@cute.jit
def softmax_under_part(
    cta: Cta, f: Fragments, rows: RowState, scale, tile: TileContext, loop: LoopState,
    weighed: Tile, valid,
):  # fmt: skip
    """Weights of the previous tile, `weighed`, while part 0 of the tile at `loop.state` runs.
    `valid`: see `load_ahead`."""
    cfg, s, stage, p_stage = cta.cfg, cta.s, loop.state.index, weighed.p.index
    on_word = mma_per_word(cta, f, stage)
    profile_tile(cfg, cta.g, loop.left, "QK done")
    mask_scores(cta, f.tSrS, tile, loop.previous, loop.left + 1, valid)
    if const_expr(cfg.p_exchange):
        if not loop.p_free:
            s.p_pipe.producer_acquire(weighed.p.opposite())
    softmax_step(cta, f.tSrS, scale, rows, weighed, on_word)
    cute.arch.fence_view_async_shared()
    if const_expr(cfg.p_exchange):
        s.p_written.arrive(p_stage)
        issue_part(cta, f, f.part, 0, stage, FIRST + WORDS)
    profile_tile(cfg, cta.g, loop.left, "P stored")


@cute.jit
def qk_tile(
    cta: Cta, f: Fragments, rows: RowState, scale, tile: TileContext, loop: LoopState, number, tiles
):
    """Scores of the tile at `loop.state`, one of `tiles` of the work tile. Unless it is the first,
    the weights of the previous one, number `number` of the CTA, are computed here."""
    cfg, state = cta.cfg, loop.state
    valid, unit = load_ahead(cta, loop.previous, loop.left < tiles)
    p_phases = wait_for_keys(cta, loop)
    issue_part(cta, f, f.part, 0, state.index, 0, ahead(cfg))
    if loop.left < tiles:
        weighed = Tile(loop.previous, p_state(number), unit)
        softmax_under_part(cta, f, rows, scale, tile, loop, weighed, valid)
    else:
        issue_part(cta, f, f.part, 0, state.index, ahead(cfg))
    after = state.advance(cfg.stages)

    def test():
        keys = try_keys(cta, after, p_phases)
        following = p_state(number + 1).opposite()
        return keys, cta.s.p_pipe.producer_try_acquire(following) if cfg.p_exchange else keys

    if const_expr(cfg.p_exchange):
        ready, p_free = finish_parts_exchange(cta, f, state.index, test)
    else:
        finish = finish_parts_656 if cfg.kv_656 else finish_parts
        ready, p_free = finish(cta, f, state.index, loop.previous, loop.left < tiles, test)
    left = loop.left - 1
    after = state.advance(cfg.stages)
    return LoopState(after, p_phases, state.index, left, ready, p_free)


@cute.jit
def finish_work_tile(
    cta: Cta, f: Fragments, rows: RowState, scale, tile: TileContext, weighed: Tile
):
    """P of the last tile, `weighed`, and the row statistics for the epilogue."""
    s = cta.s
    # read again: held through the loop, it would take registers
    work = read_work(cta.g, s, tile.index)
    mask_scores(cta, f.tSrS, tile, weighed.stage, Int32(1))
    if const_expr(cta.cfg.p_exchange):
        s.p_pipe.producer_acquire(weighed.p.opposite())
    softmax_step(cta, f.tSrS, scale, rows, weighed, nothing)
    finish_rows(cta, work, weighed.stage, rows, tile.index)
    if const_expr(cta.cfg.p_exchange):
        s.p_written.arrive(weighed.p.index)
    else:
        s.p_pipe.producer_commit(weighed.stage)


@cute.jit
def mainloop_qk_softmax_hi_lo(cta: Cta):
    """Per work tile: Q split, then part 0 of QK(t + 1) issued, softmax(t) under it, P(t) stored,
    the other parts."""
    cfg = cta.cfg
    w = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % 128 // 32)
    f = make_fragments(cta)
    scale, row_max, row_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
    rows = RowState(row_max, row_sum, row_max)
    state, p_phases = PipelineState.start(), StagePhases(Int32((1 << cfg.stages) - 1))
    count = Int32(0)  # of the CTA's tiles before this work tile
    for index in cutlass.range(cta.plan.first, cta.plan.last, unroll=1):
        state = state.uniform()
        second = state.advance(cfg.stages)
        split_query(cta, f.tSrQ, scale, (state, second))
        state = second.advance(cfg.stages)
        tile, tiles = tile_context(cta, rows, index, w)
        state = state.uniform()
        # so that no older value is held in these registers
        f.tSrS.fill(0.0)
        f.part.fill(0.0)
        loop = LoopState(state, p_phases, state.index, tiles, Boolean(False), Boolean(False))
        while loop.left > 0:
            loop = LoopState(
                loop.state.uniform(), loop.p_phases.uniform(), loop.previous, loop.left,
                loop.ready, loop.p_free,
            )  # fmt: skip
            number = count + (tiles - loop.left - 1)
            loop = qk_tile(cta, f, rows, scale, tile, loop, number, tiles)
        state, p_phases = loop.state, loop.p_phases
        count = count + tiles
        weighed = Tile(loop.previous, p_state(count - 1))
        finish_work_tile(cta, f, rows, scale, tile, weighed)
