"""The producer warpgroup where tokens lie apart: small pages, and sparse calls (option gather).

A TMA box needs a run of rows; here each token is fetched alone, as 72 copies of 16 bytes
(`cp.async`) that follow the 128-byte swizzle by hand: chunk j of row t of a box lies at chunk
j ^ (t % 8). Eight lanes take a token's 128-byte piece of a box, a warp 16 tokens of each tile. A
lane's nine boxes differ by constants on both sides, so that an address serves nine copies.

Where a token comes from:

    gather 1   page `block_table[request, t / page_size]`, for pages of any size
    gather 2   slot `block_table[query token, t]` (page x page_size + offset); less than 0: none.
               Every query token is a request of its own, whose length is the table's width

Tokens that are not there arrive as zeros. The full barriers count the 128 producers; consumers
fence behind them, since these copies are not of the proxy that the matrix unit reads through.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from .config import BOX, BOXES, CONSUMER_WARPS, HEAD_DIM, TILE_KV, Shape
from .load import leave_record, load_q
from .storage import Global, Shared
from .work import ask, open_grid

#: tokens of a tile that a warp copies, four at a time
WARP_TOKENS = TILE_KV // 4
FOURS = WARP_TOKENS // 4
SPARSE = 2


@dataclass(frozen=True)
class Lane:
    """What one lane of the producer copies: 16 bytes of each box of `FOURS` tokens a tile."""

    #: first token, of the tile; others follow in steps of 4
    token: Int32
    #: 16-byte chunk of a box's row
    chunk: Int32


def copy16(target: Int32, source: cute.Pointer, size: Int32) -> None:
    """16 bytes to shared memory past the L1; of them `size` from memory, the rest zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[target, source, size],
    )


@cute.jit
def ask_tokens(
    c: cutlass.Constexpr[Shape], g: Global, request: Int32, kv_len: Int32, tile: Int32, lane: Lane
):
    """Table entries of this lane's tokens of a tile; -1 past the length."""
    last = g.block_table.shape[1] - 1
    entries = cute.make_rmem_tensor(FOURS, Int32)
    for k in cutlass.range_constexpr(FOURS):
        token = tile * TILE_KV + lane.token + 4 * k
        place = token
        if const_expr(c.gather != SPARSE):
            place = Int32(Uint32(token) // Uint32(g.kv.shape[1]))
        entry = g.block_table[request, cutlass.min(place, last)]
        entries[k] = entry if token < kv_len else Int32(-1)
    return entries


@cute.jit
def place_of(c: cutlass.Constexpr[Shape], g: Global, entry: Int32, token: Int32):
    """Element in the cache of a token whose table entry is `entry` (0 or more)."""
    page_size = g.kv.shape[1]
    page, row = entry, Int32(Uint32(token) % Uint32(page_size))
    if const_expr(c.gather == SPARSE):
        page = Int32(Uint32(entry) // Uint32(page_size))
        row = entry - page * page_size
    return Int64(page) * g.kv.stride[0] + Int64(row * HEAD_DIM)


@cute.jit
def places_of(
    c: cutlass.Constexpr[Shape], g: Global, entries: cute.Tensor, tile: Int32, lane: Lane
):  # fmt: skip
    """Where this lane's 16 bytes of each token begin in the cache, in elements; -1: no token."""
    places = cute.make_rmem_tensor(FOURS, Int64)
    for k in cutlass.range_constexpr(FOURS):
        entry = entries[k]
        token = tile * TILE_KV + lane.token + 4 * k
        at = place_of(c, g, cutlass.max(entry, Int32(0)), token) + Int64(lane.chunk * 8)
        places[k] = at if entry >= 0 else Int64(-1)
    return places


@cute.jit
def copy_tile(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, places: cute.Tensor, stage: Int32, lane: Lane
):
    """This lane's part of a tile into `stage`, and its arrival when that is there."""
    base = Int32(s.k.iterator.toint()) + stage * (TILE_KV * HEAD_DIM * 2)
    base = base + lane.token * (BOX * 2)
    for k in cutlass.range_constexpr(FOURS):
        at = cutlass.max(places[k], Int64(0))
        size = Int32(16) if places[k] >= 0 else Int32(0)
        source = (g.kv.iterator + at).align(16)
        # 4 rows below, the swizzle is that of the lane's first with bit 2 turned
        chunk = (lane.chunk ^ (lane.token & 7)) ^ (4 * (k % 2))
        target = base + 4 * k * (BOX * 2) + (chunk << 4)
        for box in cutlass.range_constexpr(BOXES):
            copy16(target + box * (TILE_KV * BOX * 2), source + box * BOX, size)
    cute.arch.cp_async_mbarrier_arrive_noinc(s.full + stage)


@cute.jit
def gather(c: cutlass.Constexpr[Shape], g: Global, s: Shared):
    """Grid mode: the one work tile of this CTA, by the producer warpgroup."""
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(tid // 32) - CONSUMER_WARPS
    lane = Lane(warp * WARP_TOKENS + tid % 32 // 8, tid % 8)
    a = ask(c, g)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(s.q_full, c.q_bytes)
        load_q(c, g, s, a.begin * g.heads + a.row_tile * c.rows)
    w, record = open_grid(c, g, a, Int32(0))
    entries = ask_tokens(c, g, w.request, w.kv_len, w.first, lane)
    if warp == 0:
        with cute.arch.elect_one():
            leave_record(s, record)
            cute.arch.mbarrier_arrive(s.q_full)
    for i in cutlass.range(w.mine, unroll=1):
        tile = w.first + i
        stage = i % c.stages
        # made before the stage is free, which is what the copies wait for
        places = places_of(c, g, entries, tile, lane)
        cute.arch.mbarrier_wait(s.empty + stage, ((i // c.stages) & 1) ^ 1)
        copy_tile(c, g, s, places, stage, lane)
        # past the last tile a few entries too many, all inside the table
        cute.autovec_copy(ask_tokens(c, g, w.request, w.kv_len, tile + 1, lane), entries)
