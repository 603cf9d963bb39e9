"""GQA and MQA decode by FlashInfer's names and parameter lists.

Order and defaults are FlashInfer's; what is ours is keyword-only. The semantics of the two names
are one: a token sees its own past (causal, bottom-right) unless a mask says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..core.errors import invalid, unsupported
from . import gqa
from .gqa import GqaArguments


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    workspace_buffer: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Tensor | Sequence[Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Any = None,
    multi_ctas_kv_counter_buffer: Any = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: Any = None,
    *,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """GQA or MQA decode over a paged cache: softmax(bmm1_scale x q k) v x bmm2_scale.

    Query head h reads KV head h // (heads / kv_heads). Tensors lie on one device; only out, lse and
    workspace_buffer are written, and none is copied.

    query: [num_tokens, heads, head_dim], num_tokens = batch x q_len_per_req, or ragged with
        cum_seq_lens_q. bf16, fp16, e4m3; for teaching fp32 and fp64.
    kv_cache: (keys, values), each [pages, kv_heads, page_size, head_dim] ("HND") or [pages,
        page_size, kv_heads, head_dim] ("NHD"), or one tensor [pages, 2, ...]. The query's dtype, or
        e4m3 under a 16-bit query. Slots that no length reaches may hold anything.
    workspace_buffer: 1-D uint8 or int8, zeroed once before its first use; None allocates.
    block_tables: int32 [batch, max_pages]; with uses_shared_paged_kv_idx=False [batch, 2,
        max_pages], row 0 for the keys, row 1 for the values.
    seq_lens: int32 [batch], keys of each request with the new ones in it; 0 is legal.
    max_seq_len: a bound of seq_lens for scheduling.
    bmm1_scale, bmm2_scale: on the scores (with 1/sqrt(head_dim) in it) and on out; a float, or fp32
        of one element on the device.
    window_left: keys that a token sees before its own; -1: all.
    out, out_dtype: default a new out of out_dtype, else of the query's dtype; the query's dtype,
        bf16 or fp16.
    sinks: fp32 [heads] or a list of one: a term exp(sink) more in the denominator, head by head.
    q_len_per_req: new tokens of each request, the last of its seq_len.
    o_scale: XQA multiplies by it and divides again; it changes no result here.
    mask: uint16 [batch, q_len, ceil(q_len / 32) x 2] or [num_tokens, ...] (`mla_lab.core.masks`);
    None
        is causal.
    max_q_len, cum_seq_lens_q: ragged queries: int32 [batch + 1] prefix sums, and a bound that
        spares a GPU the copy that would find it.
    skip_softmax_threshold_scale_factor: as in MLA decode; on the torch path.
    lse, return_lse: fp32 [num_tokens, heads], natural log, without the sink.
    backend: "auto" (the CUDA kernel where it can, else torch), "torch", "cuda"; "xqa" is cuda,
        "trtllm-gen" auto.
    o_sf_scale, o_sf_vec_size, kv_cache_sf: FP4, which there is not; bmm1_scale_log2,
        multi_ctas_kv_counter_buffer, enable_block_sparse_attention, bf16q_fp8kv_transform_mode:
        other values than the defaults are not supported.
    batch_invariant: each request's bits do not depend on what else is in the batch.

    Returns out, or (out, lse) with return_lse; rows without a key have out 0 and lse -inf.
    Raises InvalidInput, InvalidType or Unsupported before anything runs.
    Source: flashinfer.decode.trtllm_batch_decode_with_kv_cache (FlashInfer 0.7.2).
    """
    fp4 = {"o_sf_scale": o_sf_scale, "o_sf_vec_size": o_sf_vec_size, "kv_cache_sf": kv_cache_sf}
    for name, value in fp4.items():
        if value is not None:
            _refuse(name, "a value", "None: there is no FP4")
    if bmm1_scale_log2 is not None:
        _refuse("bmm1_scale_log2", "a value", "None: bmm1_scale may be a tensor itself")
    if multi_ctas_kv_counter_buffer is not None:
        _refuse("multi_ctas_kv_counter_buffer", "a value", "None: counters lie in workspace_buffer")
    if enable_block_sparse_attention:
        _refuse("enable_block_sparse_attention", True, "False")
    if bf16q_fp8kv_transform_mode is not None:
        _refuse("bf16q_fp8kv_transform_mode", repr(bf16q_fp8kv_transform_mode), "None")
    given = GqaArguments(
        query=query,
        kv_cache=kv_cache,
        workspace_buffer=workspace_buffer,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        window_left=window_left,
        out=out,
        out_dtype=out_dtype,
        sinks=sinks,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
        q_len_per_req=q_len_per_req,
        o_scale=o_scale,
        mask=mask,
        max_q_len=max_q_len,
        cum_seq_lens_q=cum_seq_lens_q,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        uses_shared_paged_kv_idx=uses_shared_paged_kv_idx,
        lse=lse,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
    )
    return gqa.decode(given, backend)


def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    workspace_buffer: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    sinks: Tensor | Sequence[Tensor] | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: Tensor | None = None,
) -> Tensor:
    """GQA or MQA decode by the CUDA kernel on a GPU, by torch where the tensors are a CPU's.

    Parameters as in `trtllm_batch_decode_with_kv_cache`, except: kv_layout is "NHD" by default;
    more than one new token a request needs a mask, as XQA does; q_cu_seq_lens is that name's
    cum_seq_lens_q, and q_len_per_req then the bound of query tokens a request.

    Returns out. Raises InvalidInput, InvalidType or Unsupported before anything runs.
    Source: flashinfer.decode.xqa_batch_decode_with_kv_cache (FlashInfer 0.7.2).
    """
    if q_len_per_req != 1 and mask is None:
        raise invalid("mask", f"None with q_len_per_req {q_len_per_req}", "packed uint16 rows")
    ragged = q_cu_seq_lens is not None
    result = trtllm_batch_decode_with_kv_cache(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale,
        bmm2_scale,
        window_left,
        out,
        sinks=sinks,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
        backend="cuda" if isinstance(query, Tensor) and query.is_cuda else "torch",
        q_len_per_req=None if ragged else q_len_per_req,
        o_scale=o_scale,
        mask=mask,
        max_q_len=q_len_per_req if ragged else None,
        cum_seq_lens_q=q_cu_seq_lens,
        kv_cache_sf=kv_cache_sf,
    )
    return result if isinstance(result, Tensor) else result[0]


def _refuse(name: str, got: object, supported: str) -> NoReturn:
    raise unsupported(name, str(got), supported)
