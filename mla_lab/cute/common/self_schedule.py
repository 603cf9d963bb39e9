"""The rule of `plan.self_schedule` on the device: a warp finds its worker's tiles from seq_lens.

A lane holds HELD requests that follow each other, so that all lengths of up to 256 requests are
loaded in one latency; a larger batch takes groups of 256 one after the other, three times. Names
and numbers are those of the Python module, which is the definition.

A launch finds its work once a step (see `kept_schedule`), by a function whose code lies behind the
kernel's own (see `outlined`).

What is found fits into one register a lane:

| lanes | word |
|---|---|
| 0 .. 7 | the plan row of the worker's first tile |
| 8 .. 15 | that of its last tile where a cut ends it, else -1 in lane 8 |
| 16 | 1 where row tiles lie beside each other (`bundled`) |
| 17 | the first row in a plan in memory, -1 where the tiles follow from the rule |
| 18 | number of tiles |
| 19 | 0, the first tile's index; as a constant it would cost registers |
| 20 | the block before which the first tile ends, at most |
| 21 | of a `single` request: 1 where the gate of the launch is closed |
| 22 .. 31 | where pieces are dealt the requests of the tiles between, else -1 in lane 22 |

All tiles between are whole. A plan row's words are those of `plan.tile.WorkTile`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ...plan.self_schedule import (
    BLOCK,
    COARSE,
    LARGE,
    LEAST,
    LEAST_EVEN,
    MOST_EVEN,
    MOST_LENGTH,
    SNAP,
    STEPS,
)
from ...plan.workspace import HELD_REQUESTS, TILE_WORDS
from .ptx_sm90 import div_pow2, load_lasting, load_where

#: words of a plan row
WORDS = TILE_WORDS
#: `block_end` of a tile that ends where the keys end
REST = 0x7FFFFFFF
#: the last block of 64 tokens whose positions fit into 32 bits
LAST_BLOCK = (1 << 25) - 1
#: the greatest length: positions of its blocks, and of those looked up ahead, fit into 32 bits
LONGEST = 2**31 - 1024
BUNDLED, PLAN_ROW, COUNT, FIRST, END, CLOSED, MIDDLE = 16, 17, 18, 19, 20, 21, 22
#: requests that a lane holds where a batch has more than 32
HELD = HELD_REQUESTS // 32


@dataclass(frozen=True)
class Batch:
    """What the rule is computed from. `q_len` 0: requests differ, see `q_begin`."""

    seq_lens: cute.Tensor
    q_begin: cute.Tensor
    heads: Int32
    q_len: Int32
    workers: Int32
    #: `Costs.packed`, and a gate in its upper half
    costs: Int32
    tile_rows: int
    #: the batch is one request, of no more row tiles than workers: `Costs.least`; 0: any batch
    single: int = 0
    #: by the rule of batch invariance (`fixed_pieces`), of which `costs` are the cuts
    pieces: bool = False
    #: pieces may be dealt (`Costs.deals`)
    deals: bool = True
    #: query tokens of the launch, into which offsets are cut; None: they are taken as they are
    tokens: Any = None


@dataclass(frozen=True)
class Plan:
    """A worker's tiles: indices [first, last), and the words of the module's table."""

    first: Int32
    last: Int32
    words: Int32


@dataclass(frozen=True)
class Requests:
    """What a lane holds of a group: HELD requests that follow each other, from HELD * lane on.

    `tiles` are row tiles, 0 past the batch; `sizes` what an item of each takes of the line.
    """

    blocks: cute.Tensor
    tiles: cute.Tensor
    sizes: cute.Tensor

    @classmethod
    def empty(cls) -> Requests:
        """Registers alone."""
        return cls(*(cute.make_rmem_tensor(HELD, Int32) for _ in range(3)))


@dataclass(frozen=True)
class Totals:
    """Of a batch: `items` of `work` blocks in all, the longest of `longest`."""

    items: Int32
    work: Int32
    longest: Int32
    bundled: Int32
    row_tiles: Int32


@dataclass(frozen=True)
class Line:
    """The line that is cut, in units of cost, of whole items, or of even pieces."""

    length: Uint32
    parts: Uint32
    shift: Int32
    whole: Int32
    #: L of even pieces, else 0
    even: Int32
    piece: Int32
    bundled: Int32
    #: of shares or even pieces, whichever is the lower one
    price: Int32


@dataclass(frozen=True)
class Cut:
    """Where a cut falls: before block `block` of item `item`, row tile `row_tile` of `request`.

    `start` is the item's place on the line, `size` what it takes of it, `blocks` its length.
    """

    request: Int32
    row_tile: Int32
    item: Int32
    block: Int32
    start: Int32
    size: Int32
    blocks: Int32


@cute.jit
def select(condition, yes, no):
    """`yes` where the condition holds, else `no`, without a branch."""
    result = no
    if condition:
        result = yes
    return result


def total(value: Int32) -> Int32:
    """Sum over the warp."""
    return Int32(cute.arch.warp_redux_sync(value, "add"))


@cute.jit
def scan(value: Int32) -> Int32:
    """Inclusive prefix sums over the warp."""
    lane = cute.arch.lane_idx()
    for bit in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << bit)
        value = value + select(lane >= (1 << bit), other, Int32(0))
    return value


def pack(lane: Int32, values: list[Any], first: int, words: Any) -> Any:
    """`words` with `values` in lanes `first` and up."""
    for i, value in enumerate(values):
        words = select(lane == first + i, value, words)
    return words


def query_tokens(g: Any) -> Int32:
    """Query tokens that q, out and lse of a launch have rows for."""
    if len(g.mO.shape) > 2:
        return Int32(cute.size(g.mO.shape[:-2]))
    return Int32(Uint32(g.mO.shape[0]) // Uint32(g.heads))


def cut_offset(token: Int32, tokens: Int32) -> Int32:
    """An offset of `q_begin` inside of [0, tokens]."""
    return cutlass.max(cutlass.min(token, tokens), 0)


def token_of(b: Batch, offset: Int32) -> Int32:
    """The query token that an offset of `q_begin` names."""
    return offset if b.tokens is None else cut_offset(offset, b.tokens)


def rows_between(b: Batch, token: Int32, next_token: Int32) -> Int32:
    """Rows of a request that begins at `token`: none where the offsets fall."""
    return cutlass.max(next_token - token, 0) * b.heads


@cute.jit
def rows_of(b: Batch, request: Int32):
    """Rows of a request of the batch."""
    begin = b.q_begin.iterator + request
    return rows_between(b, *(token_of(b, load_lasting(begin + i)) for i in range(2)))


def row_tiles_of(b: Batch, rows: Int32) -> Int32:
    """Row tiles of so many rows."""
    return Int32(Uint32(rows + b.tile_rows - 1) // Uint32(b.tile_rows))


def blocks_of(kv_len: Int32) -> Int32:
    """Blocks of a request of so many tokens; one that has none counts as one."""
    return cutlass.max(div_pow2(kv_len + BLOCK - 1, BLOCK), 1)


@cute.jit
def load_group(
    b: Batch, base: Int32, r: Requests,
    takes: cutlass.Constexpr = None, size_of: cutlass.Constexpr = None,
):  # fmt: skip
    """Blocks and row tiles of the lane's requests of the group from `base` on. With `takes`, of
    their rows, requests that the launch leaves out have no row tiles; with `size_of`, of their
    blocks, also their sizes."""
    first = base + cute.arch.lane_idx() * HELD
    left = b.seq_lens.shape[0] - first
    lens, begin = b.seq_lens.iterator + first, b.q_begin.iterator + first
    token = token_of(b, load_where(begin, 0, left, 0))
    for c in cutlass.range_constexpr(HELD):
        kv_len = load_where(lens, c, left, c)
        next_token = token_of(b, load_where(begin, c + 1, left, c))
        rows = rows_between(b, token, next_token)
        there = left > c if takes is None else (left > c) & takes(rows)
        r.tiles[c] = select(there, row_tiles_of(b, rows), Int32(0))
        r.blocks[c] = blocks_of(kv_len)
        if cutlass.const_expr(size_of is not None):
            r.sizes[c] = size_of(r.blocks[c])
        token = next_token


@cute.jit
def totals_of(b: Batch, r: Requests) -> Totals:
    """First pass; leaves the last group in `r`."""
    batch = b.seq_lens.shape[0]
    first = cute.arch.lane_idx() * HELD
    items, work, longest = Int32(0), Int32(0), Int32(1)
    most, least, keys = Int32(0), Int32(REST), Int32(0)
    for base in cutlass.range(0, batch, HELD_REQUESTS, unroll=1):
        load_group(b, base, r)
        for c in cutlass.range_constexpr(HELD):
            there = base + first + c < batch
            keys = keys + select(there, r.blocks[c], Int32(0))
            items = items + r.tiles[c]
            work = work + r.tiles[c] * r.blocks[c]
            longest = select(r.tiles[c] > 0, cutlass.max(longest, r.blocks[c]), longest)
            most = cutlass.max(most, r.tiles[c])
            least = select(there, cutlass.min(least, r.tiles[c]), least)
    keys, items, work = total(keys), total(items), total(work)
    longest, most = (Int32(cute.arch.warp_redux_sync(x, "max")) for x in (longest, most))
    least = Int32(cute.arch.warp_redux_sync(least, "min"))
    row_tiles, bundled = Int32(1), Int32(0)
    if (most == least) & (most > 0) & (most <= b.workers):
        row_tiles, bundled, items, work = most, Int32(1), Int32(batch), keys
    return Totals(items, work, longest, bundled, row_tiles)


def items_of(bundled: Int32, tiles: Int32) -> Int32:
    """Items of a request with so many row tiles."""
    return select(bundled == 1, cutlass.min(tiles, 1), tiles)


def ceil_by(divisor: Int32) -> Callable[[Int32], Int32]:
    """blocks -> ceil(blocks / divisor), of a reciprocal within 2**-22, for up to 2**20 blocks: what
    is added lies half of 1 / divisor below 1, farther from either whole number than the product may
    be off."""
    inverse = Float32(cute.arch.rcp_approx(Float32(divisor)))
    up = Float32(1.0) - Float32(0.5) * inverse
    return lambda blocks: Int32(Float32(blocks) * inverse + up)


@cute.jit
def even_pieces(t: Totals, r: Requests, even: Int32):
    """How many even pieces there are with L = `even`; `r.sizes` are those of each request."""
    sizes_of, count = ceil_by(even), Int32(0)
    for c in cutlass.range_constexpr(HELD):
        r.sizes[c] = sizes_of(r.blocks[c])
        count = count + items_of(t.bundled, r.tiles[c]) * r.sizes[c]
    return total(count)


@cute.jit
def even_size(t: Totals, bundles: Int32, low: Int32, r: Requests):
    """L of even pieces, from the only group of requests, and how many pieces there are; leaves
    their sizes in `r`."""
    room = bundles - t.items
    each = Int32(Uint32(bundles) // Uint32(t.items))
    high = Int32(Uint32(t.longest + each - 1) // Uint32(each))
    if room > 0:
        high = cutlass.min(high, Int32(Uint32(t.work - t.items + room - 1) // Uint32(room)))
    high = cutlass.max(low, high)
    middle, step, pieces = high - 1, Int32(0), Int32(0)
    while step <= STEPS:
        found = (low >= high) | (step == STEPS)
        middle = select(found, high, middle)
        pieces = even_pieces(t, r, middle)
        step = select(found, Int32(STEPS), step) + 1
        high = select(pieces <= bundles, middle, high)
        low = select(pieces <= bundles, low, middle + 1)
        middle = (low + high) >> 1
    return high, pieces


@cute.jit
def line_of(b: Batch, t: Totals, bundles: Int32, r: Requests) -> Line:
    """Whole items, even pieces or shares of the cost line, whichever is priced lowest; whole ones
    where lengths go so far beyond their rows of the block table that sums may not fit."""
    piece, merge = b.costs & 255, (b.costs >> 8) & 255
    turns = Int32(Uint32(t.items + bundles - 1) // Uint32(bundles))
    low = Int32(Uint32(t.work + bundles - 1) // Uint32(bundles))
    low = cutlass.max(low, LEAST_EVEN)
    whole_price = turns * (t.longest + piece)
    length = t.work + t.items * piece
    parts = cutlass.max(cutlass.min(bundles, length // LEAST), 1)
    price = Int32(Uint32(length + parts - 1) // Uint32(parts)) + piece + merge
    even, pieces = Int32(0), Int32(0)
    fits = Int64(t.items) * (t.longest + piece) < MOST_LENGTH
    small = (t.items > 0) & (b.seq_lens.shape[0] <= HELD_REQUESTS) & (length < LARGE)
    small = small & (t.longest <= MOST_EVEN) & (turns == 1) & fits
    if small & (low + piece + merge < whole_price):
        even, pieces = even_size(t, bundles, low, r)
        if even + piece + merge <= price:
            price = even + piece + merge
        else:
            even = Int32(0)
    whole = select((whole_price <= price) | ~fits, Int32(1), Int32(0))
    shift = select((length >= LARGE) & (whole == 0), Int32(COARSE), Int32(0))
    if whole == 1:
        length, parts, even = t.items, bundles, Int32(0)
    if even > 0:
        length, parts = pieces, pieces
    return Line(Uint32(length), Uint32(parts), shift, whole, even, piece, t.bundled, price)


@cute.jit
def place_of(line: Line, cut: Int32) -> Int32:
    """Where cut `cut` lies on the line: cut * length / parts, in whole steps of 2**shift."""
    place = Uint32(cut) * (line.length >> line.shift) // line.parts
    return select(Uint32(cut) < line.parts, Int32(place) << line.shift, Int32(line.length))


@cute.jit
def locate(line: Line, r: Requests, lane_begin: tuple, place: Int32, old: Cut):
    """The item in which a place of the line lies, if it is one of this group; else `old`.

    `lane_begin`: the lane's first request, where it and what follows the lane's begin on the line,
    and the items before it.
    """
    request, start, upto, items = lane_begin
    here = (start <= place) & (place < upto)
    found = [request, items, start, r.sizes[0], r.blocks[0]]
    run = start
    for c in cutlass.range_constexpr(1, HELD):
        mine = items_of(line.bundled, r.tiles[c - 1])
        run = run + mine * r.sizes[c - 1]
        items = items + mine
        next_one = [request + c, items, run, r.sizes[c], r.blocks[c]]
        found = [select(place >= run, new, at) for new, at in zip(next_one, found, strict=True)]
    lanes = Uint32(cute.arch.vote_ballot_sync(here))
    owner = Int32(cute.arch.popc((lanes - 1) & ~lanes))
    found = [cute.arch.shuffle_sync(value, owner & 31) for value in found]
    before = [old.request, old.item, old.start, old.size, old.blocks]
    request, items, start, size, blocks = [
        select(lanes != 0, new, at) for new, at in zip(found, before, strict=True)
    ]
    return Cut(request, old.row_tile, items, old.block, start, size, blocks)


@cute.jit
def find_item(b: Batch, line: Line, r: Requests, place: Int32):
    """The item in which a place of the line lies."""
    batch, zero = b.seq_lens.shape[0], Int32(0)
    before, items_before, item = zero, zero, Cut(*[zero] * 5, Int32(1), zero)
    for base in cutlass.range(0, batch, HELD_REQUESTS, unroll=1):
        if batch > HELD_REQUESTS:
            load_group(b, base, r)
        cost, mine = Int32(0), Int32(0)
        for c in cutlass.range_constexpr(HELD):
            if line.even == 0:
                r.sizes[c] = select(line.whole == 1, Int32(1), r.blocks[c] + line.piece)
            items = items_of(line.bundled, r.tiles[c])
            cost, mine = cost + items * r.sizes[c], mine + items
        request = base + cute.arch.lane_idx() * HELD
        upto = before + scan(cost)
        items = request
        if line.bundled == 0:
            items = items_before + scan(mine) - mine
            items_before = items_before + total(mine)
        item = locate(line, r, (request, upto - cost, upto, items), place, item)
        before = cute.arch.shuffle_sync(upto, 31)
    return item


@cute.jit
def cut_at(b: Batch, line: Line, r: Requests, place: Int32) -> Cut:
    """The cut at a place of the line, moved to an item's end nearby."""
    item = find_item(b, line, r, place)
    row_tile, start = Int32(0), item.start
    if line.bundled == 0:
        row_tile = Int32(Uint32(place - start) // Uint32(item.size))
        start = start + row_tile * item.size
    block = select(line.whole == 1, Int32(0), place - start - line.piece)
    if block <= SNAP:
        block = Int32(0)
    elif item.blocks - block <= SNAP:
        block = item.blocks
    return Cut(item.request, row_tile, item.item + row_tile, block, start, item.size, item.blocks)


@cute.jit
def pieces_of(line: Line, cut: Cut):
    """The part that has the first piece of a cut item, and the number of pieces."""
    step = (1 << line.shift) - 1
    low = cut.start + line.piece + SNAP + 1
    high = cut.start + line.piece + cut.blocks - SNAP - 1
    units = line.length >> line.shift
    low = Uint32((low + step) >> line.shift) * line.parts
    high = Uint32((high >> line.shift) + 1) * line.parts - 1
    first = Int32((low + units - 1) // units)
    last = cutlass.min(Int32(high // units), Int32(line.parts) - 1)
    return first - 1, last - first + 2


def even_tile(line: Line, at: Cut, part: Int32, group: Int32, slots: Int32) -> list[Int32]:
    """Of an even piece, the words behind request and row tile."""
    split = part - at.start
    begin = Int32(Uint32(at.blocks * split) // Uint32(at.size))
    end = Int32(Uint32(at.blocks * (split + 1)) // Uint32(at.size))
    shared = at.size > 1
    slot = select(shared, slots + at.start + part, Int32(-1))
    return [begin, end, split, at.size, slot, select(shared, group, Int32(-1))]


@cute.jit
def next_item(b: Batch, bundled: Int32, request: Int32, row_tile: Int32):
    """The request and row tile that follow in work order; behind the last item, unspecified."""
    if bundled == 1:
        request = request + 1
    else:
        row_tile = row_tile + 1
        left = row_tiles_of(b, rows_of(b, request)) - row_tile
        while (left <= 0) & (request + 1 < b.seq_lens.shape[0]):
            request = request + 1
            row_tile = Int32(0)
            left = rows_of(b, request)
    return request, row_tile


@cute.jit
def first_tile(b: Batch, line: Line, at: Cut, shared: list, part: Int32, slots: Int32, own: tuple):
    """The plan row of the worker's first tile, and its item; `shared`: the words of a piece behind
    its blocks; `own`: the worker's row tile of its bundle, and how many a bundle has."""
    bundle_row, row_tiles = own
    request, row_tile, item, start = at.request, at.row_tile, at.item, at.block
    row = [start, Int32(REST), Int32(0), Int32(1), Int32(-1), Int32(-1)]
    if line.even > 0:
        row = even_tile(line, at, part, at.start * row_tiles + bundle_row, slots)
    elif start == at.blocks:
        request, row_tile = next_item(b, line.bundled, request, row_tile)
        item, row[0] = item + 1, Int32(0)
    elif start > 0:
        row = [start, Int32(REST), *shared]
    return [request, select(line.bundled == 1, bundle_row, row_tile), *row], item
