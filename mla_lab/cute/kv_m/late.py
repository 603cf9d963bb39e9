"""A warpgroup's round for its own tile k, where query and cache are e4m3.

    S^T(k) | maxima of k | await P(k-1) of the other, and its factors | P(k), publish it
    | O^T(k-1), release stage of k-1 | O^T(k), release stage of k

Scores and weights come before the other's product (16-bit builds: see `rounds`): from one P to the
next there is only the second half of a softmax, the products of two tiles are off that path, and
while one warpgroup is at its products the other is at its scores. There is room in the ring for
the stages that wait. Scores and a slice of O^T are never held at once, which is what 64 rows leave
registers for. Statistics of a warpgroup lie in two places in turn: its factors are read once more
behind the own softmax, when the other may be one tile further.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..hopper import fresh_thread
from . import fp8
from . import softmax as sx
from .config import TILE_KV, Shape
from .finish import publish_totals
from .mma import issue_scores
from .rounds import FIRST, ONE, Fragments, Span, clear_tail, release
from .storage import Global, Products, Shared, stamp, statistics


@cute.jit
def add_tile(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], owner: cutlass.Constexpr[int],
    s: Shared, mma: Products, f: Fragments, stage: Int32, at: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """Issue O^T of tile `at` of the walk, whose P is here, beside O^T x its factors."""
    sx.read_factors(c, s, statistics(c, owner, at), f.factor, lane)
    fp8.issue_values(c, wg, s, mma.o.op, f, f.factor, stage, warp, lane)


@cute.jit
def take_last(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], s: Shared, mma: Products,
    f: Fragments, stage: Int32, at: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """Behind the own last tile: O^T of the other warpgroup's, and the totals its factors."""
    cute.arch.mbarrier_wait(s.p_ready + (1 - wg), (at >> 1) & 1)
    add_tile(c, wg, 1 - wg, s, mma, f, stage, at, warp, lane)
    sx.scale_totals(f.total, f.factor)


@cute.jit
def own_tile(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], order: cutlass.Constexpr[str],
    g: Global, s: Shared, mma: Products, f: Fragments, w: Span, k: Int32,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """One round of the module's docstring; `order` FIRST: the work tile has no tile k-1."""
    if const_expr(c.rows == 64):
        # whatever follows from the thread takes no register from one round to the next
        lane = fresh_thread() % 32
        warp = cute.arch.make_warp_uniform(fresh_thread() % 128 // 32)
    thread = warp * 32 + lane
    at = w.done + k
    stage = at % c.stages
    tile_token = w.token + k * TILE_KV
    warpgroup.fence()
    issue_scores(c, s, mma.s.op, f.acc_s, f.k, f.q, stage, (at // c.stages) & 1, f.rest)
    warpgroup.wait_group(0)
    if const_expr(c.halves):
        for x in cutlass.range_constexpr(cute.size(f.acc_s)):
            f.acc_s[x] = f.acc_s[x] + f.rest[x]
    if const_expr(order == FIRST):
        stamp(c, s, 2)
    if k + 2 >= w.mine:
        cute.arch.mbarrier_arrive(s.q_empty)
    sx.mask_scores(c, g, f.acc_s, tile_token, w, 16 * warp + lane // 4, lane)
    sx.softmax(c, wg, order == FIRST, g, s, f.acc_s, f.total, f.factor, at, warp, lane)
    fp8.publish(c, s, f.acc_s, stage, warp, lane)
    if tile_token + TILE_KV > w.kv_len:
        clear_tail(c, s, stage, w.kv_len - tile_token, thread)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(s.p_ready + wg)
    cute.arch.barrier(barrier_id=ONE + wg, number_of_threads=128)
    if const_expr(order != FIRST):
        before = (at + c.stages - 1) % c.stages
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
