"""The merge of a batch-invariant launch: each worker of a split row tile merges a share of its
columns, behind the tile that it runs next, from row-major partials and without the KV ring, which
the producer is filling.

Partials are added in split order, whoever adds them: the bits follow from the pieces alone.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from ..common.feature_operands import with_scales
from ..common.ptx_sm90 import fresh_thread
from .piece_flags import mark_read, wait_for_pieces
from .swap_ab_fragments import CONSUMERS, LATENT_DIM
from .swap_ab_last_cta import merge_four

#: columns that a warp merges at a time, four a lane
WARP_COLUMNS = 128


@cute.jit
def merge_piece(c: cutlass.Constexpr, g: Any, r: Any):
    """This worker's share of the row tile that `r` records; by all consumers, which hold nothing
    else. At its end all of them have read `r`."""
    warp = cute.arch.make_warp_uniform(fresh_thread() // 32)
    first = r.partial - r.split
    if warp == 0:
        wait_for_pieces(g.counters, first, r.num_splits)
    CONSUMERS.sync()
    g = with_scales(c, g)
    units = c.rows * (LATENT_DIM // WARP_COLUMNS)
    begin, end = units * r.split // r.num_splits, units * (r.split + 1) // r.num_splits
    for unit in cutlass.range(begin + warp, end, 8, unroll=1):
        row = unit // (LATENT_DIM // WARP_COLUMNS)
        col = unit % (LATENT_DIM // WARP_COLUMNS) * WARP_COLUMNS + fresh_thread() % 32 * 4
        merge_four(c, g, r, row, col)
    CONSUMERS.sync()
    if warp == 0:
        mark_read(g.counters, first, r.num_splits)
