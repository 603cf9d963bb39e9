"""Mask and online softmax over tokens, which lie along M: row maxima cross lanes and warps.

See `mma` for which token and row an accumulator of S^T belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from ..common.feature_operands import orient_scores, scale_now
from ..common.ptx_sm90 import (
    NO_SCORE,
    fold_lanes,
    folded_index,
    fresh_thread,
    load4,
    pick,
    small_quotient,
)
from .mma import WarpGroup
from .params import TILE_KV, KvLoad, Traits
from .shared_storage import Globals, Shared, WorkTile

#: rows of a thread whose maxima are read together
ROWS_AT_ONCE = 8
#: what lies in `Shared.sStats`
ROW_MAX, RESCALE = 0, 1


def thread_row(i: int | Int32, lane: Int32) -> Int32:
    """Row in the tile of a thread's i-th."""
    return 8 * (i >> 1) + 2 * (lane & 3) + (i & 1)


@cute.jit
def mask_tokens(acc: cute.Tensor, keep: Boolean, h: cutlass.Constexpr[int]):
    """Scores of the thread's token `h` become -inf, for every row, unless `keep`."""
    for i in cutlass.range_constexpr(cute.size(acc) // 2):
        x = 4 * (i // 2) + 2 * h + i % 2
        acc[x] = acc[x] if keep else -Float32.inf


@cute.jit
def mask_causal(
    acc: cute.Tensor, w: WorkTile, heads: Int32, tile_token: Int32, token: Int32, lane: Int32
):
    """Row r keeps `prefix` + r // heads + 1 tokens of the request (bottom-right)."""
    for i in cutlass.range_constexpr(cute.size(acc) // 2):
        end = w.prefix - tile_token + small_quotient(w.row + thread_row(i, lane), heads) + 1
        for h in cutlass.range_constexpr(2):
            x = 4 * (i // 2) + 2 * h + i % 2
            acc[x] = acc[x] if token + 8 * h < end else -Float32.inf


@cute.jit
def mask_tree(
    g: Globals, acc: cute.Tensor, w: WorkTile, tile_token: Int32, token: Int32, lane: Int32
):
    """Row r keeps the prefix and the draft tokens whose bits are set in its token's words. Where
    the mask has no columns for the request's last query tokens, the others become NaN."""
    last, words = g.mask.shape[0] - 1, g.mask.shape[1]
    hidden = pick(w.kv_len - w.prefix > 32 * words, Float32.nan, -Float32.inf)
    for i in cutlass.range_constexpr(cute.size(acc) // 2):
        draft = cutlass.min(small_quotient(w.out_row + thread_row(i, lane), g.heads), last)
        for h in cutlass.range_constexpr(2):
            at = tile_token + token + 8 * h
            column = at - w.prefix
            word = cutlass.max(cutlass.min(column >> 5, words - 1), Int32(0))
            bit = (Uint32(g.mask[draft, word]) >> Uint32(column & 31)) & Uint32(1)
            keep = ((column < 0) | (bit != Uint32(0))) & (at < w.kv_len) & (column < 32 * words)
            x = 4 * (i // 2) + 2 * h + i % 2
            acc[x] = acc[x] if keep else hidden


@cute.jit
def load_slot_bits(c: cutlass.Constexpr[Traits], g: Globals, tile_token: Int32, w: WorkTile):
    """Sparse: bit h is set where the thread's token h has a slot. Loaded before QK, which hides
    the latency; one register until then."""
    bits = Int32(3)
    if const_expr(c.kv_load == KvLoad.GATHER_SPARSE):
        last = w.kv_len - 1
        tid = fresh_thread()
        bits = Int32(0)
        for h in cutlass.range_constexpr(2):
            at = tile_token + 16 * (tid % 128 // 32) + tid % 32 // 4 + 8 * h
            slot = g.block_table[w.prefix, cutlass.min(at, last)]
            bits = bits | (Int32(1 << h) if (slot >= 0) & (at <= last) else Int32(0))
    return bits


@cute.jit
def apply_mask(
    c: cutlass.Constexpr[Traits], g: Globals, acc: cute.Tensor, w: WorkTile, tile_token: Int32,
    slot_bits: Int32, token: Int32, lane: Int32,
):  # fmt: skip
    """-inf for the tokens that a row does not see; only in tiles that have such a token."""
    if const_expr(c.kv_load == KvLoad.GATHER_SPARSE):
        for h in cutlass.range_constexpr(2):
            mask_tokens(acc, (slot_bits & (1 << h)) != 0, h)
    elif const_expr(c.tree):
        if tile_token + TILE_KV > w.prefix:
            if cute.size(g.mask) > 0:
                mask_tree(g, acc, w, tile_token, token, lane)
            else:
                mask_causal(acc, w, g.heads, tile_token, token, lane)
    elif const_expr(c.causal and c.fp8):
        # from the first row's token on: there is no time for a division per tile
        if tile_token + TILE_KV > w.prefix + 1:
            mask_causal(acc, w, g.heads, tile_token, token, lane)
    elif const_expr(c.causal):
        # kv_len - q_len + token + 1 <= kv_len, so this covers the end of the request too
        if tile_token + TILE_KV > w.prefix + w.row // g.heads + 1:
            mask_causal(acc, w, g.heads, tile_token, token, lane)
    elif tile_token + TILE_KV > w.kv_len:
        for h in cutlass.range_constexpr(2):
            mask_tokens(acc, token + 8 * h < w.kv_len - tile_token, h)


def greatest(c: Traits) -> Callable[[Any, Any], Float32]:
    """The maximum of two scores. With the option skip a NaN is the greatest, so that a tile with
    one is not skipped."""
    return partial(cute.arch.fmax, nan=True) if c.skip else cute.arch.fmax


@cute.jit
def store_tile_max(
    c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, acc: cute.Tensor, warp: Int32,
    lane: Int32,
):  # fmt: skip
    """Maximum of each row over this warp's tokens, for all warps of the group."""
    num, top = c.rows // 4, greatest(c)
    maxima = []
    for i in cutlass.range_constexpr(num):
        maxima.append(top(acc[4 * (i // 2) + i % 2], acc[4 * (i // 2) + 2 + i % 2]))
    maxima = fold_lanes(maxima, top, lane)
    start = folded_index(num, lane)
    for i in cutlass.range_constexpr(len(maxima)):
        s.sTileMax[wg.idx, thread_row(start + i, lane), warp] = maxima[i]
    wg.sync()


def tile_max(c: Traits, s: Shared, wg: WarpGroup, row: Int32) -> Float32:
    """Maximum of a row over the tile's 64 tokens, once all four warps have stored theirs."""
    v = load4(s.sTileMax.iterator + (wg.idx * c.rows + row) * 4)
    top = greatest(c)
    return top(top(v[0], v[1]), top(v[2], v[3]))


@cute.jit
def online_softmax_step(
    c: cutlass.Constexpr[Traits], first: cutlass.Constexpr[bool], g: Globals, s: Shared,
    wg: WarpGroup,
):  # fmt: skip
    """16 bits: tSrS <- exp2(scale * score - row max); the row sums follow, and row max and rescale
    are published for the other warp group. `first`: there is no earlier tile."""
    num = c.rows // 4
    scale = orient_scores(c, wg.tSrS, scale_now(c, g))
    store_tile_max(c, s, wg, wg.tSrS, wg.warp, wg.lane)
    for at in cutlass.range_constexpr(0, num, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, num)
        maxima = exp2_rows(c, first, scale, s, wg, range(at, at + count))
        if wg.warp == 0 and wg.lane < 4:
            for n in cutlass.range_constexpr(count):
                s.sStats[wg.idx, ROW_MAX, thread_row(at + n, wg.lane)] = maxima[n]
                s.sStats[wg.idx, RESCALE, thread_row(at + n, wg.lane)] = wg.rescale[at + n]


def exp2_rows(
    c: Traits, first: bool, scale: Float32, s: Shared, wg: WarpGroup, numbers: range
) -> list[Float32]:
    """The step for a thread's rows `numbers`; their new maxima. All loads come first: behind a
    store each row would wait for shared memory on its own."""
    rows = [thread_row(i, wg.lane) for i in numbers]
    vectors = [load4(s.sTileMax.iterator + (wg.idx * c.rows + row) * 4) for row in rows]
    olds = [Float32(NO_SCORE) if first else s.sStats[1 - wg.idx, ROW_MAX, row] for row in rows]
    acc, maxima = wg.tSrS, []
    for i, v, old in zip(numbers, vectors, olds, strict=True):
        top = cute.arch.fmax(cute.arch.fmax(v[0], v[1]), cute.arch.fmax(v[2], v[3]))
        new = cute.arch.fmax(old, top * scale)
        wg.rescale[i] = cute.math.exp2(old - new, fastmath=True)
        x = 4 * (i // 2) + i % 2
        acc[x] = cute.math.exp2(acc[x] * scale - new, fastmath=True)
        acc[x + 2] = cute.math.exp2(acc[x + 2] * scale - new, fastmath=True)
        wg.row_sum[i] = wg.row_sum[i] * wg.rescale[i] + (acc[x] + acc[x + 2])
        maxima.append(new)
    return maxima


def load_rescale(c: Traits, s: Shared, wg: WarpGroup, owner: int) -> None:
    """The rescale factors that warp group `owner` published with its last tile."""
    for i in range(c.rows // 4):
        wg.rescale[i] = s.sStats[owner, RESCALE, thread_row(i, wg.lane)]


def rescale_o(c: Traits, wg: WarpGroup) -> None:
    """O^T accumulators (4 slices of 64 columns) times their rows' rescale factors."""
    for x in range(cute.size(wg.tOrO)):
        j = x % (c.rows // 2) // 4
        wg.tOrO[x] = wg.tOrO[x] * wg.rescale[2 * j + x % 2]


def rescale_sums(wg: WarpGroup) -> None:
    """Row sums of this warp group's tiles, after a tile of the other's moved the row max."""
    for i in range(cute.size(wg.row_sum)):
        wg.row_sum[i] = wg.row_sum[i] * wg.rescale[i]
