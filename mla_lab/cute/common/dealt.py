"""The rule of `plan.dealt` on the device, by one warp; names and numbers are those of that module.

A lane holds HELD requests as in `common.self_schedule`. Their costs are sorted in registers, and
the pieces stored by rank where the CTA keeps its words, since any bundle may take any rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ...plan.dealt import (
    LEAST,
    MOST_PIECES,
    MOST_ROUNDS,
    MOST_TARGET,
    SEARCHED,
    SPLIT,
    TRIED,
    WHOLE,
)
from .ptx_sm90 import div_pow2, load_relaxed, load_where, store_relaxed
from .self_schedule import (
    BLOCK,
    BUNDLED,
    HELD,
    MIDDLE,
    REST,
    Batch,
    Requests,
    Totals,
    pack,
    scan,
    select,
    total,
)

#: bits of the number of pieces or of a piece, and of it with a request above; above them a cost, in
#: keys as what it lacks of MOST_COST, so that they rise where costs fall
PIECE_BITS, ITEM_BITS, MOST_COST = 9, 17, (1 << 14) - 1
PIECE, REQUEST = (1 << PIECE_BITS) - 1, (1 << (ITEM_BITS - PIECE_BITS)) - 1
#: key of a lane's place without a request, behind all others
NONE = 0x7FFFFFFF


@dataclass(frozen=True)
class Dealt:
    """What was dealt: the target, or 0 where nothing was, the greatest load, and the pieces."""

    target: Int32
    load: Int32
    pieces: Int32


def upwards(divisor: Int32) -> tuple[Float32, Float32]:
    """Factors of `ceil_of`."""
    inverse = Float32(cute.arch.rcp_approx(Float32(divisor)))
    return inverse, Float32(1.0) - Float32(0.5) * inverse


def ceil_of(blocks: Int32, factors: tuple[Float32, Float32]) -> Int32:
    """ceil(blocks / divisor), exact as in `self_schedule.even_pieces`."""
    return Int32(Float32(blocks) * factors[0] + factors[1])


def pieces_for(blocks: Int32, target: Int32, factors: tuple[Float32, Float32]) -> Int32:
    """Pieces of an item; `factors` of target - SPLIT."""
    split = cutlass.max(ceil_of(blocks, factors), Int32(2))
    return select(blocks + WHOLE <= target, Int32(1), split)


@cute.jit
def cost_of(r: Requests, target: Int32):
    """What all pieces cost, before their blocks are rounded up."""
    factors, cost = upwards(target - SPLIT), Int32(0)
    for c in cutlass.range_constexpr(HELD):
        pieces = pieces_for(r.blocks[c], target, factors)
        own = r.blocks[c] + select(pieces == 1, Int32(WHOLE), pieces * SPLIT)
        cost = cost + select(r.tiles[c] > 0, own, Int32(0))
    return total(cost)


@cute.jit
def sort(keys: cute.Tensor):
    """Keys of the warp, HELD a lane, into rising order (Batcher's bitonic sort)."""
    lane, held = cute.arch.lane_idx(), HELD.bit_length() - 1
    for log2 in cutlass.range(1, held + 6, unroll=1):
        # runs of `size` keys rise and fall by turns
        size = Int32(1) << log2
        falls = ((lane * HELD) & size) != 0
        for step in cutlass.range(1, log2 - held + 1, unroll=1):
            bit = (size >> step) // HELD
            lower = (lane & bit) == 0
            for c in cutlass.range_constexpr(HELD):
                other = cute.arch.shuffle_sync_bfly(keys[c], bit)
                low, high = cutlass.min(keys[c], other), cutlass.max(keys[c], other)
                keys[c] = select(lower != falls, low, high)
        for step in cutlass.range_constexpr(held):
            apart = HELD >> (step + 1)
            if apart < size:
                for c in cutlass.range_constexpr(HELD):
                    if cutlass.const_expr(c & apart == 0):
                        a, b = keys[c], keys[c + apart]
                        falls_here = ((lane * HELD + c) & size) != 0
                        low, high = cutlass.min(a, b), cutlass.max(a, b)
                        keys[c] = select(falls_here, high, low)
                        keys[c + apart] = select(falls_here, low, high)


@cute.jit
def rank_pieces(r: Requests, target: Int32, scratch: cute.Pointer):
    """Store cost, number in its item and request of each piece by its rank; returns how many there
    are. `r.sizes` are overwritten."""
    lane, factors = cute.arch.lane_idx(), upwards(target - SPLIT)
    keys = r.sizes
    for c in cutlass.range_constexpr(HELD):
        pieces = pieces_for(r.blocks[c], target, factors)
        whole, split = r.blocks[c] + WHOLE, ceil_of(r.blocks[c], upwards(pieces)) + SPLIT
        cost = select(pieces == 1, whole, split)
        key = (MOST_COST - cost) << ITEM_BITS | (lane * HELD + c) << PIECE_BITS | pieces
        keys[c] = select(r.tiles[c] > 0, key, Int32(NONE))
    sort(keys)
    mine, most = Int32(0), Int32(0)
    for c in cutlass.range_constexpr(HELD):
        pieces = item_pieces(keys[c])
        mine, most = mine + pieces, cutlass.max(most, pieces)
    upto = scan(mine)
    most = Int32(cute.arch.warp_redux_sync(most, "max"))
    cute.arch.sync_warp()  # what was stored for another target has been read
    for split in cutlass.range(most, unroll=1):
        rank = upto - mine
        for c in cutlass.range_constexpr(HELD):
            pieces = item_pieces(keys[c])
            cost = MOST_COST - (keys[c] >> ITEM_BITS)
            request = keys[c] & (REQUEST << PIECE_BITS)
            if (split < pieces) & (rank + split < MOST_PIECES):
                word = cost << ITEM_BITS | request | split
                store_relaxed(scratch + (rank + split), word)
            rank = rank + pieces
    cute.arch.sync_warp()
    return cute.arch.shuffle_sync(upto, 31)


def item_pieces(key: Int32) -> Int32:
    """Pieces of a key's item, 0 of none."""
    return select(key == NONE, Int32(0), key & PIECE)


def rank_of(part: Int32, turn: Int32, bundles: Int32) -> Int32:
    """The rank that a bundle takes in a round."""
    return turn * bundles + select((turn & 1) == 1, bundles - 1 - part, part)


@cute.jit
def greatest_load(pieces: Int32, bundles: Int32, scratch: cute.Pointer):
    """Of any bundle, a lane adding up every 32nd one."""
    lane, loads = cute.arch.lane_idx(), cute.make_rmem_tensor(HELD, Int32)
    for c in cutlass.range_constexpr(HELD):
        loads[c] = Int32(0)
    rounds = Int32(Uint32(pieces + bundles - 1) // Uint32(bundles))
    for turn in cutlass.range(rounds, unroll=1):
        for c in cutlass.range_constexpr(HELD):
            part = lane + 32 * c
            rank = rank_of(part, turn, bundles)
            left = select(part < bundles, pieces - rank, Int32(0))
            loads[c] = loads[c] + (load_where(scratch + rank, 0, left, 0) >> ITEM_BITS)
    most = loads[0]
    for c in cutlass.range_constexpr(1, HELD):
        most = cutlass.max(most, loads[c])
    return Int32(cute.arch.warp_redux_sync(most, "max"))


@cute.jit
def deal(t: Totals, bundles: Int32, r: Requests, scratch: cute.Pointer) -> Dealt:
    """Pieces of the only group of requests, stored by rank for the target that was tried last."""
    least = Int32(Uint32(t.work + WHOLE * t.items + bundles - 1) // Uint32(bundles))
    target = cutlass.max(least, LEAST)
    end, found = target + SEARCHED, Int32(0)
    while (found == 0) & (target < end) & (target <= MOST_TARGET):
        found = select(cost_of(r, target) <= bundles * target, Int32(1), Int32(0))
        target = target + 1
    end = target + select(t.items <= bundles, Int32(TRIED), Int32(1))
    load, pieces = Int32(REST), Int32(0)
    while (found == 1) & (target < end):
        pieces = rank_pieces(r, target, scratch)
        if (pieces <= MOST_PIECES) & (pieces <= MOST_ROUNDS * bundles):
            load = greatest_load(pieces, bundles, scratch)
        else:
            found, load = Int32(0), Int32(0)
        end = select(load <= target, target, end)
        target = target + 1
    return Dealt(select(found == 1, target - 1, Int32(0)), load, pieces)


@cute.jit
def dealt_words(b: Batch, d: Dealt, place: tuple, scratch: cute.Pointer) -> Int32:
    """The words of a worker's tiles; `place`: its bundle, of how many, its row tile, of how many.
    Lane t has what follows from the piece of round t."""
    part, bundles, row_tile, row_tiles = place
    lane = cute.arch.lane_idx()
    rank = rank_of(part, lane, bundles)
    there = (lane < MOST_ROUNDS) & (part < bundles) & (rank < d.pieces)
    word = load_where(scratch + rank, 0, select(there, Int32(1), Int32(0)), 0)
    request, split = (word >> PIECE_BITS) & REQUEST, word & PIECE
    kv_len = load_relaxed(b.seq_lens.iterator + request)
    blocks = cutlass.max(div_pow2(kv_len + BLOCK - 1, BLOCK), 1)
    pieces = pieces_for(blocks, d.target, upwards(d.target - SPLIT))
    begin, end = [Int32(Uint32(blocks * j) // Uint32(pieces)) for j in (split, split + 1)]
    shared = pieces > 1
    slot = row_tile * (2 * bundles) + rank
    group = ((rank - split) >> 1) * row_tiles + row_tile
    row = [
        request, row_tile, begin, select(shared, end, Int32(REST)), split, pieces,
        select(shared, slot, Int32(-1)), select(shared, group, Int32(-1)),
    ]  # fmt: skip
    words = cute.arch.shuffle_sync(select(there, request, Int32(-1)), (lane - MIDDLE + 2) & 31)
    for i, value in enumerate(row):
        of_round = cute.arch.shuffle_sync(select(there, value, Int32(-1)), (lane >> 3) & 1)
        words = select((lane < 16) & ((lane & 7) == i), of_round, words)
    count = total(select(there, Int32(1), Int32(0)))
    first_end = cute.arch.shuffle_sync(end, 0)
    return pack(lane, [Int32(1), Int32(-1), count, Int32(0), first_end, Int32(0)], BUNDLED, words)
