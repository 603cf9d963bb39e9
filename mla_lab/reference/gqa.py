"""Float64 oracle of a GQA or MQA decode call.

Query head h reads KV head h // group. A KV head with its group of query heads is computed as one
MLA request of `group` heads: it is resolved into `Operands`, and the MLA oracle's `attend`,
`skip_tiles` and `add_sinks` do the rest.

Scales follow the call: bmm1_scale on the scores, bmm2_scale on the output. (XQA
multiplies by o_scale and divides by it again, so it is not here.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ..call.gqa_args import KV_LAYOUTS, GqaArgs
from ..core.errors import invalid
from .mla import Result, TileWalk, add_sinks, attend, skip_tiles
from .operands import Operands, visible_keys


def decode_gqa_reference(
    call: GqaArgs, *, walk: TileWalk | None = None, dtype: torch.dtype = torch.float64
) -> Result:
    """Exact out [num_tokens, heads, head_dim] and natural lse [num_tokens, heads].

    walk: the tiles of skip-softmax; their rows are token x group + head within the group.
    """
    scale = float(call.bmm1_scale)
    factor = call.skip_softmax_threshold_scale_factor
    parts = []
    for b, kv_heads in enumerate(gqa_operands(call, dtype)):
        if factor is not None:
            walk = walk or TileWalk()
            kv_heads = [skip_tiles(one, scale, float(factor), walk, b) for one in kv_heads]
        results = [attend(one, scale) for one in kv_heads]
        parts.append(Result(*(torch.cat(r, dim=1) for r in zip(*results, strict=True))))
    lse = torch.cat([part.lse for part in parts])
    out = add_sinks(torch.cat([part.out for part in parts]), lse, call.sinks)
    return Result(out * float(call.bmm2_scale), lse)


def gqa_operands(call: GqaArgs, dtype: torch.dtype = torch.float64) -> Iterator[list[Operands]]:
    """For each request the operands of its KV heads."""
    keys, values = key_value_pages(call)
    heads, kv_heads = call.query.shape[1], keys.shape[2]
    if heads % kv_heads:
        raise invalid("query", f"{heads} heads", f"a multiple of the cache's {kv_heads}")
    for b, (begin, end) in enumerate(pairwise(q_begins(call))):
        kv_len = int(call.seq_lens[b])
        tables = torch.atleast_2d(call.block_tables[b])
        key = _gather(keys, tables[0], kv_len).to(dtype)
        value = _gather(values, tables[-1], kv_len).to(dtype)
        query = call.query[begin:end].to(dtype).unflatten(1, (kv_heads, -1))
        visible = _visible(call, begin, end, kv_len).unsqueeze(1)
        yield [
            Operands(query[:, h], key[None, :, h], value[None, :, h], visible)
            for h in range(kv_heads)
        ]


def key_value_pages(call: GqaArgs) -> tuple[Tensor, Tensor]:
    """Keys and values as views [pages, page_size, kv_heads, head_dim], whatever the layout."""
    if call.kv_layout not in KV_LAYOUTS:
        raise invalid("kv_layout", repr(call.kv_layout), KV_LAYOUTS)
    if isinstance(call.kv_cache, Tensor):
        if call.kv_cache.dim() != 5 or call.kv_cache.shape[1] != 2:
            raise invalid("kv_cache", f"shape {tuple(call.kv_cache.shape)}", "[pages, 2, ...]")
        key, value = call.kv_cache.unbind(1)
    else:
        key, value = call.kv_cache
    if call.kv_layout == "HND":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    return key, value


def _gather(pages: Tensor, page_ids: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a request, [length, kv_heads, head_dim]; no slot after them."""
    position = torch.arange(length, device=pages.device)
    page = page_ids.long()[position // pages.shape[1]]
    return pages[page, position % pages.shape[1]]


def q_begins(call: GqaArgs) -> list[int]:
    """Query-token prefix sums, [batch + 1]."""
    if call.cum_seq_lens_q is not None:
        return [int(c) for c in call.cum_seq_lens_q.tolist()]
    tokens, q_len = len(call.query), call.q_len_per_req or 1
    if tokens != len(call.seq_lens) * q_len:
        expected = f"{len(call.seq_lens)} requests x q_len_per_req {q_len}"
        raise invalid("query", f"{tokens} tokens", expected)
    return list(range(0, tokens + 1, q_len))


def _visible(call: GqaArgs, begin: int, end: int, kv_len: int) -> Tensor:
    """Bool [q_len, kv]: the causal rule or the mask, and the window counted from each token.

    Token r of a request is at position kv_len - q_len + r and sees window_left tokens before it.
    """
    q_len = end - begin
    position = torch.arange(kv_len, device=call.query.device)
    drafts = None if call.mask is None else call.mask.flatten(0, -2)[begin:end]
    visible = visible_keys(q_len, position, kv_len, drafts)
    if call.window_left < 0:
        return visible
    own = torch.arange(kv_len - q_len, kv_len, device=position.device).unsqueeze(-1)
    return visible & (position >= own - call.window_left)
