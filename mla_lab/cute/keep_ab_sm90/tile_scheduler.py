"""Reading the plan, records of work tiles, and which KV positions a row may see."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .params import BLOCK, RECORD_WORDS, RECORDS, Config, Globals, Shared, Work

WORDS = 8  # of a plan row


@dataclass(frozen=True)
class Plan:
    """A worker's rows of the plan, and the words of the first one (lane i: word i of 8)."""

    first: Int32
    last: Int32
    words: Int32


@cute.jit
def plan_words(g: Globals, index):
    """Words of plan row `index`, lane i the i-th of eight."""
    return g.tiles[index, cute.arch.lane_idx() % WORDS]


@cute.jit
def open_plan(g: Globals, worker):
    """Where the worker's rows lie. Most workers have one, row `worker`: it is asked for beside
    their bounds, not after them."""
    lane = cute.arch.lane_idx()
    words = plan_words(g, cutlass.min(worker, g.tiles.shape[0] - 1))
    bound = g.worker_begin[worker + lane % 2]
    first = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(bound, 0))
    last = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(bound, 1))
    if (first != worker) & (first < last):
        words = plan_words(g, first)
    return Plan(first, last, words)


@cute.jit
def record(
    cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, words: Int32, index: Int32, rank: Int32
):
    """Leave the work tile `index` in shared memory, by one warp; `words` are its plan row's.

    An empty tile counts as one block: of zeros, wholly masked, so out 0 and lse -inf follow.
    """
    lane = cute.arch.lane_idx()
    request = cute.arch.shuffle_sync(words, 0)
    begin = cute.arch.shuffle_sync(words, 2)
    # one latency for all three
    token = g.q_begin[request + lane % 2]
    kv_len = g.seq_lens[request]
    page = first_pages(cfg, g, request, begin, lane)
    first_row = (cute.arch.shuffle_sync(words, 1) * cfg.cluster + rank) * BLOCK
    end = cutlass.max(cute.arch.shuffle_sync(words, 3), begin + 1)
    first_token = cute.arch.shuffle_sync(token, 0)
    q_len = cute.arch.shuffle_sync(token, 1) - first_token
    split_idx, num_splits, slot, group = [cute.arch.shuffle_sync(words, i) for i in range(4, 8)]
    found = [
        request, first_row, begin, end, split_idx + (num_splits << 16), slot, group,
        first_token * g.heads + first_row, q_len, kv_len,
        *(cute.arch.shuffle_sync(page, i) for i in range(4)),
    ]  # fmt: skip
    if lane == 0:
        for i in cutlass.range_constexpr(RECORD_WORDS):
            s.records[i, index % RECORDS] = found[i]
    cute.arch.sync_warp()


@cute.jit
def first_pages(cfg: cutlass.Constexpr[Config], g: Globals, request, block, lane):
    """Page ids of a block, one a lane, over and over. Entries past kv_len may hold anything."""
    first = block * BLOCK + (lane % (BLOCK // cfg.box_rows)) * cfg.box_rows
    entry = cutlass.min(first // cfg.page_size, g.block_table.shape[1] - 1)
    return g.block_table[request, entry]


@cute.jit
def read_work(g: Globals, s: Shared, index: Int32):
    """The work tile as this CTA sees it, from its record."""
    r = s.records[None, index % RECORDS]
    return Work(
        request=r[0],
        first_row=r[1],
        begin=r[2],
        end=r[3],
        split_idx=r[4] & 0xFFFF,
        num_splits=r[4] >> 16,
        slot=r[5],
        group=r[6],
        num_rows=r[8] * g.heads,
        global_row=r[7],
        q_len=r[8],
        kv_len=r[9],
    )


def visible(g, work, row):
    """Number of KV positions that packed row `first_row + row` sees (bottom-right causal)."""
    token = cutlass.min((work.first_row + row) // g.heads, work.q_len - 1)
    return work.kv_len - work.q_len + token + 1
