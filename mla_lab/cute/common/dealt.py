"""The rule of `plan.dealt` on the device, by one warp; names and numbers are those of that module.

A lane holds HELD requests as in `common.self_schedule`. Their costs are sorted in registers, and
the pieces stored by rank where the CTA keeps its words, since any bundle may take any rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...plan.dealt import (
    GAIN,
    LEAST,
    MOST_PIECES,
    MOST_ROUNDS,
    MOST_SPLITS,
    MOST_TARGET,
    SPLIT,
    TRIED,
    WHOLE,
)
from .ptx_sm90 import load_lasting, load_where, small_quotient, store_relaxed
from .self_schedule import (
    BUNDLED,
    HELD,
    MIDDLE,
    REST,
    WORDS,
    Batch,
    Requests,
    Totals,
    blocks_of,
    ceil_by,
    pack,
    scan,
    select,
    total,
)

#: bits of the number of pieces or of a piece, and of it with a request above; above them what the
#: cost lacks of MOST_COST, so that words rise where costs fall
PIECE_BITS, ITEM_BITS, MOST_COST = 9, 17, (1 << 14) - 1
PIECE, REQUEST = (1 << PIECE_BITS) - 1, (1 << (ITEM_BITS - PIECE_BITS)) - 1
#: bits of a bundle's number, below its load
BUNDLE_BITS = 8
#: of a lane's place without a request, behind all others: no pieces
NONE = 0x7FFFFFFF - PIECE
#: lanes that stand for one round each, in `dealt_words`
ROUNDS = 1 | 1 << WORDS | sum(1 << lane for lane in range(MIDDLE, MIDDLE + MOST_ROUNDS - 2))


@dataclass(frozen=True)
class Dealt:
    """What was dealt: the target, or 0 where nothing was, how many pieces, and the rank of the
    worker's bundle in the last round."""

    target: Int32
    pieces: Int32
    last: Int32


def pieces_for(blocks: Int32, target: Int32) -> Int32:
    """Pieces of an item."""
    split = cutlass.max(ceil_by(target - SPLIT)(blocks), Int32(2))
    return select(blocks + WHOLE <= target, Int32(1), split)


@cute.jit
def cost_of(r: Requests, target: Int32):
    """What all pieces cost for a target, before their blocks are rounded up."""
    cost = Int32(0)
    for c in cutlass.range_constexpr(HELD):
        pieces = pieces_for(r.blocks[c], target)
        own = select(pieces == 1, Int32(WHOLE), pieces * SPLIT)
        cost = cost + select(r.tiles[c] > 0, r.blocks[c] + own, Int32(0))
    return total(cost)


@cute.jit
def make_keys(r: Requests, target: Int32):
    """Cost, request and number of pieces of each item, into `r.sizes`; returns the most pieces of
    a lane's item, and what all cost, before their blocks are rounded up."""
    total_cost, most, first = Int32(0), Int32(0), cute.arch.lane_idx() * HELD
    for c in cutlass.range_constexpr(HELD):
        blocks, pieces = r.blocks[c], pieces_for(r.blocks[c], target)
        own = select(pieces == 1, Int32(WHOLE), Int32(SPLIT))
        key = (MOST_COST - own - ceil_by(pieces)(blocks)) << ITEM_BITS
        key = key | (first + c) << PIECE_BITS | pieces
        there = r.tiles[c] > 0
        r.sizes[c] = select(there, key, Int32(NONE))
        total_cost = total_cost + select(there, blocks + pieces * own, Int32(0))
        most = cutlass.max(most, r.sizes[c] & PIECE)
    return most, total(total_cost)


def exchange(keys: cute.Tensor, a: int, b: int) -> None:
    """The lower of two of a lane's keys first."""
    low, high = cutlass.min(keys[a], keys[b]), cutlass.max(keys[a], keys[b])
    keys[a], keys[b] = low, high


@cute.jit
def merge_in_lane(keys: cute.Tensor, size: int, alternate: bool):
    """Runs of `size` keys, which rise and then fall, into rising order; every second one into
    falling order, if they `alternate`."""
    for step in cutlass.range_constexpr(size.bit_length() - 1):
        apart = size >> (step + 1)
        for c in cutlass.range_constexpr(HELD):
            if cutlass.const_expr(c & apart == 0):
                falls = alternate and c & size != 0
                exchange(keys, c + apart * falls, c + apart * (not falls))


@cute.jit
def sort(keys: cute.Tensor):
    """Keys of the warp, HELD a lane, into rising order (Batcher's bitonic sort): runs of 2, 4, ...
    keys rise and fall by turns. Of a falling run all bits are turned over meanwhile."""
    lane, held = cute.arch.lane_idx(), HELD.bit_length() - 1
    for log2 in cutlass.range_constexpr(1, held):
        merge_in_lane(keys, 1 << log2, True)
    for log2 in cutlass.range(held, held + 6, unroll=1):
        turned = select((lane >> (log2 - held) & 1) == 1, Int32(-1), Int32(0))
        for c in cutlass.range_constexpr(HELD):
            keys[c] = keys[c] ^ turned
        for step in cutlass.range(1, log2 - held + 1, unroll=1):
            bit = Int32(1) << (log2 - held - step)
            for c in cutlass.range_constexpr(HELD):
                other = cute.arch.shuffle_sync_bfly(keys[c], bit)
                low, high = cutlass.min(keys[c], other), cutlass.max(keys[c], other)
                keys[c] = select((lane & bit) == 0, low, high)
        merge_in_lane(keys, HELD, False)
        for c in cutlass.range_constexpr(HELD):
            keys[c] = keys[c] ^ turned


@cute.jit
def rank_pieces(keys: cute.Tensor, most: Int32, scratch: cute.Pointer):
    """Store each piece by its rank: its item's key with its number in place of that of pieces;
    returns how many there are, up to MOST_PIECES of which are stored. `most`: pieces of a lane's
    item."""
    sort(keys)
    mine = Int32(0)
    for c in cutlass.range_constexpr(HELD):
        mine = mine + (keys[c] & PIECE)
    begin, pieces = scan(mine) - mine, total(mine)
    if pieces <= MOST_PIECES:
        for split in cutlass.range(most, unroll=1):
            place = scratch + (begin + split)
            for c in cutlass.range_constexpr(HELD):
                if split < (keys[c] & PIECE):
                    store_relaxed(place, (keys[c] & ~PIECE) | split)
                place = place + (keys[c] & PIECE)
    cute.arch.sync_warp()
    return pieces


def rank_of(part: Int32, turn: Int32, bundles: Int32) -> Int32:
    """The rank that a bundle takes in a round."""
    return turn * bundles + select((turn & 1) == 1, bundles - 1 - part, part)


def cost_of_rank(pieces: Int32, rank: Int32, there, scratch: cute.Pointer) -> Int32:
    """Cost of the piece of a rank, 0 where there is none."""
    left = select(there, pieces - rank, Int32(0))
    word = load_where(scratch + rank, 0, left, 0)
    return select(word > 0, MOST_COST - (word >> ITEM_BITS), Int32(0))


@cute.jit
def greatest_load(pieces: Int32, part: Int32, bundles: Int32, scratch: cute.Pointer):
    """Of any bundle, a lane adding up every 32nd one, all words of a round in one latency; and the
    rank of bundle `part` in the last round."""
    lane, loads = cute.arch.lane_idx(), cute.make_rmem_tensor(HELD, Int32)
    loads.fill(0)
    rounds = Int32(Uint32(pieces + bundles - 1) // Uint32(bundles))
    by_load = rounds > 2
    for turn in cutlass.range(rounds - select(by_load, Int32(1), Int32(0)), unroll=1):
        for c in cutlass.range_constexpr(HELD):
            bundle = lane + 32 * c
            rank = rank_of(bundle, turn, bundles)
            loads[c] = loads[c] + cost_of_rank(pieces, rank, bundle < bundles, scratch)
    last = rank_of(part, rounds - 1, bundles)
    if by_load:
        last = Int32(0)
        for c in cutlass.range_constexpr(HELD):
            bundle = lane + 32 * c
            loads[c] = select(bundle < bundles, loads[c] << BUNDLE_BITS | bundle, Int32(NONE))
        sort(loads)
        for c in cutlass.range_constexpr(HELD):
            there, bundle = loads[c] < NONE, loads[c] & ((1 << BUNDLE_BITS) - 1)
            rank = (rounds - 1) * bundles + lane * HELD + c
            last = select(there & (bundle == part), rank, last)
            cost = cost_of_rank(pieces, rank, there, scratch)
            loads[c] = select(there, (loads[c] >> BUNDLE_BITS) + cost, Int32(0))
        last = Int32(cute.arch.warp_redux_sync(last, "max"))
    most = loads[0]
    for c in cutlass.range_constexpr(1, HELD):
        most = cutlass.max(most, loads[c])
    return Int32(cute.arch.warp_redux_sync(most, "max")), last


@cute.jit
def first_target(t: Totals, bundles: Int32, price: Int32, r: Requests):
    """The first target that is tried, 0 where there is none."""
    least = Int32(Uint32(t.work + WHOLE * t.items + bundles - 1) // Uint32(bundles))
    least = cutlass.max(least, LEAST)
    between = Int32(Uint32(cost_of(r, least) + bundles - 1) // Uint32(bundles))
    between = (least + cutlass.max(least, between)) >> 1
    first = Int32(Uint32(cost_of(r, between) + bundles - 1) // Uint32(bundles))
    first = cutlass.max(least, first)
    there = (least <= MOST_TARGET) & (GAIN * (price - first) >= price)
    return select(there, first, Int32(0))


@cute.jit
def deal(t: Totals, place: tuple, price: Int32, r: Requests, scratch: cute.Pointer) -> Dealt:
    """Pieces of the only group of requests, stored by rank for the target that was dealt last; no
    target where they cost `price` or more. `place` as of `dealt_words`."""
    part, bundles, _, _ = place
    target = first_target(t, bundles, price, r)
    end, dealt, load = select(target > 0, target + TRIED, Int32(0)), *[Int32(0)] * 2
    pieces, last = Int32(0), Int32(0)
    while target < end:
        most, cost = make_keys(r, target)
        most = Int32(cute.arch.warp_redux_sync(most, "max"))
        if cost <= bundles * target:
            dealt, load = target, Int32(0)
            if most <= MOST_SPLITS:
                pieces = rank_pieces(r.sizes, most, scratch)
                if pieces <= cutlass.min(MOST_ROUNDS * bundles, MOST_PIECES):
                    load, last = greatest_load(pieces, part, bundles, scratch)
            enough = select(t.items > bundles, price - 1, target)
            end = select(load <= enough, target, end)
        target = target + 1
    return Dealt(select((load > 0) & (load < price), dealt, Int32(0)), pieces, last)


@cute.jit
def dealt_words(b: Batch, d: Dealt, place: tuple, scratch: cute.Pointer) -> Int32:
    """The words of a worker's tiles; `place`: its bundle, of how many, its row tile, of how many.
    Eight lanes each have the pieces of rounds 0 and 1, one each those of later ones."""
    part, bundles, row_tile, row_tiles = place
    lane = cute.arch.lane_idx()
    turn = select(lane < 2 * WORDS, lane // WORDS, lane - (MIDDLE - 2))
    rounds = Int32(Uint32(d.pieces + bundles - 1) // Uint32(bundles))
    rank = select(turn + 1 == rounds, d.last, rank_of(part, turn, bundles))
    there = (part < bundles) & (turn >= 0) & (lane != MIDDLE - 1) & (lane != MIDDLE - 2)
    left = select(there, d.pieces - rank, Int32(0))
    word = load_where(scratch + rank, 0, left, 0)
    request, split = (word >> PIECE_BITS) & REQUEST, word & PIECE
    kv_len = load_lasting(b.seq_lens.iterator + request)
    blocks = blocks_of(kv_len)
    pieces = pieces_for(blocks, d.target)
    # blocks * split // pieces, without a long division
    each = small_quotient(blocks, pieces)
    rest = blocks - each * pieces
    begin, end = [each * j + small_quotient(rest * j, pieces) for j in (split, split + 1)]
    slot = row_tile * (2 * bundles) + rank
    group = ((rank - split) >> 1) * row_tiles + row_tile
    if pieces == 1:
        end, slot, group = Int32(REST), Int32(-1), Int32(-1)
    row, words = [request, row_tile, begin, end, split, pieces, slot, group], request
    for i, value in enumerate(row):
        words = select((lane < 2 * WORDS) & (lane % WORDS == i), value, words)
    words = select(left > 0, words, Int32(-1))
    there = cute.arch.vote_ballot_sync(left > 0)
    first = cutlass.min(cute.arch.shuffle_sync(end, 0), cute.arch.shuffle_sync(blocks, 0))
    count = Int32(cute.arch.popc(Uint32(there) & ROUNDS))
    cute.arch.sync_warp()  # lengths are kept where the ranks were
    return pack(lane, [Int32(1), Int32(-1), count, Int32(0), first, Int32(0)], BUNDLED, words)
