"""Work tiles of a worker, their records in shared memory, and which KV positions a row may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ...plan.gate import LEAST_BLOCKS
from ..common.fixed_pieces import OWN_PIECES, Before
from ..common.ptx_sm90 import div_pow2, load_lasting, pick, small_quotient
from ..common.self_schedule import LAST_BLOCK, LONGEST, Batch, Plan, cut_offset, query_tokens
from ..common.worker_plan import tile_words
from .params import (
    BLOCK,
    OUTSIDE,
    PAGED,
    RECORD_WORDS,
    RECORDS,
    SPARSE,
    Config,
    Globals,
    Work,
)


def batch_of(cfg: Config, g: Globals) -> Batch:
    """What the scheduling rule reads."""
    tile_rows, single = BLOCK * cfg.cluster, LEAST_BLOCKS[cfg.dual] if cfg.dual else 0
    return Batch(
        g.seq_lens, g.q_begin, g.heads, g.q_len, g.num_workers, g.costs, tile_rows,
        single=single, pieces=bool(cfg.pieces), deals=not cfg.gather, tokens=query_tokens(g),
    )  # fmt: skip


@cute.jit
def span_of(words: Int32, kv_len: Int32):
    """Blocks [begin, end) of a plan's row, of the lengths of this launch, whatever a plan was made
    for: the last split ends where the keys end, and one beyond them is empty. An empty tile counts
    as one block: of zeros, wholly masked, so out 0 and lse -inf follow."""
    begin, end, split_idx, num_splits = [cute.arch.shuffle_sync(words, i) for i in range(2, 6)]
    held = div_pow2(kv_len + BLOCK - 1, BLOCK)
    if split_idx + 1 == num_splits:
        end = held
    begin = cutlass.min(begin, held)
    return begin, cutlass.max(cutlass.min(end, held), begin + 1)


@dataclass(frozen=True)
class RecordLoads:
    """What a record is made from beside a plan's row: loads in flight together, a value a lane."""

    token: Int32  # q_begin of the request, and in odd lanes of the one after it
    kv_len: Int32
    page: Int32  # see `first_pages`


@cute.jit
def issue_loads(cfg: cutlass.Constexpr[Config], g: Globals, words: Int32):
    """The loads of a likely plan's row, which may hold anything: none is outside of the tensors."""
    lane = cute.arch.lane_idx()
    request, block = cute.arch.shuffle_sync(words, 0), cute.arch.shuffle_sync(words, 2)
    request = cutlass.min(cutlass.max(request, 0), g.seq_lens.shape[0] - 1)
    entry = entry_of(cfg, g, cutlass.min(cutlass.max(block, 0), LAST_BLOCK), lane)
    at = Int64(request) * g.block_table.stride[0] + entry
    return RecordLoads(
        load_lasting(g.q_begin.iterator + (request + lane % 2)),
        load_lasting(g.seq_lens.iterator + request),
        load_lasting(g.block_table.iterator + at),
    )


@cute.jit
def record(
    cfg: cutlass.Constexpr[Config], g: Globals, s: Any, plan: Plan, index: Int32, rank: Int32
):
    """Leave the work tile `index` in shared memory, by one warp, after that of `index` - 1."""
    before = Before.none()
    if index > 0:
        last = s.records[None, (index + (RECORDS - 1)) % RECORDS]
        row_tile, splits = last[1] // (BLOCK * cfg.cluster), last[4]
        before = Before(last[0], row_tile, splits & 0xFFFF, splits >> 16)
    words = tile_words(batch_of(cfg, g), g.tiles, plan, index, before)
    lane, request = cute.arch.lane_idx(), cute.arch.shuffle_sync(words, 0)
    # one latency for all three
    token = g.q_begin[request + lane % 2]
    kv_len = g.seq_lens[request]
    block = cutlass.min(cute.arch.shuffle_sync(words, 2), LAST_BLOCK)
    page = first_pages(cfg, g, request, block, lane)
    store_record(cfg, g, s, words, RecordLoads(token, kv_len, page), index, rank)


def names(cfg: Config, g: Globals, kv_len: Int32):
    """Whether a request's row of the block table names so many tokens. A list of slots does.

    By a shift with pages of 16 and 32 as well, ptxas keeps 8 B of e4m3's merge on the stack."""
    width, page_size = g.block_table.shape[1], cfg.page_size
    if cfg.gather == SPARSE:
        return True
    if cfg.gather == PAGED:
        page_size = g.cache.shape[1]
    elif page_size >= BLOCK:
        return div_pow2(kv_len - 1, page_size) < width
    return Int64(width) * page_size >= Int64(kv_len)


@cute.jit
def store_record(
    cfg: cutlass.Constexpr[Config], g: Globals, s: Any, words: Int32, loads: RecordLoads,
    index: Int32, rank: Int32,
):  # fmt: skip
    """The record of a plan's row, by one warp. Lengths and query tokens are in device memory alone:
    whatever they are, its rows and blocks lie inside the tensors."""
    request, row_tile = cute.arch.shuffle_sync(words, 0), cute.arch.shuffle_sync(words, 1)
    split_idx, num_splits, slot, group = [cute.arch.shuffle_sync(words, i) for i in range(4, 8)]
    token, kv_len = cut_offset(loads.token, query_tokens(g)), cutlass.max(loads.kv_len, 0)
    if const_expr(cfg.gather == SPARSE):
        kv_len = cutlass.min(kv_len, g.block_table.shape[1])
    there = (token == loads.token) & (kv_len <= LONGEST) & names(cfg, g, kv_len)
    first_token, q_len = cute.arch.shuffle_sync(token, 0), cute.arch.shuffle_sync(token, 1)
    q_len = q_len - first_token
    kv_len = pick(cute.arch.vote_all_sync(there & (q_len >= 0)), kv_len, Int32(OUTSIDE))
    if const_expr(cfg.pieces):
        # its only block is no item of several pieces
        if (kv_len == OUTSIDE) & (group == OWN_PIECES):
            num_splits, slot, group = Int32(1), Int32(-1), Int32(-1)
    first_row = (row_tile * cfg.cluster + rank) * BLOCK
    begin, end = span_of(words, kv_len)
    found = [
        request, first_row, begin, end, split_idx + (num_splits << 16), slot, group,
        first_token * g.heads + first_row, cutlass.max(q_len, 0), kv_len,
        *(cute.arch.shuffle_sync(loads.page, i) for i in range(4)),
    ]  # fmt: skip
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(RECORD_WORDS):
            s.records[i, index % RECORDS] = found[i]
    cute.arch.sync_warp()


def entry_of(cfg: Config, g: Globals, block, lane):
    """Place in the block table of a page of a block, one a lane, over and over."""
    first = block * BLOCK + (lane % (BLOCK // cfg.box_rows)) * cfg.box_rows
    return cutlass.min(div_pow2(first, cfg.page_size), g.block_table.shape[1] - 1)


@cute.jit
def first_pages(cfg: cutlass.Constexpr[Config], g: Globals, request, block, lane):
    """Page ids of a block, one a lane, over and over. Entries past kv_len may hold anything."""
    return g.block_table[request, entry_of(cfg, g, block, lane)]


@cute.jit
def read_work(g: Globals, s: Any, index: Int32):
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


def piece_begin(work: Work, piece):
    """Blocks from the beginning of a work tile of a batch-invariant call to its piece `piece`, of
    those that its worker adds up itself (`plan.fixed_pieces`), else of one."""
    pieces = pick(work.group == OWN_PIECES, work.num_splits, Int32(1))
    return Int32(Uint32((work.end - work.begin) * piece) // Uint32(pieces))


def visible(cfg: Config, g: Globals, work: Work, row):
    """Number of KV positions that packed row `first_row + row` sees (bottom-right causal).

    With the short quotient ptxas keeps 16 B of a cluster of two's softmax on the stack, without it
    8 B of a single CTA's."""
    row = work.first_row + row
    token = row // g.heads if cfg.cluster == 2 else small_quotient(row, g.heads)
    token = cutlass.min(token, work.q_len - 1)
    return work.kv_len - work.q_len + token + 1
