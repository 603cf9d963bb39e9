"""Step 69: a batch of requests on workers that find their own share, and merge what they split.

All tiles of all requests follow each other in one line, and a worker (a CTA) takes an equal piece
of it: its share. So the pieces of a request lie in neighbouring workers. The worker that has a
request's first tile keeps its accumulator and adds what the workers behind it send; each of those
sends at most one piece, its first, before it waits for anybody.

A piece travels by the LL protocol: each 32-bit word is its own flag, 0 means that it has not
arrived, and +0.0 travels as -0.0. `mailbox` is zero between launches; the reader leaves it so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from mla_lab.cute.common.ptx_sm90 import read4_relaxed, write4_relaxed
from mla_lab.cute.steps.empty_kernel import consumer_registers, producer_registers
from mla_lab.cute.steps.one_barrier import THREADS
from mla_lab.cute.steps.online_softmax import Rows, close_rows, rescale, start_rows, store_lse
from mla_lab.cute.steps.page_load import PageCopy, page_copy, page_of
from mla_lab.cute.steps.scores import (
    Query,
    ScoreOperands,
    load_query,
    make_query,
    score_operands,
)
from mla_lab.cute.steps.shape import TILE, WARP_GROUP
from mla_lab.cute.steps.stage_ring import Ring, fill_stage, init_ring, make_ring
from mla_lab.cute.steps.values import (
    ValueOperands,
    attend_tile,
    rescale_rows,
    store_out,
    value_operands,
)

#: words of a thread in the mailbox, by fours: 64 of the accumulator, row maxes and row sums
QUADS = 17
MINUS_ZERO = -(1 << 31)


@dataclass(frozen=True)
class Batch:
    """What all workers read."""

    block_table: cute.Tensor  # int32 [requests, tiles]
    seq_lens: cute.Tensor  # int32 [requests]
    out: cute.Tensor  # bf16 [requests, 64, 128]
    lse: cute.Tensor  # fp32 [requests, 64]
    mailbox: cute.Tensor  # int32 [workers, QUADS, 128, 4]
    scale_log2: Float32


@dataclass(frozen=True)
class Parts:
    """A consumer's operands."""

    query: Query
    ring: Ring
    scores: ScoreOperands
    values: ValueOperands
    rows: Rows


def first_of_share(worker, workers, tiles):
    """The first tile of a worker's share; the share ends where that of `worker` + 1 begins."""
    return worker * tiles // workers


@cute.jit
def nonzero_word(value: Float32):
    """The 32 bits of a number, never 0: +0.0 becomes -0.0."""
    bits = value.bitcast(Int32)
    return bits if bits != 0 else Int32(MINUS_ZERO)


def merge_factors(top, other):
    """Factors that bring two pieces to one row max: of this one's sums, and of the other's. Row
    maxes in units of log2."""
    new = cute.arch.fmax(top, other)
    return rescale(top, new), rescale(other, new)


@cute.jit
def tiles_of(batch: Batch, request):
    """Tiles of a request."""
    return (batch.seq_lens[request] + TILE - 1) // TILE


@cute.jit
def share_of(batch: Batch, worker):
    """Where a worker's share begins and ends in the line of all tiles. Workers past the number of
    tiles have none and come last, so that no worker waits for a piece of them."""
    total = Int32(0)
    for request in cutlass.range(batch.seq_lens.shape[0], unroll=1):
        total = total + tiles_of(batch, request)
    workers = cutlass.min(cute.arch.grid_dim()[0], total)
    return first_of_share(worker, workers, total), first_of_share(worker + 1, workers, total)


@cute.jit
def slots(batch: Batch, worker, thread):
    """A worker's mailbox as seen by one thread: (4 words, QUADS)."""
    return batch.mailbox[worker, None, thread, None]


@cute.jit
def send(batch: Batch, parts: Parts, worker, thread):
    """This worker's piece, to whoever holds the request's first tile."""
    mine, out, rows = slots(batch, worker, thread), parts.values.out, parts.rows
    for quad in cutlass.range_constexpr(QUADS):
        words = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(quad < QUADS - 1):
                words[i] = nonzero_word(out[4 * quad + i])
            else:
                words[i] = nonzero_word(rows.top[i] if i < 2 else rows.total[i - 2])
        write4_relaxed(mine[quad, None].iterator, words)


@cute.jit
def receive(batch: Batch, worker, thread, quad):
    """Four words of another worker's piece, once they are there; leaves zeros."""
    source = slots(batch, worker, thread)[quad, None].iterator
    words, zeros = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(4, Int32)
    words.fill(0)
    zeros.fill(0)
    while (words[0] == 0) | (words[1] == 0) | (words[2] == 0) | (words[3] == 0):
        got = read4_relaxed(source)
        for i in cutlass.range_constexpr(4):
            words[i] = got[i]
    write4_relaxed(source, zeros)
    return cute.recast_tensor(words, Float32)


@cute.jit
def add_piece(batch: Batch, parts: Parts, worker, thread):
    """Merge the piece of another worker into this one's accumulator."""
    out, rows = parts.values.out, parts.rows
    stats = receive(batch, worker, thread, QUADS - 1)
    mine, theirs = [None, None], [None, None]
    for half in cutlass.range_constexpr(2):
        mine[half], theirs[half] = merge_factors(rows.top[half], stats[half])
        rows.top[half] = cute.arch.fmax(rows.top[half], stats[half])
        rows.total[half] = rows.total[half] * mine[half] + stats[2 + half] * theirs[half]
    rescale_rows(out, mine)
    for quad in cutlass.range_constexpr(QUADS - 1):
        got = receive(batch, worker, thread, quad)
        for i in cutlass.range_constexpr(4):
            out[4 * quad + i] = out[4 * quad + i] + got[i] * theirs[i // 2]


@cute.jit
def load_piece(copies, parts, batch: Batch, request, span, count):
    """Producer: the query once it is free, and the piece's tiles; `count` tiles came before."""
    query, ring = parts
    first, last, piece = span
    cute.arch.mbarrier_wait(query.full + 1, (piece + 1) % 2)
    load_query(copies[0], query, request)
    for t in cutlass.range(first, last, unroll=1):
        page = page_of(batch.block_table[request, None], t)
        fill_stage(copies[1], ring, count + t - first, page)


@cute.jit
def attend_piece(parts: Parts, batch: Batch, request, span, count, thread):
    """Consumer: tiles [first, last) of a request."""
    first, last, piece = span
    parts.values.out.fill(0.0)
    parts.rows.top.store(start_rows().top.load())
    parts.rows.total.fill(0.0)
    cute.arch.mbarrier_wait(parts.query.full, piece % 2)
    for t in cutlass.range(first, last, unroll=1):
        attend_tile(
            parts.scores, parts.values, parts.rows, parts.ring, count + t - first, thread,
            batch.seq_lens[request] - t * TILE, batch.scale_log2,
        )  # fmt: skip
    close_rows(parts.rows)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(parts.query.full + 1)


@cute.jit
def finish_piece(parts: Parts, batch: Batch, request, begins, end, worker, thread):
    """Send a piece that does not hold the request's first tile; else add the pieces behind it, up
    to `end` in the line of tiles, and write the result."""
    if begins:
        other = worker + 1
        reached = share_of(batch, other)[0]
        while reached < end:
            add_piece(batch, parts, other, thread)
            other = other + 1
            reached = share_of(batch, other)[0]
        store_lse(parts.rows, batch.lse[request, None], thread)
        store_out(parts.values, parts.rows, batch.out[request, None, None], thread)
    else:
        send(batch, parts, worker, thread)


@cute.jit
def produce(copies, query: Query, ring: Ring, batch: Batch, worker):
    """Producer warp: the pieces of the worker's share, one after the other."""
    first, last = share_of(batch, worker)
    begin, count, piece = Int32(0), Int32(0), Int32(0)
    for request in cutlass.range(batch.seq_lens.shape[0], unroll=1):
        tiles = tiles_of(batch, request)
        a, b = cutlass.max(first - begin, 0), cutlass.min(last - begin, tiles)
        if a < b:
            load_piece(copies, (query, ring), batch, request, (a, b, piece), count)
            count, piece = count + b - a, piece + 1
        begin = begin + tiles


@cute.jit
def consume(parts: Parts, batch: Batch, worker, thread):
    """Consumer warp group: the same pieces."""
    first, last = share_of(batch, worker)
    begin, count, piece = Int32(0), Int32(0), Int32(0)
    for request in cutlass.range(batch.seq_lens.shape[0], unroll=1):
        tiles = tiles_of(batch, request)
        a, b = cutlass.max(first - begin, 0), cutlass.min(last - begin, tiles)
        if a < b:
            attend_piece(parts, batch, request, (a, b, piece), count, thread)
            finish_piece(parts, batch, request, a == 0, begin + tiles, worker, thread)
            count, piece = count + b - a, piece + 1
        begin = begin + tiles


@cute.kernel
def decode(copy_q: PageCopy, copy_kv: PageCopy, batch: Batch):
    """One worker: warp 0 loads, warp group 1 attends and merges."""
    thread, worker = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    query, ring = make_query(BFloat16), make_ring(BFloat16)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(query.full, 1)
            cute.arch.mbarrier_init(query.full + 1, 4)
    init_ring(ring, warp)
    if warp < 4:
        cute.arch.setmaxregister_decrease(producer_registers())
        if warp == 0:
            produce((copy_q, copy_kv), query, ring, batch, worker)
    else:
        cute.arch.setmaxregister_increase(consumer_registers())
        operands = score_operands(query, ring), value_operands(ring)
        consume(Parts(query, ring, *operands, start_rows()), batch, worker, thread - WARP_GROUP)


@cute.jit
def launch(
    q: cute.Tensor, cache: cute.Tensor, block_table: cute.Tensor, seq_lens: cute.Tensor,
    out: cute.Tensor, lse: cute.Tensor, mailbox: cute.Tensor, scale_log2: Float32, stream: Any,
):  # fmt: skip
    """q: bf16 [requests, 64, 192]. cache: bf16 [pages, 64, 192]. block_table: int32 [requests,
    tiles]. seq_lens: int32 [requests], each at least 1; last pages are finite, as in step 68. out:
    bf16 [requests, 64, 128]. lse: fp32 [requests, 64]. mailbox: int32 [workers, 17, 128, 4], zeros.
    All workers must be resident."""
    batch = Batch(block_table, seq_lens, out, lse, mailbox, scale_log2)
    decode(page_copy(q), page_copy(cache), batch).launch(
        grid=(mailbox.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream,
        min_blocks_per_mp=1, cooperative=True,
    )  # fmt: skip
