"""The merge of a batch-invariant launch: each worker of a split row tile merges a share of its
columns, behind the tile that it runs next, from row-major partials and without the KV ring, which
the producer is filling.

A worker that runs an item whole adds up all of it, behind its last piece.

Partials are added in split order, whoever adds them: the bits follow from the pieces alone.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.feature_operands import with_scales
from ..common.fixed_pieces import OWN_PIECES
from ..common.ptx_sm90 import (
    LOG2E,
    NO_SCORE,
    WARP,
    add,
    butterflies,
    discard_line,
    fresh_thread,
    pick,
    vec4,
)
from .piece_flags import mark_read, wait_for_pieces
from .swap_ab_fragments import CONSUMER_THREADS, CONSUMERS, LATENT_DIM
from .swap_ab_last_cta import store_four

WARPS = CONSUMER_THREADS // 32
#: columns that a warp merges at a time, four a lane; such units of a row
COLUMNS = 128
UNITS = LATENT_DIM // COLUMNS
#: units of a warp, and splits, whose loads are in flight together
ROUNDS, BATCH = 4, 4


@cute.jit
def merge_piece(c: cutlass.Constexpr, g: Any, r: Any):
    """This worker's share of the row tile that `r` records, or all of an item that it ran whole; by
    all consumers, which hold nothing else. At its end all of them have read `r`."""
    warp = cute.arch.make_warp_uniform(fresh_thread() // 32)
    first, splits, own = r.partial - r.split, r.num_splits, r.group == OWN_PIECES
    if (warp == 0) & ~own:
        wait_for_pieces(g.counters, first, splits, r.group)
    CONSUMERS.sync()
    g, units = with_scales(c, g), c.rows * UNITS
    shares = pick(own, Int32(1), splits)  # of an own item `split` is 0
    begin, end = units * r.split // shares, units * (r.split + 1) // shares
    for unit in cutlass.range(begin + warp, end, ROUNDS * WARPS, unroll=1):
        merge_units(c, g, r, unit, end)
        if own:
            discard_units(c, g, r, unit, end)
    CONSUMERS.sync()
    if (warp == 0) & ~own:
        mark_read(g.counters, first, splits)


def column_of(unit: Int32) -> Int32:
    """The lane's first column of a unit."""
    return unit % UNITS * COLUMNS + fresh_thread() % 32 * 4


@cute.jit
def merge_units(c: cutlass.Constexpr, g: Any, r: Any, unit: Int32, end: Int32):
    """Units `unit`, `unit` + WARPS, ... below `end`, ROUNDS of them: lane k computes the weight of
    split k, and the splits are added in their order."""
    lane, first, splits = fresh_thread() % 32, r.partial - r.split, r.num_splits
    at = [cutlass.min(unit + WARPS * i, end - 1) for i in range(ROUNDS)]
    values = []
    for i in cutlass.range_constexpr(ROUNDS):
        split = first + cutlass.min(lane, splits - 1)
        value = g.mLSE_partial[split, at[i] // UNITS] * Float32(LOG2E)
        values.append(value if lane < splits else Float32(NO_SCORE))
    part = cute.make_rmem_tensor((4, ROUNDS * BATCH), Float32)
    part.fill(0.0)
    load_splits(c, g, part, at, first, splits, Int32(0))
    tops = butterflies(cute.arch.fmax, values, WARP)
    weights = []
    for i in cutlass.range_constexpr(ROUNDS):
        weight = cute.math.exp2(values[i] - tops[i], fastmath=True)
        # a split without keys weighs nothing, one with a NaN is NaN
        weights.append(Float32(0.0) if values[i] <= NO_SCORE else weight)
    totals = butterflies(add, weights, WARP)
    acc = cute.make_rmem_tensor((4, ROUNDS), Float32)
    acc.fill(0.0)
    for start in cutlass.range(0, splits, BATCH, unroll=1):
        if start > 0:
            load_splits(c, g, part, at, first, splits, start)
        for k in cutlass.range_constexpr(BATCH):
            for i in cutlass.range_constexpr(ROUNDS):
                # weights are 0 past the last split
                one = cute.arch.shuffle_sync(weights[i], (start + k) & 31)
                for e in cutlass.range_constexpr(4):
                    acc[e, i] = acc[e, i] + one * part[e, i * BATCH + k]
    for i in cutlass.range_constexpr(ROUNDS):
        row = at[i] // UNITS
        if (unit + WARPS * i < end) & (row < r.rows):
            store_four(c, g, r, acc[None, i], row, column_of(at[i]), tops[i], totals[i])


@cute.jit
def discard_units(c: cutlass.Constexpr, g: Any, r: Any, unit: Int32, end: Int32):
    """The lines of `merge_units`, which all lanes have read, and which nobody reads again."""
    cute.arch.sync_warp()
    if fresh_thread() % 8 == 0:
        for split in cutlass.range(r.partial, r.partial + r.num_splits, unroll=1):
            for i in cutlass.range_constexpr(ROUNDS):
                at = unit + WARPS * i
                row = split * c.rows + at // UNITS
                if at < end:
                    discard_line(g.mO_partial.iterator + (row * LATENT_DIM + column_of(at)))


@cute.jit
def load_splits(
    c: cutlass.Constexpr, g: Any, part: cute.Tensor, at: list, first: Int32, splits: Int32,
    start: Int32,
):  # fmt: skip
    """BATCH splits of each unit from split `start` on; those past the last one keep what was
    there, finite numbers."""
    for k in cutlass.range_constexpr(BATCH):
        if start + k < splits:
            for i in cutlass.range_constexpr(ROUNDS):
                row = (first + start + k) * c.rows + at[i] // UNITS
                source = g.mO_partial.iterator + (row * LATENT_DIM + column_of(at[i]))
                cute.autovec_copy(vec4(source), part[None, i * BATCH + k])
