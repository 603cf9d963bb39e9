"""What the cost model leaves out: a factor on its time, learnt from the record it is fitted to.

A tile of a way (see `ways`) has one weight for each of `FEATURES`, all of which are read off the
work tiles and their assignment. The factor is e to the weighted sum, within `MOST`. So the weights
say in words where the model's few constants are wrong: what a fuller card costs, a longer piece, a
worker's second tile, one more piece to merge, uneven workers; and what a count of pieces that is a
power of two spares, of which every share of a merge is a whole number of rows.
"""

from __future__ import annotations

import numpy as np

from .cuts import Shape
from .tile import Plan

FEATURES = ("constant", "busy", "longest", "walked", "pieces", "uneven", "binary")
#: the factor's logarithm at most, either way: it corrects, and no more than that
MOST = 0.25
Weights = tuple[float, ...]


def features(
    busy: np.ndarray,
    longest: np.ndarray,
    walked: np.ndarray,
    pieces: np.ndarray,
    uneven: np.ndarray,
) -> np.ndarray:
    """float64 [..., len(FEATURES)] of launches, each about 0 to 2: `busy` is the share of the
    card's SMs with work, `longest` the blocks of the longest piece, `walked` the most tiles of a
    worker, `pieces` the most of a row tile, `uneven` the longest worker's blocks over the mean.
    """
    binary = (np.log2(pieces) % 1 == 0).astype(np.float64)
    return np.stack(
        [
            np.ones_like(binary),
            np.minimum(1.0, busy),
            np.log2(np.maximum(1, longest)) / 3,
            np.log2(np.maximum(1, walked)),
            np.log2(pieces) / 3,
            uneven - 1,
            binary,
        ],
        axis=-1,
    )


def of_tiles(tiles: np.ndarray, worker_begin: np.ndarray, room: float) -> np.ndarray:
    """Features of one launch, float64 [len(FEATURES)]: int32 `tiles` [n, 8] in walking order, on a
    card that has room for so many workers, SMs / cluster.
    """
    if not len(tiles):
        return np.zeros(len(FEATURES))
    counts = np.diff(worker_begin)
    blocks = (tiles[:, 3] - tiles[:, 2]).astype(np.float64)
    worker = np.repeat(np.arange(len(counts)), counts)
    loads = np.bincount(worker, weights=blocks)
    at_work = loads[loads > 0]
    return features(
        busy=np.array(len(tiles) / room),
        longest=blocks.max(),
        walked=counts.max(),
        pieces=tiles[:, 5].max(),
        uneven=np.array(loads.max() / at_work.mean() if len(at_work) else 1.0),
    )


def of_plan(plan: Plan, room: float) -> np.ndarray:
    """`of_tiles` of a plan."""
    return of_tiles(plan.tiles, plan.worker_begin, room)


def of_formula(shape: Shape, splits: np.ndarray, room: float) -> np.ndarray:
    """Features of grids by formula, float64 [counts, len(FEATURES)], with every request in so many
    pieces, int64 [counts].
    """
    blocks, row_tiles = shape.blocks * shape.has_keys, shape.row_tiles
    pieces = np.minimum(splits[:, None], shape.blocks)
    tiles = pieces @ row_tiles
    longest = (-(-blocks // pieces)).max(axis=1, initial=0)
    # a piece without keys is no load
    loaded = (pieces * shape.has_keys) @ row_tiles
    mean = (blocks @ row_tiles) / np.maximum(1, loaded)
    return features(
        busy=tiles / room,
        longest=longest,
        walked=np.ones_like(tiles),
        pieces=pieces.max(axis=1, initial=1),
        uneven=np.where(longest > 0, longest / np.maximum(mean, 1e-9), 1.0),
    )


def factor(weights: Weights, found: np.ndarray) -> np.ndarray:
    """What the model's time is multiplied by; 1 without weights."""
    if not weights:
        return np.ones(found.shape[:-1])
    return bounded(found @ np.array(weights))


def bounded(log: np.ndarray) -> np.ndarray:
    """e to `log`, within `MOST`."""
    return np.asarray(np.exp(np.clip(log, -MOST, MOST)))
