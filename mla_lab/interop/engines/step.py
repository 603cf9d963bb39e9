"""The decode part of an engine's step: its metadata and a layer's tensors to one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...api import contract
from ...backends.base import refuse_capture
from ...core.dims import LATENT_DIM, ROPE_DIM
from ...core.errors import invalid

#: of one device; the call refuses a plan whose partials need more
WORKSPACE_BYTES = 256 << 20

_WORKSPACES: dict[torch.device, Tensor] = {}


@dataclass(frozen=True)
class Ranks:
    """Decode context parallel: this rank has the tokens rank, rank + world, ... of a request."""

    world: int
    rank: int
    #: int32 [batch], tokens of all ranks
    seq_lens_of_all: Tensor


@dataclass(frozen=True)
class Step:
    """What all layers of a step share; tensors stay on the device, and nothing here is read."""

    #: int32 [batch, pages], [batch] and [batch + 1]
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    #: bounds that a captured graph keeps: tokens of a request, and its query tokens
    max_seq_len: int
    max_query_len: int
    ranks: Ranks | None = None


def workspace(device: torch.device) -> Tensor:
    """The workspace of a device, zeroed when it is made; the layers of one stream share it. Raises
    InvalidInput where that would be recorded into a graph, and not be done."""
    if device not in _WORKSPACES:
        refuse_capture("query", "the first one, and a workspace is zeroed", device)
        _WORKSPACES[device] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _WORKSPACES[device]


def decode(
    step: Step,
    query: Tensor,
    kv_cache: Tensor,
    *,
    scale: float,
    value_scale: float,
    out_dtype: torch.dtype,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """out [tokens, heads, latent] and, where it is wanted, lse fp32 [tokens, heads], natural.

    query: [tokens, heads, head_dim], contiguous; kv_cache: [pages, page_size, head_dim], in the
    query's dtype, or e4m3. scale: q_scale x k_scale x softmax scale; value_scale: of the cache.
    """
    batch, tokens = len(step.seq_lens), query.shape[0]
    ragged = step.max_query_len > 1
    if not ragged and tokens != batch:
        got = f"{tokens} tokens of {batch} requests with max_query_len 1"
        raise invalid("query", got, "one token a request")
    out = torch.empty((*query.shape[:-1], LATENT_DIM), dtype=out_dtype, device=query.device)
    lens = {"cum_seq_lens_q": step.query_start_loc, "max_q_len": step.max_query_len}
    ranks = step.ranks
    of_ranks = {}
    if ranks is not None:
        of_ranks = {
            "enable_dcp": True,
            "cp_world": ranks.world,
            "cp_rank": ranks.rank,
            "causal_seqlens_kv_global": ranks.seq_lens_of_all,
        }
    result = contract.trtllm_batch_decode_with_kv_cache_mla(
        query if ragged else query.unsqueeze(1),
        kv_cache,
        workspace(query.device),
        128,  # plays no part
        LATENT_DIM,
        ROPE_DIM,
        step.block_table,
        step.seq_lens,
        step.max_seq_len,
        out=out if ragged else out.unsqueeze(1),
        bmm1_scale=scale,
        bmm2_scale=value_scale,
        return_lse=return_lse,
        **(lens if ragged else {}),  # type: ignore[arg-type]
        **of_ranks,  # type: ignore[arg-type]
    )
    return out, result[1] if return_lse else None
