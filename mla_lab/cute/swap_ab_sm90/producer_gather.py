"""The producer warpgroup where tokens lie apart: small pages, and sparse calls (option gather).

A TMA box needs a run of rows; here each token is fetched alone, by copies of 16 bytes (`cp.async`)
that follow the swizzle by hand. A warp takes 16 tokens of each tile, one lane 16 bytes of a token's
row in every box. A lane's boxes differ by constants on both sides, so that one address serves all.

    tokens of   copies   boxes               lanes of a row   chunk j of row t lies at
    16 bits     72       9 of 128 bytes      8                j ^ (t % 8)
    e4m3        36       9 of 64 bytes       4                j ^ (t / 2 % 4)
    656 bytes   41       4 of 128, the rope  8                j ^ (t % 8); scales as they are

Of 656 bytes a token's four scales are one copy more, by a lane of its own for each of four tokens.

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

from .kv_656 import ROPE_BEGIN, SCALES_BEGIN
from .params import CONSUMER_WARPS, GROUPS, SCALE_BYTES, TILE_KV, Shape
from .producer import leave_record, load_q
from .shared_storage import Global, Shared
from .tile_scheduler import ask, open_grid

#: tokens of a tile that a warp copies, as many at a time as its lanes have rows for
WARP_TOKENS = TILE_KV // 4
SPARSE = 2


@dataclass(frozen=True)
class Lane:
    """What one lane of the producer copies: 16 bytes of each box of `turns` tokens a tile."""

    #: first token, of the tile; others follow in steps of `apart`
    token: Int32
    #: 16-byte chunk of a box's row
    chunk: Int32


def lanes_of(c: Shape) -> int:
    """Lanes of a token's row in a box."""
    return c.box * c.bytes // 16


def apart(c: Shape) -> int:
    """Tokens that a warp copies at a time."""
    return 32 // lanes_of(c)


def turns(c: Shape) -> int:
    """Tokens of a tile that a lane copies a part of."""
    return WARP_TOKENS // apart(c)


def chunk_at(c: Shape, lane: Lane, turn: int) -> Int32:
    """Where the swizzle puts the lane's chunk in the row of its token `turn`."""
    if apart(c) == 8:
        return lane.chunk ^ ((lane.token >> 1) & 3)
    # 4 rows below, the swizzle is that of the lane's first with bit 2 turned
    return (lane.chunk ^ (lane.token & 7)) ^ (4 * (turn % 2))


def copy16(c: Shape, target: Int32, source: cute.Pointer, size: Int32) -> None:
    """16 bytes to shared memory past the L1; of them `size` from memory, the rest zeros. The L2
    asks for lines of 128 bytes where tokens begin at such, else of 64, since they share lines with
    neighbours that nobody wants."""
    line = 64 if c.eight else 128
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global.L2::{line}B [{{$r0}}], [{{$r1}}], 16, {{$r2}};",
        read_only_args=[target, source, size],
    )


@cute.jit
def ask_tokens(
    c: cutlass.Constexpr[Shape], g: Global, request: Int32, kv_len: Int32, tile: Int32, lane: Lane
):
    """Table entries of this lane's tokens of a tile; -1 past the length."""
    last = g.block_table.shape[1] - 1
    entries = cute.make_rmem_tensor(turns(c), Int32)
    for k in cutlass.range_constexpr(turns(c)):
        token = tile * TILE_KV + lane.token + apart(c) * k
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
    return Int64(page) * g.kv.stride[0] + Int64(row * g.kv.shape[2])


@cute.jit
def places_of(
    c: cutlass.Constexpr[Shape], g: Global, entries: cute.Tensor, tile: Int32, lane: Lane
):  # fmt: skip
    """Where this lane's 16 bytes of each token begin in the cache, in elements; -1: no token."""
    places = cute.make_rmem_tensor(turns(c), Int64)
    for k in cutlass.range_constexpr(turns(c)):
        entry = entries[k]
        token = tile * TILE_KV + lane.token + apart(c) * k
        at = place_of(c, g, cutlass.max(entry, Int32(0)), token)
        at = at + Int64(lane.chunk * (16 // c.bytes))
        places[k] = at if entry >= 0 else Int64(-1)
    return places


@cute.jit
def copy_tile(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, places: cute.Tensor, stage: Int32, lane: Lane
):
    """This lane's part of a tile into `stage`, and its arrival when that is there."""
    width = c.box * c.bytes
    base = Int32(s.k.iterator.toint()) + stage * c.k_bytes
    base = base + lane.token * width
    for k in cutlass.range_constexpr(turns(c)):
        at = cutlass.max(places[k], Int64(0))
        size = Int32(16) if places[k] >= 0 else Int32(0)
        source = (g.kv.iterator + at).align(16)
        chunk = chunk_at(c, lane, k)
        target = base + apart(c) * k * width + (chunk << 4)
        for box in cutlass.range_constexpr(c.columns // c.box):
            copy16(c, target + box * (TILE_KV * width), source + box * c.box, size)
        if const_expr(c.scaled):
            row = lane.token + apart(c) * k
            rope = Int32(s.scaled.rope.iterator.toint()) + stage * c.rope_bytes
            copy16(c, rope + row * width + (chunk << 4), source + ROPE_BEGIN, size)
            if lane.chunk == k:
                scales = Int32(s.scaled.scales.iterator.toint()) + stage * SCALE_BYTES
                copy16(c, scales + row * (4 * GROUPS), source + (SCALES_BEGIN - 16 * k), size)
    cute.arch.cp_async_mbarrier_arrive_noinc(s.full + stage)


@cute.jit
def gather(c: cutlass.Constexpr[Shape], g: Global, s: Shared):
    """Grid mode: the one work tile of this CTA, by the producer warpgroup."""
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(tid // 32) - CONSUMER_WARPS
    lane = Lane(warp * WARP_TOKENS + tid % 32 // lanes_of(c), tid % lanes_of(c))
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
