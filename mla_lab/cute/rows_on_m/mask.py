"""Masks for accumulators of 64 rows: the causal rule, or a packed mask of draft tokens.

A thread's accumulator of 64 x n scores, seen as `rows_of(acc)[h, c]`, holds row
`first_row(tid) + 8 h`, column `2 (lane % 4) + column_of(c)`: the coordinates that `partition_C` of
an identity tensor gives (tests/test_cute_keep_ab.py).

Most tiles lie wholly before the first position that any row of a warp must not see; one comparison
per warp detects them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..common.ptx_sm90 import bits_below, fresh_thread, pick, shift_pair
from .params import BLOCK, Cta, Globals, Work
from .work_records import read_work, visible


def first_row(tid):
    """The first of the two rows, eight apart, that a thread of the warp group holds."""
    return ((tid >> 1) & 48) + ((tid >> 2) & 7)


def rows_of(acc: cute.Tensor) -> cute.Tensor:
    """A view [row half, column index] of an accumulator of 64 rows."""
    count = cute.size(acc) // 4
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, count)), stride=(2, (1, 4))))


def column_of(c: int) -> int:
    """Offset of column index `c` of `rows_of` from the thread's first column."""
    return 8 * (c // 2) + c % 2


@cute.jit
def apply_causal(cta: Cta, acc: cute.Tensor, work: Work, first: Int32):
    """Scores of positions after a row's own become -inf; the tile begins at position `first`."""
    tid = fresh_thread()
    scores = rows_of(acc)
    for h in cutlass.range_constexpr(2):
        left = visible(cta.cfg, cta.g, work, first_row(tid) + 8 * h) - first - 2 * (tid & 3)
        for c in cutlass.range_constexpr(cute.size(acc) // 2):
            scores[h, c] = scores[h, c] if column_of(c) < left else -Float32.inf


@cute.jit
def draft_word(g: Globals, draft, word):
    """32 bits of a draft token's mask: ones before the first column, zeros past the last."""
    bits = Uint32(0)
    if word < 0:
        bits = Uint32(0xFFFFFFFF)
    if (word >= 0) & (word < g.mask.shape[1]):
        bits = Uint32(g.mask[cutlass.min(draft, g.mask.shape[0] - 1), word])
    return bits


@cute.jit
def apply_tree(g: Globals, acc: cute.Tensor, work: Work, first: Int32):
    """Scores that the packed mask excludes become -inf, and those past the request's end, whatever
    its bits there are; all positions before the draft are visible. The tile begins at position
    `first`.

    Where the mask has no columns for the request's last query tokens, a score of inf makes the row
    NaN. The maximum of a tile's scores, which decides whether it is skipped, would leave a NaN out.
    """
    tid = fresh_thread()
    scores = rows_of(acc)
    column = 2 * (tid & 3) - (work.kv_len - work.q_len - first)
    left = work.q_len - column
    for h in cutlass.range_constexpr(2):
        draft = (work.global_row + first_row(tid) + 8 * h) // g.heads
        words = [draft_word(g, draft, (column >> 5) + i) for i in range(3)]
        window = [shift_pair(words[i], words[i + 1], column) for i in range(2)]
        window = [window[i] & bits_below(left - 32 * i) for i in range(2)]
        for c in cutlass.range_constexpr(cute.size(acc) // 2):
            at = column_of(c)
            bit = window[at // 32] & Uint32(1 << at % 32)
            scores[h, c] = scores[h, c] if bit != Uint32(0) else -Float32.inf
        scores[h, 0] = pick(work.q_len > 32 * g.mask.shape[1], Float32.inf, scores[h, 0])


@cute.jit
def apply_mask(cta: Cta, acc: cute.Tensor, index, mask_free, tiles_left):
    """Mask the scores of the tile that is `tiles_left` before the end of work tile `index`;
    `mask_free` as `mask_free_until` gives it, which suffices to skip most tiles."""
    if mask_free + tiles_left * BLOCK < BLOCK:
        work = read_work(cta.g, cta.s, index)
        first = (work.end - tiles_left) * BLOCK
        if const_expr(cta.cfg.tree):
            apply_tree(cta.g, acc, work, first)
        else:
            apply_causal(cta, acc, work, first)


@cute.jit
def apply_valid(acc: cute.Tensor, words: list):
    """Scores of slots that hold no token become -inf: bit t of word h stands for slot 32 h + t."""
    if (words[0] & words[1]) != -1:
        shift = 2 * (fresh_thread() & 3)
        bits = [Uint32(word) >> Uint32(shift) for word in words]
        seen = rows_of(acc)
        for c in cutlass.range_constexpr(cute.size(acc) // 2):
            at = column_of(c)
            bit = bits[at // 32] & Uint32(1 << at % 32)
            for h in cutlass.range_constexpr(2):
                seen[h, c] = seen[h, c] if bit != Uint32(0) else -Float32.inf


@cute.jit
def mask_free_until(cta: Cta, work: Work, row):
    """Number of positions past the work tile's end that `row` and all rows after it see, nearly
    always negative. With a packed mask, of those before the draft. Held once per warp, because no
    thread has a register for it."""
    beyond = visible(cta.cfg, cta.g, work, row) - work.end * BLOCK
    if const_expr(cta.cfg.tree):
        beyond = work.kv_len - work.q_len - work.end * BLOCK
    return beyond
