"""What a CTA found by the rule, kept in the workspace for the launches that follow.

Beside the words of its tiles (see `common.self_schedule`) lies all that they were found from. The
next launch compares and takes them, which costs one load latency; all but one layer of a step do.
A fetch ahead reads from them which KV the CTA began with last.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .kv_prefetch import KvCache, prefetch_tiles
from .ptx_sm90 import load_relaxed, store_relaxed
from .self_schedule import (
    COUNT,
    END,
    GROUP,
    HELD,
    Batch,
    Requests,
    find_work,
    load_requests,
    pack,
    select,
    total,
)


@cute.jit
def key_of(b: Batch, worker: Int32, words: Int32) -> Int32:
    """What beside lengths and query tokens decides the words, and a checksum of them, one value a
    lane."""
    lane = cute.arch.lane_idx()
    check = total((words ^ (lane * Int32(0x01000193))) * Int32(0x2C1B3C6D))
    batch = Int32(b.seq_lens.shape[0])
    values = [batch, b.heads, b.q_len, b.workers, b.costs, Int32(b.tile_rows), worker, check]
    return pack(lane, values, 0, Int32(0))


@cute.jit
def recall(b: Batch, worker: Int32, kept: cute.Tensor, held: cutlass.Constexpr[int]) -> Int32:
    """What the CTA kept where lengths and all else are the same, or `find_work`, and then kept.

    kept: int32 [KEPT]: words, key, lengths, query tokens where they differ, one a lane in each row
    of 32. It may hold anything: the batch is not 0, and the key has a checksum.
    """
    lane = cute.arch.lane_idx()
    row = kept.iterator + lane
    r = Requests.empty(held)
    words, key = load_relaxed(row), load_relaxed(row + 32)
    load_requests(b, Int32(0), r)
    changed = Int32(0)
    for c in cutlass.range_constexpr(held):
        changed = changed | (load_relaxed(row + 32 * (2 + c)) ^ r.lens[c])
    if b.q_len == 0:
        for c in cutlass.range_constexpr(held):
            changed = changed | (load_relaxed(row + 32 * (2 + HELD + c)) ^ r.rows[c])
    changed = changed | (key ^ key_of(b, worker, words))
    if not cute.arch.vote_all_sync(changed == 0):
        words = find_work(b, worker, r)
        store_relaxed(row, words)
        store_relaxed(row + 32, key_of(b, worker, words))
        for c in cutlass.range_constexpr(held):
            store_relaxed(row + 32 * (2 + c), r.lens[c])
            store_relaxed(row + 32 * (2 + HELD + c), r.rows[c])
    return words


@cute.jit
def find_plan_words(b: Batch, worker: Int32, kept: cute.Tensor) -> Int32:
    """The words of the module's table by the rule."""
    words, batch = Int32(0), b.seq_lens.shape[0]
    if batch <= 32:
        words = recall(b, worker, kept, 1)
    elif batch <= GROUP:
        words = recall(b, worker, kept, HELD)
    else:
        words = find_work(b, worker, Requests.empty(HELD))
    return words


@cute.jit
def prefetch_kept(kv: KvCache, kept: cute.Tensor):
    """KV of the tile that the worker began with in the launch before into L2, ahead of the wait for
    the kernel in front; by one warp."""
    words = load_relaxed(kept.iterator + cute.arch.lane_idx())
    request, begin, end, count = [cute.arch.shuffle_sync(words, i) for i in (0, 2, END, COUNT)]
    there = (count > 0) & (request >= 0) & (request < kv.block_table.shape[0]) & (begin >= 0)
    prefetch_tiles(kv, request, begin, select(there, end, Int32(0)))
