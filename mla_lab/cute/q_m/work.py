"""Reading a work tile, and which KV positions a row may see."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr

from .storage import BLOCK, Config, Globals, Work

#: moments of a stamped build, nanoseconds of the global timer, one row a CTA
MOMENTS = (
    "start",
    "set up",
    "first P",
    "last PV",
    "arrived",
    "partials there",
    "end",
)


@cute.jit
def stamp(cfg: cutlass.Constexpr[Config], g: Globals, moment: cutlass.Constexpr[int]):
    """Note the time of a moment, by the first accumulate thread (stamped builds only)."""
    if const_expr(cfg.stamps):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if tid == 0:
            g.stamps[cta, moment] = Int64(cute.arch.globaltimer())


@cute.jit
def read_work(cfg: cutlass.Constexpr[Config], g: Globals, index, rank):
    """The work tile as this CTA sees it: `rank` takes the rank-th 64 rows of the row tile.

    An empty tile counts as one block: of zeros, wholly masked, so out 0 and lse -inf follow.
    """
    request = g.tiles[index, 0]
    first_token = g.q_begin[request]
    q_len = g.q_begin[request + 1] - first_token
    begin = g.tiles[index, 2]
    first_row = (g.tiles[index, 1] * cfg.cluster + rank) * BLOCK
    return Work(
        request=request,
        first_row=first_row,
        begin=begin,
        end=cutlass.max(g.tiles[index, 3], begin + 1),
        split_idx=g.tiles[index, 4],
        num_splits=g.tiles[index, 5],
        slot=g.tiles[index, 6],
        group=g.tiles[index, 7],
        num_rows=q_len * g.heads,
        global_row=first_token * g.heads + first_row,
        q_len=q_len,
        kv_len=g.seq_lens[request],
    )


def visible(g, work, row):
    """Number of KV positions that packed row `first_row + row` sees (bottom-right causal)."""
    token = cutlass.min((work.first_row + row) // g.heads, work.q_len - 1)
    return work.kv_len - work.q_len + token + 1
