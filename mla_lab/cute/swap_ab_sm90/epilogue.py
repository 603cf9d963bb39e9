"""End of a work tile: sums across warps, then the result, a partial, or the cluster's exchange."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import with_scales, with_sink
from ..common.ptx_sm90 import NO_SCORE, add, fold_lanes, folded_index, fresh_thread, load4
from ..split_merge.ll_words import send_notes
from ..split_merge.swap_ab_cluster_reduce import reduce_share, send
from ..split_merge.swap_ab_cooperative import arrive
from ..split_merge.swap_ab_last_cta import merge_share
from ..split_merge.swap_ab_ll import send_units
from . import online_softmax as sx
from .epilogue_store import write_fragments, write_lse
from .params import CONSUMERS, Shape
from .shared_storage import Global, Shared, stamp

#: named barrier of all consumers
ALL = 1


@cute.jit
def publish_totals(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], s: Shared, total: cute.Tensor,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """Each warp's sum of exponentials of each row, for all to add up in one order."""
    num = c.rows // 4
    values = []
    for i in cutlass.range_constexpr(num):
        values.append(total[i])
    values = fold_lanes(values, add, lane)
    start = folded_index(num, lane)
    for i in cutlass.range_constexpr(len(values)):
        s.sums[sx.fold_row(start + i, lane), wg * 4 + warp] = values[i]


def row_total(s: Shared, row: Int32) -> Float32:
    """Sum of exponentials of a row over the 8 warps."""
    a, b = load4(s.sums.iterator + row * 8), load4(s.sums.iterator + (row * 8 + 4))
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((b[0] + b[1]) + (b[2] + b[3]))


@cute.jit
def row_peak(s: Shared, mine: Int32, last: Int32, row: Int32):
    """Running maximum (log2 units) of a row after this CTA's last tile, which is at `last`."""
    return s.peak[last, 0, row] if mine > 0 else Float32(NO_SCORE)


@cute.jit
def send_sums(
    c: cutlass.Constexpr[Shape], wg: Int32, g: Global, s: Shared, mine: Int32, last: Int32,
    more: cute.Tensor, warp: Int32, lane: Int32,
):  # fmt: skip
    """Maximum and sum of all row pairs, a pair a warp at a time, to those who merge them."""
    for at in cutlass.range_constexpr(0, c.pairs, 8):
        pair = at + 4 * wg + warp
        if pair < c.pairs:
            values = cute.make_rmem_tensor(4, Float32)
            for e in cutlass.range_constexpr(2):
                values[2 * e] = row_peak(s, mine, last, 2 * pair + e)
                values[2 * e + 1] = row_total(s, 2 * pair + e)
            send_notes(c, g, values, pair, more, lane)


@cute.jit
def write_alone(
    c: cutlass.Constexpr[Shape], wg: Int32, g: Global, s: Shared, acc: cute.Tensor, mine: Int32,
    last: Int32, tail: cute.Tensor, more: cute.Tensor,
):  # fmt: skip
    """What one CTA a worker has to say: rows of the result, or a partial's."""
    tid = fresh_thread()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid % 128 // 32)
    inverse = cute.make_rmem_tensor(c.rows // 4, Float32)
    for i in cutlass.range_constexpr(c.rows // 4):
        row = sx.row_of(i, lane)
        seen = row_total(s, row)
        whole = seen
        if const_expr(c.features):
            if more[2] == 1:
                whole = with_sink(c, g, seen, row_peak(s, mine, last, row), tail[0] + row)
        inverse[i] = cute.arch.rcp_approx(whole) if seen > 0.0 else Float32(0.0)
    write_fragments(c, wg, g, acc, inverse, tail, more[0], more[2], warp, lane)
    if tid < c.rows:
        write_lse(c, g, tid, row_peak(s, mine, last, tid), row_total(s, tid), tail, more)


@cute.jit
def finish(
    c: cutlass.Constexpr[Shape], wg: Int32, g: Global, s: Shared, acc: cute.Tensor, mine: Int32,
    last: Int32, tail: cute.Tensor, more: cute.Tensor, turn: Int32, rank: Int32,
):  # fmt: skip
    """After `publish_totals` of both warpgroups.

    tail: row, out_row, rows, active. more: slot, group, num_splits, split of the record.
    """
    g = with_scales(c, g)
    tid = fresh_thread()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid % 128 // 32)
    if const_expr(c.fused_merge == 3):
        if more[2] > 1:
            send_units(c, wg, g, acc, more[0], warp, lane)
    cute.arch.mbarrier_arrive(s.summed)
    cute.arch.mbarrier_wait(s.summed, turn & 1)
    if const_expr(c.fused_merge == 3):
        if more[2] > 1:
            send_sums(c, wg, g, s, mine, last, more, warp, lane)
        else:
            write_alone(c, wg, g, s, acc, mine, last, tail, more)
    elif const_expr(c.cluster == 1):
        write_alone(c, wg, g, s, acc, mine, last, tail, more)
    else:
        peaks = cute.make_rmem_tensor(4, Float32)
        pairs = max(c.rows // 2, c.cluster)
        pair = (tid % pairs) // c.parts
        peaks[0] = row_peak(s, mine, last, 2 * pair)
        peaks[1] = row_total(s, 2 * pair)
        peaks[2] = row_peak(s, mine, last, 2 * pair + 1)
        peaks[3] = row_total(s, 2 * pair + 1)
        send(c, wg, s, acc, peaks, tail[3], turn, mine, rank)
        stamp(c, s, 4)
        reduce_share(c, g, s, tail, more, turn, rank)
        stamp(c, s, 5)
    if const_expr(c.fused_merge == 1):
        if more[2] > 1:
            merge_share(c, g, s, tail, more, rank)
    # statistics are read: the next work tile may write them (fused_merge 3 has one tile only)
    if const_expr(c.fused_merge != 3):
        cute.arch.barrier(barrier_id=ALL, number_of_threads=CONSUMERS)
    if const_expr(c.fused_merge == 2):
        if more[2] > 1:
            arrive(c, g, more, rank)
    stamp(c, s, 6)
