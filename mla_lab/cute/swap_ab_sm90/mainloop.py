"""The two consumer warp groups: each owns every second KV tile and 256 columns of O^T.

The owner of a KV tile computes its scores and P; both add V^T P^T for their half of the columns
(`mainloop_bf16`, `mainloop_fp8`). Both run one code, which is fetched once, or each has its own,
without the first tile of the other (`Traits.one_code`).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..common.fixed_pieces import OWN_PIECES
from ..common.ptx_sm90 import fresh_thread, load4, pick
from ..common.self_schedule import Plan
from ..common.worker_plan import may_be_split, plan_of, split_words
from ..split_merge.swap_ab_cluster_reduce import release_partials
from ..split_merge.swap_ab_fragments import CONSUMER_THREADS, CtaEvent, profile_event
from ..split_merge.swap_ab_merge import merge_slice
from ..split_merge.swap_ab_pieces import merge_piece
from . import mainloop_bf16, mainloop_fp8
from . import query_hi_lo as hi_lo
from .epilogue import epilogue, publish_row_sums
from .mainloop_bf16 import FIRST, PV_FIRST, QK_FIRST, SECOND
from .mma import Accumulators, WarpGroup, accumulators, warp_group
from .params import TILE_KV, KvLoad, Traits
from .shared_storage import (
    NAN_LENGTH,
    Globals,
    Record,
    Shared,
    TiledMmas,
    WorkTile,
    first_owner,
    stats_idx,
)
from .tile_scheduler import merge_record


def first_sum(c: Traits, w: WorkTile) -> Float32:
    """Where row sums start: at NaN, which reaches out and lse, for a request that lies outside of
    the call's tensors. A list of slots is never longer than its row."""
    if c.kv_load == KvLoad.GATHER_SPARSE:
        return Float32(0.0)
    return pick(w.kv_len == NAN_LENGTH, Float32.nan, Float32(0.0))


@cute.jit
def mainloop(
    c: cutlass.Constexpr[Traits], g: Globals, s: Shared, wg: WarpGroup, w: WorkTile
):  # fmt: skip
    """All KV tiles of one work tile into tOrO and row_sum; the row sums are published under the
    last MMA."""
    design = mainloop_fp8 if const_expr(c.fp8) else mainloop_bf16
    own_tile, finish_other = design.own_tile, design.finish_other
    wg.tOrO.fill(0.0)
    wg.row_sum.fill(first_sum(c, w))
    start = Int32(wg.idx)
    if const_expr(c.one_code):
        start = cute.arch.make_warp_uniform(start + first_owner(c, w.tiles_before)) % 2
    if w.q_is_read(w.num_tiles <= start):
        # no own tile: this warp group reads no Q
        s.q.consumer_release(0)
    begin = start
    if const_expr(not c.one_round):
        if const_expr(c.one_code or wg.idx == 0):
            if start == 0 and w.num_tiles > 0:
                own_tile(c, FIRST, g, s, wg, w, Int32(0))
        begin = 2 - start
    if const_expr(c.pv_first and c.grid and (c.one_code or wg.idx == 1)):
        # one work tile, whose tile 1 is the second warp group's
        if start == 1:
            if w.num_tiles > 1:
                own_tile(c, SECOND, g, s, wg, w, Int32(1))
            begin = Int32(3)
    order = PV_FIRST if const_expr(c.pv_first) else QK_FIRST
    for k in cutlass.range(begin, w.num_tiles, 2, unroll=1):
        own_tile(c, order, g, s, wg, w, k)
    if w.num_tiles > 0 and (w.num_tiles - 1) % 2 != start:
        finish_other(c, s, wg, w, w.tiles_before + w.num_tiles - 1)
    if w.num_tiles == 0:
        publish_row_sums(c, s, wg)


@cute.jit
def consume(c: cutlass.Constexpr[Traits], g: Globals, s: Shared, mma: TiledMmas, rank: Int32):
    """All work tiles until the producer's END; `merge_slices` follows."""
    acc = accumulators(c, mma)
    s.q.full.wait(0, 0)
    num_tiles = cute.arch.make_warp_uniform(cute.arch.load(s.record, Int32))
    if const_expr(c.grid):
        if const_expr(c.multicast > 1):
            if num_tiles < 0:
                cute.arch.cluster_arrive_relaxed()
        if num_tiles >= 0:
            consume_tile(c, g, s, mma, acc, num_tiles, Int32(0), Int32(0), rank)
    else:
        index = Int32(0)
        tiles = Int32(0)
        pieces = Int32(0)
        while num_tiles >= 0:
            if const_expr(c.pieces):
                pieces = consume_pieces(c, g, s, mma, acc, num_tiles, index, (tiles, pieces), rank)
            else:
                consume_tile(c, g, s, mma, acc, num_tiles, index, tiles, rank)
            index = index + 1
            tiles = tiles + num_tiles
            s.q.full.wait(0, index & 1)
            num_tiles = cute.arch.make_warp_uniform(cute.arch.load(s.record, Int32))
        if const_expr(c.pieces):
            merge_due(c, g, s, index, Int32(-1), rank)


def kept_record(s: Shared, index: Int32) -> cute.Pointer:
    """`tail` and `more` of the record of work tile `index`, until tile `index` + 2 is done: on the
    words of the plan, which nothing reads here."""
    return s.plan.iterator + (index & 1) * 8


@cute.jit
def keep_record(s: Shared, r: Record):
    """Leave what the merge needs of a work tile; by one thread, behind the tile's last barrier."""
    to = kept_record(s, r.index)
    for i in cutlass.range_constexpr(4):
        cute.arch.store(to + i, r.tail[i])
        cute.arch.store(to + 4 + i, r.more[i])
    s.kept_full.arrive(r.index & 1)


@cute.jit
def merge_due(
    c: cutlass.Constexpr[Traits], g: Globals, s: Shared, index: Int32, own: Int32, rank: Int32
):
    """Work tile `own`, an item that this CTA ran whole, or, where that is -1, its share of work
    tile `index` - 1, if that is a piece which others share."""
    due = pick(own >= 0, own, index - 1)
    if due >= 0:
        s.kept_full.wait(due & 1, (due >> 1) & 1)
        at = kept_record(s, due)
        r = Record(load4(at), load4(at + 4), rank=rank)
        if (r.num_splits > 1) & ((r.group == OWN_PIECES) == (own >= 0)):
            merge_piece(c, g, r)


@cute.jit
def load_plan(s: Shared) -> Plan:
    """The worker's tiles that the producer has left in shared memory."""
    return plan_of(cute.arch.load(s.plan.iterator + cute.arch.lane_idx(), Int32))


@cute.jit
def merge_slices(
    c: cutlass.Constexpr[Traits], g: Globals, s: Shared, rank: Int32,
    warms_code: cutlass.Constexpr[bool],
):  # fmt: skip
    """This CTA's slice of every split row tile of its worker, the last one first. `warms_code`: the
    producer warp comes here too, and runs the code of that one alone (see `merge_slice`)."""
    if const_expr(c.grid and c.waits):
        if const_expr(warms_code):
            if not consumes():
                s.q.full.wait(0, 0)
        r = Record(load4(s.record + 4), load4(s.record + 8), rank=rank)
        if r.num_splits > 1:
            merge_slice(c, g, s, r, Int32(0), consumes() if warms_code else True)
    elif const_expr(c.waits and not c.pieces):
        s.plan_full.wait(0, 0)
        merges, index = Int32(0), Int32(0)
        left = load_plan(s).last > 0
        while left:
            plan = load_plan(s)  # held through a merge, its words would cost a register
            at = plan.last - 1 - index
            if may_be_split(plan, at):
                words = split_words(g.tiles, plan, at)
                if cute.arch.shuffle_sync(words, 5) > 1:
                    tail, more = merge_record(c, g, words)
                    r = Record(tail, more, rank=rank)
                    merge_slice(c, g, s, r, merges, consumes() if warms_code else True)
                    merges = merges + 1
            index = index + 1
            left = index < load_plan(s).last
            if const_expr(warms_code):
                left = left & consumes()


def consumes() -> Any:
    """True in a consumer warp; computed anew, as it is held nowhere."""
    return fresh_thread() < CONSUMER_THREADS


@cute.jit
def consume_tile(
    c: cutlass.Constexpr[Traits], g: Globals, s: Shared, mma: TiledMmas, acc: Accumulators,
    num_tiles: Int32, index: Int32, tiles_before: Int32, rank: Int32,
):  # fmt: skip
    """One work tile, from its record to its result or partial."""
    place = place_of_thread()
    head = load4(s.record)
    r = Record(load4(s.record + 4), load4(s.record + 8), num_tiles, index, rank)
    rows = r.rows if c.skip else None
    w = WorkTile(num_tiles, head[1], head[2], head[3], r.row, r.out_row, rows, tiles_before)
    if const_expr(c.cluster > 1 and not c.partials_on_ring):
        release_partials(c, s)
    if const_expr(c.hi_lo):
        hi_lo.split_query(c, s, index)
    run_tile(c, g, s, mma, acc, place, w, r)


@cute.jit
def consume_pieces(
    c: cutlass.Constexpr[Traits], g: Globals, s: Shared, mma: TiledMmas, acc: Accumulators,
    num_tiles: Int32, index: Int32, before: tuple, rank: Int32,
):  # fmt: skip
    """`consume_tile` of a batch-invariant call, and the merge that is due behind it: a piece, or a
    whole item piece by piece, over one query. `before`: KV tiles and pieces of this CTA so far.
    Returns the pieces with this one's."""
    tiles_before, done = before
    place = place_of_thread()
    head = load4(s.record)
    r = Record(load4(s.record + 4), load4(s.record + 8), num_tiles, index, rank)
    own = r.group == OWN_PIECES
    pieces = pick(own, r.num_splits, Int32(1))
    if const_expr(c.hi_lo):
        hi_lo.split_query(c, s, index)
    begin = Int32(0)
    for piece in cutlass.range(pieces, unroll=1):
        end = Int32(Uint32(num_tiles * (piece + 1)) // Uint32(pieces))
        w = WorkTile(
            end - begin, head[1] + begin * TILE_KV, head[2], head[3], r.row, r.out_row,
            r.rows if c.skip else None, tiles_before + begin, piece + 1 == pieces,
        )  # fmt: skip
        run_tile(c, g, s, mma, acc, place, w, r.of_piece(piece, end - begin, done))
        begin, done = end, done + 1
    if cute.arch.thread_idx()[0] == 0:
        keep_record(s, r)
    merge_due(c, g, s, index, pick(own, index, Int32(-1)), rank)
    return done


def place_of_thread() -> tuple:
    """Lane; thread and warp of the warp group; warp group."""
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    thread = tid % 128
    warp = cute.arch.make_warp_uniform(thread // 32)
    return lane, thread, warp, cute.arch.make_warp_uniform(tid // 128)


@cute.jit
def run_tile(
    c: cutlass.Constexpr[Traits], g: Globals, s: Shared, mma: TiledMmas, acc: Accumulators,
    place: tuple, w: WorkTile, r: Record,
):  # fmt: skip
    """Mainloop and epilogue of a work tile, or of a piece; `place` by `place_of_thread`."""
    lane, thread, warp, wg = place
    if const_expr(c.one_code):
        mainloop(c, g, s, warp_group(c, wg, s, mma, acc, thread, warp, lane), w)
    elif wg == 0:
        mainloop(c, g, s, warp_group(c, 0, s, mma, acc, thread, warp, lane), w)
    else:
        mainloop(c, g, s, warp_group(c, 1, s, mma, acc, thread, warp, lane), w)
    if const_expr(c.multicast > 1):
        # behind the last arrival at a peer; the kernel waits for the peers' at its end
        cute.arch.cluster_arrive_relaxed()
    profile_event(c, s, CtaEvent.MAINLOOP_DONE)
    owner = (w.num_tiles + 1 + first_owner(c, w.tiles_before)) % 2
    last = stats_idx(c, owner, w.tiles_before + w.num_tiles - 1)
    epilogue(c, wg, g, s, acc.tOrO, r, last)
