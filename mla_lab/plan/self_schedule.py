"""The rule by which every CTA finds its own work from the lengths: one definition, in integers.

The kernels compute it on the device (`cute.common.self_schedule`), so that a call needs no plan;
`self_schedule` here gives the same tiles as a `Plan`.

An *item* is a request's keys under one bundle of row tiles, `n` = max(1, blocks) long. Where all
requests have the same number R of row tiles, and R <= workers, an item has all R of them, and a
*bundle* of R workers, one a row tile, walks the same items. Otherwise R = 1: each (request, row
tile) is an item. There are P = workers // R bundles, and N items in the order of the batch.

Items lie on a line, `piece` + n units long each, `piece` the fixed cost of a piece in blocks; T is
the line's length.

- *shares*: p = min(P, max(1, T // LEAST)) parts. Part i is [cut(i), cut(i + 1)) with cut(i) =
  i * T // p. Inside an item, a cut x units behind the item's start falls before block
  k = x - piece. One with k <= SNAP moves to the item's start, one with n - k <= SNAP to its end.
- *whole*: P parts of whole items, cut(i) = i * N // P items.

Whole items are taken where ceil(N / P) * (piece + longest n) <= ceil(T / p) + `merge`.

Part i is walked by bundle i. A split item whose first piece is in part a has, in row tile lane r of
its bundle, the slots 2 P r + a + i for the pieces of parts i = a, a + 1, ..., and the counter
a R + r. Two split items never share a slot, since the last part of one is the first of the
next at the earliest; so 2 * workers slots and `workers` counters suffice for any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import invalid
from ..core.problem import Problem
from .extent import kv_tokens, row_tiles
from .tile import Plan

#: a piece of at most so many blocks is not cut off
SNAP = 1
#: the shortest part of the cost line; longer than SNAP, so that two cuts never meet
LEAST = 4
#: from this length on, cuts lie at multiples of 256 units, so that products fit into 32 bits
LARGE = 1 << 23
COARSE = 8
#: workers with which products fit into 32 bits
MAX_WORKERS = 256


@dataclass(frozen=True)
class Costs:
    """What the rule weighs, in the time of one block: the start and end of a piece, and the merge
    that follows where any item is split.
    """

    piece: int
    merge: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value <= 255:
                raise invalid(f"Costs.{name}", value, "0 to 255 blocks")

    @property
    def packed(self) -> int:
        """Both as a kernel takes them, in one int32."""
        return self.piece | self.merge << 8


#: of each way that walks (see `ways`), with the least mean of `predicted_us` against `choose` over
#: uniform, drawn and traced batches of 16 to 256 requests; neighbours differ by less than 1 %
COSTS = {"walk": Costs(piece=4, merge=6), "rows": Costs(piece=6, merge=8)}


@dataclass(frozen=True)
class Line:
    """Items of a batch on the line that is cut, arrays int64 [items]."""

    request: np.ndarray
    row_tile: np.ndarray
    blocks: np.ndarray
    #: row tiles of a bundle, 1 where row tiles are items of their own
    bundle: int
    bundles: int
    piece: int
    whole: bool
    parts: int
    #: where items begin on the line, int64 [items + 1], in items where they stay whole
    begin: np.ndarray

    @classmethod
    def of(cls, blocks: np.ndarray, tiles: np.ndarray, workers: int, costs: Costs) -> Line:
        """`blocks` and row tiles of every request, int64 [batch]."""
        most = int(tiles.max(initial=0))
        bundled = 0 < most <= workers and int(tiles.min()) == most
        bundle = most if bundled else 1
        counts = np.minimum(tiles, 1) if bundled else tiles
        request = np.repeat(np.arange(len(tiles)), counts)
        row_tile = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks = np.maximum(blocks[request], 1)
        bundles = max(1, workers // bundle)
        length = int(blocks.sum()) + costs.piece * len(blocks)
        parts = min(bundles, max(1, length // LEAST))
        turns = -(-len(blocks) // bundles)
        price = turns * (int(blocks.max(initial=1)) + costs.piece)
        whole = price <= -(-length // parts) + costs.merge
        sizes = np.ones_like(blocks) if whole else blocks + costs.piece
        begin = np.append(0, np.cumsum(sizes))
        parts = bundles if whole else parts
        return cls(request, row_tile, blocks, bundle, bundles, costs.piece, whole, parts, begin)

    def cuts(self) -> tuple[np.ndarray, np.ndarray]:
        """Item and block before which each part begins, and the last one's end, [parts + 1]."""
        length, items = int(self.begin[-1]), len(self.blocks)
        shift = COARSE if length >= LARGE and not self.whole else 0
        at = np.arange(self.parts + 1) * (length >> shift) // self.parts << shift
        at[-1] = length
        item = np.searchsorted(self.begin, at, side="right") - 1
        inside = item < items
        n = self.blocks[np.minimum(item, items - 1)]
        block = np.where(inside & (not self.whole), at - self.begin[item] - self.piece, 0)
        near_end = (block > SNAP) & (n - block <= SNAP)
        block = np.where((block <= SNAP) | near_end, 0, block)
        return item + near_end, block


def self_schedule(
    problem: Problem,
    *,
    tile_rows: int,
    num_workers: int,
    costs: Costs,
    tile_kv: int = 64,
) -> Plan:
    """The plan that kernels follow where a call brings none. Raises InvalidInput for more workers
    than the rule's products allow, and for sparse problems.
    """
    if not 1 <= num_workers <= MAX_WORKERS:
        raise invalid("num_workers", num_workers, f"1 to {MAX_WORKERS}")
    if problem.top_k:
        raise invalid("problem.top_k", problem.top_k, "0: lists of slots have one length")
    tokens = kv_tokens(problem)
    line = Line.of(-(-tokens // tile_kv), row_tiles(problem, tile_rows), num_workers, costs)
    tiles, part = _tiles(line) if len(line.blocks) else (np.zeros((0, 8), dtype=np.int64),) * 2
    rows = [_lane(line, tiles, lane) for lane in range(line.bundle)]
    worker = [part.reshape(-1)[: len(tiles)] * line.bundle + lane for lane in range(line.bundle)]
    owner = np.concatenate(worker).astype(np.int64)
    order = np.argsort(owner, kind="stable")
    begins = np.append(0, np.cumsum(np.bincount(owner, minlength=num_workers)))
    words = np.concatenate(rows)[order].astype(np.int32)
    words[tokens[words[:, 0]] == 0, 3] = 0  # a request without keys has an empty tile
    return Plan(problem, tile_rows, tile_kv, "self", "persistent", words, begins.astype(np.int32))


def _tiles(line: Line) -> tuple[np.ndarray, np.ndarray]:
    """Pieces in walking order, int64 [pieces, 8] as in `WorkTile` for lane 0, and their parts.

    Slots and groups lack the lane, see `_lane`.
    """
    items = len(line.blocks)
    item, block = line.cuts()
    starts = np.stack([np.arange(items), np.zeros(items, dtype=np.int64)], axis=1)
    edges = np.concatenate([np.stack([item, block], axis=1), starts])
    edges = np.unique(edges[edges[:, 0] < items], axis=0)
    owner, begin = edges.T
    follows = np.append(owner[1:] == owner[:-1], False)
    end = np.where(follows, np.append(begin[1:], 0), line.blocks[owner])
    pieces = np.bincount(owner, minlength=items)
    split = np.arange(len(owner)) - (np.cumsum(pieces) - pieces)[owner]
    # the last part that begins at or before a piece has it
    key = item * (int(line.blocks.max()) + 1) + block
    part = np.searchsorted(key, owner * (int(line.blocks.max()) + 1) + begin, side="right") - 1
    part = np.minimum(part, line.parts - 1)
    first = part - split
    shared = pieces[owner] > 1
    columns = [
        line.request[owner], line.row_tile[owner], begin, end, split, pieces[owner],
        np.where(shared, first + part, -1), np.where(shared, first, -1),
    ]  # fmt: skip
    return np.stack(columns, axis=1), part


def _lane(line: Line, tiles: np.ndarray, lane: int) -> np.ndarray:
    """`tiles` for lane `lane` of each bundle."""
    own = tiles.copy()
    own[:, 1] += lane
    shared = own[:, 6] >= 0
    own[shared, 6] += 2 * line.bundles * lane
    own[shared, 7] = own[shared, 7] * line.bundle + lane
    return own
