"""The calls that serving engines make, by FlashInfer's names and parameter lists.

Code that imports them from `flashinfer.mla` runs on ours by changing the import. Each is `decode`
behind that list: order and defaults are FlashInfer 0.7.2's and those of its pull requests for
ragged queries, XQA, speculative masks and a CuTe DSL backend; what is ours is keyword-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import NoReturn

import torch
from torch import Tensor

from ..core.errors import invalid_type, unsupported
from ..plan import Plan
from .decode import decode


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | Sequence[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
    *,
    mask: Tensor | None = None,
    batch_invariant: bool = False,
    plan: Plan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """MLA decode over a paged cache: softmax(bmm1_scale x q k) v x bmm2_scale for each row.

    A cached token is one row of 576 values, all of them its key, the first 512 its value. A
    request's q_len new tokens are the last of its seq_len; without a mask they see their own past
    (causal, bottom-right). Tensors are contiguous where nothing else is said, on one device, and
    never copied or written, except out, lse and workspace_buffer.

    query: dense [batch, q_len, heads, 576], or ragged [total_q, heads, 576] with cum_seq_lens_q;
        512 latent columns, then 64 rope. bf16, fp16, e4m3; for teaching fp32 and fp64.
    kv_cache: [pages, page_size, 576] or [pages, 1, page_size, 576] in the query's dtype, or e4m3
        under a bf16 query; or uint8 [..., 656] (512 e4m3, 4 fp32 scales, 64 bf16 rope). Pages may
        lie apart. Slots that no length reaches may hold anything.
    workspace_buffer: 1-D uint8 or int8, at an address that is a multiple of 64 bytes, zeroed once
        before its first use. None or an empty one does for a plan without partials.
    qk_nope_head_dim: any; it plays no part in the absorbed form.
    kv_lora_rank, qk_rope_head_dim: (512, 64); on the torch backend also (256, 64).
    block_tables: int32 [batch, max_pages] page ids, rows may lie apart; with
        uses_shared_paged_kv_idx=False [batch, 2, max_pages], row 0 for the scores, row 1 for the
        values. With sparse_mla_top_k: [batch, q_len, top_k] or ragged [total_q, top_k] token
        slots (page x page_size + offset); -1 is skipped, a duplicate counts again.
    seq_lens: int32 [batch], tokens of each request with the new ones in it; 0 is legal. A sparse
        call reads what its slots say, whatever the lengths.
    max_seq_len: tokens, a bound of seq_lens for scheduling.
    sparse_mla_top_k: slots a query token; 0 is dense.
    out: bf16, fp16, or with an e4m3 query e4m3, [*query.shape[:-1], 512]; default a new bf16 one
        (fp32 and fp64 queries: their own dtype).
    bmm1_scale: q_scale x k_scale x softmax scale, natural units: a float, or fp32 of one element.
    bmm2_scale: v_scale x o_scale, on out only: a float, or fp32 of one element.
    sinks: fp32 [heads] or a list of one: a term exp(sink) more in the denominator.
    skip_softmax_threshold_scale_factor: a KV tile is skipped for a row tile where each row's
        exp(tile_max - running_max) is below factor / seq_len (arXiv:2512.12087).
    enable_pdl: None leaves it to the device; True raises where there is none.
    backend: "auto", "torch", "cute", "cuda"; "xqa" is cuda, "cute-dsl" cute, "trtllm-gen" auto.
        A backend that is named runs the call or raises.
    is_var_seq: False promises equal lengths, a hint for scheduling without effect on results.
    lse, return_lse, return_lse_base: fp32 [total_q, heads] or [batch, q_len, heads], natural
        (None, "basee") or "base2"; without the sink. A given one is written in any case.
    cum_seq_lens_q: int32 [batch + 1], prefix sums of the query tokens, from 0 to total_q.
    max_q_len: a bound of query tokens a request, spares a GPU the copy that would find it.
    enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global: the cache holds tokens rank, rank +
        world, ... of each request, seq_lens counts those, the last int32 [batch] all of them, with
        cp_world 1 the same. Needs return_lse; `context_parallel.merge` merges and takes the sinks.
    cute_dsl_impl: "auto" or "monolithic", whose rules are these; "modular", which is not causal,
        where each request has one query token.
    kv_scale_format, multi_ctas_kv_counter_buffer, sparse_mla_top_k_lens, use_fp16_softmax: other
        values than the defaults (or False) are not supported.
    mask: uint16 [batch, q_len, ceil(q_len / 32) x 2], ragged [total_q, ceil(max_q_len / 32) x 2]:
        bit c of draft row r, least significant first, shows it draft column c
        (`mla_lab.core.masks`).
    batch_invariant: each request's bits do not depend on what else is in the batch. With 8192 keys
        on an H200 a request takes 10.7 or 6.6 times as long alone (16 or 128 heads), and calls of
        1024 to 8192 keys at most 1.14 times from batch 64 on (data/records/h200_invariant.jsonl).
    plan: made for these lengths and heads; default the backend's own.

    Returns out, or (out, lse) with return_lse; rows without a key have out 0 and lse -inf.
    Raises InvalidInput, InvalidType or Unsupported before anything runs.
    Source: flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla (FlashInfer 0.7.2).
    """
    _check_int("qk_nope_head_dim", qk_nope_head_dim)
    _check_int("max_seq_len", max_seq_len)
    _check_implementation(cute_dsl_impl, query)
    if kv_scale_format != "auto":
        _refuse("kv_scale_format", kv_scale_format, "'auto': scales are read as any fp32")
    if multi_ctas_kv_counter_buffer is not None:
        _refuse("multi_ctas_kv_counter_buffer", "a value", "None: counters lie in workspace_buffer")
    if sparse_mla_top_k_lens is not None:
        _refuse("sparse_mla_top_k_lens", "a value", "None: a slot of -1 is skipped")
    if use_fp16_softmax:
        _refuse("use_fp16_softmax", use_fp16_softmax, "None or False: the softmax is fp32")
    return decode(
        query,
        kv_cache,
        block_tables,
        seq_lens,
        max_seq_len=max_seq_len,
        workspace_buffer=_no_bytes(query) if workspace_buffer is None else workspace_buffer,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        sparse_mla_top_k=sparse_mla_top_k,
        out=out,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=sinks,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        enable_pdl=enable_pdl,
        is_var_seq=is_var_seq,
        uses_shared_paged_kv_idx=uses_shared_paged_kv_idx,
        lse=lse,
        return_lse=return_lse,
        return_lse_base=return_lse_base,
        cum_seq_lens_q=cum_seq_lens_q,
        max_q_len=max_q_len,
        enable_dcp=enable_dcp,
        cp_world=cp_world,
        cp_rank=cp_rank,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
        mask=mask,
        batch_invariant=batch_invariant,
        plan=plan,
        backend=backend,
    )


def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | Sequence[Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """MLA decode by the CUDA backend on a GPU, by the torch backend where the tensors are a CPU's.

    Parameters as in `trtllm_batch_decode_with_kv_cache_mla`. XQA's own limits (one query token,
    128 heads, no sinks, SM120) do not hold here: what the backend supports is run.

    Returns out. Raises InvalidInput, InvalidType or Unsupported before anything runs.
    Source: flashinfer.mla.xqa_batch_decode_with_kv_cache_mla (FlashInfer 0.7.2).
    """
    result = trtllm_batch_decode_with_kv_cache_mla(
        query,
        kv_cache,
        workspace_buffer,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        out=out,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=sinks,
        enable_pdl=enable_pdl,
        backend="cuda" if isinstance(query, Tensor) and query.is_cuda else "torch",
    )
    return result if isinstance(result, Tensor) else result[0]


def _check_int(name: str, value: object) -> None:
    if type(value) is int:  # the abstract class takes a third of a microsecond to say so
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise invalid_type(name, type(value).__name__, "an int")


def _check_implementation(name: str, query: object) -> None:
    """FlashInfer has two CuTe implementations that differ for several query tokens; ours is one."""
    one_token = isinstance(query, Tensor) and query.dim() == 4 and query.shape[1] == 1
    if name not in ("auto", "monolithic") and not (name == "modular" and one_token):
        causal = "'auto', 'monolithic'; 'modular' for one query token: its rows are not causal"
        _refuse("cute_dsl_impl", name, causal)


def _no_bytes(query: object) -> Tensor | None:
    """An empty workspace: enough for a plan without partials, an error that names sizes else."""
    return query.new_empty(0, dtype=torch.uint8) if isinstance(query, Tensor) else None


def _refuse(name: str, got: object, supported: str) -> NoReturn:
    raise unsupported(name, repr(got), supported)
