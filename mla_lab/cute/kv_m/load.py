"""The producer warp: reads the plan, streams KV and Q by TMA, leaves the work record."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..hopper import EVICT_FIRST
from .config import BOX, BOXES, CONSUMER_WARPS, HEAD_DIM, TILE_KV, Shape
from .storage import END, Global, Shared

#: a page outside of every cache: the TMA writes zeros and counts the bytes
NO_PAGE = 1 << 30


@dataclass(frozen=True)
class Work:
    """One work tile as this CTA sees it; all values are uniform in the warp."""

    request: Int32
    #: blocks of this CTA: first and count
    first: Int32
    mine: Int32
    kv_len: Int32
    #: 32 block table entries from `base` on, one a lane
    base: Int32
    entry: Int32


def barriers_init(c: Shape, s: Shared) -> None:
    """By one lane; the counts are those of the kernel's docstring."""
    for i in range(c.stages * c.groups):
        cute.arch.mbarrier_init(s.full + i, 1)
    for i in range(c.stages):
        cute.arch.mbarrier_init(s.empty + i, CONSUMER_WARPS)
    cute.arch.mbarrier_init(s.q_full, 1)
    cute.arch.mbarrier_init(s.q_empty, CONSUMER_WARPS)
    cute.arch.mbarrier_init(s.free, CONSUMER_WARPS * c.cluster)
    cute.arch.mbarrier_init(s.sent, 1)
    cute.arch.mbarrier_init(s.drained, CONSUMER_WARPS)


def kv_parts(c: Shape, g: Global, s: Shared) -> tuple[cute.Tensor, cute.Tensor]:
    """TMA views: smem [box, row slot, column slot, stage], gmem [box, row, column, page]."""
    rows, cols = c.box_rows, c.box_cols
    smem = cute.make_tensor(
        s.k.iterator,
        cute.make_layout(
            (rows, (BOX, cols), TILE_KV // rows, BOXES // cols, c.stages),
            stride=(BOX, (1, TILE_KV * BOX), rows * BOX, cols * TILE_KV * BOX, TILE_KV * HEAD_DIM),
        ),
    )
    gmem = cute.local_tile(g.gk, (rows, (BOX, cols)), (None, None, None))
    return cpasync.tma_partition(
        g.tma_k,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(gmem, 0, 2),
    )


@cute.jit
def load_q(c: cutlass.Constexpr[Shape], g: Global, s: Shared, row: Int32):
    """All `rows` x 576 of the row tile, from row `row` on; rows past the end read zeros."""
    smem = cute.make_tensor(
        s.q.iterator,
        cute.make_layout((c.rows, (BOX, BOXES)), stride=(BOX, (1, c.rows * BOX))),
    )
    gmem = cute.local_tile(cute.domain_offset((row, 0), g.gq), (c.rows, (BOX, BOXES)), (0, 0))
    qs, qg = cpasync.tma_partition(
        g.tma_q,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(gmem, 0, 2),
    )
    cute.copy(g.tma_q, qg, qs, tma_bar_ptr=s.q_full)


@cute.jit
def load_entries(g: Global, request: Int32, base: Int32):
    """32 entries of the request's block table from `base` on, one a lane."""
    last = g.block_table.shape[1] - 1
    return g.block_table[request, cutlass.min(base + cute.arch.lane_idx(), last)]


@cute.jit
def load_tile(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, w: Work, tile: Int32, stage: Int32
):
    """KV tile `tile` of the request into `stage`, each column group on its own barrier."""
    ks, kg = kv_parts(c, g, s)
    policy = Int64(EVICT_FIRST) if const_expr(c.evict) else None
    slots = TILE_KV // c.box_rows
    per_group = c.group // c.box_cols
    for n in cutlass.range_constexpr(c.groups):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                s.full + stage * c.groups + n, TILE_KV * c.group * BOX * 2
            )
    for n in cutlass.range_constexpr(c.groups):
        for slot in cutlass.range_constexpr(slots):
            token = tile * TILE_KV + slot * c.box_rows
            page = cute.arch.shuffle_sync(w.entry, token // c.page - w.base)
            if const_expr(slots > 1):
                page = page if token < w.kv_len else Int32(NO_PAGE)
            inside = (token % c.page) // c.box_rows
            for x in cutlass.range_constexpr(per_group):
                col = n * per_group + x
                cute.copy(
                    g.tma_k,
                    kg[None, inside, col, page],
                    ks[None, slot, col, stage],
                    tma_bar_ptr=s.full + stage * c.groups + n,
                    cache_policy=policy,
                )


@cute.jit
def prefetch_tile(c: cutlass.Constexpr[Shape], g: Global, s: Shared, w: Work, tile: Int32):
    """Ask for a tile in L2, where its table entries are in this warp's 32."""
    _, kg = kv_parts(c, g, s)
    for slot in cutlass.range_constexpr(TILE_KV // c.box_rows):
        token = tile * TILE_KV + slot * c.box_rows
        index = token // c.page - w.base
        if tile < w.first + w.mine and index < 32 and token < w.kv_len:
            page = cute.arch.shuffle_sync(w.entry, index)
            for col in cutlass.range_constexpr(BOXES // c.box_cols):
                cute.prefetch(g.tma_k, kg[None, (token % c.page) // c.box_rows, col, page])


@cute.jit
def open_work(c: cutlass.Constexpr[Shape], g: Global, words: cute.Tensor, rank: Int32):
    """From a plan's row to this CTA's share; also the words of the record that follow from it."""
    request = words[0]
    blocks = words[3] - words[2]
    # the share by the plan alone: its table entries are asked for beside the lengths
    first = words[2] + share_begin(c, blocks, rank)
    base = first * TILE_KV // c.page
    entry = load_entries(g, request, base)
    kv_len = g.seq_lens[request]
    begin = g.q_begin[request]
    q_len = g.q_begin[request + 1] - begin
    held = (kv_len + TILE_KV - 1) // TILE_KV - words[2]
    if held < blocks:
        # lengths shrank below the plan's: never read past them
        blocks = cutlass.max(held, Int32(0))
        first = words[2] + share_begin(c, blocks, rank)
        base = first * TILE_KV // c.page
        entry = load_entries(g, request, base)
    mine = words[2] + share_begin(c, blocks, rank + 1) - first
    row = words[1] * c.rows
    record = (
        mine,
        first * TILE_KV,
        kv_len,
        kv_len - q_len,
        row,
        begin * g.heads + row,
        cutlass.max(cutlass.min(Int32(c.rows), q_len * g.heads - row), Int32(0)),
        cutlass.min(blocks, Int32(c.cluster)),
        words[6],
        words[7],
        words[5],
        words[4],
    )
    return Work(request, first, mine, kv_len, base, entry), record


def share_begin(c: Shape, blocks: Int32, rank: Int32) -> Int32:
    """First of `blocks` that CTA `rank` of the cluster takes: shares differ by one at most."""
    return rank * (blocks // c.cluster) + cutlass.min(rank, blocks % c.cluster)


@cute.jit
def leave_record(s: Shared, record: tuple):
    """The work record, before the arrival that publishes it."""
    for i in cutlass.range_constexpr(len(record)):
        cute.arch.store(s.work + i, record[i])


def read_words(g: Global, index: Int32) -> cute.Tensor:
    """The eight words of one plan row."""
    words = cute.make_rmem_tensor(8, Int32)
    row = cute.make_tensor((g.tiles.iterator + index * 8).align(16), cute.make_layout(8))
    cute.autovec_copy(row, words)
    return words


@cute.jit
def produce(c: cutlass.Constexpr[Shape], g: Global, s: Shared, worker: Int32, rank: Int32):
    """Walk the worker's tiles. Of a tile: first KV block, then Q and the record, then the rest."""
    # in a grid plan worker w has row w: ask for it together with the bounds
    words = read_words(g, cutlass.min(worker, g.tiles.shape[0] - 1))
    begin = g.worker_begin[worker]
    end = g.worker_begin[worker + 1]
    if begin != worker and begin < end:
        cute.autovec_copy(read_words(g, begin), words)
    count = Int32(0)  # KV tiles loaded so far
    for it in cutlass.range(begin, end, unroll=1):
        turn = it - begin
        w, record = open_work(c, g, words, rank)
        if const_expr(c.aliased):
            if turn > 0:
                cute.arch.mbarrier_wait(s.drained, (turn & 1) ^ 1)
        if w.mine > 0:
            cute.arch.mbarrier_wait(s.empty + count % c.stages, ((count // c.stages) & 1) ^ 1)
            load_tile(c, g, s, w, w.first, count % c.stages)
        cute.arch.mbarrier_wait(s.q_empty, (turn & 1) ^ 1)
        with cute.arch.elect_one():
            leave_record(s, record)
            if w.mine > 0:
                cute.arch.mbarrier_arrive_and_expect_tx(s.q_full, c.q_bytes)
            else:
                cute.arch.mbarrier_arrive(s.q_full)
        if w.mine > 0:
            load_q(c, g, s, record[5])
        if it + 1 < end:
            cute.autovec_copy(read_words(g, it + 1), words)
        produce_rest(c, g, s, w, count)
        count = count + w.mine
    cute.arch.mbarrier_wait(s.q_empty, ((end - begin) & 1) ^ 1)
    with cute.arch.elect_one():
        cute.arch.store(s.work, Int32(END))
        cute.arch.mbarrier_arrive(s.q_full)


@cute.jit
def produce_rest(c: cutlass.Constexpr[Shape], g: Global, s: Shared, w: Work, count: Int32):
    """Tiles 1, 2, ... of this CTA's share, as stages become empty."""
    base = w.base
    entry = w.entry
    if const_expr(c.prefetch > 0):
        for i in cutlass.range_constexpr(c.stages, c.stages + c.prefetch):
            prefetch_tile(c, g, s, w, w.first + i)
    for i in cutlass.range(1, w.mine, unroll=1):
        tile = w.first + i
        # the last entry that this tile needs
        if (tile * TILE_KV + TILE_KV - 1) // c.page - base > 31:
            base = tile * TILE_KV // c.page
            entry = load_entries(g, w.request, base)
        now = Work(w.request, w.first, w.mine, w.kv_len, base, entry)
        stage = (count + i) % c.stages
        cute.arch.mbarrier_wait(s.empty + stage, (((count + i) // c.stages) & 1) ^ 1)
        load_tile(c, g, s, now, tile, stage)
        if const_expr(c.prefetch > 0):
            prefetch_tile(c, g, s, now, tile + c.stages - 1 + c.prefetch)
