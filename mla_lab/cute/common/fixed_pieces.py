"""The rule of `plan.fixed_pieces` on the device: a warp finds its worker's pieces from seq_lens.

Beside the words of `common.self_schedule`'s table (the plan row of the first piece, their number)
the lanes from PART on hold what the later pieces follow from. Of up to 256 requests a piece is
found in one latency, whatever its number; of more, in groups of 256 from the piece before on.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...plan.fixed_pieces import (
    CHANGE_BLOCKS,
    INVARIANT_ROWS,
    LEAST_BUNDLES,
    MOST_PIECES,
    RING,
    WHOLE_PIECES,
)
from .self_schedule import (
    BUNDLED,
    HELD,
    HELD_REQUESTS,
    Batch,
    Requests,
    items_of,
    load_group,
    pack,
    scan,
    select,
    total,
)

#: lanes of a worker's words: its bundle, the number of bundles, its row tile of the bundle, the
#: slots of the row tiles before, 1 where pieces go by their size, 1 where rounds have whole items
PART, BUNDLES, BUNDLE_ROW, FIRST_SLOT, BY_SIZE, WHOLE = 22, 23, 24, 25, 26, 27
#: `group` of a work tile that is a whole item, whose pieces its worker adds up itself
OWN_PIECES = 0


@dataclass(frozen=True)
class Before:
    """Of the piece that a worker ran last: request, row tile, which of how many."""

    request: Int32
    row_tile: Int32
    split: Int32
    num_splits: Int32

    @classmethod
    def none(cls) -> Before:
        """Of a worker's first piece."""
        return cls(*[Int32(0)] * 4)


@dataclass(frozen=True)
class Bundle:
    """A worker's bundle: its number, of how many, the worker's row tile of it and first slot, and
    whether rounds have whole items."""

    part: Int32
    bundles: Int32
    bundle_row: Int32
    first_slot: Int32
    whole: Int32


@dataclass(frozen=True)
class Found:
    """Where piece `number` of all lies: `offset` pieces behind the first of its request."""

    request: Int32
    offset: Int32
    blocks: Int32
    size: Int32


@cute.jit
def piece_size(b: Batch, blocks: Int32):
    """Blocks of the longest piece of a request of so many blocks."""
    half = cutlass.min((b.costs >> 8) & 255, (blocks + 1) >> 1)
    least = cutlass.max(b.costs & 255, (blocks + (MOST_PIECES - 1)) // MOST_PIECES)
    return pieces_of(blocks, pieces_of(blocks, cutlass.max(least, half)))


def pieces_of(blocks: Int32, size: Int32) -> Int32:
    """Pieces of a row tile whose longest has `size` blocks: ceil(blocks / size)."""
    return Int32(Uint32(blocks + size - 1) // Uint32(size))


@cute.jit
def number_of(part: Int32, index: Int32, bundles: Int32):
    """The piece that bundle `part` runs in round `index`; every second round goes back, where there
    are MOST_PIECES bundles or more."""
    back = ((index & 1) == 1) & (bundles >= MOST_PIECES)
    return index * bundles + select(back, bundles - 1 - part, part)


def takes(b: Batch, rows: Int32):
    """Whether a request of so many query rows is of this launch (`PieceCuts`)."""
    kind = select(rows <= INVARIANT_ROWS, Int32(16), Int32(17))
    return ((b.costs >> kind) & 1) == 1


@cute.jit
def load_requests(b: Batch, whole: Int32, base: Int32, r: Requests):
    """The lane's requests of the group from `base` on: blocks, row tiles of this launch, sizes of
    their pieces, or blocks again where rounds have `whole` items."""

    def size_of(blocks):
        return select(whole == 1, blocks, piece_size(b, blocks))

    load_group(b, base, r, lambda rows: takes(b, rows), size_of)


@cute.jit
def level_of(r: Requests, number: Int32):
    """The size of piece `number`, where pieces go by falling size, and how many are larger."""
    high = Int32(1)
    for c in cutlass.range_constexpr(HELD):
        high = select(r.tiles[c] > 0, cutlass.max(high, r.sizes[c]), high)
    high, low = Int32(cute.arch.warp_redux_sync(high, "max")), Int32(1)
    while low < high:
        middle = (low + high + 1) >> 1
        count = at_least(r, middle)
        low = select(count > number, middle, low)
        high = select(count > number, high, middle - 1)
    return low, at_least(r, low + 1)


@cute.jit
def at_least(r: Requests, size: Int32):
    """Pieces of that size or more; `r.tiles` are the pieces of each request."""
    count = Int32(0)
    for c in cutlass.range_constexpr(HELD):
        count = count + select(r.sizes[c] >= size, r.tiles[c], Int32(0))
    return total(count)


@cute.jit
def find_piece(b: Batch, shape: tuple, number: Int32, base: Int32, before: Int32) -> Found:
    """Piece `number`; `shape`: whether row tiles are bundled, pieces go by size, and items are
    whole, of one piece here. Request `base` begins with piece `before`, and no later than piece
    `number`."""
    bundled, by_size, whole = shape
    r = Requests.empty()
    request, start, blocks, size = base, before, Int32(1), Int32(1)
    searching = Int32(1)
    while searching == 1:
        load_requests(b, whole, base, r)
        mine = Int32(0)
        for c in cutlass.range_constexpr(HELD):
            r.tiles[c] = items_of(bundled, r.tiles[c]) * pieces_of(r.blocks[c], r.sizes[c])
        if by_size == 1:
            level, before = level_of(r, number)
            for c in cutlass.range_constexpr(HELD):
                r.tiles[c] = select(r.sizes[c] == level, r.tiles[c], Int32(0))
        for c in cutlass.range_constexpr(HELD):
            mine = mine + r.tiles[c]
        upto = before + scan(mine)
        run = upto - mine
        lanes = Uint32(cute.arch.vote_ballot_sync((run <= number) & (number < upto)))
        owner = Int32(cute.arch.popc((lanes - 1) & ~lanes)) & 31
        found = [base + cute.arch.lane_idx() * HELD, run, r.blocks[0], r.sizes[0]]
        for c in cutlass.range_constexpr(1, HELD):
            run = run + r.tiles[c - 1]
            own = [base + cute.arch.lane_idx() * HELD + c, run, r.blocks[c], r.sizes[c]]
            found = [select(number >= run, new, at) for new, at in zip(own, found, strict=True)]
        request, start, blocks, size = [cute.arch.shuffle_sync(word, owner) for word in found]
        before = cute.arch.shuffle_sync(upto, 31)
        base = base + HELD_REQUESTS
        # behind the last group there is none such: whatever was found lies inside the batch
        searching = select((lanes == 0) & (base < b.seq_lens.shape[0]), Int32(1), Int32(0))
    request = cutlass.min(request, b.seq_lens.shape[0] - 1)
    return Found(request, number - start, blocks, size)


@cute.jit
def row_of(b: Batch, f: Found, number: Int32, w: Bundle):
    """The plan row of piece `number`; its group is the turn of the ring, from 1 on. Of a whole
    item: its number of pieces, the first of its bundle's slots, OWN_PIECES for a group."""
    num_splits = pieces_of(f.blocks, f.size)
    row_tile = Int32(Uint32(f.offset) // Uint32(num_splits))
    split = f.offset - row_tile * num_splits
    begin, end = [Int32(Uint32(f.blocks * j) // Uint32(num_splits)) for j in (split, split + 1)]
    first, ring = number - split, RING * w.bundles
    turn = Int32(Uint32(first) // Uint32(ring))
    slot, turn = first - turn * ring + split, turn + 1
    if w.whole == 1:
        num_splits = pieces_of(f.blocks, piece_size(b, f.blocks))
        slot, turn = RING * w.part, Int32(OWN_PIECES)
    slot = select(num_splits > 1, w.first_slot + slot, Int32(-1))
    turn = select(num_splits > 1, turn, Int32(-1))
    return [f.request, row_tile + w.bundle_row, begin, end, split, num_splits, slot, turn]


@cute.jit
def runs_whole(b: Batch, items: Int32, pieces: Int32, bundles: Int32, longest: tuple):
    """1 where rounds have whole items, by `plan.fixed_pieces`; `longest`: of the items taken the
    blocks of the longest one, the pieces of the one with most, and the blocks of all."""
    blocks, most, total_blocks = longest
    load = Int32(Uint32(items + bundles - 1) // Uint32(bundles)) * blocks
    change = Int32(Uint32(pieces + bundles - 1) // Uint32(bundles)) * CHANGE_BLOCKS
    fits = load <= Int32(Uint32(total_blocks) // Uint32(bundles)) + change
    return select((pieces > items) & (most <= WHOLE_PIECES) & fits, Int32(1), Int32(0))


@cute.jit
def find_pieces(b: Batch, worker: Int32) -> Int32:
    """The words of the worker's pieces by the rule; by one warp."""
    r = Requests.empty()
    batch, first = b.seq_lens.shape[0], cute.arch.lane_idx() * HELD
    most, least, longest, splits = Int32(0), Int32(0x7FFFFFFF), Int32(0), Int32(0)
    # pieces, items and blocks with row tiles apart, and with all row tiles of a request as one item
    apart, beside = [Int32(0)] * 3, [Int32(0)] * 3
    for base in cutlass.range(0, batch, HELD_REQUESTS, unroll=1):
        load_requests(b, Int32(0), base, r)
        for c in cutlass.range_constexpr(HELD):
            pieces, tiles = pieces_of(r.blocks[c], r.sizes[c]), r.tiles[c]
            one = cutlass.min(tiles, 1)
            each = (pieces, Int32(1), r.blocks[c])
            apart = [count + tiles * x for count, x in zip(apart, each, strict=True)]
            beside = [count + one * x for count, x in zip(beside, each, strict=True)]
            most = cutlass.max(most, tiles)
            least = select(base + first + c < batch, cutlass.min(least, tiles), least)
            longest = cutlass.max(longest, one * r.blocks[c])
            splits = cutlass.max(splits, one * pieces)
    apart, beside = [total(x) for x in apart], [total(x) for x in beside]
    most, longest, splits = [
        Int32(cute.arch.warp_redux_sync(x, "max")) for x in (most, longest, splits)
    ]
    least = Int32(cute.arch.warp_redux_sync(least, "min"))
    row_tiles, bundled = Int32(1), Int32(0)
    pieces, items, blocks = apart
    if (most == least) & (most > 0) & (most * LEAST_BUNDLES <= b.workers):
        row_tiles, bundled = most, Int32(1)
        pieces, items, blocks = beside
    bundles = Int32(Uint32(b.workers) // Uint32(row_tiles))
    part = Int32(Uint32(worker) // Uint32(row_tiles))
    bundle_row = worker - part * row_tiles
    whole = runs_whole(b, items, pieces, bundles, (longest, splits, blocks))
    pieces = select(whole == 1, items, pieces)
    count, row = Int32(0), [Int32(0)] * 8
    by_size = select((batch <= HELD_REQUESTS) & (pieces > bundles), Int32(1), Int32(0))
    first_slot = bundle_row * (RING * bundles + MOST_PIECES - 1)
    if (part < bundles) & (part < pieces):
        rounds = Int32(Uint32(pieces) // Uint32(bundles))
        count = rounds + select(number_of(part, rounds, bundles) < pieces, Int32(1), Int32(0))
        found = find_piece(b, (bundled, by_size, whole), part, Int32(0), Int32(0))
        row = row_of(b, found, part, Bundle(part, bundles, bundle_row, first_slot, whole))
    at = cute.arch.lane_idx()
    words = pack(at, [bundled, Int32(-1), count, Int32(0), row[3]], BUNDLED, Int32(0))
    words = pack(at, [part, bundles, bundle_row, first_slot, by_size, whole], PART, words)
    return pack(at, row, 0, words)


@cute.jit
def next_piece(b: Batch, words: Int32, index: Int32, last: Before) -> Int32:
    """The plan row of a worker's piece `index` from its words, behind the piece `last`."""
    part, bundles, bundle_row, first_slot, by_size, whole, bundled = [
        cute.arch.shuffle_sync(words, i)
        for i in (PART, BUNDLES, BUNDLE_ROW, FIRST_SLOT, BY_SIZE, WHOLE, BUNDLED)
    ]
    row = words
    if index > 0:
        number = number_of(part, index, bundles)
        base, before = Int32(0), Int32(0)
        if b.seq_lens.shape[0] > HELD_REQUESTS:
            base = last.request
            earlier = number_of(part, index - 1, bundles)
            run = select(whole == 1, Int32(1), last.num_splits)
            before = earlier - (last.row_tile - bundle_row) * run - last.split
        found = find_piece(b, (bundled, by_size, whole), number, base, before)
        bundle = Bundle(part, bundles, bundle_row, first_slot, whole)
        row = pack(cute.arch.lane_idx(), row_of(b, found, number, bundle), 0, Int32(-1))
    return row
