"""The merge of split row tiles: all CTAs that split one merge a share of it each.

A partial lies in its slot as the accumulators hold it, so that every access is 512 B in a row of
a warp: fp32 [rank][warp][group][col8 of 32][lane][4], where a thread's four values are two
columns of rows `r` and `r + 8`; 256 such *units* are the 64 rows of a CTA. A share is
256 / num_splits of them. The launch is cooperative: a CTA waits here for others, after its last
tile, so all of them must be running.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..extras import with_scales, with_sink
from .attend import add, quad, select
from .output import store_lse, store_pair, store_rows
from .storage import BLOCK, LATENT, LN2, Config, Globals, Shared, Work
from .work import read_work, stamp

MERGE_BARRIER = 2
UNITS = 256
WARPS = 8
#: up to so many splits a warp takes four units at a time, four splits in flight; beyond, one unit
#: and eight splits: the memory's latency, not its rate, is what a short share waits for
FEW_SPLITS = 8
LOG2E = 1.4426950408889634


def fragment(g, slot_row, unit, lane, count):
    """`count` units of a thread from `unit` on: (value of 4, unit)."""
    offset = cute.assume(slot_row * LATENT + unit * 128 + lane * 4, divby=4)
    return cute.make_tensor(
        g.partial_out.iterator + offset, cute.make_layout((4, count), stride=(1, 128))
    )


@cute.jit
def store_fragment(cfg: cutlass.Constexpr[Config], g: Globals, acc: cute.Tensor, slot, rank, wg):
    """A thread's 32 units into its slot."""
    tid, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform((tid % 128) // 32)
    count = cute.size(acc) // 4
    dst = fragment(
        g, (slot * cfg.cluster + rank) * BLOCK, (w * 2 + wg) * count, cute.arch.lane_idx(), count
    )
    for i in cutlass.range_constexpr(count):
        v = cute.make_rmem_tensor(4, Float32)
        for e in cutlass.range_constexpr(4):
            v[e] = acc[4 * i + e]
        cute.autovec_copy(v, dst[None, i])


@cute.jit
def partial_lse(g: Globals, slot_row):
    """Natural lse of one row of a partial, past the L1: another SM wrote it."""
    return cute.arch.load(g.partial_lse.iterator + slot_row, Float32, cop="cg")


@cute.jit
def weigh_rows(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, work: Work, base, rank):
    """Greatest lse of each row's partials into row_max, their sum of weights into row_sum.

    Four threads a row, every fourth split each. Row values of the last tile are dead by now.
    """
    tid, _, _ = cute.arch.thread_idx()
    row = tid // 4
    stride = BLOCK * cfg.cluster
    top = Float32(-Float32.inf)
    for i in cutlass.range(tid % 4, work.num_splits, 4, unroll=8):
        top = cute.arch.fmax(top, partial_lse(g, base + row + i * stride))
    top = quad(cute.arch.fmax, top)
    top = select(top == -Float32.inf, Float32(0.0), top)
    total = Float32(0)
    for i in cutlass.range(tid % 4, work.num_splits, 4, unroll=8):
        lse = partial_lse(g, base + row + i * stride)
        total = total + cute.math.exp2((lse - top) * Float32(LOG2E), fastmath=True)
    total = quad(add, total)
    if tid % 4 == 0:
        s.row_max[row] = top
        s.row_sum[row] = total
    cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=256)


@cute.jit
def merge_units(
    cfg: cutlass.Constexpr[Config],
    count: cutlass.Constexpr[int],
    unroll: cutlass.Constexpr[int],
    g: Globals,
    s: Shared,
    work: Work,
    base,
    unit,
):
    """`count` units of 16 rows by one warp, partials in split order."""
    lane = cute.arch.lane_idx()
    row = 16 * (unit // 64) + lane // 4
    top0, top1 = s.row_max[row], s.row_max[row + 8]
    total0, total1 = s.row_sum[row], s.row_sum[row + 8]
    g = with_scales(cfg, g)
    first = work.first_row + row
    whole0 = with_sink(cfg, g, total0, top0 * Float32(LOG2E), first)
    whole1 = with_sink(cfg, g, total1, top1 * Float32(LOG2E), first + 8)
    inv0 = select(total0 > 0.0, cute.arch.rcp_approx(whole0), Float32(0.0)) * g.out_scale
    inv1 = select(total1 > 0.0, cute.arch.rcp_approx(whole1), Float32(0.0)) * g.out_scale
    acc = cute.make_rmem_tensor(4 * count, Float32)
    acc.fill(0.0)
    for i in cutlass.range(0, work.num_splits, unroll=unroll):
        at = base + i * (BLOCK * cfg.cluster)
        v = cute.make_rmem_tensor((4, count), Float32)
        src = fragment(g, at, unit, lane, count)
        for c in cutlass.range_constexpr(count):
            cute.autovec_copy(src[None, c], v[None, c])
        f0 = cute.math.exp2((partial_lse(g, at + row) - top0) * Float32(LOG2E), fastmath=True)
        f1 = cute.math.exp2((partial_lse(g, at + row + 8) - top1) * Float32(LOG2E), fastmath=True)
        for c in cutlass.range_constexpr(count):
            for e in cutlass.range_constexpr(2):
                acc[4 * c + e] = acc[4 * c + e] + f0 * v[e, c]
                acc[4 * c + 2 + e] = acc[4 * c + 2 + e] + f1 * v[2 + e, c]
    for c in cutlass.range_constexpr(count):
        for e in cutlass.range_constexpr(2):
            acc[4 * c + e] = acc[4 * c + e] * inv0
            acc[4 * c + 2 + e] = acc[4 * c + 2 + e] * inv1
    column = (unit % 64) * 8
    if const_expr(count == 1):
        store_pair(cfg, g, acc, work, row, column, lane)
    else:
        store_rows(cfg, g, acc, work, row, column, lane)
    if unit % 64 == 0:
        lse0 = top0 + cute.math.log2(total0, fastmath=True) * Float32(LN2)
        lse1 = top1 + cute.math.log2(total1, fastmath=True) * Float32(LN2)
        store_lse(cfg, g, work, row, lane, lse0, lse1)


@cute.jit
def merge_share(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, work: Work, rank):
    """Units [share, next share) of this CTA's 64 rows."""
    tid, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(tid // 32)
    base = (work.slot - work.split_idx) * (BLOCK * cfg.cluster) + rank * BLOCK
    weigh_rows(cfg, g, s, work, base, rank)
    if work.num_splits <= FEW_SPLITS:
        first = UNITS // 4 * work.split_idx // work.num_splits
        last = UNITS // 4 * (work.split_idx + 1) // work.num_splits
        for i in cutlass.range(first + w, last, WARPS, unroll=1):
            merge_units(cfg, 4, 4, g, s, work, base, 4 * i)
    else:
        first = UNITS * work.split_idx // work.num_splits
        last = UNITS * (work.split_idx + 1) // work.num_splits
        for i in cutlass.range(first + w, last, WARPS, unroll=1):
            merge_units(cfg, 1, 8, g, s, work, base, i)


def count_up(g, work, cluster, rank):
    """Add one to the group's counter, and go from 2 num_splits - 1 to zero.

    Arrivals take it to num_splits, finished shares on to zero again, as the next launch needs
    it. Releases what the barrier before it has gathered.
    """
    counter = g.counters.iterator + (work.group * cluster + rank)
    cute.arch.inline_ptx(
        "red.release.gpu.global.inc.u32 [{$r0}], {$r1};",
        read_only_args=[counter, 2 * work.num_splits - 1],
    )


@cute.jit
def arrive(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, rank):
    """This CTA's partial is in its slot."""
    tid, _, _ = cute.arch.thread_idx()
    cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=256)
    if tid == 0:
        count_up(g, work, cfg.cluster, rank)


@cute.jit
def merge(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, index, rank):
    """Wait for the partials of a split row tile, and merge a share of it.

    Runs after the worker's last tile, so that nobody whom others wait for waits.
    """
    tid, _, _ = cute.arch.thread_idx()
    work = read_work(cfg, g, index, rank)
    if work.slot >= 0:
        if tid == 0:
            counter = g.counters.iterator + (work.group * cfg.cluster + rank)
            seen = Int32(0)
            while seen < work.num_splits:
                seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=256)
        stamp(cfg, g, 5)
        merge_share(cfg, g, s, work, rank)
        arrive(cfg, g, work, rank)
