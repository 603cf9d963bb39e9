"""Grid plans that are a formula: every request in `num_splits` even pieces, each with a worker.

A kernel that follows one reads no plan: request, row tile and piece are its block indices, and the
piece's blocks follow from the request's length (policy "fixed", schedule "grid"). Its merge waits
for the other pieces, so that all workers must be running at once.
"""

from __future__ import annotations

import numpy as np

from .cost import CostModel
from .cuts import Shape
from .search import memory_time, sharing
from .workspace import MAIL_WORDS, MAX_GROUPS

#: splits that a kernel merges
MAX_SPLITS = 160
#: a request of so many blocks or fewer is not cut
WHOLE_BLOCKS = 4
#: counts of pieces among which one is chosen, beside the most that run at once: those that sweeps
#: measure
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def most_splits(shape: Shape, batch: int, cluster: int, pair: int = 1) -> int:
    """The most pieces of a request with which all workers of `shape` run at once; 0 where not even
    whole requests do, or where there are more row tiles than counters, one a CTA of the cluster.

    A grid has workers for all `batch` requests, those without query rows as well, and where `pair`
    row tiles go together, for the last ones' missing neighbours.
    """
    groups = batch * whole_pairs(shape.max_row_tiles, pair) if shape.batch else 0
    if groups == 0 or groups * cluster > MAX_GROUPS:
        return 0
    return min(shape.workers // groups, shape.max_blocks, MAX_SPLITS)


def whole_pairs(row_tiles: int, pair: int) -> int:
    """Row tiles that a grid has workers for."""
    return -(-row_tiles // pair) * pair


def mail_words(slots: int, rows: int, splits: int, latent_dim: int) -> tuple[int, int]:
    """fp32 words of partials that are their own flags: those of `slots`, then their notes.

    A note is four words, (maximum, sum) of two rows; a slot has one for each share of the merge,
    `splits` of them, and one more for each row pair where a share ends.
    """
    return slots * rows * latent_dim, slots * (splits + rows // 2) * 4


def fits_mail(slots: int, tile_rows: int, num_splits: int, latent_dim: int) -> bool:
    """Whether so many partials go by mail: its slice of every workspace has one size."""
    return sum(mail_words(slots, tile_rows, num_splits, latent_dim)) <= MAIL_WORDS


def counts(most: int) -> list[int]:
    """The counts of pieces worth pricing, rising; none where not even whole requests fit."""
    return sorted({count for count in (*COUNTS, most) if 1 <= count <= most})


def makespans(shape: Shape, model: CostModel, most: int) -> np.ndarray:
    """Predicted nanoseconds with 1, 2, ..., `most` pieces a request, float64 [most]."""
    return times_of(shape, model, np.minimum(np.arange(1, most + 1)[:, None], shape.blocks))


def times_of(shape: Shape, model: CostModel, splits: np.ndarray) -> np.ndarray:
    """Predicted nanoseconds of each row of `splits`, int64 [n, requests]; float64 [n]."""
    split = splits > 1
    tiles = splits @ shape.row_tiles
    start = np.asarray(model.start_time(tiles * sharing(shape)))[:, None]
    partials = np.where(split, splits, 0) @ shape.row_tiles
    longest = -(-shape.blocks * shape.has_keys // splits)
    steps = model.steps(-(-longest // model.kv_ways))
    partial = model.partial_time(partials, tiles)[:, None]
    merge = model.merge_time(partials, splits.max(axis=1))
    times = np.rint(start + steps * model.block_ns + split * partial)
    ready = np.where(split, times, 0.0).max(axis=1)
    return model.launch_ns + model.ends(times.max(axis=1), ready, merge, memory_time(shape, model))
