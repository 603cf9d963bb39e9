"""The producer warp: reads the plan, streams KV and Q by TMA, leaves the work record."""

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..common.ptx_sm90 import EVICT_FIRST, nanoseconds
from ..common.self_schedule import WORDS, plan_of
from . import kv_656 as scaled
from .params import BOX, BOXES, CONSUMER_WARPS, CONSUMERS, TILE_KV, Shape
from .shared_storage import END, Global, Shared
from .tile_scheduler import Work, ask, load_entries, next_words, open_grid, open_work

#: a page outside of every cache: the TMA writes zeros and counts the bytes
NO_PAGE = 1 << 30


def barriers_init(c: Shape, s: Shared) -> None:
    """By one lane; the counts are those of the kernel's docstring."""
    for i in range(c.stages * c.groups):
        cute.arch.mbarrier_init(s.full + i, c.producers)
    for i in range(c.stages):
        cute.arch.mbarrier_init(s.empty + i, CONSUMER_WARPS * c.pair)
    cute.arch.mbarrier_init(s.q_full, 1)
    cute.arch.mbarrier_init(s.q_empty, CONSUMERS)
    cute.arch.mbarrier_init(s.free, CONSUMER_WARPS * c.cluster)
    cute.arch.mbarrier_init(s.sent, 1)
    cute.arch.mbarrier_init(s.drained, CONSUMER_WARPS)
    for i in range(2):
        cute.arch.mbarrier_init(s.p_ready + i, CONSUMERS // 2)
        if c.eight:
            cute.arch.mbarrier_init(s.p_ready + 2 + i, CONSUMERS // 2)
            cute.arch.mbarrier_init(s.m_ready + i, c.rows)
    if c.terms > 1:
        cute.arch.mbarrier_init(s.q_read, CONSUMERS)
        cute.arch.mbarrier_init(s.q_split, CONSUMERS)
    cute.arch.mbarrier_init(s.summed, CONSUMERS)
    cute.arch.mbarrier_init(s.weighed, CONSUMERS)


def kv_parts(c: Shape, g: Global, s: Shared) -> tuple[cute.Tensor, cute.Tensor]:
    """TMA views: smem [box, row slot, column slot, stage], gmem [box, row, column, page]."""
    rows, cols, box = c.box_rows, c.box_cols, c.box
    smem = cute.make_tensor(
        s.k.iterator,
        cute.make_layout(
            (rows, (box, cols), TILE_KV // rows, c.columns // box // cols, c.stages),
            stride=(
                box,
                (1, TILE_KV * box),
                rows * box,
                cols * TILE_KV * box,
                TILE_KV * c.columns,
            ),
        ),
    )
    gmem = cute.local_tile(g.gk, (rows, (box, cols)), (None, None, None))
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
        cute.recast_ptr(s.q.iterator, dtype=c.q_dtype) if c.terms > 1 else s.q.iterator,
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
def load_tile(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, w: Work, tile: Int32, stage: Int32
):
    """KV tile `tile` of the request into `stage`, each column group on its own barrier.

    With `pair` each CTA of the cluster asks for every pair-th column box, for all of them.
    """
    ks, kg = kv_parts(c, g, s)
    policy = Int64(EVICT_FIRST) if const_expr(c.evict) else None
    slots = TILE_KV // c.box_rows
    per_group = c.group // c.box_cols
    for n in cutlass.range_constexpr(c.groups):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(s.full + stage * c.groups + n, c.group_bytes)
    for n in cutlass.range_constexpr(c.groups):
        for slot in cutlass.range_constexpr(slots):
            token = tile * TILE_KV + slot * c.box_rows
            page = cute.arch.shuffle_sync(w.entry, token // c.page - w.base)
            if const_expr(slots > 1):
                page = page if token < w.kv_len else Int32(NO_PAGE)
            inside = (token % c.page) // c.box_rows
            if const_expr(c.scaled):
                scaled.load_more(c, g, s, inside, page, slot, stage, policy)
            for x in cutlass.range_constexpr(per_group):
                col = n * per_group + x
                if const_expr(c.pair == 1):
                    cute.copy(
                        g.tma_k,
                        kg[None, inside, col, page],
                        ks[None, slot, col, stage],
                        tma_bar_ptr=s.full + stage * c.groups + n,
                        cache_policy=policy,
                    )
                elif (col + tile) % c.pair == cute.arch.block_idx_in_cluster():
                    cute.copy(
                        g.tma_k,
                        kg[None, inside, col, page],
                        ks[None, slot, col, stage],
                        tma_bar_ptr=s.full + stage * c.groups + n,
                        mcast_mask=Int16((1 << c.pair) - 1),
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
            for col in cutlass.range_constexpr(c.columns // c.box // c.box_cols):
                cute.prefetch(g.tma_k, kg[None, (token % c.page) // c.box_rows, col, page])


@cute.jit
def leave_record(s: Shared, record: tuple):
    """The work record, before the arrival that publishes it."""
    for i in cutlass.range_constexpr(len(record)):
        cute.arch.store(s.work + i, record[i])


@cute.jit
def produce(c: cutlass.Constexpr[Shape], g: Global, s: Shared, found: Int32, rank: Int32):
    """Walk the worker's tiles. Of a tile: first KV block, then Q and the record, then the rest."""
    plan = plan_of(found)
    words = cute.make_rmem_tensor(WORDS, Int32)
    words.fill(0)
    if plan.last > 0:
        next_words(c, g, plan, Int32(0), words)
    count = Int32(0)  # KV tiles loaded so far
    for turn in cutlass.range(plan.last, unroll=1):
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
        if turn + 1 < plan.last:
            next_words(c, g, plan, turn + 1, words)
        produce_rest(c, g, s, w, count)
        count = count + w.mine
    cute.arch.mbarrier_wait(s.q_empty, (plan.last & 1) ^ 1)
    with cute.arch.elect_one():
        cute.arch.store(s.work, Int32(END))
        cute.arch.mbarrier_arrive(s.q_full)


@cute.jit
def produce_one(c: cutlass.Constexpr[Shape], g: Global, s: Shared, rank: Int32):
    """Grid mode: the one work tile of this CTA. Q first, while length and table are on the way."""
    a = ask(c, g)
    with cute.arch.elect_one():
        cute.arch.mbarrier_expect_tx(s.q_full, c.q_bytes)
    load_q(c, g, s, a.begin * g.heads + a.row_tile * c.rows)
    w, record = open_grid(c, g, a, rank)
    if w.mine > 0:
        load_tile(c, g, s, w, w.first, Int32(0))
    if const_expr(c.stamps):
        with cute.arch.elect_one():
            cute.arch.store(s.stamps + 8, nanoseconds())
    with cute.arch.elect_one():
        leave_record(s, record)
        cute.arch.mbarrier_arrive(s.q_full)
    produce_rest(c, g, s, w, Int32(0))


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
