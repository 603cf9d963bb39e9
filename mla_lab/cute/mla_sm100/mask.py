"""Masks for a thread's scores: 64 tokens of one row, as tensor memory holds them.

Thread t of the softmax warp group has row t % 64 and half t / 64 of the tile's 128 tokens.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..common.ptx_sm90 import pick, shift_pair
from ..rows_on_m.mask import draft_word
from ..rows_on_m.params import BLOCK
from ..rows_on_m.work_records import visible
from .params import S_COLUMNS, Cta


@cute.jit
def open_until(cta: Cta, work, row):
    """Position before which `row` sees all keys of the work tile; without a packed mask it sees
    none from there on."""
    until = visible(cta.cfg, cta.g, work, row)
    if const_expr(cta.cfg.tree):
        until = work.kv_len - work.q_len
    return cutlass.min(until, work.end * BLOCK)


@cute.jit
def apply_causal(scores, left):
    """Scores from index `left` on become -inf."""
    for c in cutlass.range_constexpr(S_COLUMNS):
        scores[c] = scores[c] if c < left else -Float32.inf


@cute.jit
def apply_tree(cta: Cta, scores, work, row, first):
    """Scores that the packed mask excludes become -inf, and those past the request's end or the
    work tile; the thread's first score is at position `first`. They are NaN where the mask has no
    columns for the request's last query tokens."""
    g = cta.g
    column = first - (work.kv_len - work.q_len)
    draft = (work.global_row + row) // g.heads
    words = [draft_word(g, draft, (column >> 5) + i) for i in range(3)]
    window = [shift_pair(words[i], words[i + 1], column) for i in range(2)]
    left = cutlass.min(work.end * BLOCK, work.kv_len) - first
    for c in cutlass.range_constexpr(S_COLUMNS):
        bit = window[c // 32] & Uint32(1 << c % 32)
        scores[c] = scores[c] if (bit != Uint32(0)) & (c < left) else -Float32.inf
    scores[0] = pick(work.q_len > 32 * g.mask.shape[1], Float32.nan, scores[0])


@cute.jit
def apply_mask(cta: Cta, scores, work, row, until, first: Int32):
    """Mask the scores of a tile, the thread's first one at position `first`."""
    if first + S_COLUMNS > until:
        if const_expr(cta.cfg.tree):
            apply_tree(cta, scores, work, row, first)
        else:
            apply_causal(scores, until - first)
