"""End of a work tile: row sums across warps, then the result, a partial, or the cluster's
reduction; and the merge of split row tiles where it follows at once."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...plan.fixed_pieces import RING
from ..common.feature_operands import with_scales, with_sink
from ..common.fixed_pieces import OWN_PIECES
from ..common.ptx_sm90 import NO_SCORE, add, fold_lanes, folded_index, fresh_thread, load4
from ..split_merge import SplitMerge
from ..split_merge.piece_flags import mark_written, wait_until_free
from ..split_merge.swap_ab_cluster_reduce import reduce_partials, send_partial
from ..split_merge.swap_ab_cooperative import arrive
from ..split_merge.swap_ab_fragments import CONSUMERS, CtaEvent, inverse_of, profile_event
from ..split_merge.swap_ab_last_cta import merge_if_last
from ..split_merge.swap_ab_ll import (
    bound_exponent,
    publish_bound,
    scaled_stats,
    send_fragments,
    send_stats,
)
from .epilogue_store import store_accumulators, store_lse
from .mma import WarpGroup
from .online_softmax import ROW_MAX, thread_row
from .params import Traits
from .shared_storage import Globals, Record, Shared


@cute.jit
def publish_row_sums(c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup):
    """Each warp's sum of exponentials of each row, for all to add up in one order."""
    num = c.rows // 4
    values = []
    for i in cutlass.range_constexpr(num):
        values.append(wg.row_sum[i])
    values = fold_lanes(values, add, wg.lane)
    start = folded_index(num, wg.lane)
    for i in cutlass.range_constexpr(len(values)):
        s.sRowSum[thread_row(start + i, wg.lane), wg.idx * 4 + wg.warp] = values[i]


def row_total(s: Shared, row: Int32) -> Float32:
    """Sum of exponentials of a row over the 8 warps."""
    a, b = load4(s.sRowSum.iterator + row * 8), load4(s.sRowSum.iterator + (row * 8 + 4))
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((b[0] + b[1]) + (b[2] + b[3]))


@cute.jit
def row_max(s: Shared, r: Record, last: Int32, row: Int32):
    """Maximum (log2) of a row after this CTA's last KV tile, whose statistics are at `last`."""
    return s.sStats[last, ROW_MAX, row] if r.num_tiles > 0 else Float32(NO_SCORE)


def pair_stats(s: Shared, r: Record, last: Int32, pair: Int32, values: cute.Tensor) -> cute.Tensor:
    """values <- (m, l, m, l): maximum and sum of exponentials of both rows of a pair."""
    for e in range(2):
        values[2 * e] = row_max(s, r, last, 2 * pair + e)
        values[2 * e + 1] = row_total(s, 2 * pair + e)
    return values


@cute.jit
def send_all_stats(
    c: cutlass.Constexpr[Traits], wg: Int32, g: Globals, s: Shared, r: Record, last: Int32,
    exponent: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """LL merge: the statistics of all row pairs, a pair per warp, to the CTAs that merge them;
    `exponent` of the accumulators' bound."""
    for at in cutlass.range_constexpr(0, c.row_pairs, 8):
        pair = at + 4 * wg + warp
        if pair < c.row_pairs:
            values = cute.make_rmem_tensor(4, Float32)
            values = scaled_stats(pair_stats(s, r, last, pair, values), exponent)
            send_stats(c, g, r, values, pair, lane)


@cute.jit
def store_tile(
    c: cutlass.Constexpr[Traits], wg: Int32, g: Globals, s: Shared, tOrO: cute.Tensor,
    r: Record, last: Int32,
):  # fmt: skip
    """Without a cluster: rows of the result, or of a partial, divided by their sums."""
    tid = fresh_thread()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid % 128 // 32)
    inverse = cute.make_rmem_tensor(c.rows // 4, Float32)
    for i in cutlass.range_constexpr(c.rows // 4):
        row = thread_row(i, lane)
        seen = row_total(s, row)
        whole = seen
        if const_expr(c.features):
            if r.num_splits == 1:
                whole = with_sink(c, g, seen, row_max(s, r, last, row), r.row + row)
        inverse[i] = inverse_of(whole, seen)
    store_accumulators(c, wg, g, tOrO, inverse, r, warp, lane)
    if tid < c.rows:
        store_lse(c, g, r, tid, row_max(s, r, last, tid), row_total(s, tid))


@cute.jit
def wait_for_slot(g: Globals, r: Record):
    """Of a batch-invariant launch: wait until all have read what the slot of this piece held, if
    others read it."""
    shared = (r.num_splits > 1) & (r.group != OWN_PIECES)
    if (fresh_thread() == 0) & shared & (r.index >= RING):
        wait_until_free(g.counters, r.partial)


@cute.jit
def count_partial(c: cutlass.Constexpr[Traits], g: Globals, r: Record):
    """After a barrier of all consumers: release the partial that they have written."""
    if const_expr(c.pieces):
        if (fresh_thread() == 0) & (r.group != OWN_PIECES):
            mark_written(g.counters, r.partial, r.group)
    else:
        arrive(c, g, r)


@cute.jit
def epilogue(
    c: cutlass.Constexpr[Traits], wg: Int32, g: Globals, s: Shared, tOrO: cute.Tensor,
    r: Record, last: Int32,
):  # fmt: skip
    """After `publish_row_sums` of both warp groups; `last`: statistics of the last KV tile."""
    g = with_scales(c, g)
    tid = fresh_thread()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid % 128 // 32)
    if const_expr(c.split_merge == SplitMerge.LL):
        if r.num_splits > 1:
            publish_bound(c, s, tOrO, wg, warp, lane)
    if const_expr(c.pieces):
        wait_for_slot(g, r)
    s.sums_full.arrive(0)
    s.sums_full.wait(0, r.index & 1)
    if const_expr(c.split_merge == SplitMerge.LL):
        if r.num_splits > 1:
            exponent = bound_exponent(c, s)
            send_all_stats(c, wg, g, s, r, last, exponent, warp, lane)
            send_fragments(c, wg, g, tOrO, exponent, r.partial, warp, lane)
        else:
            store_tile(c, wg, g, s, tOrO, r, last)
    elif const_expr(c.cluster == 1):
        store_tile(c, wg, g, s, tOrO, r, last)
    else:
        values = cute.make_rmem_tensor(4, Float32)
        pair = (tid % max(c.rows // 2, c.cluster)) // c.column_parts
        send_partial(c, wg, s, tOrO, pair_stats(s, r, last, pair, values), r)
        profile_event(c, s, CtaEvent.PEER_PARTIALS_SENT)
        reduce_partials(c, g, s, r)
        profile_event(c, s, CtaEvent.CLUSTER_REDUCED)
    if const_expr(c.split_merge == SplitMerge.LAST_CTA):
        if r.num_splits > 1:
            merge_if_last(c, g, s, r)
    # statistics are read: the next work tile may write them (LL has one work tile only)
    if const_expr(c.split_merge != SplitMerge.LL):
        CONSUMERS.sync()
    if const_expr(c.split_merge == SplitMerge.COOPERATIVE):
        if r.num_splits > 1:
            count_partial(c, g, r)
    profile_event(c, s, CtaEvent.TILE_DONE)
