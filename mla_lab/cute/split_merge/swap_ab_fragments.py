"""Fragments: the pieces in which swap_ab's partials are moved and merged.

A fragment is 16 bytes of a row pair. In fp32 it is the four accumulators of O^T that a thread holds
side by side, columns g and g + 8 (e4m3: 2g and 2g + 1) of rows r and r + 1, in the order (column,
row), (column, row + 1), (next column, row), (next column, row + 1). In fp16, as the LL merge sends
them, it is these four and the four of the columns 64 further. A row pair is 256 or 128 fragments
(`Traits.fragment_values`). Partials in the workspace keep this order, so that neither side
shuffles.

In this package `c`, `g`, `s` and `r` are `Traits`, `Globals`, `Shared` and `Record` of
`mla_lab.cute.swap_ab_sm90`, which imports this package and not the other way round.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ...core.dims import LATENT_DIM
from ...plan.formula import MAX_SPLITS
from ..common.barriers import NamedBarrier
from ..common.fp8 import put_two
from ..common.ptx_sm90 import LN2, small_quotient, smem_f32, vec4

#: threads of the two consumer warp groups, which run every merge
CONSUMER_THREADS = 256
CONSUMERS = NamedBarrier(1, CONSUMER_THREADS)


class CtaEvent(IntEnum):
    """Timestamps of a profiled build, in the order of a row of its record."""

    START = 0
    SETUP_DONE = 1
    FIRST_QK_DONE = 2
    MAINLOOP_DONE = 3
    PEER_PARTIALS_SENT = 4
    CLUSTER_REDUCED = 5
    TILE_DONE = 6
    EXIT = 7
    FIRST_KV_ISSUED = 8
    PARTIALS_HERE = 9


@cute.jit
def profile_event(c: cutlass.Constexpr, s: Any, event: cutlass.Constexpr[int]) -> None:
    """Store the global timer, ns, as `event`; by the first consumer thread of a profiled build."""
    if const_expr(c.profile):
        tid, _, _ = cute.arch.thread_idx()
        if tid == 0:
            cute.arch.store(s.profile + event, Int64(cute.arch.globaltimer()))


def fragments_per_split(fragments: Any, num_splits: Any) -> Any:
    """Fragments that each of `num_splits` CTAs merges: a multiple of 8, so that slices begin at
    lines, and the lane pairs of `store_fragment` stay together."""
    up = fragments + num_splits - 1
    share = up // num_splits if isinstance(num_splits, int) else small_quotient(up, num_splits)
    return (share + 7) & ~7


def partial_words(c: Any, g: Any, partial: Int32, rank: Int32, fragment: Int32) -> cute.Tensor:
    """A fragment of a partial in the workspace, [partial][rank][fragment][4] fp32."""
    at = ((partial * c.cluster + rank) * c.fragments + fragment) * 4
    return vec4(g.mO_partial.iterator + at)


def fragments_per_row_pair(c: Any) -> int:
    """Fragments of all latent columns of two rows."""
    return 2 * LATENT_DIM // c.fragment_values


def row_pair_of(c: Any, fragment: Int32) -> Int32:
    """The row pair of a fragment of the CTA's rows."""
    return fragment >> (fragments_per_row_pair(c).bit_length() - 1)


def fragment_place(c: Any, fragment: Int32, rank: Int32) -> tuple[Int32, Int32]:
    """First row of a fragment of CTA `rank`'s rows, and its place in the row pair."""
    if c.column_parts > 1:
        return 2 * (rank // c.column_parts), fragment + rank % c.column_parts * c.fragments
    place = fragment & (fragments_per_row_pair(c) - 1)
    return 2 * (row_pair_of(c, fragment) * c.cluster + rank), place


def fragment_column(c: Any, place: Int32) -> Int32:
    """First latent column of a fragment; the second is `Traits.o_half_cols` further, and in fp16
    two more 64 columns behind these."""
    return (
        (place >> 5) * (16 * c.fragment_values)
        + ((place >> 3) & 3) * 16
        + (place & 7) * c.o_row_cols
    )


def weight_table(s: Any, pair: Int32) -> cute.Pointer:
    """Weights of a row pair's splits, fp32 [MAX_SPLITS][2] per pair, on the idle KV ring."""
    return smem_f32(s.sKV.iterator) + pair * (2 * MAX_SPLITS)


def wants_lse(g: Any) -> Any:
    """True where the caller's lse has elements."""
    return cute.size(g.mLSE) > 0


@cute.jit
def inverse_of(whole: Float32, total: Float32):
    """1 / `whole`, or 0 of a row whose sum `total` of exponentials is 0: a NaN stays."""
    return Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(whole)


@cute.jit
def natural_lse(top: Float32, total: Float32):
    """lse of a row with the sum `total` of exponentials relative to its maximum `top` (log2)."""
    value = (top + cute.math.log2(total, fastmath=True)) * Float32(LN2)
    return -Float32.inf if total == 0.0 else value  # a NaN stays


def store_fragment(
    c: Any,
    g: Any,
    out_row: Int32,
    values: cute.Tensor,
    rows: Int32,
    row: Int32,
    col: Int32,
    lane: Int32,
) -> None:
    """One merged fragment into the output, where its rows are below `rows`. Neighbour lanes hold
    neighbouring fragments of a row pair."""
    if not c.fp8:
        _store_lane_pair(c, g, out_row, values, rows, row, col, lane)
        return
    for e in range(2):
        low, high = values[e] * g.out_scale, values[2 + e] * g.out_scale
        store_two(c, g, row + e < rows, out_row + row + e, col, low, high)


@cute.jit
def store_two(
    c: cutlass.Constexpr, g: Any, inside: Boolean, row: Int32, col: Int32, low: Float32,
    high: Float32,
):  # fmt: skip
    """Two neighbouring columns of an output row, where `inside`."""
    if inside:
        put_two(c.out_dtype, g.mO, row * LATENT_DIM + col, low, high)


@cute.jit
def _store_lane_pair(
    c: cutlass.Constexpr, g: Any, out_row: Int32, values: cute.Tensor, rows: Int32, row: Int32,
    col: Int32, lane: Int32,
):  # fmt: skip
    """Exchange with the neighbour lane, which holds the next column: even lanes store two columns
    of the first row, odd lanes of the second."""
    odd = lane & 1
    even = odd == 0
    own_row = row + odd
    for h in cutlass.range_constexpr(2):
        give = values[2 * h + 1] if even else values[2 * h]
        keep = values[2 * h] if even else values[2 * h + 1]
        got = cute.arch.shuffle_sync_bfly(give, offset=1)
        pair = cute.make_rmem_tensor(2, c.out_dtype)
        first = keep if even else got
        second = got if even else keep
        pair[0] = (first * g.out_scale).to(c.out_dtype)
        pair[1] = (second * g.out_scale).to(c.out_dtype)
        if own_row < rows:
            at = (out_row + own_row) * LATENT_DIM + (col - odd) + 8 * h
            pointer = (g.mO.iterator + at).align(4)
            cute.autovec_copy(pair, cute.make_tensor(pointer, cute.make_layout(2)))
