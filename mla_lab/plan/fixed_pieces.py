"""The rule of batch invariance by which every CTA finds its own pieces from the lengths.

A request is cut by its own length alone (`PieceCuts`), into pieces that differ by at most a block,
so that the bits of its result do not depend on its neighbours; who runs a piece, and when, may
depend on them.
The kernels compute the rule on the device (`cute.common.fixed_pieces`); `fixed_pieces` here gives
the same tiles as a `Plan`.

Where all requests have the same number R of row tiles, and LEAST_BUNDLES * R <= workers, a *bundle*
of R workers, one a row tile, runs the same pieces, and an item is a request; otherwise R = 1, and
an item is a (request, row tile). The pieces of all items are numbered: items in the order of the
batch, or, where the batch has at most 256 requests and more pieces than there are bundles, by
falling size of the request's pieces with ties kept; row tiles of a request in order, and of an item
its pieces in order. Each round of P bundles runs the next P pieces, in the order of the bundles,
and, of at least MOST_PIECES bundles, every second round in the opposite order: the bundle with the
largest piece of one round has the smallest of the next, so that lengths drawn from a trace load
bundles more evenly.

Rounds have whole items in place of pieces where that loads no bundle much more: where, of R rounds
of P items, R times the longest item is at most an even share of all blocks and CHANGE_BLOCKS for
each round of pieces, and no item has more than WHOLE_PIECES pieces. The bundle then runs all pieces
of an item one after the other, and adds them up itself: the pieces and their order are the same,
and so are the bits, but nobody waits for another, the query stays where it is, and KV is loaded on
from one piece to the next. Such items go by falling length, where pieces would go by falling size.

Pieces of a split item that rounds have apart lie in consecutive slots: with f the number of the
item's first piece, piece j of row tile r of a bundle has slot r S + f mod (RING P) + j, of S = RING
P + MOST_PIECES - 1 slots a row tile, in turn f // (RING P) + 1, which stands in the place of a
group. Two pieces of a slot are a multiple of RING rounds apart. RING is even, so both rounds go in
the same direction, and one worker alone writes a slot: again RING of its tiles later at the
earliest, when all workers of the item before have read it (`cute.split_merge.piece_flags`). With
MOST_PIECES bundles or more an item's pieces lie in two rounds at most, and are read behind the
next; with fewer, in three, and then no worker's next piece waits for an item behind its own, which
an opposite order would not keep. A bundle that runs whole items has RING slots of its own, from r S
+ RING p on, with p its number, and stores the pieces of one item after the other in WHOLE_PIECES of
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import invalid
from ..core.problem import Problem
from .extent import kv_tokens, row_tiles
from .self_schedule import BLOCK
from .tile import Plan
from .workspace import HELD_REQUESTS

#: a worker's tiles of which each has a slot of its own; even, see above
RING = 4
#: bundles are formed where there are at least so many
LEAST_BUNDLES = 16
#: the most pieces of an item: one lane of a warp each
MOST_PIECES = 32
#: the most pieces of an item that one bundle runs whole
WHOLE_PIECES = 3
#: blocks that a change of work tiles with its merge costs beyond a change of pieces in an item. Not
#: fitted: lengths that are alike are far below the bound, lengths of traces far above it
CHANGE_BLOCKS = 4
#: query rows of a request up to which it is of a launch for `few`
INVARIANT_ROWS = 16


@dataclass(frozen=True)
class PieceCuts:
    """How many pieces k a request of n blocks has: as many as it takes of max(split_blocks,
    min(half_blocks, ceil(n / 2)), ceil(n / MOST_PIECES)) blocks, piece j being blocks
    [n j // k, n (j + 1) // k); and which requests a launch takes, by their query rows: `few` of up
    to INVARIANT_ROWS, `many` of more.
    """

    split_blocks: int
    half_blocks: int
    few: bool = True
    many: bool = True

    def __post_init__(self) -> None:
        for name in ("split_blocks", "half_blocks"):
            if not 1 <= getattr(self, name) <= 255:
                raise invalid(f"PieceCuts.{name}", getattr(self, name), "1 to 255 blocks")

    @property
    def packed(self) -> int:
        """All as a kernel takes them, in one int32."""
        return self.split_blocks | self.half_blocks << 8 | self.few << 16 | self.many << 17

    def takes(self, rows: np.ndarray) -> np.ndarray:
        """Whether requests of so many query rows are among the launch's, bool [batch]."""
        few = rows <= INVARIANT_ROWS
        return (few & self.few) | (~few & self.many)

    def pieces(self, blocks: np.ndarray) -> np.ndarray:
        """Pieces of a row tile of requests of so many blocks, 1 or more, int64 [batch]."""
        least = np.maximum(self.split_blocks, -(-blocks // MOST_PIECES))
        return -(-blocks // np.maximum(least, np.minimum(self.half_blocks, -(-blocks // 2))))


def ring_slots(bundles: int) -> int:
    """S: slots of a row tile of a bundle."""
    return RING * bundles + MOST_PIECES - 1


def most_slots(workers: int, row_tiles: int | None = None) -> int:
    """Slots that suffice for any batch, or for requests of `row_tiles` row tiles, or none, each:
    every row tile of a bundle has its own, and none has more than workers // LEAST_BUNDLES."""
    widest = max(1, workers // LEAST_BUNDLES)
    sizes = range(1, widest + 1) if row_tiles is None else (1, min(row_tiles, widest))
    return max(size * ring_slots(workers // size) for size in sizes)


def bundle_of(tiles: np.ndarray, workers: int) -> int:
    """R, of requests with so many row tiles, int64 [batch]."""
    most = int(tiles.max(initial=0))
    bundled = most > 0 and int(tiles.min()) == most and LEAST_BUNDLES * most <= workers
    return most if bundled else 1


def runs_whole(items: np.ndarray, blocks: np.ndarray, pieces: np.ndarray, bundles: int) -> bool:
    """Whether rounds have whole items: see above. Of each request its items, and of one of them
    blocks and pieces, int64 [batch]."""
    count, all_pieces = int(items.sum()), int((items * pieces).sum())
    taken = items > 0
    if all_pieces == count or int(pieces[taken].max()) > WHOLE_PIECES:
        return False
    load = -(-count // bundles) * int(blocks[taken].max())
    share = int((items * blocks).sum()) // bundles
    return load <= share + CHANGE_BLOCKS * -(-all_pieces // bundles)


def fixed_pieces(problem: Problem, *, tile_rows: int, num_workers: int, cuts: PieceCuts) -> Plan:
    """The plan that kernels follow where a batch-invariant call brings none; its slots are numbered
    as in every plan. Raises InvalidInput for fewer than LEAST_BUNDLES workers, and for sparse
    problems.
    """
    if num_workers < LEAST_BUNDLES:
        raise invalid("num_workers", num_workers, f"{LEAST_BUNDLES} or more")
    if problem.top_k:
        raise invalid("problem.top_k", problem.top_k, "0: lists of slots have one length")
    tokens = kv_tokens(problem)
    tiles = np.where(cuts.takes(problem.rows), row_tiles(problem, tile_rows), 0)
    blocks = np.maximum(-(-tokens // BLOCK), 1)
    pieces = cuts.pieces(blocks)
    bundle = bundle_of(tiles, num_workers)
    items = np.minimum(tiles, 1) if bundle > 1 else tiles
    bundles = num_workers // bundle
    whole = runs_whole(items, blocks, pieces, bundles)
    # what a bundle runs in a round: a piece, or all pieces of an item
    run = np.ones_like(pieces) if whole else pieces
    each, order = items * run, np.arange(len(tokens))
    if len(tokens) <= HELD_REQUESTS and int(each.sum()) > bundles:
        order = np.argsort(-blocks // run, kind="stable")
    request, count = np.repeat(order, each[order]), int(each.sum())
    first = np.repeat(np.cumsum(each[order]) - each[order], each[order])
    row_tile, split = np.divmod(np.arange(count) - first, run[request])
    round_, place = np.divmod(np.arange(count), bundles)
    back = (round_ % 2 == 1) & (bundles >= MOST_PIECES)
    part = np.where(back, bundles - 1 - place, place)
    if whole:
        times = pieces[request]
        split = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        request, row_tile, part = (np.repeat(x, times) for x in (request, row_tile, part))
        count = len(request)
    begin, end = (blocks[request] * j // pieces[request] for j in (split, split + 1))
    end = np.where(tokens[request] == 0, 0, end)
    rows, owner = [], []
    for bundle_row in range(bundle):
        words = np.stack(
            [request, row_tile + bundle_row, begin, end, split, pieces[request],
             np.full(count, -1), np.full(count, -1)], axis=1,
        )  # fmt: skip
        rows.append(words)
        owner.append(part * bundle + bundle_row)
    words, workers = np.concatenate(rows), np.concatenate(owner).astype(np.int64)
    _number(words)
    chosen = np.argsort(workers, kind="stable")
    begins = np.append(0, np.cumsum(np.bincount(workers, minlength=num_workers)))
    return Plan(
        problem, tile_rows, BLOCK, "fixed_size", "persistent",
        words[chosen].astype(np.int32), begins.astype(np.int32),
    )  # fmt: skip


def _number(words: np.ndarray) -> None:
    """Slots and groups of the split row tiles, in the order (request, row tile, split)."""
    split = np.flatnonzero(words[:, 5] > 1)
    order = split[np.lexsort((words[split, 4], words[split, 1], words[split, 0]))]
    words[order, 6] = np.arange(len(order))
    words[order, 7] = np.cumsum(words[order, 4] == 0) - 1
