"""What a decode call means before any arithmetic: who attends which keys.

`ReferenceCall` holds the contract's arguments that change a result; `operands` resolves page
tables, token formats, draft masks and context parallelism, one request at a time, into tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..core import kv_cache as formats
from ..core import masks
from ..core.errors import invalid, unsupported


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceCall:
    """Arguments of the contract's decode call that change its result, by their names there."""

    #: dense [batch, q_len, heads, head_dim] or ragged [total_q, heads, head_dim]
    query: Tensor
    #: [pages, page_size, width] or [pages, 1, page_size, width]
    kv_cache: Tensor
    #: int32 [batch, max_pages], [batch, 2, max_pages], or token slots [.., top_k] if sparse
    block_tables: Tensor
    #: int32 [batch]; under context parallel the tokens of this rank
    seq_lens: Tensor
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    sparse_mla_top_k: int = 0
    bmm1_scale: float | Tensor = 1.0
    bmm2_scale: float | Tensor = 1.0
    #: fp32 [heads], or a list of one
    sinks: Tensor | Sequence[Tensor] | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    uses_shared_paged_kv_idx: bool = True
    return_lse_base: str | None = None
    #: int32 [batch + 1]
    cum_seq_lens_q: Tensor | None = None
    enable_dcp: bool = False
    cp_world: int = 1
    cp_rank: int = 0
    #: int32 [batch], lengths over all ranks
    causal_seqlens_kv_global: Tensor | None = None
    #: uint16 [batch, q_len, words] or [total_q, words]
    mask: Tensor | None = None

    @property
    def sparse(self) -> bool:
        return self.sparse_mla_top_k > 0


@dataclass(frozen=True)
class Operands:
    """What one request attends, once pages, formats and masks are resolved.

    In a dense call the query tokens share their keys (first dimension 1); in a sparse call
    each has its own.
    """

    query: Tensor  # [q_len, heads, head_dim]
    keys: Tensor  # [1 or q_len, kv, head_dim]
    values: Tensor  # [1 or q_len, kv, latent]
    visible: Tensor  # bool [q_len, 1 or heads, kv]


def operands(call: ReferenceCall, dtype: torch.dtype = torch.float64) -> Iterator[Operands]:
    """What each request attends; one request's keys are in memory at a time.

    Raises InvalidInput or Unsupported where the call has no meaning.
    """
    check(call)
    tokens = call.query.flatten(0, -3)
    for b, (begin, end) in enumerate(pairwise(q_begins(call))):
        query = tokens[begin:end].to(dtype)
        if call.sparse:
            slots = call.block_tables.flatten(0, -2)[begin:end]
            yield _sparse_operands(query, call.kv_cache, slots, call.kv_lora_rank)
            continue
        kv_len = int(call.seq_lens[b])
        # a [2, max_pages] table has a row for the keys and one for the values
        tables = torch.atleast_2d(call.block_tables[b])
        stored = [formats.gather(call.kv_cache, ids, kv_len) for ids in tables]
        key, value = formats.unpack(stored[0], dtype), formats.unpack(stored[-1], dtype)
        drafts = None if call.mask is None else call.mask.flatten(0, -2)[begin:end]
        visible = visible_keys(end - begin, *_positions(call, b, kv_len), drafts)
        yield Operands(query, key[None], value[None, :, : call.kv_lora_rank], visible.unsqueeze(1))


def check(call: ReferenceCall) -> None:
    """Raises where shapes or features contradict each other (a contract call checks more)."""
    if call.sparse and (call.mask is not None or call.enable_dcp):
        raise unsupported("mask", "a sparse call with a mask or ranks", "these in dense calls")
    if call.sparse and call.skip_softmax_threshold_scale_factor is not None:
        name = "skip_softmax_threshold_scale_factor"
        raise unsupported(name, "a sparse call", "dense calls")
    table_dims = 2 if call.uses_shared_paged_kv_idx else 3
    if not call.sparse and call.block_tables.dim() != table_dims:
        shapes = "[batch, max_pages], or [batch, 2, max_pages] with unshared tables"
        raise invalid("block_tables", f"shape {tuple(call.block_tables.shape)}", shapes)
    head_dim = call.kv_lora_rank + call.qk_rope_head_dim
    if call.query.shape[-1] != head_dim:
        raise invalid("query", f"{call.query.shape[-1]} columns", head_dim)
    if call.enable_dcp and call.causal_seqlens_kv_global is None:
        raise invalid("causal_seqlens_kv_global", None, "int32 [batch] with enable_dcp")


def _sparse_operands(query: Tensor, kv_cache: Tensor, slots: Tensor, latent_dim: int) -> Operands:
    """Each query token's own keys: those at its slots [q_len, top_k], without the -1 ones."""
    given = slots >= 0
    stored = formats.gather_slots(kv_cache, slots.clamp_min(0))
    keys = formats.unpack(stored, query.dtype).masked_fill(~given.unsqueeze(-1), 0.0)
    return Operands(query, keys, keys[..., :latent_dim], given.unsqueeze(1))


def visible_keys(q_len: int, position: Tensor, length: int, drafts: Tensor | None) -> Tensor:
    """Which new token sees which key, bool [q_len, kv].

    position: int [kv], where each key stands among the `length` tokens of its request, the
    last q_len of which are new. drafts: packed mask rows [q_len, words] of the new tokens;
    without them a new token sees those up to itself.
    """
    column = position - (length - q_len)
    if drafts is None:
        return column <= torch.arange(q_len, device=position.device).unsqueeze(-1)
    last = max(q_len - 1, 0)
    return (column < 0) | masks.unpack(drafts, last + 1)[:, column.clamp(0, last)]


def q_begins(call: ReferenceCall) -> list[int]:
    """Query-token prefix sums, [batch + 1]."""
    if call.cum_seq_lens_q is not None:
        return [int(c) for c in call.cum_seq_lens_q.tolist()]
    batch, q_len = call.query.shape[:2]
    return [b * q_len for b in range(batch + 1)]


def _positions(call: ReferenceCall, b: int, kv_len: int) -> tuple[Tensor, int]:
    """Positions of a request's cached tokens, and its length over all ranks.

    Context parallel deals tokens out in turn: local token j of rank r is token j x world + r.
    """
    position = torch.arange(kv_len, device=call.query.device)
    if not call.enable_dcp or call.causal_seqlens_kv_global is None:
        return position, kv_len
    return position * call.cp_world + call.cp_rank, int(call.causal_seqlens_kv_global[b])
