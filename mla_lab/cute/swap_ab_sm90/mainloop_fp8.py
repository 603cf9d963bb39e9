"""A warpgroup's round for its own tile k, where the products are of e4m3.

    S^T(k) | tile's maxima | await m(k-1) of the other, m(k) | P(k), publish it
    | await P(k-1) of the other, O^T(k-1), release stage of k-1 | O^T(k), release stage of k

Scores and weights come before the other's product (16-bit builds: see `rounds`), and maxima leave
before weights: from one tile to the next there is only a maximum of two numbers a row, the rest of
a round is off that path, and while one warpgroup is at its products the other is at its scores.
There is room in the ring for the stages that wait. Scores and a slice of O^T are never held at
once, which is what 64 rows leave registers for.

A thread a row makes the statistics of tile k:

    m(k) = max(m(k-1), tile's maximum - 8), f(k) = 2^(m(k-1) - m(k)), and f(k-1) f(k), which takes
    a warpgroup's sums from its last own tile, k-2, to this one

They lie in two places in turn, [2 warpgroup + place][3][rows]: factors are read once more behind
the own softmax, when the other may be one tile further. So P, too, is announced at two mbarriers
in turn: at one, the other's second tile would pass by whoever still waits for its first. m(k) has
one of `rows` arrivals, since nobody makes another without it.

With the option skip (skip-softmax) the threads that make statistics also vote: where no row of the
request's has a score of at least its greatest so far plus log2(factor / length), the tile is left
out. Then m(k) = m(k-1), f(k) = 1, and a word at the statistics' place says so to both warpgroups:
no weights are made, and P is announced although nothing was written.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..common.feature_operands import scale_now
from ..common.fp8 import join_two, round_two
from ..common.ptx_sm90 import NO_SCORE, fold_lanes, folded_index, fresh_thread, load2, load4, pick
from . import fp8_operands as fp8
from . import kv_656 as scaled
from . import online_softmax as sx
from . import query_hi_lo as split
from .epilogue import publish_totals
from .mainloop_bf16 import FIRST, ONE, Fragments, Span, clear_tail, release
from .mma import issue_scores
from .params import GROUPS, TILE_KV, Shape
from .shared_storage import Global, Products, Shared, stamp, statistics

#: what lies at a place of the statistics
PEAK, FACTOR, BOTH = range(3)


def pair_of(c: Shape, s: Shared, place: Int32, what: int, j: int, lane: Int32) -> cute.Tensor:
    """A statistic of a thread's rows 2j and 2j + 1, which are neighbours."""
    return load2(s.peak.iterator + (3 * place + what) * c.rows + 8 * j + 2 * (lane % 4))


@cute.jit
def row_statistics(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], first: cutlass.Constexpr[bool],
    g: Global, s: Shared, w: Span, scale: Float32, at: Int32, row: Int32,
):  # fmt: skip
    """One thread a row: its statistics of tile `at`, for both warpgroups."""
    v = load4(s.top.iterator + (wg * c.rows + row) * 4)
    top = cute.arch.fmax(cute.arch.fmax(v[0], v[1]), cute.arch.fmax(v[2], v[3]))
    old, before = Float32(NO_SCORE), Float32(1.0)
    if const_expr(not first):
        other = statistics(c, 1 - wg, at - 1)
        cute.arch.mbarrier_wait(s.m_ready + (1 - wg), ((at - 1) >> 1) & 1)
        old, before = s.peak[other, PEAK, row], s.peak[other, FACTOR, row]
    elif const_expr(not c.grid):
        # nothing to read, and long there: but each phase is waited for before the next begins
        if at > 0:
            cute.arch.mbarrier_wait(s.m_ready + (1 - wg), ((at - 1) >> 1) & 1)
    new = cute.arch.fmax(old, top * scale - fp8.P_LOG2)
    place = statistics(c, wg, at)
    if const_expr(c.skip):
        out = vote_out(c, first, g, w, top * scale - fp8.P_LOG2 - old, row)
        new = pick(out != 0, old, new)
        if row == 0:
            s.skipped[place] = out
    factor = cute.math.exp2(old - new, fastmath=True)
    s.peak[place, PEAK, row] = new
    s.peak[place, FACTOR, row] = factor
    s.peak[place, BOTH, row] = before * factor
    cute.arch.mbarrier_arrive(s.m_ready + wg)


def vote_out(c: Shape, first: bool, g: Global, w: Span, gain: Float32, row: Int32) -> Int32:
    """1 where all rows agree to leave a tile out, `gain` above the row's greatest score so far
    (log2 units); never the first. By the threads of all rows, which are of one warp."""
    if first:
        return Int32(0)
    least = cute.math.log2(g.skip / w.kv_len.to(Float32), fastmath=True)
    objects = pick((row < w.rows) & ~(gain < least), Int32(1), Int32(0))
    return cute.arch.inline_ptx(
        "{ .reg .pred p, q; setp.eq.s32 p, {$r0}, 0;"
        f" vote.sync.all.pred q, p, {(1 << c.rows) - 1:#x}; selp.s32 {{$w0}}, 1, 0, q; }}",
        write_only_types=[Int32],
        read_only_args=[objects],
    )


def is_taken(c: Shape, s: Shared, place: Int32) -> Any:
    """Whether the tile whose statistics lie there counts (skip-softmax)."""
    return s.skipped[place] == 0


def add_scores(
    c: Shape, s: Shared, mma: Products, f: Fragments, stage: Int32, phase: Int32, lane: Int32
) -> None:
    """Scores of a tile."""
    if c.terms > 1:
        split.add_scores(c, s, mma, f, stage, phase, lane)
        return
    issue_scores(c, s, mma.s.op, f.acc_s, f.k, f.q, stage, phase)
    warpgroup.wait_group(0)


def scores_of(c: Shape, f: Fragments) -> cute.Tensor:
    """A thread's scores, and its weights later."""
    if c.terms == 1:
        return f.acc_s
    return cute.make_tensor(f.rest.iterator, cute.make_layout(c.rows // 2))


@cute.jit
def weigh(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], first: cutlass.Constexpr[bool],
    g: Global, s: Shared, f: Fragments, w: Span, at: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """Scores become weights, and totals follow; of a tile that is left out the totals alone."""
    acc, scale = scores_of(c, f), scale_now(c, g)
    tops = []
    for i in cutlass.range_constexpr(c.rows // 4):
        tops.append(cute.arch.fmax(acc[4 * (i // 2) + i % 2], acc[4 * (i // 2) + 2 + i % 2]))
    tops = fold_lanes(tops, cute.arch.fmax, lane)
    mine = folded_index(c.rows // 4, lane)
    for i in cutlass.range_constexpr(len(tops)):
        s.top[wg, sx.fold_row(mine + i, lane), warp] = tops[i]
    cute.arch.barrier(barrier_id=ONE + wg, number_of_threads=128)
    row = warp * 32 + lane
    if const_expr(c.scaled):
        if (row >= 32) & (row < 32 + GROUPS):
            scaled.group_statistics(c, wg, s, at, row - 32)
    if row < c.rows:
        row_statistics(c, wg, first, g, s, w, scale, at, row)
    cute.arch.barrier(barrier_id=ONE + wg, number_of_threads=128)
    place = statistics(c, wg, at)
    if const_expr(c.skip):
        if is_taken(c, s, place):
            make_weights(c, s, f, acc, scale, place, lane)
        else:
            for j in cutlass.range_constexpr(c.rows // 8):
                fade = pair_of(c, s, place, BOTH, j, lane)
                for e in cutlass.range_constexpr(2):
                    f.total[2 * j + e] = f.total[2 * j + e] * fade[e]
    else:
        make_weights(c, s, f, acc, scale, place, lane)


@cute.jit
def make_weights(
    c: cutlass.Constexpr[Shape], s: Shared, f: Fragments, acc: cute.Tensor, scale: Float32,
    place: Int32, lane: Int32,
):  # fmt: skip
    """Weights: of e4m3, two tokens of two rows a word, at 4 j of the scores (see `fp8`), or of
    fp32, where two terms will be made of them."""
    for j in cutlass.range_constexpr(c.rows // 8):
        peaks, fade = pair_of(c, s, place, PEAK, j, lane), pair_of(c, s, place, BOTH, j, lane)
        halves = []
        for e in cutlass.range_constexpr(2):
            # in the place of the scores: left alive, they make ptxas take the products one by one
            for x in (4 * j + e, 4 * j + 2 + e):
                acc[x] = cute.math.exp2(acc[x] * scale - peaks[e], fastmath=True)
            seen = acc[4 * j + e] + acc[4 * j + 2 + e]
            if const_expr(c.terms == 1):
                halves.append(round_two(acc[4 * j + e], acc[4 * j + 2 + e]))
                seen = fp8.sum_two(halves[e])
            f.total[2 * j + e] = f.total[2 * j + e] * fade[e] + seen
        if const_expr(c.terms == 1):
            cute.recast_tensor(acc, Int32)[4 * j] = join_two(halves[0], halves[1])


@cute.jit
def add_tile(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], owner: cutlass.Constexpr[int],
    s: Shared, mma: Products, f: Fragments, stage: Int32, at: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """Issue O^T of tile `at` of the walk, whose P is here, beside O^T x its factors. With skip it
    is added here too, unless the tile is left out."""
    if const_expr(c.skip):
        if is_taken(c, s, statistics(c, owner, at)):
            issue_tile(c, wg, owner, s, mma, f, stage, at, warp, lane)
    else:
        issue_tile(c, wg, owner, s, mma, f, stage, at, warp, lane)


@cute.jit
def issue_tile(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], owner: cutlass.Constexpr[int],
    s: Shared, mma: Products, f: Fragments, stage: Int32, at: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """O^T of tile `at`, by its factors."""
    for j in cutlass.range_constexpr(c.rows // 8):
        pair = pair_of(c, s, statistics(c, owner, at), FACTOR, j, lane)
        f.factor[2 * j], f.factor[2 * j + 1] = pair[0], pair[1]
    if const_expr(c.scaled):
        pair = load2(s.scaled.units.iterator + statistics(c, owner, at) * GROUPS + 2 * wg)
        f.units[0], f.units[1] = pair[0], pair[1]
    fp8.issue_values(c, wg, s, mma.o.op, f, f.factor, stage, warp, lane)


@cute.jit
def take_last(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], s: Shared, mma: Products,
    f: Fragments, stage: Int32, at: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """Behind the own last tile: O^T of the other warpgroup's, and the totals its factors."""
    cute.arch.mbarrier_wait(s.p_ready + statistics(c, 1 - wg, at), (at >> 2) & 1)
    if const_expr(c.skip):
        f.factor.fill(1.0)
    add_tile(c, wg, 1 - wg, s, mma, f, stage, at, warp, lane)
    sx.scale_totals(f.total, f.factor)


@cute.jit
def own_tile(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], order: cutlass.Constexpr[str],
    g: Global, s: Shared, mma: Products, f: Fragments, w: Span, k: Int32,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """One round of the module's docstring; `order` FIRST: the work tile has no tile k-1."""
    if const_expr(c.width == 64):
        # whatever follows from the thread takes no register from one round to the next
        lane = fresh_thread() % 32
        warp = cute.arch.make_warp_uniform(fresh_thread() % 128 // 32)
    thread = warp * 32 + lane
    at = w.done + k
    stage = at % c.stages
    tile_token = w.token + k * TILE_KV
    slots = sx.ask_slots(c, g, tile_token, w)
    warpgroup.fence()
    phase, token = (at // c.stages) & 1, 16 * warp + lane // 4
    if const_expr(c.scaled):
        scaled.scores(c, s, mma, f, stage, phase, w.kv_len - tile_token, token, lane)
        scaled.leave_tops(c, wg, s, f, warp, lane)
    else:
        add_scores(c, s, mma, f, stage, phase, lane)
    if const_expr(order == FIRST):
        stamp(c, s, 2)
    if k + 2 >= w.mine:
        cute.arch.mbarrier_arrive(s.q_empty)
    sx.mask_scores(c, g, scores_of(c, f), tile_token, w, token, lane)
    sx.mask_slots(c, scores_of(c, f), slots)
    weigh(c, wg, order == FIRST, g, s, f, w, at, warp, lane)
    if const_expr(c.scaled):
        scaled.publish(c, wg, s, f, scores_of(c, f), stage, at, warp, lane)
    else:
        fp8.publish(c, s, scores_of(c, f), stage, warp, lane)
    if const_expr(not c.gather):
        if tile_token + TILE_KV > w.kv_len:
            clear_tail(c, s, stage, w.kv_len - tile_token, thread)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(s.p_ready + statistics(c, wg, at))
    cute.arch.barrier(barrier_id=ONE + wg, number_of_threads=128)
    if const_expr(order != FIRST):
        before = (at + c.stages - 1) % c.stages
        cute.arch.mbarrier_wait(s.p_ready + statistics(c, 1 - wg, at - 1), ((at - 1) >> 2) & 1)
        add_tile(c, wg, 1 - wg, s, mma, f, before, at - 1, warp, lane)
        warpgroup.wait_group(0)
        fp8.land(c, f, f.factor)
        release(c, s, before)
    add_tile(c, wg, wg, s, mma, f, stage, at, warp, lane)
    if k + 1 == w.mine:
        publish_totals(c, wg, s, f.total, warp, lane)
    warpgroup.wait_group(0)
    fp8.land(c, f, f.factor)
    release(c, s, stage)
