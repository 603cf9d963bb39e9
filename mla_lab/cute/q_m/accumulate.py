"""The accumulate role: O = P V for one half of the latent, then the epilogue and the merge."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from .attend import STATS_BARRIER, add, release, select
from .load import fill, start
from .storage import BLOCK, LATENT, LN2, STAGES, Config, Globals, Mmas, Shared, Work
from .work import read_work

MERGE_BARRIER = 2
HALF = LATENT // 2
#: partials of one row tile at most: a worker adds one, and there are no more SMs than this
MAX_SPLITS = 160


def scale_rows(acc, f0, f1):
    """Scale the thread's two rows."""
    for j in range(cute.size(acc) // 4):
        for e in range(2):
            acc[4 * j + e] = acc[4 * j + e] * f0
            acc[4 * j + 2 + e] = acc[4 * j + 2 + e] * f1


@cute.jit
def exchange(take_second, x, y, offset):
    """Trade with the lane at `offset`: it gets the one that this lane does not keep."""
    got = cute.arch.shuffle_sync_bfly(select(take_second, x, y), offset=offset)
    return select(take_second, got, x), select(take_second, y, got)


@cute.jit
def store_rows(
    cfg: cutlass.Constexpr[Config], g: Globals, acc: cute.Tensor, work: Work, row, column, lane
):
    """16-byte stores: a transposition inside each quad gives every lane eight columns in a row."""
    half = cute.make_rmem_tensor_like(acc, cfg.element)
    half.store(acc.load().to(cfg.element))
    words = cute.recast_tensor(half, Int32)
    r1 = (lane & 1) == 1
    r2 = (lane & 2) == 2
    for i in cutlass.range_constexpr(8):
        for h in cutlass.range_constexpr(2):
            a = [words[2 * (4 * i + x) + h] for x in range(4)]
            a[0], a[1] = exchange(r1, a[0], a[1], 1)
            a[2], a[3] = exchange(r1, a[2], a[3], 1)
            a[0], a[2] = exchange(r2, a[0], a[2], 2)
            a[1], a[3] = exchange(r2, a[1], a[3], 2)
            v = cute.make_rmem_tensor(4, Int32)
            for x in cutlass.range_constexpr(4):
                v[x] = a[x]
            if work.first_row + row + 8 * h < work.num_rows:
                offset = (work.global_row + row + 8 * h) * LATENT + column + 8 * (lane % 4)
                at = g.out.iterator + (cute.assume(offset, divby=8) + 32 * i)
                cute.autovec_copy(
                    cute.recast_tensor(v, cfg.element), cute.make_tensor(at, cute.make_layout(8))
                )


@cute.jit
def store_lse(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, row, lane, a, b):
    """Natural lse of the thread's two rows, where the request has them."""
    if const_expr(cfg.lse):
        if lane % 4 == 0:
            if work.first_row + row < work.num_rows:
                g.lse[work.global_row + row] = a
            if work.first_row + row + 8 < work.num_rows:
                g.lse[work.global_row + row + 8] = b


def partial_rows(g, slot_row, column, lane):
    """This thread's accumulator positions in a partial: (parity, half, col8)."""
    offset = cute.assume(slot_row * LATENT + column + 2 * (lane % 4), divby=2)
    return cute.make_tensor(
        g.partial_out.iterator + offset,
        cute.make_layout((2, 2, HALF // 8), stride=(1, 8 * LATENT, 8)),
    )


@cute.jit
def store_partial(
    cfg: cutlass.Constexpr[Config], g: Globals, acc: cute.Tensor, slot_row, column, lane
):
    """The thread's accumulator, in pairs of columns, into its slot."""
    dst = partial_rows(g, slot_row, column, lane)
    for j in cutlass.range_constexpr(cute.size(acc) // 4):
        for h in cutlass.range_constexpr(2):
            v = cute.make_rmem_tensor(2, Float32)
            v[0] = acc[4 * j + 2 * h]
            v[1] = acc[4 * j + 2 * h + 1]
            cute.autovec_copy(v, dst[None, h, j])


@cute.jit
def warp_reduce(op: cutlass.Constexpr, value):
    """Reduce over a warp; every lane gets the result."""
    for offset in (16, 8, 4, 2, 1):
        value = op(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


@cute.jit
def merge_weights(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, base, lane):
    """Weights of a row's partials, lane l of word c that of split 32 c + l, and the row's lse.

    All lse are asked for at once; a weight is exp(lse - max) over their sum.
    """
    stride = BLOCK * cfg.cluster
    weights = cute.make_rmem_tensor(MAX_SPLITS // 32, Float32)
    top = Float32(-Float32.inf)
    for c in cutlass.range_constexpr(MAX_SPLITS // 32):
        weights[c] = -Float32.inf
        if 32 * c + lane < work.num_splits:
            at = g.partial_lse.iterator + (base + (32 * c + lane) * stride)
            weights[c] = cute.arch.load(at, Float32, cop="cg")
        top = cute.arch.fmax(top, weights[c])
    top = warp_reduce(cute.arch.fmax, top)
    shift = select(top == -Float32.inf, Float32(0.0), top)
    total = Float32(0)
    for c in cutlass.range_constexpr(MAX_SPLITS // 32):
        weights[c] = cute.math.exp2((weights[c] - shift) * Float32(1.0 / LN2), fastmath=True)
        total = total + weights[c]
    total = warp_reduce(add, total)
    inv = select(total > 0.0, cute.arch.rcp_approx(total), Float32(0.0)) * g.out_scale
    for c in cutlass.range_constexpr(MAX_SPLITS // 32):
        weights[c] = weights[c] * inv
    return weights, shift + cute.math.log2(total, fastmath=True) * Float32(LN2)


@cute.jit
def merge_row(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, at, lane):
    """One row by one warp, partials in split order; lanes hold 4 x 4 of the 512 columns."""
    stride = BLOCK * cfg.cluster
    base = (work.slot - work.split_idx) * stride + at
    weights, lse = merge_weights(cfg, g, work, base, lane)
    acc = cute.make_rmem_tensor((4, 4), Float32)
    acc.fill(0.0)
    for c in cutlass.range_constexpr(MAX_SPLITS // 32):
        count = cutlass.min(work.num_splits - 32 * c, Int32(32))
        for i in cutlass.range(0, count, unroll=4):
            w = cute.arch.shuffle_sync(weights[c], i)
            offset = cute.assume((base + (32 * c + i) * stride) * LATENT + 4 * lane, divby=4)
            src = cute.make_tensor(
                g.partial_out.iterator + offset, cute.make_layout((4, 4), stride=(1, 128))
            )
            v = cute.make_rmem_tensor((4, 4), Float32)
            for x in cutlass.range_constexpr(4):
                cute.autovec_copy(src[None, x], v[None, x])
            for x in cutlass.range_constexpr(16):
                acc[x] = acc[x] + w * v[x]
    row = work.global_row + at % BLOCK
    offset = cute.assume(row * LATENT + 4 * lane, divby=4)
    dst = cute.make_tensor(g.out.iterator + offset, cute.make_layout((4, 4), stride=(1, 128)))
    half = cute.make_rmem_tensor((4, 4), cfg.element)
    for x in cutlass.range_constexpr(16):
        half[x] = acc[x].to(cfg.element)
    for x in cutlass.range_constexpr(4):
        cute.autovec_copy(half[None, x], dst[None, x])
    if const_expr(cfg.lse):
        if lane == 0:
            g.lse[row] = lse


@cute.jit
def merge_rows(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, rank, first, last):
    """Rows [first, last) of this CTA's 64, one a warp at a time."""
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    last = cutlass.min(last, work.num_rows - work.first_row)
    for i in cutlass.range(first + cute.arch.make_warp_uniform(tid // 32), last, 8, unroll=1):
        merge_row(cfg, g, work, rank * BLOCK + i, lane)


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
        share = (BLOCK + work.num_splits - 1) // work.num_splits
        first = work.split_idx * share
        merge_rows(cfg, g, work, rank, first, cutlass.min(first + share, Int32(BLOCK)))
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=256)
        if tid == 0:
            done = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            if done == 2 * work.num_splits - 1:
                cute.arch.store(counter, Int32(0))


@cute.jit
def finish(
    cfg: cutlass.Constexpr[Config],
    wg: cutlass.Constexpr[int],
    g: Globals,
    s: Shared,
    acc: cute.Tensor,
    index,
    last,
    rank,
):
    """Normalise; write the result, or the partial and, as the last of the group, the merge."""
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    row = 16 * cute.arch.make_warp_uniform((tid % 128) // 32) + lane // 4
    column = wg * HALF
    work = read_work(cfg, g, index, rank)  # again: held through the loop it would cost registers
    sum0, sum1 = s.row_sum[row], s.row_sum[row + 8]
    max0, max1 = s.row_max[row], s.row_max[row + 8]
    if index + 1 < last:
        cute.arch.barrier_arrive(barrier_id=STATS_BARRIER, number_of_threads=384)
    lse0 = (max0 + cute.math.log2(sum0, fastmath=True)) * Float32(LN2)
    lse1 = (max1 + cute.math.log2(sum1, fastmath=True)) * Float32(LN2)
    inv0 = select(sum0 > 0.0, cute.arch.rcp_approx(sum0), Float32(0.0))
    inv1 = select(sum1 > 0.0, cute.arch.rcp_approx(sum1), Float32(0.0))
    if work.slot < 0:
        scale_rows(acc, inv0 * g.out_scale, inv1 * g.out_scale)
        store_rows(cfg, g, acc, work, row, column, lane)
        if const_expr(wg == 0):
            store_lse(cfg, g, work, row, lane, lse0, lse1)
    else:
        scale_rows(acc, inv0, inv1)
        stride = BLOCK * cfg.cluster
        at = rank * BLOCK + row
        slot_row = work.slot * stride + at
        store_partial(cfg, g, acc, slot_row, column, lane)
        if const_expr(wg == 0):
            if lane % 4 == 0:
                g.partial_lse[work.slot, at] = lse0
                g.partial_lse[work.slot, at + 8] = lse1
        if const_expr(cfg.fused_merge):
            arrive(cfg, g, s, work, rank)


@cute.jit
def accumulate(
    cfg: cutlass.Constexpr[Config],
    wg: cutlass.Constexpr[int],
    g: Globals,
    s: Shared,
    mma: Mmas,
    worker,
    rank,
):
    """Per work tile: P V tile by tile as P is announced, filling the ring behind it."""
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    w = cute.arch.make_warp_uniform((tid % 128) // 32)
    row = 16 * w + lane // 4
    p_box = cute.local_tile(s.kv, (64, 64), (0, 8, None))
    r_p = mma.pv.make_fragment_A(mma.pv.get_slice(0).partition_A(p_box))
    half = cute.local_tile(s.values, (HALF, BLOCK), (wg, 0, None))
    r_v = mma.pv.make_fragment_B(mma.pv.get_slice(0).partition_B(half))
    acc = cute.make_rmem_tensor(mma.pv.partition_shape_C((64, HALF)), Float32)
    phases = Int32(0)
    first = g.worker_begin[worker]
    last = g.worker_begin[worker + 1]
    feeds = (w == 0) if const_expr(wg == 0) else False
    feed = start(cfg, g, first, last, lane)
    if const_expr(wg == 0):
        if feeds:
            for _ in cutlass.range(STAGES, unroll=1):
                feed = fill(cfg, g, s, feed, last, rank, lane)
    for index in cutlass.range(first, last, unroll=1):
        begin = g.tiles[index, 2]
        end = cutlass.max(g.tiles[index, 3], begin + 1)
        if const_expr(wg == 0):
            if feeds:
                feed = fill(cfg, g, s, feed, last, rank, lane)  # the slot that Q gives back
        stage = Int32(1)
        acc.fill(0.0)
        for _ in cutlass.range(begin, end, unroll=1):
            stage = cute.arch.make_warp_uniform(stage)
            cute.arch.mbarrier_wait(s.p_full + stage, (phases >> stage) & 1)
            phases = phases ^ (1 << stage)
            f0 = s.factor[row, stage].to(Float32)
            f1 = s.factor[row + 8, stage].to(Float32)
            if cute.arch.vote_any_sync((f0 != Float32(1.0)) | (f1 != Float32(1.0))):
                scale_rows(acc, f0, f1)
            atom = cute.make_mma_atom(mma.pv.op)
            atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.fence()
            for k in cutlass.range_constexpr(4):
                cute.gemm(atom, acc, r_p[None, None, k, stage], r_v[None, None, k, stage], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            release(cfg, s, stage, lane)
            if const_expr(wg == 0):
                if feeds:
                    feed = fill(cfg, g, s, feed, last, rank, lane)
            stage = stage + 1
            if stage == STAGES:
                stage = Int32(0)
        if const_expr(wg == 0):
            # the slots that the ring passes over, so that the next Q enters stage 0
            if feeds & (stage > 0):
                for _ in cutlass.range(STAGES - stage, unroll=1):
                    feed = fill(cfg, g, s, feed, last, rank, lane)
        finish(cfg, wg, g, s, acc, index, last, rank)
    if const_expr(cfg.fused_merge == 2):
        for index in cutlass.range(first, last, unroll=1):
            merge_share(cfg, g, index, rank)
