"""The mainloop of e4m3 operands: a warp group's round for its own KV tile k.

    QK(k), tile maxima | wait for row max(k-1) of the other, row max(k) | weights, publish P(k)
    | wait for P(k-1) of the other, PV(k-1), release stage of k-1 | PV(k), release stage of k

Scores and softmax come before PV of the other's tile (unlike `mainloop_bf16`), and row maxima are
published before weights: the only chain from tile to tile is one maximum of two numbers per row.
While one warp group is in its MMAs, the other is in its softmax. The ring has room for the stages
that wait. Scores and a slice of O^T never live at once, which is what 64 rows leave registers for.

One thread per row computes the statistics of tile k:

    row max  m(k) = max(m(k-1), tile's maximum - 8)       (log2; for the 8 see `fp8_operands`)
    rescale  f(k) = 2^(m(k-1) - m(k))
    both     f(k-1) f(k), which takes a warp group's row sums from its last own tile, k-2, to k

`Shared.sStats` is [2 warp group + buffer][3][rows] with two buffers: rescale factors are read once
more behind the own softmax, when the other warp group may be one tile further. P too is published
at two mbarriers in turn: at one, the other's second tile would complete a phase that a warp group
still waits for. `stats_full` counts `rows` arrivals, one per thread that computes.

Option skip (skip-softmax): the threads that compute the statistics also vote. If no row of the
request has a score of at least its maximum so far plus log2(threshold / length), nor a NaN, PV of
the tile is skipped: m(k) = m(k-1), f(k) = 1, `Shared.skipped` is 1 for both warp groups, no weights
are computed, and P is published although nothing was written.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..common.barriers import MBarriers
from ..common.feature_operands import orient_scores, scale_now
from ..common.fp8 import join_two, round_two
from ..common.pipeline import PipelineState
from ..common.ptx_sm90 import NO_SCORE, fresh_thread, load2, pick
from ..split_merge.swap_ab_fragments import CtaEvent, profile_event
from . import fp8_operands as fp8
from . import kv_656
from . import online_softmax as sx
from . import query_hi_lo as hi_lo
from .epilogue import publish_row_sums
from .mainloop_bf16 import FIRST, publish_p, release_stage
from .mma import WarpGroup, issue_qk
from .online_softmax import RESCALE, ROW_MAX
from .params import SCALES, TILE_KV, Traits
from .shared_storage import Globals, Shared, WorkTile, stats_idx

#: third statistic of a tile, beside ROW_MAX and RESCALE
RESCALE_TWO = 2


def stats_pair(c: Traits, s: Shared, stats: Int32, what: int, j: int, lane: Int32) -> cute.Tensor:
    """A statistic of a thread's rows 2 j and 2 j + 1, which are neighbours."""
    return load2(s.sStats.iterator + (3 * stats + what) * c.rows + 8 * j + 2 * (lane % 4))


@cute.jit
def row_stats(
    c: cutlass.Constexpr[Traits], later: Boolean, g: Globals, s: Shared, wg: WarpGroup,
    w: WorkTile, scale: Float32, tile: Int32, row: Int32,
):  # fmt: skip
    """One thread per row: the statistics of the CTA's KV tile `tile`, for both warp groups."""
    top = sx.tile_max(c, s, wg, row)
    other = stats_idx(c, 1 - wg.idx, tile - 1)
    if tile > 0:
        # statistics of the work tile before are not read, but no phase may be passed over
        MBarriers(s.stats_full.at(1 - wg.idx)).wait(0, ((tile - 1) >> 1) & 1)
    old, before = Float32(NO_SCORE), Float32(1.0)
    if later:
        old, before = s.sStats[other, ROW_MAX, row], s.sStats[other, RESCALE, row]
    new = cute.arch.fmax(old, top * scale - fp8.P_LOG2)
    stats = stats_idx(c, wg.idx, tile)
    if const_expr(c.skip):
        gain = top * scale - fp8.P_LOG2 - old
        skipped = pick(later, vote_skip(c, g, w, gain, row), Int32(0))
        new = pick(skipped != 0, old, new)
        if row == 0:
            s.skipped[stats] = skipped
    rescale = cute.math.exp2(old - new, fastmath=True)
    s.sStats[stats, ROW_MAX, row] = new
    s.sStats[stats, RESCALE, row] = rescale
    s.sStats[stats, RESCALE_TWO, row] = before * rescale
    s.stats_full.arrive(wg.idx)


def vote_skip(c: Traits, g: Globals, w: WorkTile, gain: Float32, row: Int32) -> Int32:
    """1 where all rows agree to skip a tile whose maximum lies `gain` (log2) above the row's so
    far. By the threads of all rows, which are of one warp."""
    least = cute.math.log2(g.skip / w.kv_len.to(Float32), fastmath=True)
    objects = pick((row < w.rows) & ~(gain < least), Int32(1), Int32(0))
    return cute.arch.inline_ptx(
        "{ .reg .pred p, q; setp.eq.s32 p, {$r0}, 0;"
        f" vote.sync.all.pred q, p, {(1 << c.rows) - 1:#x}; selp.s32 {{$w0}}, 1, 0, q; }}",
        write_only_types=[Int32],
        read_only_args=[objects],
    )


def thread_scores(c: Traits, wg: WarpGroup) -> cute.Tensor:
    """A thread's scores, later its weights."""
    if not c.hi_lo:
        return wg.tSrS
    return cute.make_tensor(wg.scores.iterator, cute.make_layout(c.rows // 2))


@cute.jit
def online_softmax_step(
    c: cutlass.Constexpr[Traits], later: Boolean, g: Globals, s: Shared, wg: WarpGroup,
    w: WorkTile, tile: Int32, stage: Int32,
):  # fmt: skip
    """Scores become weights, and row sums follow; of a skipped tile only the row sums."""
    acc = thread_scores(c, wg)
    scale = orient_scores(c, acc, scale_now(c, g))
    sx.store_tile_max(c, s, wg, acc, wg.warp, wg.lane)
    thread = wg.warp * 32 + wg.lane
    if const_expr(c.kv_656):
        if (thread >= 32) & (thread < 32 + SCALES):
            kv_656.p_scale(c, s, wg, stage, thread - 32)
    if thread < c.rows:
        row_stats(c, later, g, s, wg, w, scale, tile, thread)
    wg.sync()
    stats = stats_idx(c, wg.idx, tile)
    if const_expr(c.skip):
        if s.skipped[stats] == 0:
            exp2_tile(c, s, wg, acc, scale, stats)
        else:
            for j in cutlass.range_constexpr(c.rows // 8):
                rescale = stats_pair(c, s, stats, RESCALE_TWO, j, wg.lane)
                for e in cutlass.range_constexpr(2):
                    wg.row_sum[2 * j + e] = wg.row_sum[2 * j + e] * rescale[e]
    else:
        exp2_tile(c, s, wg, acc, scale, stats)


@cute.jit
def exp2_tile(
    c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, acc: cute.Tensor, scale: Float32,
    stats: Int32,
):  # fmt: skip
    """Weights as e4m3, a word per 8 rows on its place among the scores; with hi and lo in fp32,
    which both are made of later."""
    for j in cutlass.range_constexpr(c.rows // 8):
        maxima = stats_pair(c, s, stats, ROW_MAX, j, wg.lane)
        rescale = stats_pair(c, s, stats, RESCALE_TWO, j, wg.lane)
        halves = []
        for e in cutlass.range_constexpr(2):
            # in place of the scores: were those alive, ptxas would serialise the wgmmas
            for x in (4 * j + e, 4 * j + 2 + e):
                acc[x] = cute.math.exp2(acc[x] * scale - maxima[e], fastmath=True)
            seen = acc[4 * j + e] + acc[4 * j + 2 + e]
            if const_expr(not c.hi_lo):
                halves.append(round_two(acc[4 * j + e], acc[4 * j + 2 + e]))
                seen = fp8.sum_two(halves[e])
            wg.row_sum[2 * j + e] = wg.row_sum[2 * j + e] * rescale[e] + seen
        if const_expr(not c.hi_lo):
            cute.recast_tensor(acc, Int32)[4 * j] = join_two(halves[0], halves[1])


@cute.jit
def pv(
    c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, owner: cutlass.Constexpr[int],
    stage: Int32, tile: Int32,
):  # fmt: skip
    """Issue PV of the CTA's KV tile `tile`, whose P is in shared memory, unless it is skipped."""
    if const_expr(c.skip):
        if s.skipped[stats_idx(c, owner, tile)] == 0:
            issue_pv(c, s, wg, owner, stage, tile)
    else:
        issue_pv(c, s, wg, owner, stage, tile)


@cute.jit
def issue_pv(
    c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, owner: cutlass.Constexpr[int],
    stage: Int32, tile: Int32,
):  # fmt: skip
    """Load the tile's factors and issue its PV."""
    for j in cutlass.range_constexpr(c.rows // 8):
        pair = stats_pair(c, s, stats_idx(c, owner, tile), RESCALE, j, wg.lane)
        wg.rescale[2 * j], wg.rescale[2 * j + 1] = pair[0], pair[1]
    if const_expr(c.kv_656):
        scales = s.kv_656.sP_scale.iterator
        pair = load2(scales + stage * SCALES + 2 * wg.idx)
        wg.pv_scale[0], wg.pv_scale[1] = pair[0], pair[1]
    fp8.issue_pv(c, s, wg, stage)


@cute.jit
def pv_of_other(
    c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, stage: Int32, tile: Int32
):  # fmt: skip
    """Wait for P of the other warp group's tile and issue its PV."""
    p_full = MBarriers(s.p_full.at(stats_idx(c, 1 - wg.idx, tile)))
    p_full.wait(0, (tile >> 2) & 1)
    pv(c, s, wg, 1 - wg.idx, stage, tile)


@cute.jit
def finish_other(
    c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, w: WorkTile, tile: Int32
):  # fmt: skip
    """PV of the last tile, which is the other warp group's, and the row sums."""
    stage = 1 - wg.idx if const_expr(c.stage_per_group) else tile % c.stages
    if const_expr(c.skip):
        wg.rescale.fill(1.0)
    pv_of_other(c, s, wg, stage, tile)
    sx.rescale_sums(wg)
    publish_row_sums(c, s, wg)
    finish_pv(c, s, wg, stage)


@cute.jit
def finish_pv(c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, stage: Int32):
    """Wait for PV, add it to O^T, release the stage."""
    warpgroup.wait_group(0)
    fp8.promote_tile(c, wg)
    release_stage(c, s, stage)


@cute.jit
def own_tile(
    c: cutlass.Constexpr[Traits], order: cutlass.Constexpr[str], g: Globals, s: Shared,
    wg: WarpGroup, w: WorkTile, k: Int32,
):  # fmt: skip
    """One round of the module's docstring; `order` FIRST: the work tile has no tile k-1. With
    `Traits.one_round` a branch on k stands in place of `order`."""
    if const_expr(c.mma_n == 64):
        # whatever follows from the thread takes no register from one round to the next
        lane = fresh_thread() % 32
        warp = cute.arch.make_warp_uniform(fresh_thread() % 128 // 32)
        wg = replace(wg, warp=warp, lane=lane)
    thread = wg.warp * 32 + wg.lane
    tile = w.tiles_before + k
    stage = tile % c.stages
    tile_token = w.token + k * TILE_KV
    slot_bits = sx.load_slot_bits(c, g, tile_token, w)
    warpgroup.fence()
    state = PipelineState.of_count(tile, c.stages)
    token = 16 * wg.warp + wg.lane // 4
    if const_expr(c.kv_656):
        kv_656.qk(c, s, wg, state, w.kv_len - tile_token, token)
        kv_656.store_max_scale(c, s, wg)
    elif const_expr(c.hi_lo):
        hi_lo.qk(c, s, wg, state)
    else:
        issue_qk(c, s, wg, state.index, state.phase)
        warpgroup.wait_group(0)
    later = Boolean(order != FIRST)
    if const_expr(c.one_round and (c.one_code or wg.idx == 0)):
        later = k > 0  # the first tile of a grid is the first warp group's
    if not later:
        profile_event(c, s, CtaEvent.FIRST_QK_DONE)
    if w.q_is_read(k + 2 >= w.num_tiles):
        s.q.consumer_release(0)
    sx.apply_mask(c, g, thread_scores(c, wg), w, tile_token, slot_bits, token, wg.lane)
    online_softmax_step(c, later, g, s, wg, w, tile, stage)
    if const_expr(c.kv_656):
        kv_656.store_p(c, s, wg, thread_scores(c, wg), stage)
    else:
        fp8.store_p(c, s, wg, thread_scores(c, wg), stage)
    publish_p(c, s, wg, w, tile_token, thread, stage, stats_idx(c, wg.idx, tile))
    if later:
        before = (tile + c.stages - 1) % c.stages
        pv_of_other(c, s, wg, before, tile - 1)
        finish_pv(c, s, wg, before)
    pv(c, s, wg, wg.idx, stage, tile)
    if k + 1 == w.num_tiles:
        publish_row_sums(c, s, wg)
    finish_pv(c, s, wg, stage)
