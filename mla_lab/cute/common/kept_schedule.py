"""What a CTA found by the rule, kept in the workspace for the launches that follow.

Beside the words of its tiles (see `common.self_schedule`) lies all that they were found from. The
next launch compares and takes them, which costs one load latency; all but one layer of a step do.
A fetch ahead reads from them which KV the CTA began with last.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ...plan.dealt import MOST_PIECES
from .find_work import find_work, find_work_of_one
from .fixed_pieces import find_pieces
from .kv_prefetch import KvCache, prefetch_tiles
from .outlined import call_outlined
from .ptx_sm90 import load_lasting, load_where, pick, store_relaxed
from .self_schedule import (
    COUNT,
    END,
    HELD,
    HELD_REQUESTS,
    Batch,
    pack,
    select,
    token_of,
    total,
)


@cute.jit
def key_of(b: Batch, worker: Int32, words: Int32) -> Int32:
    """What beside lengths and query tokens decides the words, and a checksum of them, one value a
    lane."""
    lane = cute.arch.lane_idx()
    check = total((words ^ (lane * Int32(0x01000193))) * Int32(0x2C1B3C6D))
    batch = Int32(b.seq_lens.shape[0])
    # builds that find work by different rules may follow each other in one workspace
    rule = 3 + b.single if b.single else 2 if b.pieces else 0 if b.deals else 3
    tile = Int32(b.tile_rows + (rule << 16))
    values = [batch, b.heads, b.q_len, b.workers, b.costs, tile, worker, check]
    return pack(lane, values, 0, Int32(0))


@cute.jit
def lengths_differ(b: Batch, row: cute.Pointer, held: cutlass.Constexpr[int]):
    """Nonzero where one of the lane's requests, `lane` and every 32nd behind it, differs from what
    is kept from `row` on. Query tokens are compared where they may differ, by where they end."""
    lane, changed = cute.arch.lane_idx(), Int32(0)
    left = b.seq_lens.shape[0] - lane
    lens, end = b.seq_lens.iterator + lane, b.q_begin.iterator + (lane + 1)
    for c in cutlass.range_constexpr(held):
        kept = load_where(row, 32 * (2 + c), left, 32 * c)
        changed = changed | (load_where(lens, 32 * c, left, 32 * c) ^ kept)
    if b.q_len == 0:
        begin = token_of(b, load_lasting(b.q_begin.iterator))
        for c in cutlass.range_constexpr(held):
            kept = load_where(row, 32 * (2 + HELD + c), left, 32 * c)
            tokens = token_of(b, load_where(end, 32 * c, left, 32 * c)) - begin
            changed = changed | pick(left > 32 * c, tokens ^ kept, Int32(0))
    return changed


@cute.jit
def any_length_differs(b: Batch, row: cute.Pointer):
    """`lengths_differ` for a batch of any size; nonzero where not all of its lengths are kept."""
    batch, changed = b.seq_lens.shape[0], Int32(1)
    if batch <= 32:
        changed = lengths_differ(b, row, 1)
    elif batch <= HELD_REQUESTS:
        changed = lengths_differ(b, row, HELD)
    return changed


@cute.jit
def keep_lengths(b: Batch, row: cute.Pointer):
    """What `lengths_differ` compares with, of up to HELD_REQUESTS requests."""
    begin, batch = token_of(b, load_lasting(b.q_begin.iterator)), b.seq_lens.shape[0]
    for base in cutlass.range(0, cutlass.min(batch, HELD_REQUESTS), 32, unroll=1):
        at = cutlass.min(base + cute.arch.lane_idx(), batch - 1)
        store_relaxed(row + (base + 32 * 2), load_lasting(b.seq_lens.iterator + at))
        end = token_of(b, load_lasting(b.q_begin.iterator + at + 1))
        store_relaxed(row + (base + 32 * (2 + HELD)), end - begin)


@cute.jit
def find_plan_words(b: Batch, worker: Int32, kept: cute.Tensor) -> Int32:
    """The words of the table in `common.self_schedule`: those that the CTA kept, where lengths and
    all else are the same, or those that it finds by the rule and then keeps. For a batch that one
    group does not hold they are found in each launch.

    kept: int32 [KEPT]: words, key, lengths, where each request's query tokens end, one a lane in
    each row of 32. It may hold anything: the batch is not 0, and the key has a checksum.
    """
    row = kept.iterator + cute.arch.lane_idx()
    words, key = load_lasting(row), load_lasting(row + 32)
    if const_expr(b.single):
        changed = lengths_differ(b, row, 1)
    else:
        changed = any_length_differs(b, row)
    changed = changed | (key ^ key_of(b, worker, words))
    if not cute.arch.vote_all_sync(changed == 0):
        words = find_outlined(b, worker, kept)
        store_relaxed(row, words)
        store_relaxed(row + 32, key_of(b, worker, words))
        keep_lengths(b, row)
    return words


def find_outlined(b: Batch, worker: Int32, kept: cute.Tensor) -> Int32:
    """The words by the rule, found by a function of its own: one layer of a step calls it."""
    rule = "one_request" if b.single else "pieces" if b.pieces else "work"
    numbers = [Int32(n) for n in (b.heads, b.q_len, b.workers, b.costs, worker)]
    # the division by a constant is a shift
    fields = {} if isinstance(b.tile_rows, int) else {"tile_rows": Int32(b.tile_rows)}
    if b.tokens is not None:
        fields["tokens"] = b.tokens
    scratch = kept.iterator + 32 * 2
    addresses = [Int64(p.toint()) for p in (b.seq_lens.iterator, b.q_begin.iterator, scratch)]

    def body(seq_lens, q_begin, scratch, batch, *numbers):
        heads, q_len, workers, costs, worker, *values = numbers
        given = Batch(
            ints_at(seq_lens, batch), ints_at(q_begin, batch + 1), heads, q_len, workers, costs,
            b.tile_rows, b.single, b.pieces, b.deals,
        )  # fmt: skip
        given = replace(given, **dict(zip(fields, values, strict=True)))
        if b.single:
            return find_work_of_one(given, worker)
        if b.pieces:
            return find_pieces(given, worker)
        return find_work(given, worker, ints_at(scratch, MOST_PIECES).iterator)

    args = [*addresses, Int32(b.seq_lens.shape[0]), *numbers, *fields.values()]
    return call_outlined(f"find_{rule}", body, args)


def ints_at(address: Int64, count: Int32) -> cute.Tensor:
    """int32 [count] in global memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout((count,)))


@cute.jit
def prefetch_kept(kv: KvCache, kept: cute.Tensor):
    """KV of the tile that the worker began with in the launch before into L2, ahead of the wait for
    the kernel in front; by one warp. What is kept may hold anything."""
    words = load_lasting(kept.iterator + cute.arch.lane_idx())
    request, begin, end, count = [cute.arch.shuffle_sync(words, i) for i in (0, 2, END, COUNT)]
    there = (count > 0) & (request >= 0) & (request < kv.block_table.shape[0])
    prefetch_tiles(kv, *(select(there, word, Int32(0)) for word in (request, begin, end)))
