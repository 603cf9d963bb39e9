"""Pieces dealt to bundles by falling cost: the fourth kind of line of `plan.self_schedule`.

Even shares of the cost line give nearly every worker two pieces of requests, each of which costs as
much as SPLIT blocks beside its own. Here requests stay whole unless they are long, and a bundle
gets a long one with a short one.

For a *target* X, an item of n blocks with n + WHOLE <= X stays whole and costs n + WHOLE. Of others
k = max(2, ceil(n / (X - SPLIT))) even pieces are made, which cost ceil(n / k) + SPLIT each. Pieces
stand by falling cost, of equal cost by item and piece; the one in place r has *rank* r. Bundle i of
P takes rank t P + i in round t = 0, 2, ... and rank t P + P - 1 - i in round t = 1, 3, ...; of more
than two rounds the last is taken by rising load, of equal load by bundle.

The cost of all pieces for a target, before their blocks are rounded up, is

    c(X) = sum of n + WHOLE (whole items) + SPLIT (pieces of others),

which does not rise with X. The least target is m = max(LEAST, ceil((sum of n + WHOLE N) / P)).
Targets are tried from max(m, ceil(c(Y) / P)) on, where Y lies halfway between m and
max(m, ceil(c(m) / P)). One with c(X) > P X has no room, and is passed over. TRIED are looked at,
until the greatest load of a bundle is at most X, or for N > P below a price. The last one dealt is
taken, if that load is below the price. None is where an item has more than MOST_SPLITS pieces,
there are more than MOST_ROUNDS rounds or MOST_PIECES pieces, the least target is above MOST_TARGET,
or the first one less than a 1 / GAIN of the price below it.

A piece of a split item costs more than X / 2, and the costs of all pieces are at most P X; so fewer
than 2 P pieces cost as much as such a piece, and each is dealt in round 0 or 1. A bundle walks the
piece of round 0 first, that of round 1 last, and whole items between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: what a piece costs beside its blocks, in the time of one block: of an item that stays whole, and
#: of one that is split, with its partial and its share of the merge. From 50 schedules of ten trace
#: steps with 128 heads, whose times the greatest load of a CTA gives within 1.7 % with 2 and 5
#: (H200, 2026-11-29); a merge of two splits takes 1.2 us less since, about a block's time (H200,
#: 2026-11-30, `data/notes/kernel_attempts.jsonl`)
WHOLE, SPLIT = 2, 4
#: the least target, and how many are looked at
LEAST, TRIED = WHOLE + SPLIT, 3
#: of the least target, so that a piece's cost, its number in its item and the request fit into one
#: int32
MOST_TARGET = 1 << 12
#: rounds of a bundle, whose words a CTA keeps in one register a lane; pieces that it ranks
MOST_ROUNDS, MOST_PIECES = 12, 512
#: pieces of an item, which are stored one after the other; and what may be gained at least, a 16th
#: of the price: steps of long requests gain less, and the search takes 5 us and more of them
MOST_SPLITS, GAIN = 8, 16


@dataclass(frozen=True)
class Dealt:
    """Pieces by rank: int64 [pieces] their item, number in it, and bundle; int64 [items] how many
    an item has. `load` is the greatest cost of a bundle."""

    item: np.ndarray
    split: np.ndarray
    bundle: np.ndarray
    pieces: np.ndarray
    load: int


def pieces_for(blocks: np.ndarray, target: int) -> np.ndarray:
    """Pieces of each item, int64 [items], for a target above SPLIT."""
    split = np.maximum(2, -(-blocks // (target - SPLIT)))
    return np.where(blocks + WHOLE <= target, 1, split)


def deal(blocks: np.ndarray, bundles: int, price: int) -> Dealt | None:
    """Items of so many blocks, int64 [items], dealt to the bundles; None where that costs `price`
    or more, the rule has no target with room, or too many pieces."""
    least = max(LEAST, -(-int(blocks.sum() + WHOLE * len(blocks)) // bundles))
    if least > MOST_TARGET:
        return None
    between = (least + max(least, -(-_cost(blocks, least) // bundles))) // 2
    first, found = max(least, -(-_cost(blocks, between) // bundles)), None
    if GAIN * (price - first) < price:
        return None
    for target in range(first, first + TRIED):
        if _cost(blocks, target) <= bundles * target:
            found = _dealt(blocks, target, bundles)
            enough = price - 1 if len(blocks) > bundles else target
            if found is None or found.load <= enough:
                break
    return found if found and found.load < price else None


def _cost(blocks: np.ndarray, target: int) -> int:
    """What all pieces cost, before their blocks are rounded up."""
    pieces = pieces_for(blocks, target)
    return int(blocks.sum() + np.where(pieces == 1, WHOLE, SPLIT * pieces).sum())


def _dealt(blocks: np.ndarray, target: int, bundles: int) -> Dealt | None:
    pieces = pieces_for(blocks, target)
    total = int(pieces.sum())
    rounds = -(-total // bundles)
    if rounds > MOST_ROUNDS or total > MOST_PIECES or pieces.max() > MOST_SPLITS:
        return None
    cost = -(-blocks // pieces) + np.where(pieces == 1, WHOLE, SPLIT)
    item = np.repeat(order := np.argsort(-cost, kind="stable"), pieces[order])
    begin = np.cumsum(pieces[order]) - pieces[order]
    turn, at = np.divmod(np.arange(total), bundles)
    bundle = np.where(turn % 2, bundles - 1 - at, at)
    if rounds > 2:
        last = turn == rounds - 1
        load = np.bincount(bundle[~last], weights=cost[item[~last]])
        bundle[last] = np.argsort(load, kind="stable")[: last.sum()]
    load = np.bincount(bundle, weights=cost[item])
    split = np.arange(total) - np.repeat(begin, pieces[order])
    return Dealt(item, split, bundle, pieces, int(load.max()))


def dealt_tiles(blocks: np.ndarray, dealt: Dealt) -> tuple[np.ndarray, np.ndarray]:
    """Rows (item, 0, begin, end, split, pieces, slot, group) in walking order, int64 [pieces, 8],
    and their bundles; slots and groups as of row tile 0 of a bundle."""
    rank = np.arange(len(dealt.item))
    n, pieces = blocks[dealt.item], dealt.pieces[dealt.item]
    begin, end = (n * j // pieces for j in (dealt.split, dealt.split + 1))
    first, shared = rank - dealt.split, pieces > 1
    slot, group = np.where(shared, rank, -1), np.where(shared, first // 2, -1)
    columns = [dealt.item, np.zeros_like(rank), begin, end, dealt.split, pieces, slot, group]
    # round 1 behind all others
    turn = rank // max(1, int(dealt.bundle.max()) + 1)
    walk = np.lexsort((np.where(turn == 1, MOST_ROUNDS, turn), dealt.bundle))
    return np.stack(columns, axis=1)[walk], dealt.bundle[walk]
