"""Which scores a row must not see: the causal rule, or a packed mask of draft tokens.

For accumulators of 64 rows as `attend` describes them. Most tiles lie wholly before the first
position that any row of a warp may not see, which one comparison a warp tells.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..common.ptx_sm90 import fresh_thread, shift_pair
from .params import BLOCK, Config, Globals, Shared, Work
from .tile_scheduler import read_work, visible


def own_row(tid):
    """First of the two rows whose accumulators a thread of the warpgroup holds."""
    return ((tid >> 1) & 48) + ((tid >> 2) & 7)


@cute.jit
def mask(g: Globals, acc: cute.Tensor, work: Work, first: Int32):
    """-inf at columns that a row must not see; the tile begins at position `first`."""
    tid = fresh_thread()
    for h in cutlass.range_constexpr(2):
        left = visible(g, work, own_row(tid) + 8 * h) - first - 2 * (tid & 3)
        for j in cutlass.range_constexpr(cute.size(acc) // 4):
            for e in cutlass.range_constexpr(2):
                i = 4 * j + 2 * h + e
                acc[i] = acc[i] if 8 * j + e < left else -Float32.inf


@cute.jit
def draft_word(g: Globals, draft, word):
    """32 bits of a draft token's mask: all set before the first column, none past the last."""
    bits = Uint32(0)
    if word < 0:
        bits = Uint32(0xFFFFFFFF)
    if (word >= 0) & (word < g.mask.shape[1]):
        bits = Uint32(g.mask[cutlass.min(draft, g.mask.shape[0] - 1), word])
    return bits


@cute.jit
def mask_tree(g: Globals, acc: cute.Tensor, work: Work, first: Int32):
    """-inf at columns that a row must not see: positions before the draft are all seen, the words
    of the row's draft token tell of the others. The tile begins at position `first`."""
    tid = fresh_thread()
    column = 2 * (tid & 3) - (work.kv_len - work.q_len - first)
    for h in cutlass.range_constexpr(2):
        draft = (work.global_row + own_row(tid) + 8 * h) // g.heads
        words = [draft_word(g, draft, (column >> 5) + i) for i in range(3)]
        window = [shift_pair(words[i], words[i + 1], column) for i in range(2)]
        for j in cutlass.range_constexpr(cute.size(acc) // 4):
            for e in cutlass.range_constexpr(2):
                bit = window[j // 4] & Uint32(1 << (8 * (j % 4) + e))
                x = 4 * j + 2 * h + e
                acc[x] = acc[x] if bit != Uint32(0) else -Float32.inf


@cute.jit
def hide(
    cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, acc: cute.Tensor, index, beyond, blocks
):
    """-inf at columns that the thread's rows must not see, `blocks` before the work tile's end.
    Whether there are any is known from `beyond` alone, see `open_positions`."""
    if beyond + blocks * BLOCK < BLOCK:
        work = read_work(g, s, index)
        first = (work.end - blocks) * BLOCK
        if const_expr(cfg.tree):
            mask_tree(g, acc, work, first)
        else:
            mask(g, acc, work, first)


@cute.jit
def open_positions(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, row):
    """Positions past the work tile's end that `row` surely sees, and all after it: nearly always
    negative; with a packed mask, those before the draft. One a warp: no thread has a register."""
    beyond = visible(g, work, row) - work.end * BLOCK
    if const_expr(cfg.tree):
        beyond = work.kv_len - work.q_len - work.end * BLOCK
    return beyond
