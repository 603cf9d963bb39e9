"""The producer warp group that fetches KV token by token: small pages, and sparse calls.

A TMA box needs consecutive tokens of a page. Here each token is copied alone, 16 bytes at a time
(`cp.async`), to where the swizzle of the MMA's layout has it. A warp takes 16 tokens of each tile,
a lane the same 16 bytes of a token's row in every box: its boxes differ by constants in global and
in shared memory, so that one address serves all.

    tokens of   copies   boxes               lanes of a row   chunk j of row t lies at
    16 bits     72       9 of 128 bytes      8                j ^ (t % 8)
    e4m3        36       9 of 64 bytes       4                j ^ (t / 2 % 4)
    656 bytes   41       4 of 128, the rope  8                j ^ (t % 8); scales unswizzled

The four scales of a 656-byte token are one more copy, each token's by another lane.

Where a token lies in the cache:

    GATHER_PAGED    page `block_table[request, t / page_size]`, for pages of any size
    GATHER_SPARSE   slot `block_table[query token, t]` (page x page_size + offset), negative for
                    none. Every query token is a request, as long as the table is wide, or as the
                    first `seq_lens[query token]` slots where there are lengths

Missing tokens arrive as zeros. The full barriers count the 128 producer threads; consumers fence
behind them, since cp.async does not write through the async proxy that wgmma reads through.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ..common.kv_656 import ROPE_BEGIN, SCALES_BEGIN
from .params import CONSUMER_WARPS, SCALE_BYTES, SCALES, TILE_KV, KvLoad, Traits
from .producer import acquire_stage, load_q, store_record
from .shared_storage import Globals, Shared
from .tile_scheduler import issue_loads, open_grid

#: tokens of a tile that a warp copies
WARP_TOKENS = TILE_KV // 4


@dataclass(frozen=True)
class Lane:
    """What one lane copies: chunk `chunk` of tokens `token`, `token` + `tokens_at_once`, ..."""

    #: first token of the tile
    token: Int32
    #: 16-byte chunk of a token's row in a box
    chunk: Int32


def lanes_per_token(c: Traits) -> int:
    """Lanes that copy one token's row of a box."""
    return c.box * c.bytes // 16


def tokens_at_once(c: Traits) -> int:
    """Tokens that a warp copies with one instruction."""
    return 32 // lanes_per_token(c)


def tokens_per_lane(c: Traits) -> int:
    """Tokens of a tile that a lane copies a part of."""
    return WARP_TOKENS // tokens_at_once(c)


def swizzled_chunk(c: Traits, lane: Lane, k: int) -> Int32:
    """Chunk of the shared memory row that receives the lane's chunk of its k-th token."""
    if tokens_at_once(c) == 8:
        return lane.chunk ^ ((lane.token >> 1) & 3)
    # the k-th token is 4 k rows below the first: bit 2 of the swizzle flips with k
    return (lane.chunk ^ (lane.token & 7)) ^ (4 * (k % 2))


def copy16(c: Traits, target: Int32, source: cute.Pointer, size: Int32) -> None:
    """16 bytes to shared memory past the L1, `size` of them from memory and zeros behind. L2 lines
    are filled by 128 bytes where tokens begin at multiples of that, else by 64: the rest of the
    line belongs to a token that nobody reads."""
    line = 64 if c.fp8 else 128
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global.L2::{line}B [{{$r0}}], [{{$r1}}], 16, {{$r2}};",
        read_only_args=[target, source, size],
    )


@cute.jit
def load_table(
    c: cutlass.Constexpr[Traits], g: Globals, request: Int32, kv_len: Int32, tile: Int32, lane: Lane
):
    """Block table entries of this lane's tokens of a tile; -1 past the length."""
    last = g.block_table.shape[1] - 1
    entries = cute.make_rmem_tensor(tokens_per_lane(c), Int32)
    for k in cutlass.range_constexpr(tokens_per_lane(c)):
        token = tile * TILE_KV + lane.token + tokens_at_once(c) * k
        column = token
        if const_expr(c.kv_load == KvLoad.GATHER_PAGED):
            column = Int32(Uint32(token) // Uint32(g.cache.shape[1]))
        entry = g.block_table[request, cutlass.min(column, last)]
        entries[k] = entry if token < kv_len else Int32(-1)
    return entries


@cute.jit
def token_offset(c: cutlass.Constexpr[Traits], g: Globals, entry: Int32, token: Int32):
    """First element in the cache of the token with table entry `entry` (0 or more)."""
    page_size = g.cache.shape[1]
    page, row = entry, Int32(Uint32(token) % Uint32(page_size))
    if const_expr(c.kv_load == KvLoad.GATHER_SPARSE):
        page = Int32(Uint32(entry) // Uint32(page_size))
        row = entry - page * page_size
    return Int64(page) * g.cache.stride[0] + Int64(row * g.cache.shape[2])


@cute.jit
def chunk_offsets(
    c: cutlass.Constexpr[Traits], g: Globals, entries: cute.Tensor, tile: Int32, lane: Lane
):  # fmt: skip
    """First element in the cache of the lane's chunk of each token; -1 where there is no token."""
    offsets = cute.make_rmem_tensor(tokens_per_lane(c), Int64)
    for k in cutlass.range_constexpr(tokens_per_lane(c)):
        entry = entries[k]
        token = tile * TILE_KV + lane.token + tokens_at_once(c) * k
        at = token_offset(c, g, cutlass.max(entry, Int32(0)), token)
        at = at + Int64(lane.chunk * (16 // c.bytes))
        offsets[k] = at if entry >= 0 else Int64(-1)
    return offsets


@cute.jit
def copy_tile(
    c: cutlass.Constexpr[Traits], g: Globals, s: Shared, offsets: cute.Tensor, stage: Int32,
    lane: Lane,
):  # fmt: skip
    """This lane's part of a tile into `stage`, and its arrival when the copies are complete."""
    width = c.box * c.bytes
    base = Int32(s.sKV.iterator.toint()) + stage * c.k_bytes
    base = base + lane.token * width
    for k in cutlass.range_constexpr(tokens_per_lane(c)):
        at = cutlass.max(offsets[k], Int64(0))
        size = Int32(16) if offsets[k] >= 0 else Int32(0)
        source = (g.cache.iterator + at).align(16)
        chunk = swizzled_chunk(c, lane, k)
        target = base + tokens_at_once(c) * k * width + (chunk << 4)
        for box in cutlass.range_constexpr(c.columns // c.box):
            copy16(c, target + box * (TILE_KV * width), source + box * c.box, size)
        if const_expr(c.kv_656):
            row = lane.token + tokens_at_once(c) * k
            rope = Int32(s.kv_656.sRope.iterator.toint()) + stage * c.rope_bytes
            copy16(c, rope + row * width + (chunk << 4), source + ROPE_BEGIN, size)
            if lane.chunk == k:
                scales = Int32(s.kv_656.sScale.iterator.toint()) + stage * SCALE_BYTES
                copy16(c, scales + row * (4 * SCALES), source + (SCALES_BEGIN - 16 * k), size)
    cute.arch.cp_async_mbarrier_arrive_noinc(s.kv.full.at(stage))


@cute.jit
def produce_gathered(c: cutlass.Constexpr[Traits], g: Globals, s: Shared):
    """Grid mode: the one work tile of this CTA, by the producer warp group."""
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(tid // 32) - CONSUMER_WARPS
    lane = Lane(warp * WARP_TOKENS + tid % 32 // lanes_per_token(c), tid % lanes_per_token(c))
    a = issue_loads(c, g)
    if warp == 0:
        with cute.arch.elect_one():
            s.q.full.expect_tx(0, c.q_bytes)
        load_q(c, g, s, a.tokens.begin * g.heads + a.row_tile * c.rows)
    w, record = open_grid(c, g, a, Int32(0))
    entries = load_table(c, g, w.request, w.kv_len, w.first, lane)
    if warp == 0:
        with cute.arch.elect_one():
            store_record(s, record)
            s.q.producer_commit(0)
    for i in cutlass.range(w.mine, unroll=1):
        tile = w.first + i
        stage = i % c.stages
        # computed before the stage is empty, which the copies wait for
        offsets = chunk_offsets(c, g, entries, tile, lane)
        acquire_stage(c, s, i)
        copy_tile(c, g, s, offsets, stage, lane)
        # past the last tile a few entries too many, all inside the table
        cute.autovec_copy(load_table(c, g, w.request, w.kv_len, tile + 1, lane), entries)
