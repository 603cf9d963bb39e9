"""What a CTA works on: a row of a plan in memory, or a formula of its block indices (grid mode).

The formula is the plan "fixed" with the schedule "grid": request b has min(num_splits, blocks)
pieces, or one up to WHOLE_BLOCKS blocks; piece i = blocks [n i // s, n (i + 1) // s). It needs the
length alone, so that length, block table and q_begin are loaded at once. Slot = group * num_splits
+ piece and group = request * row_tiles + row tile; pieces and row tiles that a request lacks end at
once.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ...plan.formula import WHOLE_BLOCKS
from ..common.fixed_pieces import Before
from ..common.kv_prefetch import LEAST_REQUESTS, KvCache, prefetch_tiles
from ..common.ptx_sm90 import div_pow2, load_lasting, pick
from ..common.self_schedule import (
    LAST_BLOCK,
    LONGEST,
    WORDS,
    Batch,
    Plan,
    cut_offset,
    query_tokens,
    select,
)
from ..common.worker_plan import open_plan, prefetch_ahead, tile_words
from .params import TILE_KV, KvLoad, Traits
from .shared_storage import END, NAN_LENGTH, Globals, Shared

#: block table entries that a warp loads before it has the length, which decides on those needed
AHEAD = 128


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


@cute.jit
def load_entries(g: Globals, request: Int32, base: Int32):
    """32 entries of the request's block table from `base` on, one a lane."""
    at = cutlass.min(base + cute.arch.lane_idx(), g.block_table.shape[1] - 1)
    return load_lasting(g.block_table.iterator + (Int64(request) * g.block_table.stride[0] + at))


def batch_of(c: Traits, g: Globals) -> Batch:
    """What the scheduling rule reads."""
    return Batch(
        g.seq_lens, g.q_begin, g.heads, g.q_len, g.num_workers, g.costs, c.rows, pieces=c.pieces,
        tokens=query_tokens(g),
    )  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """Query tokens of a request inside of the launch's; `outside`: 1 where its offsets fall or go
    beyond them."""

    begin: Int32
    count: Int32
    outside: Int32


def cut_tokens(g: Globals, begin: Int32, end: Int32) -> Tokens:
    """The tokens that a request has by `q_begin`, cut before any address is made of them."""
    tokens = query_tokens(g)
    first = cut_offset(begin, tokens)
    past = cutlass.max(cutlass.min(end, tokens), first)
    return Tokens(first, past - first, pick((first == begin) & (past == end), Int32(0), Int32(1)))


def cut_length(c: Traits, g: Globals, kv_len: Int32, outside: Int32) -> tuple[Int32, Int32, Int32]:
    """Keys that are read of a request, their blocks, and the length in its record. No more keys
    are read than its row of the block table names, LONGEST at most; the record of a longer request
    has NAN_LENGTH, as that of one whose tokens lie `outside`. A length below 0 counts as none."""
    width, page = Int32(g.block_table.shape[1]), c.page
    if c.kv_load == KvLoad.GATHER_SPARSE:
        page = 1
    elif c.gathered:
        page = g.cache.shape[1]
    named = cutlass.min(Int64(width) * page, Int64(LONGEST)).to(Int32)
    # CTAs of a cluster send nothing without a key
    least = outside if c.cluster > 1 else Int32(0)
    keys = cutlass.min(cutlass.max(kv_len, least), named)
    told = pick((kv_len > named) | (outside != 0), Int32(NAN_LENGTH), keys)
    return keys, Int32(Uint32(keys + (TILE_KV - 1)) >> 6), told


@dataclass(frozen=True)
class WorkLoads:
    """What a work tile needs beside a plan's row: loads in flight together. `token` and `kv_len`
    are uniform; `entry` is of the piece's first blocks, where a worker is one CTA."""

    token: Int32
    next_token: Int32
    kv_len: Int32
    #: 32 block table entries, one a lane
    entry: Int32

    @classmethod
    def none(cls) -> WorkLoads:
        """Of a warp that loads nothing."""
        return cls(*[Int32(0)] * 4)


@cute.jit
def issue_work_loads(c: cutlass.Constexpr[Traits], g: Globals, request: Int32, block: Int32):
    """The loads for a piece that begins at `block` of `request`, which may be any numbers: none is
    outside of the tensors."""
    request = cutlass.min(cutlass.max(request, 0), g.seq_lens.shape[0] - 1)
    block = cutlass.min(cutlass.max(block, 0), LAST_BLOCK)
    begin = g.q_begin.iterator + request
    return WorkLoads(
        load_lasting(begin),
        load_lasting(begin + 1),
        load_lasting(g.seq_lens.iterator + request),
        load_entries(g, request, div_pow2(block * TILE_KV, c.page)),
    )


@cute.jit
def find_plan(c: cutlass.Constexpr[Traits], g: Globals, s: Shared, likely: Int32, cta: Int32):
    """The words of this CTA's tiles, also left in shared memory for the merges, and the loads of
    the first one; by one warp.

    The loads are issued beside the lengths that the tiles are checked against, for the tile that
    the CTA began with last (`likely`): one latency less in all layers of a step but the first."""
    words = likely
    loads = issue_work_loads(c, g, *first_place(words))
    words = open_plan(batch_of(c, g), g.tiles, g.schedule, cta, c.cluster)
    if const_expr(c.keeps_plan):
        s.plan[cute.arch.lane_idx()] = words
        s.plan_full.arrive(0)
    if not cute.arch.vote_all_sync(words == likely):
        loads = issue_work_loads(c, g, *first_place(words))
    return words, loads


def first_place(words: Int32) -> tuple[Int32, Int32]:
    """Request and first block of a plan's row."""
    return cute.arch.shuffle_sync(words, 0), cute.arch.shuffle_sync(words, 2)


@cute.jit
def prefetch(c: cutlass.Constexpr[Traits], g: Globals, rank: Int32):
    """The first KV tiles of this CTA into L2, ahead of the wait for the kernel in front; by one
    warp that no load waits for. A launch with a gate may have none."""
    many = g.seq_lens.shape[0] >= LEAST_REQUESTS
    if const_expr(c.grid):
        if many:
            prefetch_grid(c, g, rank)
    elif many:
        block, _, _ = cute.arch.block_idx()
        prefetch_ahead(KvCache(g.cache, g.block_table, Int32(0)), g.tiles, g.schedule, block)


@cute.jit
def next_words(
    c: cutlass.Constexpr[Traits], g: Globals, plan: Plan, index: Int32, words: cute.Tensor
):
    """Replace the plan row of work tile `index` - 1 by that of `index`."""
    before = Before(words[0], words[1], words[4], words[5])
    row = tile_words(batch_of(c, g), g.tiles, plan, index, before)
    for i in cutlass.range_constexpr(WORDS):
        words[i] = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(row, i))


@cute.jit
def open_work(
    c: cutlass.Constexpr[Traits], g: Globals, words: cute.Tensor, loads: WorkLoads, rank: Int32
):
    """From a plan's row to this CTA's share; also the words of the record that follow from it.

    Lengths are those of this launch, whatever a plan was made for: the last split ends where the
    keys end, and one beyond them is empty."""
    request, tokens = words[0], cut_tokens(g, loads.token, loads.next_token)
    keys, held, kv_len = cut_length(c, g, loads.kv_len, tokens.outside)
    # one CTA begins where the piece does
    base, entry = div_pow2(words[2] * TILE_KV, c.page), loads.entry
    end = cutlass.min(words[3], held)
    if words[4] + 1 == words[5]:
        end = held
    start = cutlass.min(words[2], held)
    blocks = cutlass.max(end - start, Int32(0))
    first = start + share_begin(c, blocks, rank)
    if const_expr(c.cluster > 1):
        base = div_pow2(first * TILE_KV, c.page)
        entry = load_entries(g, request, base)
    mine = start + share_begin(c, blocks, rank + 1) - first
    row = words[1] * c.rows
    record = (
        mine,
        first * TILE_KV,
        kv_len,
        kv_len - tokens.count,
        row,
        tokens.begin * g.heads + row,
        cutlass.max(cutlass.min(Int32(c.rows), tokens.count * g.heads - row), Int32(0)),
        cutlass.min(blocks, Int32(c.cluster)),
        words[6],
        words[7],
        words[5],
        words[4],
    )
    return Work(request, first, mine, keys, base, entry), record


def share_begin(c: Traits, blocks: Int32, rank: Int32) -> Int32:
    """First of `blocks` that CTA `rank` of the cluster takes: shares differ by one at most."""
    rest = blocks & (c.cluster - 1)
    return rank * div_pow2(blocks, c.cluster) + cutlass.min(rank, rest)


@dataclass(frozen=True)
class GridLoads:
    """Grid mode: block indices, and loads that are in flight together; none has been used yet."""

    request: Int32
    row_tile: Int32
    split: Int32
    kv_len: Int32
    tokens: Tokens
    #: the request's first AHEAD table entries, lane + 32 k in word k
    entries: tuple

    @classmethod
    def none(cls) -> GridLoads:
        """Of a warp that loads nothing."""
        zero = Int32(0)
        return cls(*[zero] * 4, Tokens(*[zero] * 3), (zero,) * (AHEAD // 32))


@cute.jit
def grid_place(c: cutlass.Constexpr[Traits], g: Globals):
    """Split, row tile and request of this CTA. In a launch of one dimension CTAs beyond the last
    request get a split that no request has."""
    x, split, request = cute.arch.block_idx()
    row_tile = x // c.cluster
    if const_expr(c.linear):
        tiles = (g.row_tiles + c.multicast - 1) // c.multicast * c.multicast
        rest = Int32(Uint32(x) // Uint32(tiles))
        row_tile = x - rest * tiles
        request = Int32(Uint32(rest) // Uint32(g.num_splits))
        split = rest - request * g.num_splits
        if request >= g.seq_lens.shape[0]:
            split, request = Int32(g.num_splits), Int32(0)
    return split, row_tile, request


@cute.jit
def issue_loads(c: cutlass.Constexpr[Traits], g: Globals):
    """Issue all loads that the work depends on."""
    split, row_tile, request = grid_place(c, g)
    if const_expr(c.kv_load == KvLoad.GATHER_SPARSE):
        # every query token is a request of one token, as long as its list of slots, or as many of
        # them as count
        width = Int32(g.block_table.shape[1])
        if g.seq_lens.shape[0] > 0:
            width = cutlass.min(width, load_lasting(g.seq_lens.iterator + request))
        own = Tokens(request, Int32(1), Int32(0))
        return GridLoads(request, row_tile, split, width, own, (Int32(0),) * (AHEAD // 32))
    return issue_request_loads(c, g, split, row_tile, request)


@cute.jit
def issue_request_loads(
    c: cutlass.Constexpr[Traits], g: Globals, split: Int32, row_tile: Int32, request: Int32
):
    """`issue_loads` where a request's length is in memory."""
    last = g.block_table.shape[1] - 1
    entries = [Int32(0)] * (AHEAD // 32)
    table = g.block_table.iterator + request * g.block_table.stride[0]
    for k in cutlass.range_constexpr(0 if c.gathered else AHEAD // 32):
        at = cutlass.min(32 * k + cute.arch.lane_idx(), last)
        # a load that the compiler leaves in its place, before the length is there
        entries[k] = cute.arch.load(table + at, Int32, cop="cg")
    kv_len = load_lasting(g.seq_lens.iterator + request)
    tokens = Tokens(request * g.q_len, g.q_len, Int32(0))
    if g.q_len == 0:
        tokens = cut_tokens(g, g.q_begin[request], g.q_begin[request + 1])
    return GridLoads(request, row_tile, split, kv_len, tokens, tuple(entries))


@cute.jit
def choose_entries(g: Globals, a: GridLoads, base: Int32, last: Int32):
    """32 table entries from `base` on, one a lane; those past `last` are not needed."""
    lane = cute.arch.lane_idx()
    word = base >> 5
    low = a.entries[0]
    high = a.entries[1]
    for k in cutlass.range_constexpr(1, AHEAD // 32):
        low = a.entries[k] if word == k else low
        high = a.entries[min(k + 1, AHEAD // 32 - 1)] if word == k else high
    place = (base & 31) + lane
    low = cute.arch.shuffle_sync(low, place & 31)
    high = cute.arch.shuffle_sync(high, place & 31)
    entry = low if place < 32 else high
    if cutlass.min(base + 31, last) >= AHEAD:
        entry = load_entries(g, a.request, base)
    return entry


@cute.jit
def cut(g: Globals, blocks: Int32, i: Int32):
    """Where piece i begins: blocks * i // splits, with a divisor that is known before the length
    (splits = blocks: one each)."""
    even = Int32(Uint32(blocks * i) // Uint32(g.num_splits))
    return even if blocks > g.num_splits else i


@cute.jit
def prefetch_grid(c: cutlass.Constexpr[Traits], g: Globals, rank: Int32):
    """Grid mode: the first KV tiles of this CTA into L2, ahead of the wait for the kernel in front.
    Lengths and table may be stale."""
    _, split, request = cute.arch.block_idx()
    kv_len = load_lasting(g.seq_lens.iterator + request)
    blocks = cutlass.max((kv_len + TILE_KV - 1) >> 6, Int32(1))
    begin, after = cut(g, blocks, split), cut(g, blocks, split + 1)
    if blocks <= WHOLE_BLOCKS:
        begin, after = Int32(0), select(split == 0, blocks, Int32(0))
    if split >= cutlass.min(g.num_splits, blocks):
        after = begin
    count = after - begin
    first = begin + share_begin(c, count, rank)
    last = begin + share_begin(c, count, rank + 1)
    prefetch_tiles(KvCache(g.cache, g.block_table, Int32(0)), request, first, last)


@cute.jit
def open_grid(c: cutlass.Constexpr[Traits], g: Globals, a: GridLoads, rank: Int32):
    """The share of CTA `rank` of piece `split`, and its work record (END, and one split: no such
    piece)."""
    keys, held, kv_len = cut_length(c, g, a.kv_len, a.tokens.outside)
    blocks = cutlass.max(held, Int32(1))
    splits = cutlass.min(g.num_splits, blocks)
    begin, after = cut(g, blocks, a.split), cut(g, blocks, a.split + 1)
    if blocks <= WHOLE_BLOCKS:
        splits, begin, after = Int32(1), Int32(0), blocks
    count = cutlass.min(after, held) - begin
    row = a.row_tile * c.rows
    rows = a.tokens.count * g.heads - row
    group = a.request * g.row_tiles + a.row_tile
    there = (a.split < splits) & (rows > 0)
    if const_expr(c.multicast > 1):
        # all of a cluster or none, since each loads for the others
        lead = row - a.row_tile % c.multicast * c.rows
        there = (a.split < splits) & (lead < a.tokens.count * g.heads)
        splits = splits if rows > 0 else Int32(1)
    if not there:
        count, splits = Int32(0), Int32(1)
    first = begin + share_begin(c, count, rank)
    mine = begin + share_begin(c, count, rank + 1) - first
    base = Int32(0)
    entry = Int32(0)
    if const_expr(not c.gathered):
        base = div_pow2(first * TILE_KV, c.page)
        entry = choose_entries(g, a, base, div_pow2((first + mine) * TILE_KV - 1, c.page))
    state = mine if there else Int32(END)
    record = (
        state,
        first * TILE_KV,
        kv_len,
        # the row of slots that a sparse call's consumers read
        a.request if const_expr(c.kv_load == KvLoad.GATHER_SPARSE) else kv_len - a.tokens.count,
        row,
        a.tokens.begin * g.heads + row,
        cutlass.max(cutlass.min(Int32(c.rows), rows), Int32(0)),
        cutlass.min(count, Int32(c.cluster)),
        group * g.num_splits + a.split,
        group,
        splits,
        a.split,
    )
    return Work(a.request, first, mine, keys, base, entry), record


@cute.jit
def merge_record(c: cutlass.Constexpr[Traits], g: Globals, words: Int32):
    """`tail` and `more` of the work record again, as far as the merge reads them, from the lanes
    of a plan's row."""
    request, row_tile = cute.arch.shuffle_sync(words, 0), cute.arch.shuffle_sync(words, 1)
    tokens = cut_tokens(g, g.q_begin[request], g.q_begin[request + 1])
    rows = tokens.count * g.heads - row_tile * c.rows
    tail, more = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(4, Int32)
    tail[0] = row_tile * c.rows
    tail[1] = tokens.begin * g.heads + row_tile * c.rows
    tail[2] = cutlass.max(cutlass.min(Int32(c.rows), rows), Int32(0))
    tail[3] = Int32(0)
    for i, word in enumerate((6, 7, 5, 4)):
        more[i] = cute.arch.shuffle_sync(words, word)
    return tail, more
