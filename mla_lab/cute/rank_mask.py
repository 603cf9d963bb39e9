"""Decode context parallel as a draft mask: the kernel of `backends.rank_mask`.

A thread makes one 32-bit word: what a query token sees of up to 32 of the last tokens of its
request that the rank holds. The first threads also write how many tokens that are.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream

from ..plan.config import KernelConfig
from .common.launch_arguments import tensor
from .common.ptx_sm90 import pick
from .registry import CuteEntry

THREADS, WORD = 128, 32


@dataclass(frozen=True)
class Requests:
    """Tokens of each request on all ranks and on this one, int32 [batch], and its query tokens:
    `q_len`, or where that is 0 by `begins`, int32 [batch + 1]."""

    of_all: cute.Tensor
    seq_lens: cute.Tensor
    begins: cute.Tensor
    world: Int32
    rank: Int32
    q_len: Int32


@cute.jit
def held_of(b: Requests, request: Int32) -> Int32:
    """Tokens of a request that the rank holds, those behind the request's end left out."""
    # without a sum, which would overflow for a length near 2^31
    of_all = cutlass.max(b.of_all[request], Int32(0))
    rounds = of_all // b.world
    more = pick(of_all - rounds * b.world > b.rank, Int32(1), Int32(0))
    return cutlass.min(b.seq_lens[request], rounds + more)


@cute.jit
def place_of(b: Requests, token: Int32):
    """Request of a query token, the token's row in it, and the request's query tokens. Tokens past
    a sum that ends early have no request of their own."""
    request, row, q_len = Int32(0), Int32(0), b.q_len
    if b.q_len > 0:
        request, row = token // b.q_len, token % b.q_len
    else:
        # the last request that begins at the token or before
        last = b.seq_lens.shape[0] - 1
        below, above = Int32(0), last
        while below < above:
            middle = (below + above + 1) >> 1
            before = b.begins[middle] <= token
            below, above = pick(before, middle, below), pick(before, above, middle - 1)
        request = below
        begin = b.begins[request]
        row, q_len = token - begin, b.begins[request + 1] - begin
    return request, row, q_len


@cute.jit
def word_of(
    b: Requests, drafts: cute.Tensor, words: Int32, columns: Int32, token: Int32, word: Int32
):
    """Bits of the columns from 32 x `word` on. Drafts are seen by the caller's masks `drafts`, of
    `words` words each, or causally if `words` is 0."""
    request, row, q_len = place_of(b, token)
    first_draft = b.of_all[request] - q_len
    first_column = held_of(b, request) - q_len
    bits = Int32(0)
    for bit in cutlass.range(WORD, unroll=1):
        column = word * WORD + bit
        draft = (first_column + column) * b.world + b.rank - first_draft
        seen = draft <= row
        if (words > 0) & (draft >= 0):
            at = cutlass.min(draft, columns - 1)
            own = drafts[token * words + (at >> 5)]
            seen = ((own >> (at & 31)) & 1) != 0
        bits = bits | pick(seen & (column < q_len), Int32(1) << bit, Int32(0))
    return bits


@cute.kernel
def _mask(
    b: Requests, drafts: cute.Tensor, words: Int32, columns: Int32, held: cute.Tensor,
    mask: cute.Tensor,
):  # fmt: skip
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    tokens, row_words = mask.shape
    if i < held.shape[0]:
        held[i] = held_of(b, i)
    if i < tokens * row_words:
        token, word = i // row_words, i % row_words
        mask[token, word] = word_of(b, drafts, words, columns, token, word)


@cute.jit
def _launch(*operands) -> None:
    """Operands in the order of `entry`, the stream last."""
    of_all, seq_lens, begins, drafts, held, mask, *numbers, stream = operands
    world, rank, q_len, words, columns = numbers
    threads = cutlass.max(held.shape[0], cute.size(mask))
    b = Requests(of_all, seq_lens, begins, world, rank, q_len)
    _mask(b, drafts, words, columns, held, mask).launch(
        grid=((threads + THREADS - 1) // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def entry(config: KernelConfig) -> CuteEntry:
    """Arguments, int32: of_all and seq_lens [batch], begins [batch + 1] (not read if q_len is not
    0), the callers' masks flat (not read if words is 0); held [batch] and mask [query tokens,
    words of 32 bits], which are written; world, rank, q_len, words of a row of the callers' masks,
    columns."""
    batch = cute.sym_int()
    shapes = [(batch,), (batch,), (None,), (None,), (batch,), (None, None)]
    tensors = [tensor(Int32, 4, *shape) for shape in shapes]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return CuteEntry(_launch, (*tensors, *[Int32(0)] * 5, stream), "rank_mask")
