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

- *even*: item b in k_b = ceil(n_b / L) pieces, piece j = blocks [n_b j // k_b, n_b (j + 1) // k_b),
  each a part of its own in the order of the items; L the least with sum of k_b <= P, and not below
  `Costs.least`, that STEPS halvings of its bounds find. Where N <= P, there are at most 256
  requests, T < LARGE, and no request is longer than MOST_EVEN.

The lowest price is taken, of equal ones the first: whole ceil(N / P) * (longest n + piece), even
L + piece + `merge`, shares ceil(T / p) + piece + `merge`, where a part may begin a second piece.

- *dealt*: pieces of long items and short ones whole, by falling cost (`plan.dealt`). In place of
  shares where that has the lower price and the build deals (`Costs.deals`), items have all row
  tiles, there are at most 256 requests, T < LARGE, and no request is longer than MOST_EVEN.

Part i is walked by bundle i. A split item whose first piece is in part a has, in row tile r of its
bundle, the slots 2 P r + a + i for the pieces of parts i = a, a + 1, ..., and the counter
a R + r. Two split items never share a slot, since the last part of one is the first of the
next at the earliest. Dealt, one whose first piece has rank a has the slots 2 P r + a + i and the
counter (a // 2) R + r. So 2 * workers slots and `workers` counters suffice for any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import invalid
from ..core.problem import Problem
from .dealt import Dealt, deal, dealt_tiles
from .extent import kv_tokens, row_tiles
from .tile import Plan
from .workspace import HELD_REQUESTS

#: tokens of a block in all rules by which workers find their work
BLOCK = 64
#: a piece of at most so many blocks is not cut off
SNAP = 1
#: the shortest part of the cost line; longer than SNAP, so that two cuts never meet
LEAST = 4
#: the least L of most builds, and the halvings after which what is left of its bounds is below
#: 1/64 of it
LEAST_EVEN = 1
STEPS = 6
#: from this length on, cuts lie at multiples of 256 units, so that products fit into 32 bits
LARGE = 1 << 23
#: blocks of a request up to which pieces may be even: a kernel divides them by L in single
#: precision, which is exact so far
MOST_EVEN = 1 << 20
COARSE = 8
#: the line is shorter: kernels add it up in int32
MOST_LENGTH = 1 << 31
#: workers with which products fit into 32 bits
MAX_WORKERS = 256


@dataclass(frozen=True)
class Costs:
    """What the rule weighs, in the time of one block: the start and end of a piece, and the merge
    that follows where any item is split.
    """

    piece: int
    merge: int
    #: whether pieces may be dealt; not where tokens are fetched one by one, from lists of a length
    deals: bool = True
    #: the least L of even pieces, in blocks, see `plan.gate.LEAST_BLOCKS`
    least: int = LEAST_EVEN

    def __post_init__(self) -> None:
        for name, value in (("piece", self.piece), ("merge", self.merge)):
            if not 0 <= value <= 255:
                raise invalid(f"Costs.{name}", value, "0 to 255 blocks")

    @property
    def packed(self) -> int:
        """Both weights as a kernel takes them, in one int32."""
        return self.piece | self.merge << 8


#: by persistent launch mode (see `launch_modes`). Of eight pairs timed on 13 steps of two serving
#: traces, 16 to 128 requests, this one is the quickest or within the noise of it: beside (4, 6) it
#: takes 0.8 to 1.0 % less with 128 heads, 0.2 to 0.9 % less with 16; (6, 6) takes up to 2.4 % more,
#: (8, 8) up to 4.7 % (H200, 2026-11-24, `data/notes/kernel_attempts.jsonl`)
COSTS = {
    "swap_ab_persistent": Costs(piece=3, merge=4),
    "keep_ab_persistent": Costs(piece=3, merge=4),
    # of gathered tokens under a query of 16 bits, whose block takes 1.7 us, or 2.1 over 656 bytes:
    # 1.5 to 1.9 times the time of e4m3 throughout (H200, 2026-11-28, `h200_sparse_bf16.jsonl`,
    # `h200_sparse.jsonl`)
    "keep_ab_gather": Costs(piece=2, merge=4, deals=False),
}


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
    #: "whole", "shares", "even" or "dealt"
    kind: str
    parts: int
    #: where items begin on the line, int64 [items + 1]: in units of cost, in items where they stay
    #: whole, in pieces where these are even or dealt
    begin: np.ndarray
    dealt: Dealt | None = None

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
        if length >= MOST_LENGTH:
            got = f"{length} blocks of all items and their costs"
            raise invalid("problem", got, f"fewer than {MOST_LENGTH}")
        parts = min(bundles, max(1, length // LEAST))
        longest = int(blocks.max(initial=1))
        held = len(tiles) <= HELD_REQUESTS and length < LARGE and longest <= MOST_EVEN
        even = 0 < len(blocks) <= bundles and held
        largest = even_size(blocks, bundles, costs.least) if even else 0
        share = -(-length // parts)
        kind = kind_of(len(blocks), bundles, longest, share, largest, costs)
        dealt = None
        if kind == "shares" and bundled and held and costs.deals:
            dealt = deal(blocks, bundles, share + costs.piece + costs.merge)
        kind = "dealt" if dealt else kind
        sizes = {
            "whole": np.ones_like(blocks),
            "shares": blocks + costs.piece,
            "even": -(-blocks // max(1, largest)),
            "dealt": dealt.pieces if dealt else blocks,
        }[kind]
        begin = np.append(0, np.cumsum(sizes))
        parts = {"shares": parts, "even": int(begin[-1])}.get(kind, bundles)
        return cls(
            request, row_tile, blocks, bundle, bundles, costs.piece, kind, parts, begin, dealt
        )

    def cuts(self) -> tuple[np.ndarray, np.ndarray]:
        """Item and block before which each part begins, and the last one's end, [parts + 1]; of a
        line that is not dealt."""
        length, items = int(self.begin[-1]), len(self.blocks)
        if self.kind == "even":
            return self._even_cuts()
        shift = COARSE if length >= LARGE and self.kind == "shares" else 0
        at = np.arange(self.parts + 1) * (length >> shift) // self.parts << shift
        at[-1] = length
        item = np.searchsorted(self.begin, at, side="right") - 1
        inside = item < items
        n = self.blocks[np.minimum(item, items - 1)]
        block = np.where(inside & (self.kind == "shares"), at - self.begin[item] - self.piece, 0)
        near_end = (block > SNAP) & (n - block <= SNAP)
        block = np.where((block <= SNAP) | near_end, 0, block)
        return item + near_end, block

    def _even_cuts(self) -> tuple[np.ndarray, np.ndarray]:
        pieces = np.diff(self.begin)
        item = np.repeat(np.arange(len(pieces)), pieces)
        piece = np.arange(self.parts) - self.begin[item]
        block = self.blocks[item] * piece // pieces[item]
        return np.append(item, len(pieces)), np.append(block, 0)


def even_size(blocks: np.ndarray, bundles: int, least: int) -> int:
    """L of even pieces, not below `least`, for at most `bundles` items of so many `blocks`, int64
    [items].

    Between total / bundles, below which there are too many pieces whatever the lengths, and what is
    enough for any: bundles // items pieces of the longest, and the least L with total / L +
    items (L - 1) / L <= bundles. The first that is tried is one below that, so that lengths that
    are alike take one step.
    """
    items, total = len(blocks), int(blocks.sum())
    low = max(least, -(-total // bundles))
    high = -(-int(blocks.max()) // (bundles // items))
    if items < bundles:
        high = min(high, -(-(total - items) // (bundles - items)))
    high = max(low, high)
    middle = high - 1
    for _ in range(STEPS):
        if low == high:
            break
        if int((-(-blocks // middle)).sum()) <= bundles:
            high = middle
        else:
            low = middle + 1
        middle = (low + high) // 2
    return high


def kind_of(items: int, bundles: int, longest: int, share: int, even: int, costs: Costs) -> str:
    """What is priced lowest: `share` are the units of a share, `even` is L, 0 where pieces may not
    be even.
    """
    best = min(share, even or share)
    kind = "even" if best == even else "shares"
    whole = -(-items // bundles) * (longest + costs.piece)
    return "whole" if whole <= best + costs.piece + costs.merge else kind


def self_schedule(
    problem: Problem,
    *,
    tile_rows: int,
    num_workers: int,
    costs: Costs,
) -> Plan:
    """The plan that kernels follow where a call brings none. Raises InvalidInput for more workers
    or blocks than the rule's numbers hold, and for sparse problems.
    """
    if not 1 <= num_workers <= MAX_WORKERS:
        raise invalid("num_workers", num_workers, f"1 to {MAX_WORKERS}")
    if problem.top_k:
        raise invalid("problem.top_k", problem.top_k, "0: lists of slots have one length")
    tokens = kv_tokens(problem)
    line = Line.of(-(-tokens // BLOCK), row_tiles(problem, tile_rows), num_workers, costs)
    tiles, part = _tiles(line) if len(line.blocks) else (np.zeros((0, 8), dtype=np.int64),) * 2
    rows = [_of_row(line, tiles, row) for row in range(line.bundle)]
    worker = [part.reshape(-1)[: len(tiles)] * line.bundle + row for row in range(line.bundle)]
    owner = np.concatenate(worker).astype(np.int64)
    order = np.argsort(owner, kind="stable")
    begins = np.append(0, np.cumsum(np.bincount(owner, minlength=num_workers)))
    words = np.concatenate(rows)[order].astype(np.int32)
    words[tokens[words[:, 0]] == 0, 3] = 0  # a request without keys has an empty tile
    return Plan(problem, tile_rows, BLOCK, "self", "persistent", words, begins.astype(np.int32))


def _tiles(line: Line) -> tuple[np.ndarray, np.ndarray]:
    """Pieces in walking order, int64 [pieces, 8] as in `WorkTile`, and their parts; row tile, slot
    and group are those of the first row tile of a bundle (see `_of_row`).
    """
    if line.dealt is not None:
        return dealt_tiles(line.blocks, line.dealt)
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


def _of_row(line: Line, tiles: np.ndarray, row: int) -> np.ndarray:
    """`tiles` for row tile `row` of each bundle."""
    own = tiles.copy()
    own[:, 1] += row
    shared = own[:, 6] >= 0
    own[shared, 6] += 2 * line.bundles * row
    own[shared, 7] = own[shared, 7] * line.bundle + row
    return own
