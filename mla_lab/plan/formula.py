"""Static grids: work tiles from a formula of block indices, `num_splits` even pieces a request.

The kernel reads no plan: request, row tile and piece are its block indices, and the piece's blocks
follow from the request's length (policy "fixed", schedule "grid"). A CTA that merges waits for
the partials of the other pieces, so all CTAs of the grid have to be resident at once.
"""

from __future__ import annotations

import numpy as np

from .cost import CostModel
from .cuts import Shape
from .search import memory_time, sharing
from .workspace import LL_WORDS, MAX_GROUPS

#: most splits of a row tile that a kernel merges
MAX_SPLITS = 160
#: a request of so many blocks or fewer is not cut
WHOLE_BLOCKS = 4
#: split counts that are priced, beside the largest resident one: those that sweeps measure
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def most_splits(shape: Shape, batch: int, cluster: int, pair: int = 1) -> int:
    """The largest `num_splits` with which all workers of `shape` are resident at once; 0 where not
    even whole requests are, or where row tiles x CTAs of the cluster exceed the merge counters.

    A grid has workers for all `batch` requests, also for those without query rows, and rounds the
    row tiles up to a multiple of `pair`, the row tiles of a multicast cluster.
    """
    groups = batch * whole_pairs(shape.max_row_tiles, pair) if shape.batch else 0
    if groups == 0 or groups * cluster > MAX_GROUPS:
        return 0
    return min(shape.workers // groups, shape.max_blocks, MAX_SPLITS)


def whole_pairs(row_tiles: int, pair: int) -> int:
    """`row_tiles` rounded up to whole clusters of `pair` row tiles."""
    return -(-row_tiles // pair) * pair


def ll_words(slots: int, rows: int, splits: int, latent_dim: int) -> tuple[int, int]:
    """fp32 words of the LL merge: room for the partials of `slots`, of which fp16 ones take half,
    then for their softmax stats.

    A stats entry is four words, (row max, row sum) of two rows. A slot has one entry for each of
    the `splits` CTAs that merge a part of the rows, and one for each pair of rows, in case a part
    ends inside it.
    """
    return slots * rows * latent_dim, slots * (splits + rows // 2) * 4


def fits_ll_slice(slots: int, tile_rows: int, num_splits: int, latent_dim: int) -> bool:
    """True if the partials fit the LL slice, which has the same size in every workspace."""
    return sum(ll_words(slots, tile_rows, num_splits, latent_dim)) <= LL_WORDS


def counts(most: int) -> list[int]:
    """Split counts to price, rising; none where not even whole requests are resident."""
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
