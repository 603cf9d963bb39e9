"""A worker's tiles from lengths alone, by one warp and the rule of `plan.self_schedule`: the words
of the table in `common.self_schedule`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...plan.self_schedule import LARGE, MOST_EVEN
from .dealt import Dealt, deal, dealt_words
from .ptx_sm90 import load_lasting
from .self_schedule import (
    BUNDLED,
    HELD_REQUESTS,
    REST,
    WORDS,
    Batch,
    Cut,
    Line,
    Requests,
    Totals,
    blocks_of,
    cut_at,
    first_tile,
    line_of,
    pack,
    pieces_of,
    place_of,
    row_tiles_of,
    rows_of,
    select,
    totals_of,
)


@cute.jit
def find_work(b: Batch, worker: Int32, scratch: cute.Pointer) -> Int32:
    """The words of the worker's tiles; `scratch`: 512 words of memory that this CTA alone uses."""
    r = Requests.empty()
    t = totals_of(b, r)
    bundles = Int32(Uint32(b.workers) // Uint32(t.row_tiles))
    part = Int32(Uint32(worker) // Uint32(t.row_tiles))
    place = (part, bundles, worker - part * t.row_tiles, t.row_tiles)
    line = line_of(b, t, bundles, r)
    dealt = Dealt(Int32(0), Int32(0), Int32(0))
    if const_expr(b.deals):
        shares = (line.whole == 0) & (line.even == 0) & (t.bundled == 1)
        small = (b.seq_lens.shape[0] <= HELD_REQUESTS) & (line.length < LARGE)
        small = small & (t.longest <= MOST_EVEN)
        if shares & small:
            dealt = deal(t, place, line.price, r, scratch)
    words = Int32(0)
    if dealt.target > 0:
        words = dealt_words(b, dealt, place, scratch)
    else:
        words = cut_words(b, t, r, line, place)
    return words


@cute.jit
def cut_words(b: Batch, t: Totals, r: Requests, line: Line, place: tuple) -> Int32:
    """The words between two cuts of the line; `place` as of `dealt_words`."""
    part, bundles, bundle_row, row_tiles = place
    slots = bundle_row * (2 * bundles)
    zero = Int32(0)
    to, to_shared = Cut(*[zero] * 7), [zero] * 4
    at, at_shared = to, to_shared
    # both cuts by the same instructions
    begin, end = zero, zero
    for side in cutlass.range(2, unroll=1):
        at, at_shared, begin = to, to_shared, end
        end = place_of(line, part + side)
        to = cut_at(b, line, r, end)
        from_part, pieces = pieces_of(line, to)
        group = from_part * row_tiles + bundle_row
        to_shared = [part - from_part, pieces, slots + from_part + part, group]
    first, item = first_tile(b, line, at, at_shared, part, slots, (bundle_row, row_tiles))
    # the last tile, and how many there are
    inside, past = to.block, to.item
    if end >= Int32(line.length):
        inside, past = Int32(0), t.items
    elif inside == to.blocks:
        inside, past = Int32(0), past + 1
    count = past - item
    last = [Int32(-1)] * 8
    if line.even > 0:
        count, inside = Int32(1), Int32(0)
    if inside > 0:
        count = count + 1
        begins = select(count == 1, first[2], Int32(0))
        row_tile = select(t.bundled == 1, bundle_row, to.row_tile)
        last = [to.request, row_tile, begins, inside, *to_shared]
        if count == 1:
            first = last
    if (begin >= Int32(line.length)) | (part >= bundles):
        count = Int32(0)
    known = select(item == at.item, at.blocks, Int32(REST))
    lane = cute.arch.lane_idx()
    found = [t.bundled, Int32(-1), count, Int32(0), cutlass.min(first[3], known)]
    words = pack(lane, found, BUNDLED, Int32(-1))
    return pack(lane, first, 0, pack(lane, last, WORDS, words))


@cute.jit
def find_work_of_one(b: Batch, worker: Int32) -> Int32:
    """`find_work` for a `single` request, in closed form: its row tiles are one bundle; it is cut
    in even pieces with L = ceil(n / P), at least b.single, also beyond MOST_EVEN blocks, or stays
    whole, with the last bundle."""
    tiles = row_tiles_of(b, rows_of(b, Int32(0)))
    blocks, row_tiles = blocks_of(load_lasting(b.seq_lens.iterator)), cutlass.max(tiles, 1)
    bundles = Int32(Uint32(b.workers) // Uint32(row_tiles))
    part = Int32(Uint32(worker) // Uint32(row_tiles))
    row_tile = worker - part * row_tiles
    even = cutlass.max(Int32(Uint32(blocks + bundles - 1) // Uint32(bundles)), b.single)
    pieces = Int32(Uint32(blocks + even - 1) // Uint32(even))
    pieces = select(even + ((b.costs >> 8) & 255) < blocks, pieces, Int32(1))
    shared = pieces > 1
    split = select(shared, part, part - (bundles - 1))
    there = (tiles > 0) & (part < bundles) & (split >= 0) & (split < pieces)
    count, closed = select(there, Int32(1), Int32(0)), Int32(0)
    if blocks < b.costs >> 16:
        count, closed = Int32(0), Int32(1)
    begin = Int32(Uint32(blocks * split) // Uint32(pieces))
    end = Int32(Uint32(blocks * (split + 1)) // Uint32(pieces))
    slot = select(shared, row_tile * 2 * bundles + part, Int32(-1))
    group = select(shared, row_tile, Int32(-1))
    lane = cute.arch.lane_idx()
    words = pack(lane, [Int32(1), Int32(-1), count, Int32(0), end, closed], BUNDLED, Int32(-1))
    return pack(lane, [Int32(0), row_tile, begin, end, split, pieces, slot, group], 0, words)
