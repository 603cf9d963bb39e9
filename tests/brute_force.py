"""The decode contract a second time: loops over rows and keys, plain Python floats.

Shares no code with the oracle, so that a mistake must be made twice to pass.
"""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import torch

from mla_lab.reference.inputs import DecodeInputs


def brute_force(call: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """out [total_q, heads, latent] and natural lse [total_q, heads], float64."""
    outs, lses = [], []
    tokens = call.query.reshape(-1, *call.query.shape[-2:])
    for index, (b, row, q_len) in enumerate(query_tokens(call)):
        keys = [token_values(call, *place) for place in places(call, index, b, row, q_len)]
        for h in range(tokens.shape[1]):
            sink = None if call.sinks is None else float(call.sinks[h])
            out, lse = one_row(call, tokens[index, h].double().tolist(), keys, sink)
            outs.append(out)
            lses.append(lse)
    shape = tokens.shape[:2]
    out = torch.tensor(outs, dtype=torch.float64).reshape(*shape, call.kv_lora_rank)
    return out, torch.tensor(lses, dtype=torch.float64).reshape(shape)


def query_tokens(call: DecodeInputs):
    """(request, row within it, its q_len) of each query token."""
    if call.cum_seq_lens_q is None:
        batch, q_len = call.query.shape[:2]
        q_lens = [q_len] * batch
    else:
        sums = call.cum_seq_lens_q.tolist()
        q_lens = [b - a for a, b in pairwise(sums)]
    return [(b, row, n) for b, n in enumerate(q_lens) for row in range(n)]


def places(call: DecodeInputs, index: int, b: int, row: int, q_len: int):
    """((key page, offset), (value page, offset)) of each key that a query token sees."""
    page_size = call.kv_cache.shape[-2]
    if call.sparse_mla_top_k:
        slots = call.block_tables.reshape(-1, call.sparse_mla_top_k)[index].tolist()
        if call.sparse_mla_top_k_lens is not None:
            of_tokens = call.sparse_mla_top_k_lens.shape[0] == call.query.flatten(0, -3).shape[0]
            slots = slots[: int(call.sparse_mla_top_k_lens[index if of_tokens else b])]
        return [(divmod(s, page_size),) * 2 for s in slots if s != -1]
    table = call.block_tables[b].tolist()
    key_pages, value_pages = (table, table) if call.uses_shared_paged_kv_idx else table
    full_len = int(call.seq_lens[b])
    if call.causal_seqlens_kv_global is not None:
        full_len = int(call.causal_seqlens_kv_global[b])
    seen = []
    for local in range(int(call.seq_lens[b])):
        column = local * call.cp_world + call.cp_rank - (full_len - q_len)
        if column < 0 or sees(call, index, row, column):
            page, offset = divmod(local, page_size)
            seen.append(((key_pages[page], offset), (value_pages[page], offset)))
    return seen


def sees(call: DecodeInputs, index: int, row: int, column: int) -> bool:
    if call.mask is None:
        return column <= row
    words = call.mask.reshape(-1, call.mask.shape[-1])[index].tolist()
    return bool(words[column // 16] & (1 << column % 16))


def token_values(call: DecodeInputs, key_place, value_place) -> tuple[list[float], list[float]]:
    return read(call, key_place), read(call, value_place)[: call.kv_lora_rank]


def read(call: DecodeInputs, place: tuple[int, int]) -> list[float]:
    pages = call.kv_cache.reshape(call.kv_cache.shape[0], *call.kv_cache.shape[-2:])
    stored = pages[place]
    if stored.dtype is not torch.uint8:
        return stored.double().tolist()
    raw = bytes(stored.tolist())
    latent = torch.tensor(list(raw[:512]), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = struct.unpack("<4f", raw[512:528])
    # a bf16 number is the upper half of an fp32 one
    rope = [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] for i in range(528, 656, 2)]
    return [v * scales[i // 128] for i, v in enumerate(latent.double().tolist())] + rope


def one_row(call: DecodeInputs, query: list[float], keys, sink: float | None):
    """(out, lse) of one head of one query token."""
    scores = [
        float(call.bmm1_scale) * math.fsum(a * b for a, b in zip(query, key, strict=True))
        for key, _ in keys
    ]
    if not scores:
        return [0.0] * call.kv_lora_rank, -math.inf
    top = max(scores)
    total = math.fsum(math.exp(s - top) for s in scores)
    below = total if sink is None else total + math.exp(sink - top)
    out = [
        float(call.bmm2_scale)
        * math.fsum(
            math.exp(s - top) / below * value[d] for s, (_, value) in zip(scores, keys, strict=True)
        )
        for d in range(call.kv_lora_rank)
    ]
    return out, top + math.log(total)
