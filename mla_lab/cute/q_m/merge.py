"""The merge of split row tiles: by the last arriver, or by all who split them, a share each."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .attend import add, select
from .storage import BLOCK, LATENT, LN2, Config, Globals, Shared, Work
from .work import read_work, stamp

MERGE_BARRIER = 2
#: partials of one row tile at most: a worker adds one, and there are no more SMs than this
MAX_SPLITS = 160
WARPS = 8


@cute.jit
def warp_reduce(op: cutlass.Constexpr, value):
    """Reduce over a warp; every lane gets the result."""
    for offset in (16, 8, 4, 2, 1):
        value = op(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


@cute.jit
def ask_weights(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, base, lane):
    """The lse of a row's partials, all asked for at once; lane l of word c: split 32 c + l."""
    lse = cute.make_rmem_tensor(MAX_SPLITS // 32, Float32)
    for c in cutlass.range_constexpr(MAX_SPLITS // 32):
        lse[c] = -Float32.inf
        if 32 * c + lane < work.num_splits:
            at = g.partial_lse.iterator + (base + (32 * c + lane) * (BLOCK * cfg.cluster))
            lse[c] = cute.arch.load(at, Float32, cop="cg")
    return lse


@cute.jit
def weigh(g: Globals, lse: cute.Tensor):
    """lse <- exp(lse - max) / sum x out_scale, the weights of the partials; returns the row's."""
    top = Float32(-Float32.inf)
    for c in cutlass.range_constexpr(MAX_SPLITS // 32):
        top = cute.arch.fmax(top, lse[c])
    top = warp_reduce(cute.arch.fmax, top)
    shift = select(top == -Float32.inf, Float32(0.0), top)
    total = Float32(0)
    for c in cutlass.range_constexpr(MAX_SPLITS // 32):
        lse[c] = cute.math.exp2((lse[c] - shift) * Float32(1.0 / LN2), fastmath=True)
        total = total + lse[c]
    total = warp_reduce(add, total)
    inv = select(total > 0.0, cute.arch.rcp_approx(total), Float32(0.0)) * g.out_scale
    for c in cutlass.range_constexpr(MAX_SPLITS // 32):
        lse[c] = lse[c] * inv
    return shift + cute.math.log2(total, fastmath=True) * Float32(LN2)


@cute.jit
def take(g: Globals, slot_row, lane):
    """A partial's row: lanes hold 4 x 4 of the 512 columns."""
    v = cute.make_rmem_tensor((4, 4), Float32)
    offset = cute.assume(slot_row * LATENT + 4 * lane, divby=4)
    src = cute.make_tensor(
        g.partial_out.iterator + offset, cute.make_layout((4, 4), stride=(1, 128))
    )
    for x in cutlass.range_constexpr(4):
        cute.autovec_copy(src[None, x], v[None, x])
    return v


@cute.jit
def put(cfg: cutlass.Constexpr[Config], g: Globals, row, acc: cute.Tensor, lse, lane):
    """A merged row of the result, and its lse."""
    offset = cute.assume(row * LATENT + 4 * lane, divby=4)
    dst = cute.make_tensor(g.out.iterator + offset, cute.make_layout((4, 4), stride=(1, 128)))
    half = cute.make_rmem_tensor((4, 4), cfg.out_element)
    for x in cutlass.range_constexpr(16):
        half[x] = acc[x].to(cfg.out_element)
    for x in cutlass.range_constexpr(4):
        cute.autovec_copy(half[None, x], dst[None, x])
    if const_expr(cfg.lse):
        if (lane == 0) & (cute.size(g.lse) > 0):
            g.lse[row] = lse


@cute.jit
def merge_two(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, rank, i, j, lane):
    """Rows i and j of this CTA's 64 by one warp, partials in split order.

    Two at a time, so that one waits for the memory's latency half as often.
    """
    stride = BLOCK * cfg.cluster
    base = (work.slot - work.split_idx) * stride + rank * BLOCK
    w0 = ask_weights(cfg, g, work, base + i, lane)
    w1 = ask_weights(cfg, g, work, base + j, lane)
    lse0 = weigh(g, w0)
    lse1 = weigh(g, w1)
    acc0 = cute.make_rmem_tensor((4, 4), Float32)
    acc1 = cute.make_rmem_tensor((4, 4), Float32)
    acc0.fill(0.0)
    acc1.fill(0.0)
    for c in cutlass.range_constexpr(MAX_SPLITS // 32):
        for k in cutlass.range(0, cutlass.min(work.num_splits - 32 * c, Int32(32)), unroll=2):
            at = base + (32 * c + k) * stride
            v0 = take(g, at + i, lane)
            v1 = take(g, at + j, lane)
            f0 = cute.arch.shuffle_sync(w0[c], k)
            f1 = cute.arch.shuffle_sync(w1[c], k)
            for x in cutlass.range_constexpr(16):
                acc0[x] = acc0[x] + f0 * v0[x]
                acc1[x] = acc1[x] + f1 * v1[x]
    put(cfg, g, work.global_row + i, acc0, lse0, lane)
    if j != i:
        put(cfg, g, work.global_row + j, acc1, lse1, lane)


@cute.jit
def merge_rows(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, rank, first, last):
    """Rows [first, last) of this CTA's 64: each of eight warps takes two at a time."""
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    last = cutlass.min(last, work.num_rows - work.first_row)
    w = cute.arch.make_warp_uniform(tid // 32)
    for i in cutlass.range(first + w, last, 2 * WARPS, unroll=1):
        j = i + WARPS
        if j >= last:
            j = i
        merge_two(cfg, g, work, rank, i, j, lane)


def counter_of(cfg, g, work, rank):
    """The merge counter of this CTA's rows of the work tile's group."""
    return g.counters.iterator + (work.group * cfg.cluster + rank)


@cute.jit
def arrive(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, work: Work, rank):
    """Count this CTA's partial in; as the last of the group, merge (fused_merge 1).

    The count releases the partials that the barrier before it has gathered, and acquires the
    others'. It is left at zero for the next launch.
    """
    tid, _, _ = cute.arch.thread_idx()
    counter = counter_of(cfg, g, work, rank)
    cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=256)
    if tid == 0:
        arrived = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        cute.arch.store(s.flag, arrived)
    if const_expr(cfg.fused_merge == 1):
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=256)
        if cute.arch.load(s.flag, Int32) == work.num_splits - 1:
            merge_rows(cfg, g, work, rank, Int32(0), Int32(BLOCK))
            if tid == 0:
                cute.arch.store(counter, Int32(0))


@cute.jit
def merge_share(cfg: cutlass.Constexpr[Config], g: Globals, index, rank):
    """Merge this CTA's share of a split row tile, once all its partials are there.

    Runs after the worker's last tile, so that nobody whom others wait for waits; the launch is
    cooperative, so that all of them run. The count goes on from the arrivals to the finished
    shares, and the last share takes it back to zero.
    """
    tid, _, _ = cute.arch.thread_idx()
    work = read_work(cfg, g, index, rank)
    if work.slot >= 0:
        counter = counter_of(cfg, g, work, rank)
        if tid == 0:
            seen = Int32(0)
            while seen < work.num_splits:
                seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=256)
        stamp(cfg, g, 5)
        share = (BLOCK + work.num_splits - 1) // work.num_splits
        first = work.split_idx * share
        merge_rows(cfg, g, work, rank, first, cutlass.min(first + share, Int32(BLOCK)))
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=256)
        if tid == 0:
            done = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            if done == 2 * work.num_splits - 1:
                cute.arch.store(counter, Int32(0))
