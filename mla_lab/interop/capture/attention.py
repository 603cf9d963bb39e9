"""The reference of a recorded call. This file is copied into each definition: torch alone."""

import itertools
import math

import torch
from torch import Tensor


def attend(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    kv_lora_rank: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor = 1.0,
    sparse: bool = False,
    cum_seq_lens_q: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    lse_base2: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Out and lse of a decode call; rows without a key have out 0 and lse -inf.

    query: [batch, q_len, heads, 576], or [tokens, heads, 576] with cum_seq_lens_q. A request's
    query tokens are its last ones: each sees its own past, or what its mask row shows of them.
    kv_cache: [pages, page_size, width], or with a dimension of 1 after pages.
    block_tables: page ids [batch, pages], or [batch, 2, pages] with the values' pages apart; if
    sparse, token slots [..., top_k], -1 for none.
    """
    pages = kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache
    tokens = query.reshape(-1, *query.shape[-2:])
    out = torch.zeros(*tokens.shape[:-1], kv_lora_rank, device=query.device)
    lse = torch.full(tokens.shape[:-1], -math.inf, device=query.device)
    begins = [b * query.shape[1] for b in range(query.shape[0] + 1)]
    if cum_seq_lens_q is not None:
        begins = cum_seq_lens_q.tolist()
    for b, (begin, end) in enumerate(itertools.pairwise(begins)):
        for t in range(begin, end):
            if sparse:
                slots = block_tables.reshape(-1, block_tables.shape[-1])[t].long()
                keys = values = stored(pages, slots[slots >= 0])
            else:
                length, q_len = int(seq_lens[b]), end - begin
                tables = block_tables[b].reshape(-1, block_tables.shape[-1])
                seen = visible(t - begin, q_len, length, row_of(mask, t), query.device)
                keys = stored(pages, positions(tables[0], seen, pages.shape[1]))
                values = stored(pages, positions(tables[-1], seen, pages.shape[1]))
            if len(keys):
                scores = float(bmm1_scale) * (tokens[t].float() @ keys.T)
                lse[t] = scores.logsumexp(-1)
                out[t] = torch.exp(scores - lse[t].unsqueeze(-1)) @ values[:, :kv_lora_rank]
    if sinks is not None:
        share = torch.sigmoid(lse - sinks.float())
        out *= torch.where(lse.isneginf(), 0.0, share).unsqueeze(-1)
    lse = lse / math.log(2) if lse_base2 else lse
    return (out * float(bmm2_scale)).reshape(*query.shape[:-1], kv_lora_rank).to(out_dtype), lse


def visible(
    row: int, q_len: int, length: int, words: Tensor | None, device: torch.device
) -> Tensor:
    """KV positions that draft row `row` of `q_len` sees; words: its packed mask, or None."""
    position = torch.arange(length, device=device)
    column = position - (length - q_len)
    if words is None:
        return position[column <= row]
    bits = (words.long().unsqueeze(-1) >> torch.arange(16, device=device)) & 1
    drafts = bits.flatten().bool()
    return position[(column < 0) | drafts[column.clamp(0, q_len - 1)]]


def row_of(mask: Tensor | None, token: int) -> Tensor | None:
    """Words of a query token's mask row, or None."""
    return None if mask is None else mask.view(torch.int16).reshape(-1, mask.shape[-1])[token]


def positions(table: Tensor, seen: Tensor, page_size: int) -> Tensor:
    """Token slots of KV positions, by a request's page ids."""
    return table.long()[seen // page_size] * page_size + seen % page_size


def stored(pages: Tensor, slots: Tensor) -> Tensor:
    """Values of cached tokens in float32 [n, width]; 656 bytes are the format with scales."""
    size = pages.shape[1]
    found = pages.view(torch.uint8)[slots // size, slots % size]
    if found.shape[-1] != 656:
        return found.view(pages.dtype).float()
    latent = found[:, :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = found[:, 512:528].contiguous().view(torch.float32)
    rope = found[:, 528:].contiguous().view(torch.bfloat16).float()
    return torch.cat([latent * scales.repeat_interleave(128, 1), rope], 1)
