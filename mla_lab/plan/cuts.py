"""Input and output of a split policy, and the work tiles that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.problem import Problem
from .extent import kv_tokens, row_tiles, spread


@dataclass(frozen=True)
class Shape:
    """A problem as a policy sees it: only requests with query rows, in order.

    `blocks` is at least 1: a request without keys counts as one block (as in FlashMLA) and comes
    out as one empty tile.
    """

    #: index of each such request in the problem, and whether it has keys, [n]
    request: np.ndarray
    has_keys: np.ndarray
    #: KV blocks and row tiles of each, int64 [n]
    blocks: np.ndarray
    row_tiles: np.ndarray
    #: workers of the card: SMs, or clusters
    workers: int

    @classmethod
    def of(cls, problem: Problem, tile_rows: int, tile_kv: int, workers: int) -> Shape:
        tiles = row_tiles(problem, tile_rows)
        request = np.flatnonzero(tiles)
        tokens = kv_tokens(problem)[request]
        blocks = np.maximum(-(-tokens // tile_kv), 1)
        return cls(request, tokens > 0, blocks, tiles[request], workers)

    @property
    def batch(self) -> int:
        return len(self.request)

    @property
    def max_blocks(self) -> int:
        return int(self.blocks.max(initial=1))

    @property
    def max_row_tiles(self) -> int:
        return int(self.row_tiles.max(initial=1))


@dataclass(frozen=True)
class Cuts:
    """Splits of the requests' KV, ordered by request, then by position; they cover each
    request's blocks exactly once. Row tiles of a request share its pieces.
    """

    #: index into the Shape's requests, then blocks [begin, end), int64 [pieces]
    request: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    #: part (bundle of workers) of each piece, or None where `schedule` assigns the pieces
    part: np.ndarray | None = None


def cut_by_count(shape: Shape, splits: np.ndarray, quantum: int = 1) -> Cuts:
    """`splits` pieces a request, never an empty one, cut at multiples of `quantum` blocks.

    Sizes differ by at most one quantum.
    """
    units = -(-shape.blocks // quantum)
    splits = np.minimum(np.maximum(splits, 1), units)
    request, index = spread(splits)
    units, splits, blocks = units[request], splits[request], shape.blocks[request]
    end = np.minimum(units * (index + 1) // splits * quantum, blocks)
    return Cuts(request, units * index // splits * quantum, end)


def cut_by_size(shape: Shape, size: np.ndarray) -> Cuts:
    """Pieces of `size` blocks from the front; the last one holds the rest."""
    request, index = spread(-(-shape.blocks // size))
    begin = index * size[request]
    return Cuts(request, begin, np.minimum(begin + size[request], shape.blocks[request]))


def number(shape: Shape, cuts: Cuts) -> tuple[np.ndarray, np.ndarray]:
    """Work tiles in the order (request, row tile, split), and the piece that each comes from.

    int32 [tiles, 8] with the columns of `WorkTile`, int64 [tiles]. Slots and groups count up in
    this order over the row tiles that have more than one piece.
    """
    splits = np.bincount(cuts.request, minlength=shape.batch)
    owner, index = spread(splits * shape.row_tiles)
    row_tile, split = np.divmod(index, splits[owner])
    piece = (np.cumsum(splits) - splits)[owner] + split
    shared = splits[owner] > 1
    tiles = np.empty((owner.size, 8), dtype=np.int32)
    tiles[:, 0] = shape.request[owner]
    tiles[:, 1] = row_tile
    tiles[:, 2] = cuts.begin[piece]
    tiles[:, 3] = np.where(shape.has_keys[owner], cuts.end[piece], 0)
    tiles[:, 4] = split
    tiles[:, 5] = splits[owner]
    tiles[:, 6] = np.where(shared, np.cumsum(shared) - 1, -1)
    tiles[:, 7] = np.where(shared, np.cumsum(shared & (split == 0)) - 1, -1)
    return tiles, piece
