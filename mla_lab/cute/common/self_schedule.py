"""The rule of `plan.self_schedule` on the device: a warp finds its worker's tiles from seq_lens.

The lane l of a warp holds requests l, l + 32, ... of a group of 256, so that all lengths of up to
256 requests are loaded in one latency; a larger batch takes the groups one after the other, twice.
Names and numbers are those of the Python module, which is the definition.

What is found fits into one register a lane:

| lanes | word |
|---|---|
| 0 .. 7 | the plan row of the worker's first tile |
| 8 .. 15 | that of its last tile where a cut ends it, else -1 in lane 8 |
| 16 | 1 where row tiles lie beside each other (`bundled`) |
| 17 | the first row in a plan in memory, -1 where the tiles follow from the rule |
| 18 | number of tiles |
| 19 | 0, the first tile's index, which no compiler may know: that would cost registers |

All tiles between are whole. A plan row's words are those of `plan.tile.WorkTile`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...plan.gate import LONG, LONGEST_BLOCKS, WORKERS
from ...plan.self_schedule import LARGE, LEAST, LEAST_EVEN, SNAP, STEPS

#: words of a plan row
WORDS = 8
#: `block_end` of a tile that ends where the keys end
REST = 0x7FFFFFFF
BUNDLED, PLAN_ROW, COUNT, FIRST = 16, 17, 18, 19
#: requests that a lane holds at once
HELD = 8
GROUP = 32 * HELD
BLOCK = 64


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


@dataclass(frozen=True)
class Plan:
    """A worker's tiles: indices [first, last), and the words of the module's table."""

    first: Int32
    last: Int32
    words: Int32


@dataclass(frozen=True)
class Totals:
    """Of a batch: `tiles` items of `work` blocks in all, the longest of `longest`; `keys` are the
    blocks of its requests."""

    tiles: Int32
    work: Int32
    longest: Int32
    bundled: Int32
    row_tiles: Int32
    keys: Int32


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


@dataclass(frozen=True)
class Chunk:
    """32 requests from `base` on, one a lane; `before` lies on the line ahead of them, `items`
    items."""

    base: Int32
    before: Int32
    items: Int32
    blocks: Int32
    tiles: Int32


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
def gate_open(gate: Int32, blocks: Int32, longest: Int32):
    """Whether a launch with this gate takes a batch of so many blocks, the longest request of
    `longest` (see `plan.gate`)."""
    least = gate
    if gate < 0:
        least = -gate
    many = blocks >= least
    if least == LONG:
        many = cutlass.min(longest, blocks // WORKERS) > LONGEST_BLOCKS
    return (gate == 0) | ((gate > 0) & (not many)) | ((gate < 0) & many)


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


@cute.jit
def load_group(b: Batch, base: Int32, blocks: cute.Tensor, tiles: cute.Tensor):
    """Blocks and row tiles of requests [base, base + 256), 0 row tiles past the batch."""
    batch = b.seq_lens.shape[0]
    lane = cute.arch.lane_idx()
    for c in cutlass.range_constexpr(HELD):
        blocks[c] = b.seq_lens[cutlass.min(base + 32 * c + lane, batch - 1)]
        tiles[c] = b.q_len
    if b.q_len == 0:
        for c in cutlass.range_constexpr(HELD):
            at = cutlass.min(base + 32 * c + lane, batch - 1)
            tiles[c] = b.q_begin[at + 1] - b.q_begin[at]
    for c in cutlass.range_constexpr(HELD):
        rows = tiles[c] * b.heads
        there = base + 32 * c + lane < batch
        tiles[c] = select(there, row_tiles_of(b, rows), Int32(0))
        blocks[c] = cutlass.max((blocks[c] + BLOCK - 1) // BLOCK, 1)


def row_tiles_of(b: Batch, rows: Int32) -> Int32:
    """Row tiles of so many rows."""
    return (rows + b.tile_rows - 1) // b.tile_rows


@cute.jit
def totals_of(b: Batch, blocks: cute.Tensor, tiles: cute.Tensor) -> Totals:
    """First pass; leaves the last group in `blocks` and `tiles`."""
    batch = b.seq_lens.shape[0]
    lane = cute.arch.lane_idx()
    items, work, longest = Int32(0), Int32(0), Int32(1)
    most, least, keys = Int32(0), Int32(REST), Int32(0)
    for base in cutlass.range(0, batch, GROUP, unroll=1):
        load_group(b, base, blocks, tiles)
        for c in cutlass.range_constexpr(HELD):
            items = items + tiles[c]
            work = work + tiles[c] * blocks[c]
            longest = select(tiles[c] > 0, cutlass.max(longest, blocks[c]), longest)
            most = cutlass.max(most, tiles[c])
            there = base + 32 * c + lane < batch
            least = select(there, cutlass.min(least, tiles[c]), least)
            keys = keys + select(there, blocks[c], Int32(0))
    items, work = total(items), total(work)
    longest = Int32(cute.arch.warp_redux_sync(longest, "max"))
    most = Int32(cute.arch.warp_redux_sync(most, "max"))
    least = Int32(cute.arch.warp_redux_sync(least, "min"))
    row_tiles, bundled = Int32(1), Int32(0)
    if (most == least) & (most > 0) & (most <= b.workers):
        row_tiles, bundled = most, Int32(1)
        items, work = Int32(batch), Int32(Uint32(work) // Uint32(most))
    return Totals(items, work, longest, bundled, row_tiles, total(keys))


@cute.jit
def even_size(
    b: Batch, t: Totals, bundles: Int32, blocks: cute.Tensor, tiles: cute.Tensor
) -> Int32:
    """L of even pieces, from the only group of requests."""
    batch = b.seq_lens.shape[0]
    low = cutlass.max((t.work + bundles - 1) // bundles, LEAST_EVEN)
    high = t.longest
    room = bundles - t.tiles
    if room > 0:
        high = cutlass.min(high, (t.work - t.tiles + room - 1) // room)
    high = cutlass.max(low, high)
    step = Int32(0)
    while (low < high) & (step < STEPS):
        middle = (low + high) >> 1
        count = Int32(0)
        for c in cutlass.range_constexpr(HELD):
            if 32 * c < batch:
                mine = select(t.bundled == 1, cutlass.min(tiles[c], 1), tiles[c])
                pieces = Uint32(blocks[c] + middle - 1) // Uint32(middle)
                count = count + mine * Int32(pieces)
        if total(count) <= bundles:
            high = middle
        else:
            low = middle + 1
        step = step + 1
    return high


@cute.jit
def even_length(b: Batch, t: Totals, even: Int32, blocks: cute.Tensor, tiles: cute.Tensor) -> Int32:
    """How many even pieces there are."""
    count = Int32(0)
    for c in cutlass.range_constexpr(HELD):
        if 32 * c < b.seq_lens.shape[0]:
            mine = select(t.bundled == 1, cutlass.min(tiles[c], 1), tiles[c])
            count = count + mine * Int32(Uint32(blocks[c] + even - 1) // Uint32(even))
    return total(count)


@cute.jit
def line_of(b: Batch, t: Totals, bundles: Int32, blocks: cute.Tensor, tiles: cute.Tensor) -> Line:
    """Whole items, even pieces or shares of the cost line, whichever is priced lowest."""
    piece, merge = b.costs & 255, (b.costs >> 8) & 255
    length = t.work + t.tiles * piece
    parts = cutlass.max(cutlass.min(bundles, length // LEAST), 1)
    price = (length + parts - 1) // parts + piece + merge
    turns = (t.tiles + bundles - 1) // bundles
    even = Int32(0)
    if (t.tiles > 0) & (turns == 1) & (b.seq_lens.shape[0] <= GROUP) & (length < LARGE):
        if t.longest > merge:
            even = even_size(b, t, bundles, blocks, tiles)
            if even + piece + merge <= price:
                price = even + piece + merge
            else:
                even = Int32(0)
    whole = select(turns * (t.longest + piece) <= price, Int32(1), Int32(0))
    shift = select((length >= LARGE) & (whole == 0), Int32(8), Int32(0))
    if whole == 1:
        length, parts, even = t.tiles, bundles, Int32(0)
    if even > 0:
        length = even_length(b, t, even, blocks, tiles)
        parts = length
    return Line(Uint32(length), Uint32(parts), shift, whole, even, piece, t.bundled)


@cute.jit
def size_of(line: Line, blocks: Int32) -> Int32:
    """What an item takes of the line."""
    size = select(line.whole == 1, Int32(1), blocks + line.piece)
    if line.even > 0:
        size = Int32(Uint32(blocks + line.even - 1) // Uint32(line.even))
    return size


@cute.jit
def place_of(line: Line, cut: Int32) -> Int32:
    """Where cut `cut` lies on the line: cut * length / parts, in whole steps of 2**shift."""
    place = Uint32(cut) * (line.length >> line.shift) // line.parts
    return select(Uint32(cut) < line.parts, Int32(place) << line.shift, Int32(line.length))


@cute.jit
def find_chunks(
    b: Batch, line: Line, blocks: cute.Tensor, tiles: cute.Tensor, one: Int32, other: Int32
):
    """Second pass: the chunks of 32 requests in which two places of the line lie."""
    batch = b.seq_lens.shape[0]
    before, items = Int32(0), Int32(0)
    found = [[Int32(0)] * 5, [Int32(0)] * 5]
    base0, before0, items0, blocks0, tiles0 = found[0]
    base1, before1, items1, blocks1, tiles1 = found[1]
    for base in cutlass.range(0, batch, GROUP, unroll=1):
        if batch > GROUP:
            load_group(b, base, blocks, tiles)
        for c in cutlass.range_constexpr(HELD):
            mine = select(line.bundled == 1, cutlass.min(tiles[c], 1), tiles[c])
            cost = mine * size_of(line, blocks[c])
            after = before + total(cost)
            if (before <= one) & (one < after):
                base0, before0, items0 = base + 32 * c, before, items
                blocks0, tiles0 = blocks[c], mine
            if (before <= other) & (other < after):
                base1, before1, items1 = base + 32 * c, before, items
                blocks1, tiles1 = blocks[c], mine
            before = after
            items = items + total(mine)
    return (
        Chunk(base0, before0, items0, blocks0, tiles0),
        Chunk(base1, before1, items1, blocks1, tiles1),
    )


@cute.jit
def cut_at(line: Line, chunk: Chunk, place: Int32) -> Cut:
    """The cut at a place of the line that lies in `chunk`, moved to an item's end nearby."""
    size = size_of(line, chunk.blocks)
    cost = chunk.tiles * size
    upto = chunk.before + scan(cost)
    beyond = Uint32(cute.arch.vote_ballot_sync(upto > place))
    owner = Int32(cute.arch.popc((beyond - 1) & ~beyond))
    items = cute.arch.shuffle_sync(scan(chunk.tiles) - chunk.tiles, owner) + chunk.items
    start = cute.arch.shuffle_sync(upto - cost, owner)
    blocks = cute.arch.shuffle_sync(chunk.blocks, owner)
    size = cute.arch.shuffle_sync(size, owner)
    row_tile = Int32(Uint32(place - start) // Uint32(size))
    start = start + row_tile * size
    block = select(line.whole == 1, Int32(0), place - start - line.piece)
    if block <= SNAP:
        block = Int32(0)
    elif blocks - block <= SNAP:
        block = blocks
    request = chunk.base + owner
    return Cut(request, row_tile, items + row_tile, block, start, size, blocks)


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
    """The item behind row tile `row_tile` of `request`."""
    if bundled == 1:
        request = request + 1
    else:
        row_tile = row_tile + 1
        left = row_tiles_of(b, (b.q_begin[request + 1] - b.q_begin[request]) * b.heads) - row_tile
        while left <= 0:
            request = request + 1
            row_tile = Int32(0)
            left = b.q_begin[request + 1] - b.q_begin[request]
    return request, row_tile


@cute.jit
def find_work(b: Batch, worker: Int32) -> Plan:
    """The worker's tiles by the rule; by one warp."""
    lane = cute.arch.lane_idx()
    blocks, tiles = cute.make_rmem_tensor(HELD, Int32), cute.make_rmem_tensor(HELD, Int32)
    t = totals_of(b, blocks, tiles)
    bundles = Int32(Uint32(b.workers) // Uint32(t.row_tiles))
    part = Int32(Uint32(worker) // Uint32(t.row_tiles))
    bundle_row = worker - part * t.row_tiles
    line = line_of(b, t, bundles, blocks, tiles)
    begin, end = place_of(line, part), place_of(line, part + 1)
    one, other = find_chunks(b, line, blocks, tiles, begin, end)
    at, to = cut_at(line, one, begin), cut_at(line, other, end)
    slots = bundle_row * (2 * bundles)
    # the first tile
    request, row_tile, item, start = at.request, at.row_tile, at.item, at.block
    if (start == at.blocks) & (line.even == 0):
        request, row_tile = next_item(b, t.bundled, request, row_tile)
        item, start = item + 1, Int32(0)
    from_part, pieces = pieces_of(line, at)
    first = [start, Int32(REST), Int32(0), Int32(1), Int32(-1), Int32(-1)]
    if start > 0:
        first = [
            start, Int32(REST), part - from_part, pieces, slots + from_part + part,
            from_part * t.row_tiles + bundle_row,
        ]  # fmt: skip
    # the last one, and how many there are
    inside, past = to.block, to.item
    if end >= Int32(line.length):
        inside, past = Int32(0), t.tiles
    elif inside == to.blocks:
        inside, past = Int32(0), past + 1
    count = past - item
    to_part, to_pieces = pieces_of(line, to)
    last = [Int32(-1)] * 8
    if inside > 0:
        count = count + 1
        begins = select(count == 1, start, Int32(0))
        last = [
            to.request, select(t.bundled == 1, bundle_row, to.row_tile), begins, inside,
            part - to_part, to_pieces, slots + to_part + part,
            to_part * t.row_tiles + bundle_row,
        ]  # fmt: skip
    if line.even > 0:
        first = even_tile(line, at, part, at.start * t.row_tiles + bundle_row, slots)
        count, inside, last = Int32(1), Int32(0), [Int32(-1)] * 8
    if (begin >= Int32(line.length)) | (part >= bundles):
        count = Int32(0)
    if not gate_open(b.costs >> 16, t.keys, t.longest):
        count = Int32(0)
    first = [request, select(t.bundled == 1, bundle_row, row_tile), *first]
    if (count == 1) & (inside > 0):
        first = last
    words = pack(lane, [t.bundled, Int32(-1), count], BUNDLED, Int32(0))
    words = pack(lane, first, 0, pack(lane, last, WORDS, words))
    return Plan(Int32(0), count, words)
