"""Published rules for splitting the keys of a decode batch, and the trivial ones.

A rule looks at a `Shape` and returns `Cuts`. The counting rules stand alone as functions of plain
numbers, in the form of their sources. "SMs" of a source are our workers: SMs, or clusters where
a worker is a cluster. One count for the batch is one piece a split, of sizes that differ
by at most one block, and no more pieces than blocks; most sources give ceil(blocks / splits)
blocks to each split from the front instead, and leave the rear ones empty where those run out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..core.errors import invalid
from .cuts import Cuts, Shape, cut_by_count, cut_by_size
from .greedy import greedy


def shrink(blocks: int, splits: int) -> int:
    """Fewest splits with the same longest piece, so that none is empty."""
    return -(-blocks // -(-blocks // splits))


def cutlass_splits(batch: int, max_blocks: int, sms: int) -> int:
    """CUTLASS, examples/77_blackwell_fmha/device/sm100_mla.hpp, set_split_kv.

    max(1, SMs / batch), at most one a block, shrunk so that no split is empty.
    """
    return shrink(max_blocks, min(max_blocks, max(1, sms // batch)))


def uniform_splits(batch: int, q_tiles: int, max_blocks: int, sms: int) -> int:
    """FlashInfer, flashinfer/cute_dsl/attention/scheduler/mla_persistent.py, mla_get_split_kv.

    max(1, SMs // batch // (2 q_tiles)), at most one a block, shrunk so that no split is empty, and
    32 of these at most; the 2 is its pair of CTAs a query tile.
    """
    splits = max(1, sms // batch // (2 * q_tiles))
    return min(shrink(max_blocks, min(max_blocks, splits)), 32)


def simplified_splits(batch: int, q_tiles: int, sms: int) -> int:
    """FlashInfer, mla_get_split_kv_simplified in the same file: what its CuTe DSL decode calls.

    min(max(1, SMs // batch // (2 q_tiles)), 32), whatever the lengths.
    """
    return min(max(1, sms // batch // (2 * q_tiles)), 32)


def fa3_splits(row_tiles: int, max_blocks: int, sms: int, max_splits: int = 128) -> int:
    """FlashAttention-3, hopper/heuristics.h, num_splits_heuristic, in its float32.

    `row_tiles` counts those of the whole batch. The fewest splits whose last wave is at least
    85 % as full as the best count's; 1 where the row tiles fill 80 % of the SMs or there are no
    more than 4 blocks. (Its L2 clause needs non-causal rows beyond any decode, and is left out.)
    """
    if row_tiles >= np.float32(0.8) * np.float32(sms) or max_blocks <= 4:
        return 1
    counts = np.arange(1, min(max_splits, sms, max_blocks) + 1)
    waves = (row_tiles * counts).astype(np.float32) / np.float32(sms)
    efficiency = waves / np.ceil(waves)
    return int(counts[np.argmax(efficiency >= 0.85 * efficiency.max().astype(np.float64))])


def xqa_splits(batch: int, max_blocks: int, sms: int) -> int:
    """XQA, csrc/xqa/mla_sm120.cu in FlashInfer: 4 x (SMs / 4 / batch) in integer division.

    At least 1; at most ceil(max_len / (2 tile)), so that a split has two tiles.
    """
    return min(max(1, sms // 4 // batch * 4), -(-max_blocks // 2))


def uniform_cuts(shape: Shape, splits: int) -> Cuts:
    """One count for every request, which has no more pieces than blocks."""
    return cut_by_count(shape, np.full_like(shape.blocks, splits))


def fixed(shape: Shape, num_splits: int = 8) -> Cuts:
    """`num_splits` pieces a request, fewer where it has fewer blocks."""
    if num_splits < 1:
        raise invalid("num_splits", num_splits, "1 or more")
    return uniform_cuts(shape, num_splits)


def fixed_size(
    shape: Shape, split_blocks: int = 16, max_splits: int = 32, half_blocks: int = 0
) -> Cuts:
    """Pieces whose size depends on the request's own length alone: batch invariant.

    size = max(split_blocks, min(half_blocks, ceil(n / 2)), ceil(n / max_splits)) blocks for a
    request of n = max(1, blocks), and piece i is [i * size, min((i + 1) * size, n)). So a request
    is in halves until they are half_blocks long, but never in pieces below split_blocks. A
    persistent schedule gives the tiles, in the order (request, row tile, split) sorted by falling
    block count with ties kept, to workers 0, 1, ..., workers - 1, workers - 1, ..., 1, 0, 0, 1, ...
    in turn: longest and shortest load differ by at most one piece, and a device planner needs a
    counting sort and no more.
    """
    if split_blocks < 1 or max_splits < 1:
        raise invalid("split_blocks, max_splits", (split_blocks, max_splits), "1 or more")
    if half_blocks < 0:
        raise invalid("half_blocks", half_blocks, "0 or more")
    least = np.maximum(split_blocks, -(-shape.blocks // max_splits))
    return cut_by_size(shape, np.maximum(least, np.minimum(half_blocks, -(-shape.blocks // 2))))


#: by name, those of one count for the batch as functions of its counts; "fa3" counts from the
#: longest request, as for padded batches; "cost" is our own and lives in `search`
PUBLISHED: dict[str, Callable[..., Cuts]] = {
    "none": lambda shape: uniform_cuts(shape, 1),
    "fixed": fixed,
    "cutlass": lambda shape: uniform_cuts(
        shape, cutlass_splits(shape.batch, shape.max_blocks, shape.workers)
    ),
    "uniform": lambda shape: uniform_cuts(
        shape, uniform_splits(shape.batch, shape.max_row_tiles, shape.max_blocks, shape.workers)
    ),
    "simplified": lambda shape: uniform_cuts(
        shape, simplified_splits(shape.batch, shape.max_row_tiles, shape.workers)
    ),
    "fa3": lambda shape: uniform_cuts(
        shape, fa3_splits(shape.batch * shape.max_row_tiles, shape.max_blocks, shape.workers)
    ),
    "greedy": greedy,
    "xqa": lambda shape: uniform_cuts(
        shape, xqa_splits(shape.batch, shape.max_blocks, shape.workers)
    ),
    "fixed_size": fixed_size,
}
