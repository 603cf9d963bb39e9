"""Split-KV MLA decode in Triton: the portable baseline. Imports triton.

Two kernels. `_partials` gives each program one tile of query rows and one split of a request's
keys; `_merge` weights the splits of a row by their lse. Rows are packed token-major (row = token
x heads + head), so 16 heads of 4 tokens fill one tile of 64 rows. Exact, bf16 or fp16 in, fp32
inside; no TMA, no warp specialisation, nothing that ties it to one card.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.inputs import DecodeInputs

#: keys of one step, by rows of a tile: with 64 rows two stages of 64 keys and the query take
#: 217 KB of an SM's 227; more keys a step spill registers where fewer warps share the rows
BLOCK_KEYS = {16: 32, 32: 32, 64: 64}
#: a split below this many keys costs more in the merge than it gains
LEAST_SPLIT = 256
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["heads", "q_len", "splits"])
def _partials(  # type: ignore[no-untyped-def]
    query,
    cache,
    table,
    seq_lens,
    out,
    lse,
    page_stride,
    table_stride,
    scale_log2,
    heads,
    q_len,
    splits,
    page_size: tl.constexpr,
    latent: tl.constexpr,
    rope: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
):
    request = tl.program_id(0)
    split = tl.program_id(2)
    rows = q_len * heads
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    in_rows = row < rows
    kv_len = tl.load(seq_lens + request)
    share = tl.cdiv(tl.cdiv(kv_len, splits), block_keys) * block_keys
    begin = split * share
    end = tl.minimum(begin + share, kv_len)

    column = tl.arange(0, latent)
    rope_column = latent + tl.arange(0, rope)
    query_row = query + (request * rows + row).to(tl.int64)[:, None] * (latent + rope)
    q_latent = tl.load(query_row + column[None, :], mask=in_rows[:, None], other=0.0)
    q_rope = tl.load(query_row + rope_column[None, :], mask=in_rows[:, None], other=0.0)
    # causal, bottom-right: the last key that a row sees
    last = kv_len - q_len + row // heads

    top = tl.full((block_rows,), -float("inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    acc = tl.zeros((block_rows, latent), tl.float32)
    for first in range(begin, end, block_keys):
        key = first + tl.arange(0, block_keys)
        here = key < end
        page = tl.load(table + request * table_stride + key // page_size, mask=here, other=0)
        offset = page.to(tl.int64) * page_stride + (key % page_size) * (latent + rope)
        # unread slots may hold NaN: they are never loaded, so a weight of 0 meets a value of 0
        k_latent = tl.load(cache + offset[:, None] + column[None, :], mask=here[:, None], other=0.0)
        k_rope = tl.load(
            cache + offset[:, None] + rope_column[None, :], mask=here[:, None], other=0.0
        )
        scores = tl.dot(q_latent, tl.trans(k_latent)) + tl.dot(q_rope, tl.trans(k_rope))
        seen = here[None, :] & (key[None, :] <= last[:, None])
        scores = tl.where(seen, scores * scale_log2, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None] + tl.dot(weight.to(k_latent.dtype), k_latent)
        top = new_top

    # [batch, rows, splits]: a row's splits lie together for the merge
    slot = (request * rows + row).to(tl.int64) * splits + split
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + slot[:, None] * latent + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=in_rows[:, None],
    )
    tl.store(lse + slot, tl.where(total > 0, top + tl.log2(total), -float("inf")), mask=in_rows)


@triton.jit(do_not_specialize=["splits"])
def _merge(parts, lse, out, splits, latent: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, latent)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros((latent,), tl.float32)
    for split in range(splits):
        slot = row * splits + split
        part_lse = tl.load(lse + slot)
        new_top = tl.maximum(top, part_lse)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        fade = tl.exp2(top - base)
        weight = tl.exp2(part_lse - base)
        acc = acc * fade + weight * tl.load(parts + slot * latent + column)
        total = total * fade + weight
        top = new_top
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + row * latent + column, acc.to(out.dtype.element_ty))


@dataclass(frozen=True)
class Splits:
    """Rows of a tile, and the number of splits of every request."""

    block_rows: int
    row_tiles: int
    num_splits: int


def choose_splits(copy: DecodeInputs, workers: int) -> Splits:
    """Splits that give each worker (SM) a program, if the longest request has keys enough."""
    problem = copy.problem
    rows = problem.q_lens[0] * problem.heads
    block_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiles = -(-rows // block_rows)
    wanted = workers // (problem.batch * tiles)
    most = -(-max(problem.kv_lens) // LEAST_SPLIT)
    return Splits(block_rows, tiles, max(1, min(wanted, most)))


@dataclass(frozen=True, eq=False)
class Buffers:
    """Results of one call: out [total_q, heads, latent], partials fp32 where there are splits."""

    out: Tensor
    partial_out: Tensor
    #: base 2
    partial_lse: Tensor


def allocate(copy: DecodeInputs, splits: Splits) -> Buffers:
    """Buffers that launches of equal calls may share."""
    problem = copy.problem
    shape = (problem.total_q, problem.heads, problem.latent_dim)
    out = torch.empty(shape, dtype=copy.query.dtype, device=copy.query.device)
    parts = (problem.total_q, problem.heads, splits.num_splits)
    partial_out = out
    if splits.num_splits > 1:
        partial_out = out.new_empty((*parts, problem.latent_dim), dtype=torch.float32)
    return Buffers(out, partial_out, out.new_empty(parts, dtype=torch.float32))


def decode(copy: DecodeInputs, splits: Splits, buffers: Buffers) -> Tensor:
    """One call: dense, causal, equal q_lens, a paged bf16 or fp16 cache. Returns buffers.out."""
    problem = copy.problem
    _partials[(problem.batch, splits.row_tiles, splits.num_splits)](
        copy.query,
        copy.kv_cache,
        copy.block_tables,
        copy.seq_lens,
        buffers.partial_out,
        buffers.partial_lse,
        copy.kv_cache.stride(0),
        copy.block_tables.stride(0),
        float(copy.bmm1_scale) * LOG2_E,
        problem.heads,
        problem.q_lens[0],
        splits.num_splits,
        page_size=problem.page_size,
        latent=problem.latent_dim,
        rope=problem.rope_dim,
        block_rows=splits.block_rows,
        block_keys=BLOCK_KEYS[splits.block_rows],
        num_warps=8 if splits.block_rows == 64 else 4,
        num_stages=2,
    )
    if splits.num_splits > 1:
        rows = problem.total_q * problem.heads
        _merge[(rows,)](
            buffers.partial_out,
            buffers.partial_lse,
            buffers.out,
            splits.num_splits,
            latent=problem.latent_dim,
            num_warps=4,
        )
    return buffers.out
