"""The two consumer warpgroups: own tiles alternate, each keeps 256 columns of O^T.

Tiles of a work tile belong to the warpgroups in turn; the owner computes scores and P, both add
V^T P^T for their half of the columns. Round of a warpgroup, for its tile k:

    issue S^T(k) | await P(k-1) of the other, issue O^T(k-1) | softmax(k), publish P(k)
    | release stage of k-1 | issue O^T(k), release stage of k

With `values_first` (two stages) O^T(k-1) and the release of its stage stand before S^T(k): there
S^T(k) would wait for tile k, and the load of k+1 for the stage, one load after another.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.cute.nvgpu import warpgroup

from ..hopper import load4
from . import softmax as sx
from .config import CONSUMERS, HEAD_DIM, TILE_KV, Shape
from .exchange import announce
from .finish import finish, publish_totals
from .mail import merge_mail
from .mma import issue_scores, issue_values
from .output import NUM_SPLITS
from .share import merge_shares
from .storage import (
    Global,
    Products,
    Shared,
    first_owner,
    stamp,
    value_view,
    weight_view,
)
from .work import merge_record, read_words

#: named barriers: all consumers; a warpgroup (2, 3); P of warpgroup 0's or 1's tile (4, 5)
ALL, ONE, P_READY = 1, 2, 4


@dataclass(frozen=True)
class Fragments:
    """Operands of this warpgroup and its registers."""

    k: cute.Tensor
    q: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    store: cute.TiledCopy
    p_out: cute.Tensor
    acc_s: cute.Tensor
    acc_o: cute.Tensor
    total: cute.Tensor
    factor: cute.Tensor


@dataclass(frozen=True)
class Span:
    """The work record's part that the loop needs."""

    mine: Int32
    token: Int32
    kv_len: Int32
    causal: Int32
    row: Int32
    #: tiles consumed before this work tile
    done: Int32


def fragments(c: Shape, wg: int, s: Shared, mma: Products, thread: Int32) -> Fragments:
    """Descriptors and accumulators, made once."""
    slice_s, slice_o = mma.s.get_slice(0), mma.o.get_slice(0)
    p = weight_view(s, c)
    count = 2 if c.rows == 8 else 4
    atom = cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(True, count), c.dtype)
    store = cute.make_tiled_copy_C(atom, mma.s).get_slice(thread)
    return Fragments(
        k=mma.s.make_fragment_A(slice_s.partition_A(s.k)),
        q=mma.s.make_fragment_B(slice_s.partition_B(s.q)),
        v=mma.o.make_fragment_A(slice_o.partition_A(value_view(s, c, wg))),
        p=mma.o.make_fragment_B(slice_o.partition_B(p)),
        store=store,
        p_out=store.partition_D(cute.make_tensor(p.iterator, cute.select(p.layout, [1, 0, 2]))),
        acc_s=cute.make_rmem_tensor(mma.s.partition_shape_C((TILE_KV, c.rows)), Float32),
        acc_o=cute.make_rmem_tensor(mma.o.partition_shape_C((256, c.rows)), Float32),
        total=cute.make_rmem_tensor(c.rows // 4, Float32),
        factor=cute.make_rmem_tensor(c.rows // 4, Float32),
    )


@cute.jit
def release(c: cutlass.Constexpr[Shape], s: Shared, stage: Int32):
    """One arrival a warp, at each CTA that loads into this stage: it is read no more."""
    if const_expr(c.pair > 1):
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < c.pair:
            cute.arch.mbarrier_arrive(s.empty + stage, lane)
    else:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(s.empty + stage)


@cute.jit
def clear_tail(s: Shared, stage: Int32, left: Int32, thread: Int32):
    """Zero the value rows of tokens past the end: an unread slot may hold NaN, and 0 x NaN is NaN.

    Whole 128-byte rows of the eight boxes, so the swizzle does not matter.
    """
    zero = cute.make_rmem_tensor(4, Int32)
    zero.fill(0)
    base = cute.make_ptr(Int32, s.k.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024)
    base = base + stage * (TILE_KV * HEAD_DIM // 2)
    box, chunk = thread // 16, thread % 8
    for row in cutlass.range(left + thread % 16 // 8, TILE_KV, 2, unroll=1):
        word = (box * TILE_KV + row) * 32 + chunk * 4
        cute.autovec_copy(zero, cute.make_tensor((base + word).align(16), cute.make_layout(4)))


@cute.jit
def take(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], s: Shared, mma: Products,
    f: Fragments, lane: Int32, stage: Int32,
):  # fmt: skip
    """Issue O^T of the other warpgroup's tile once its P is there."""
    cute.arch.barrier(barrier_id=P_READY + 1 - wg, number_of_threads=CONSUMERS)
    sx.read_factors(c, s, 1 - wg, f.factor, lane)
    sx.scale_totals(f.total, f.factor)
    sx.rescale(f.acc_o, f.factor, c.rows)
    warpgroup.fence()
    issue_values(mma.o.op, f.acc_o, f.v, f.p, stage)


@cute.jit
def own_tile(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], first: cutlass.Constexpr[bool],
    g: Global, s: Shared, mma: Products, f: Fragments, w: Span, k: Int32,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """One round of the module's docstring; `first`: the work tile has no tile k-1."""
    thread = warp * 32 + lane
    at = w.done + k
    stage = wg if const_expr(c.static_stage) else at % c.stages
    before = 1 - wg if const_expr(c.static_stage) else (at + c.stages - 1) % c.stages
    tile_token = w.token + k * TILE_KV
    phase = (at // c.stages) & 1
    if const_expr(c.values_first and not first):
        # with two stages tile k is still on its way here, and k+1 waits for the stage of k-1
        take(c, wg, s, mma, f, lane, before)
        warpgroup.wait_group(0)
        release(c, s, before)
    warpgroup.fence()
    issue_scores(c, s, mma.s.op, f.acc_s, f.k, f.q, stage, phase)
    if const_expr(first or c.values_first):
        warpgroup.wait_group(0)
    else:
        take(c, wg, s, mma, f, lane, before)
        warpgroup.wait_group(1)
    if const_expr(first):
        stamp(c, s, 2)
    if k + 2 >= w.mine:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(s.q_empty)
    token = 16 * warp + lane // 4
    sx.mask_scores(c, g, f.acc_s, tile_token, w.kv_len, w.causal, w.row, token, lane)
    sx.softmax(c, wg, first, g, s, f.acc_s, f.total, f.factor, warp, lane)
    p = cute.make_rmem_tensor_like(f.acc_s, c.dtype)
    p.store(f.acc_s.load().to(c.dtype))
    cute.copy(f.store, f.store.retile(p), f.p_out[None, None, None, stage])
    if tile_token + TILE_KV > w.kv_len:
        clear_tail(s, stage, w.kv_len - tile_token, thread)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier_arrive(barrier_id=P_READY + wg, number_of_threads=CONSUMERS)
    cute.arch.barrier(barrier_id=ONE + wg, number_of_threads=128)
    if const_expr(not first):
        if const_expr(not c.values_first):
            warpgroup.wait_group(0)
            release(c, s, before)
        sx.rescale(f.acc_o, f.factor, c.rows)
    warpgroup.fence()
    issue_values(mma.o.op, f.acc_o, f.v, f.p, stage)
    if k + 1 == w.mine:
        publish_totals(c, wg, s, f.total, warp, lane)
    warpgroup.wait_group(0)
    release(c, s, stage)


@cute.jit
def attend(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], g: Global, s: Shared,
    mma: Products, f: Fragments, w: Span, warp: Int32, lane: Int32,
):  # fmt: skip
    """All tiles of one work tile into acc_o and total, published under the last product."""
    f.acc_o.fill(0.0)
    f.total.fill(0.0)
    start = (wg + first_owner(c, w.done)) % 2
    if w.mine <= start:
        # no own tile: this warpgroup reads no Q
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(s.q_empty)
    if const_expr(c.static_stage or wg == 0):
        if start == 0 and w.mine > 0:
            own_tile(c, wg, True, g, s, mma, f, w, Int32(0), warp, lane)
    for k in cutlass.range(2 - start, w.mine, 2, unroll=1):
        own_tile(c, wg, False, g, s, mma, f, w, k, warp, lane)
    if w.mine > 0 and (w.mine - 1) % 2 != start:
        stage = (w.done + w.mine - 1) % c.stages
        if const_expr(c.static_stage):
            stage = 1 - wg
        take(c, wg, s, mma, f, lane, stage)
        publish_totals(c, wg, s, f.total, warp, lane)
        warpgroup.wait_group(0)
        release(c, s, stage)
    if w.mine == 0:
        publish_totals(c, wg, s, f.total, warp, lane)


@cute.jit
def consume(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], g: Global, s: Shared,
    mma: Products, worker: Int32, rank: Int32,
):  # fmt: skip
    """Walk the work records until the producer's END; then the shares of the merges."""
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    thread = tid % 128
    warp = cute.arch.make_warp_uniform(thread // 32)
    f = fragments(c, wg, s, mma, thread)
    cute.arch.mbarrier_wait(s.q_full, 0)
    mine = cute.arch.make_warp_uniform(cute.arch.load(s.work, Int32))
    if const_expr(c.grid):
        if const_expr(c.pair > 1):
            if mine < 0:
                cute.arch.cluster_arrive_relaxed()
        if mine >= 0:
            work_tile(c, wg, g, s, mma, f, mine, Int32(0), Int32(0), rank, warp, lane)
            if const_expr(c.fused_merge == 2):
                tail, more = load4(s.work + 4), load4(s.work + 8)
                if more[NUM_SPLITS] > 1:
                    merge_shares(c, g, s, tail, more, rank)
            if const_expr(c.fused_merge == 3):
                tail, more = load4(s.work + 4), load4(s.work + 8)
                if more[NUM_SPLITS] > 1:
                    merge_mail(c, g, s, tail, more)
    else:
        turn = Int32(0)
        done = Int32(0)
        while mine >= 0:
            work_tile(c, wg, g, s, mma, f, mine, done, turn, rank, warp, lane)
            turn = turn + 1
            done = done + mine
            cute.arch.mbarrier_wait(s.q_full, turn & 1)
            mine = cute.arch.make_warp_uniform(cute.arch.load(s.work, Int32))
        if const_expr(c.fused_merge == 2):
            for at in cutlass.range(g.worker_begin[worker], g.worker_begin[worker + 1], unroll=1):
                words = read_words(g, at)
                if words[5] > 1:
                    tail, more = merge_record(c, g, words)
                    merge_shares(c, g, s, tail, more, rank)


@cute.jit
def work_tile(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], g: Global, s: Shared,
    mma: Products, f: Fragments, mine: Int32, done: Int32, turn: Int32, rank: Int32,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """One work tile, from its record to its result or partial."""
    head = load4(s.work)
    tail = load4(s.work + 4)
    more = load4(s.work + 8)
    w = Span(mine, head[1], head[2], head[3], tail[0], done)
    if const_expr(c.cluster > 1 and not c.aliased):
        announce(c, s)
    attend(c, wg, g, s, mma, f, w, warp, lane)
    if const_expr(c.pair > 1):
        # the last arrival at a peer is behind us; the kernel waits for the peers' at its end
        cute.arch.cluster_arrive_relaxed()
    stamp(c, s, 3)
    last = (mine + 1 + first_owner(c, done)) % 2
    finish(c, wg, g, s, f.acc_o, mine, last, tail, more, turn, rank)
