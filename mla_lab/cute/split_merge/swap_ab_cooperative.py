"""Cooperative merge: the counter of a split row tile, and the lse of its partials.

A counter of a row tile belongs to one rank's row pairs or, in clusters of more CTAs than row pairs,
to the ranks that share a row pair: the first of them stores the lse that the others read. It counts
the arrivals 1 .. n of all CTAs of n / `column_parts` splits that write there, then, from n on, the
CTAs that have seen all arrivals; step 2 n takes it back to 0. A CTA waits for n or more, and cannot
miss it, since its own step is one of the 2 n. No CTA waits before its own last arrival, and the
launch is cooperative, so that all of them run.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.ptx_sm90 import LOG2E, NO_SCORE, count_up, fresh_thread, vec2
from .swap_ab_fragments import (
    CONSUMERS,
    fragment_place,
    fragments_per_row_pair,
)


def counter_of(c: Any, g: Any, r: Any) -> cute.Pointer:
    """The counter of this rank's row pairs."""
    pairs = r.rank // c.column_parts if c.column_parts > 1 else r.rank
    return g.counters.iterator + (r.group * c.cluster + pairs)


def arrivals_of(c: Any, r: Any) -> Int32:
    """CTAs that arrive at `counter_of`."""
    return r.num_splits * c.column_parts if c.column_parts > 1 else r.num_splits


@cute.jit
def arrive(c: cutlass.Constexpr, g: Any, r: Any):
    """After a barrier of all consumers: release the partial that they have written."""
    if fresh_thread() == 0:
        count_up(counter_of(c, g, r), 2 * arrivals_of(c, r) - 1, "release")


@cute.jit
def wait_for_partials(c: cutlass.Constexpr, g: Any, r: Any):
    """Wait until all splits have arrived; then count this CTA as one that has seen it."""
    if fresh_thread() == 0:
        counter = counter_of(c, g, r)
        seen = Int32(0)
        while seen < arrivals_of(c, r):
            seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        count_up(counter, 2 * arrivals_of(c, r) - 1, "relaxed")
    CONSUMERS.sync()


@cute.jit
def load_stats(
    c: cutlass.Constexpr, g: Any, r: Any, values: cute.Tensor, pair: Int32, split: Int32
):  # fmt: skip
    """What `swap_ab_ll.take_stats` gives: the lse of a row pair in log2, of `split` and every 32nd
    behind it, and 1 as the sum of each."""
    row, _ = fragment_place(c, pair * fragments_per_row_pair(c), r.rank)
    for k in cutlass.range_constexpr(cute.size(values, mode=[1])):
        two = cute.make_rmem_tensor(2, Float32)
        two.fill(NO_SCORE)
        if split + 32 * k < r.num_splits:
            at = (r.partial - r.split + split + 32 * k) * c.rows + row
            cute.autovec_copy(vec2(g.mLSE_partial.iterator + at), two)
        for e in cutlass.range_constexpr(2):
            values[2 * e, k] = two[e] * Float32(LOG2E)
            values[2 * e + 1, k] = Float32(1.0)
