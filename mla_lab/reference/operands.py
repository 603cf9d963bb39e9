"""Operands of a decode call: query, keys, values and visibility, request by request.

`operands` resolves page tables, token formats, draft masks and context parallelism, one request at
a time, into tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..call.decode_args import DecodeArgs
from ..call.slots import slots_of_rows, unused_slots
from ..core import kv_cache as formats
from ..core import masks
from ..core.errors import invalid, unsupported


@dataclass(frozen=True)
class Operands:
    """Query, keys and values of one request as dense tensors.

    The query tokens of a dense call share their keys (first dimension 1); those of a sparse call
    have their own.
    """

    query: Tensor  # [q_len, heads, head_dim]
    keys: Tensor  # [1 or q_len, kv, head_dim]
    values: Tensor  # [1 or q_len, kv, latent]
    visible: Tensor  # bool [q_len, 1 or heads, kv]


def operands(call: DecodeArgs, dtype: torch.dtype = torch.float64) -> Iterator[Operands]:
    """The operands of each request; one request's keys are in memory at a time.

    Raises InvalidInput or Unsupported for contradictory arguments.
    """
    check(call)
    tokens = call.query.flatten(0, -3)
    counts = slots_of_rows(call, len(tokens))
    for b, (begin, end) in enumerate(pairwise(q_begins(call))):
        query = tokens[begin:end].to(dtype)
        if call.sparse:
            slots = call.block_tables.flatten(0, -2)[begin:end]
            if counts is not None:
                slots = slots.masked_fill(unused_slots(slots, counts[begin:end]), -1)
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


def check(call: DecodeArgs) -> None:
    """Raise where shapes or features contradict each other (a decode call checks more)."""
    if call.sparse and (call.mask is not None or call.enable_dcp):
        raise unsupported("mask", "a sparse call with a mask or ranks", "these in dense calls")
    if call.sparse and call.skip_softmax_threshold_scale_factor:
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
    """Visibility of each key to each new token, bool [q_len, kv].

    position: int [kv], position of each key among the `length` tokens of its request, the
    last q_len of which are new. drafts: packed mask rows [q_len, words] of the new tokens;
    without them a new token sees those up to itself.
    """
    column = position - (length - q_len)
    if drafts is None:
        return column <= torch.arange(q_len, device=position.device).unsqueeze(-1)
    last = max(q_len - 1, 0)
    return (column < 0) | masks.unpack(drafts, last + 1)[:, column.clamp(0, last)]


def q_begins(call: DecodeArgs) -> list[int]:
    """Query-token prefix sums, [batch + 1]."""
    if call.cum_seq_lens_q is not None:
        return [int(c) for c in call.cum_seq_lens_q.tolist()]
    batch, q_len = call.query.shape[:2]
    return [b * q_len for b in range(batch + 1)]


def _positions(call: DecodeArgs, b: int, kv_len: int) -> tuple[Tensor, int]:
    """Positions of a request's cached tokens, and its length over all ranks.

    Context parallelism distributes tokens round-robin: local token j of rank r is j x world + r.
    """
    position = torch.arange(kv_len, device=call.query.device)
    if not call.enable_dcp or call.causal_seqlens_kv_global is None:
        return position, kv_len
    return position * call.cp_world + call.cp_rank, int(call.causal_seqlens_kv_global[b])
