"""Softmax over tokens when tokens lie along M: maxima cross lanes and warps, rows stay put.

A thread of a warpgroup holds tokens 16w + lane/4 (+8) and rows 8j + 2(lane%4) + e, at flat
accumulator index 4j + 2h + e. `i = 2j + e` counts a thread's rows.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..common.feature_operands import scale_now
from ..common.ptx_sm90 import NO_SCORE, fold_lanes, folded_index, fresh_thread, load4
from .params import TILE_KV, Shape
from .shared_storage import Global, Shared

#: rows of a thread whose maxima are read together
CHUNK = 8


def row_of(i: int, lane: Int32) -> Int32:
    """Row (in the tile) of a thread's i-th."""
    return 8 * (i // 2) + 2 * (lane % 4) + i % 2


def fold_row(i: Int32, lane: Int32) -> Int32:
    """`row_of` for a run-time i."""
    return 8 * (i >> 1) + 2 * (lane % 4) + (i & 1)


@cute.jit
def mask_tail(acc: cute.Tensor, left: Int32, token: Int32):
    """Scores of tokens at or past `left` become -inf, for every row."""
    for h in cutlass.range_constexpr(2):
        keep = token + 8 * h < left
        for j in cutlass.range_constexpr(cute.size(acc) // 4):
            for e in cutlass.range_constexpr(2):
                x = 4 * j + 2 * h + e
                acc[x] = acc[x] if keep else -Float32.inf


@cute.jit
def mask_causal(acc: cute.Tensor, left: Int32, row: Int32, heads: Int32, token: Int32, lane: Int32):
    """Row r sees `left` + r // heads + 1 tokens of this tile (bottom-right)."""
    for i in cutlass.range_constexpr(cute.size(acc) // 2):
        seen = left + (row + row_of(i, lane)) // heads + 1
        for h in cutlass.range_constexpr(2):
            x = 4 * (i // 2) + 2 * h + i % 2
            acc[x] = acc[x] if token + 8 * h < seen else -Float32.inf


@cute.jit
def mask_tree(
    g: Global, acc: cute.Tensor, tile_token: Int32, kv_len: Int32, prefix: Int32,
    out_row: Int32, token: Int32, lane: Int32,
):  # fmt: skip
    """Row r sees the `prefix` and the draft tokens whose bits are set in its token's words."""
    last, words = g.mask.shape[0] - 1, g.mask.shape[1]
    for i in cutlass.range_constexpr(cute.size(acc) // 2):
        draft = cutlass.min((out_row + row_of(i, lane)) // g.heads, last)
        for h in cutlass.range_constexpr(2):
            at = tile_token + token + 8 * h
            column = at - prefix
            word = cutlass.max(cutlass.min(column >> 5, words - 1), Int32(0))
            bit = (Uint32(g.mask[draft, word]) >> Uint32(column & 31)) & Uint32(1)
            keep = ((column < 0) | (bit != Uint32(0))) & (at < kv_len)
            x = 4 * (i // 2) + 2 * h + i % 2
            acc[x] = acc[x] if keep else -Float32.inf


@cute.jit
def ask_slots(c: cutlass.Constexpr[Shape], g: Global, tile_token: Int32, w: Any):
    """Sparse: bit h is set where the thread's token (+ 8 h) has a slot. Asked before the scores,
    which the answer would otherwise hold up; one register through them."""
    bits = Int32(3)
    if const_expr(c.gather == 2):
        request, last = w.causal, w.kv_len - 1
        tid = fresh_thread()
        bits = Int32(0)
        for h in cutlass.range_constexpr(2):
            at = tile_token + 16 * (tid % 128 // 32) + tid % 32 // 4 + 8 * h
            slot = g.block_table[request, cutlass.min(at, last)]
            bits = bits | (Int32(1 << h) if (slot >= 0) & (at <= last) else Int32(0))
    return bits


@cute.jit
def mask_slots(c: cutlass.Constexpr[Shape], acc: cute.Tensor, bits: Int32):
    """Sparse: scores of tokens without a slot become -inf, for every row."""
    if const_expr(c.gather == 2):
        for h in cutlass.range_constexpr(2):
            keep = (bits & (1 << h)) != 0
            for i in cutlass.range_constexpr(cute.size(acc) // 2):
                x = 4 * (i // 2) + 2 * h + i % 2
                acc[x] = acc[x] if keep else -Float32.inf


@cute.jit
def mask_scores(
    c: cutlass.Constexpr[Shape], g: Global, acc: cute.Tensor, tile_token: Int32,
    w: Any, token: Int32, lane: Int32,
):  # fmt: skip
    """Hide what is past the length, or past a row's own token, in the tiles that reach there.

    w: the `Span` of the work tile.
    """
    kv_len, causal, row = w.kv_len, w.causal, w.row
    if const_expr(c.gather == 2):
        pass
    elif const_expr(c.tree):
        if tile_token + TILE_KV > causal:
            if cute.size(g.mask) > 0:
                mask_tree(g, acc, tile_token, kv_len, causal, w.out_row, token, lane)
            else:
                mask_causal(acc, causal - tile_token, row, g.heads, token, lane)
    elif const_expr(c.causal and c.eight):
        # by the first row's token: there is no time for a division a tile
        if tile_token + TILE_KV > causal + 1:
            mask_causal(acc, causal - tile_token, row, g.heads, token, lane)
    elif const_expr(c.causal):
        # kv_len - q_len + token + 1 <= kv_len, so this covers the tail too
        if tile_token + TILE_KV > causal + row // g.heads + 1:
            mask_causal(acc, causal - tile_token, row, g.heads, token, lane)
    elif tile_token + TILE_KV > kv_len:
        mask_tail(acc, kv_len - tile_token, token)


@cute.jit
def softmax(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], first: cutlass.Constexpr[bool],
    g: Global, s: Shared, acc: cute.Tensor, total: cute.Tensor, factor: cute.Tensor,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """acc <- exp2(scale * score - m); total, factor and the published (m, factor) follow."""
    num = c.rows // 4
    scale = scale_now(c, g)
    tops = []
    for i in cutlass.range_constexpr(num):
        tops.append(cute.arch.fmax(acc[4 * (i // 2) + i % 2], acc[4 * (i // 2) + 2 + i % 2]))
    tops = fold_lanes(tops, cute.arch.fmax, lane)
    start = folded_index(num, lane)
    for i in cutlass.range_constexpr(len(tops)):
        s.top[wg, fold_row(start + i, lane), warp] = tops[i]
    cute.arch.barrier(barrier_id=2 + wg, number_of_threads=128)
    for at in cutlass.range_constexpr(0, num, CHUNK):
        count = min(CHUNK, num)
        peaks = weigh_rows(c, wg, first, scale, s, acc, total, factor, lane, at, count)
        if warp == 0 and lane < 4:
            for n in cutlass.range_constexpr(count):
                s.peak[wg, 0, row_of(at + n, lane)] = peaks[n]
                s.peak[wg, 1, row_of(at + n, lane)] = factor[at + n]


def weigh_rows(
    c: Shape, wg: int, first: bool, scale: Float32, s: Shared, acc: cute.Tensor, total: cute.Tensor,
    factor: cute.Tensor, lane: Int32, start: int, count: int,
) -> list[Float32]:  # fmt: skip
    """A thread's rows start .. start + count. All reads come first: a store between them would
    make each row wait for shared memory on its own."""
    rows = [row_of(i, lane) for i in range(start, start + count)]
    tops = [load4(s.top.iterator + (wg * c.rows + row) * 4) for row in rows]
    olds = [Float32(NO_SCORE) if first else s.peak[1 - wg, 0, row] for row in rows]
    peaks = []
    for i, v, old in zip(range(start, start + count), tops, olds, strict=True):
        top = cute.arch.fmax(cute.arch.fmax(v[0], v[1]), cute.arch.fmax(v[2], v[3]))
        new = cute.arch.fmax(old, top * scale)
        factor[i] = cute.math.exp2(old - new, fastmath=True)
        x = 4 * (i // 2) + i % 2
        acc[x] = cute.math.exp2(acc[x] * scale - new, fastmath=True)
        acc[x + 2] = cute.math.exp2(acc[x + 2] * scale - new, fastmath=True)
        total[i] = total[i] * factor[i] + (acc[x] + acc[x + 2])
        peaks.append(new)
    return peaks


def read_factors(c: Shape, s: Shared, wg: int, factor: cute.Tensor, lane: Int32) -> None:
    """The factors that warpgroup `wg` published with its last tile."""
    for i in range(c.rows // 4):
        factor[i] = s.peak[wg, 1, row_of(i, lane)]


def rescale(acc: cute.Tensor, factor: cute.Tensor, rows: int) -> None:
    """O^T accumulators (4 slices of 64 columns) times their row's factor."""
    for x in range(cute.size(acc)):
        j = x % (rows // 2) // 4
        acc[x] = acc[x] * factor[2 * j + x % 2]


def scale_totals(total: cute.Tensor, factor: cute.Tensor) -> None:
    """Running sums of this warpgroup's tiles, after the other's maximum moved."""
    for i in range(cute.size(total)):
        total[i] = total[i] * factor[i]
