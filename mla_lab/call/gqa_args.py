"""The parameters of the GQA and MQA decode calls, declared once, and what a checked call holds."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from .decode_args import Arg, integers_of, parameters_of

_PLAIN = Arg()

KV_LAYOUTS = ("HND", "NHD")


@dataclass(slots=True, eq=False)
class GqaArgs:
    """The arguments of one call as the caller gave them, unchecked.

    No gradient passes through a call: its results require none, whatever its tensors do.

    query: [num_tokens, heads, head_dim], num_tokens = batch x q_len_per_req, or ragged with
        cum_seq_lens_q. bf16, fp16, e4m3; for teaching fp32 and fp64.
    kv_cache: (keys, values), each [pages, kv_heads, page_size, head_dim] ("HND") or [pages,
        page_size, kv_heads, head_dim] ("NHD"), or one tensor [pages, 2, ...]. The query's dtype, or
        e4m3 under a 16-bit query. Slots behind a request's length may hold anything.
    workspace_buffer: 1-D uint8 or int8, zeroed once before its first use; a buffer each for calls
        that may run at the same time. None allocates.
    block_tables: int32 [batch, max_pages]; with uses_shared_paged_kv_idx=False [batch, 2,
        max_pages], row 0 for the keys, row 1 for the values.
    seq_lens: int32 [batch], keys of each request, its new ones included; 0 is legal.
    max_seq_len: a bound of seq_lens for scheduling.
    bmm1_scale, bmm2_scale: on the scores (1/sqrt(head_dim) included) and on out; a number, or fp32
        of one element on the device.
    window_left: keys that a token sees before its own; -1: all.
    out, out_dtype: default a new out of out_dtype, else of the query's dtype; the query's dtype,
        bf16 or fp16.
    sinks: fp32 [heads] or a list of one: exp(sink) is added to the denominator of each head.
    kv_layout: "HND" or "NHD", the order of heads and tokens in a page.
    enable_pdl: programmatic dependent launch. None: where the device has it; True raises elsewhere.
    backend: "auto" (the CUDA kernel where it can, else torch), "torch", "cuda"; "xqa" is cuda,
        "trtllm-gen" auto.
    q_len_per_req: new tokens of each request, the last of its seq_len; with cum_seq_lens_q it is
        None, 1, max_q_len or the longest.
    o_scale: XQA multiplies by it and divides again; it changes no result here.
    mask: uint16 [batch, q_len, ceil(q_len / 32) x 2] or [num_tokens, ...] (`mla_lab.core.masks`);
        None is causal.
    max_q_len, cum_seq_lens_q: ragged queries: int32 [batch + 1] prefix sums, and a bound of a
        request's query tokens, which saves a GPU the copy that would read it. Rows of a request
        with more tokens are right or NaN there.
    skip_softmax_threshold_scale_factor: as in MLA decode; on the torch backend.
    uses_shared_paged_kv_idx: keys and values have one table of pages.
    lse, return_lse: fp32 [num_tokens, heads], natural log, without the sink.
    o_sf_scale, o_sf_vec_size, kv_cache_sf: FP4, which is not supported; bmm1_scale_log2,
        multi_ctas_kv_counter_buffer, enable_block_sparse_attention, cp_world, cp_rank,
        causal_seqlens_kv_global, bf16q_fp8kv_transform_mode, request_order, request_order_plan,
        sparse_top_k, length_aware_schedule: other values than the defaults are not supported.
    batch_invariant: the bits of a request's result do not depend on the rest of the batch.
    """

    query: Annotated[Tensor, _PLAIN]
    kv_cache: Annotated[Tensor | tuple[Tensor, Tensor], _PLAIN]
    workspace_buffer: Annotated[Tensor | None, Arg(native=None, written=True)]
    block_tables: Annotated[Tensor, _PLAIN]
    seq_lens: Annotated[Tensor, _PLAIN]
    max_seq_len: Annotated[int, Arg(native=1 << 31)]
    bmm1_scale: Annotated[float | Tensor, _PLAIN] = 1.0
    bmm2_scale: Annotated[float | Tensor, _PLAIN] = 1.0
    window_left: Annotated[int, _PLAIN] = -1
    out: Annotated[Tensor | None, Arg(written=True)] = None
    out_dtype: Annotated[torch.dtype | None, _PLAIN] = None
    o_sf_scale: Annotated[float | None, _PLAIN] = None
    o_sf_vec_size: Annotated[int | None, _PLAIN] = None
    sinks: Annotated[Tensor | list[Tensor] | tuple[Tensor, ...] | None, _PLAIN] = None
    kv_layout: Annotated[str, _PLAIN] = "HND"
    enable_pdl: Annotated[bool | None, _PLAIN] = None
    backend: Annotated[str, _PLAIN] = "auto"
    q_len_per_req: Annotated[int | None, _PLAIN] = 1
    o_scale: Annotated[float | None, _PLAIN] = 1.0
    mask: Annotated[Tensor | None, _PLAIN] = None
    max_q_len: Annotated[int | None, _PLAIN] = None
    cum_seq_lens_q: Annotated[Tensor | None, _PLAIN] = None
    skip_softmax_threshold_scale_factor: Annotated[float | None, _PLAIN] = None
    kv_cache_sf: Annotated[Any, _PLAIN] = None
    uses_shared_paged_kv_idx: Annotated[bool, _PLAIN] = True
    lse: Annotated[Tensor | None, Arg(written=True)] = None
    return_lse: Annotated[bool, _PLAIN] = False
    bmm1_scale_log2: Annotated[Any, _PLAIN] = None
    multi_ctas_kv_counter_buffer: Annotated[Any, _PLAIN] = None
    enable_block_sparse_attention: Annotated[bool, _PLAIN] = False
    cp_world: Annotated[int, _PLAIN] = 1
    cp_rank: Annotated[int, _PLAIN] = 0
    causal_seqlens_kv_global: Annotated[Any, _PLAIN] = None
    bf16q_fp8kv_transform_mode: Annotated[Any, _PLAIN] = None
    request_order: Annotated[Any, _PLAIN] = None
    request_order_plan: Annotated[Any, _PLAIN] = None
    sparse_top_k: Annotated[int, _PLAIN] = 0
    length_aware_schedule: Annotated[bool, _PLAIN] = False
    _: KW_ONLY
    batch_invariant: Annotated[bool, _PLAIN] = False

    @property
    def sink(self) -> Tensor | None:
        """fp32 [heads], or None."""
        sinks = self.sinks
        return sinks if sinks is None or isinstance(sinks, Tensor) else sinks[0]


GQA_PARAMETERS = parameters_of(GqaArgs)
GQA_INTEGERS = integers_of(GQA_PARAMETERS)


@dataclass(frozen=True)
class GqaForm:
    """Facts of a checked call that need no read of a tensor; lengths are bounds."""

    batch: int
    total_q: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str
    kv_format: str
    out_dtype: str
    #: tokens that a row of the block table can name, or max_seq_len where that is less
    longest: int
    #: query tokens of a request, or their bound; None where it must be read
    max_q_len: int | None
    device: torch.device
    ragged: bool
    #: data, tokens, heads and pages of query, cache and out lie at multiples of 16 bytes
    aligned: bool
    #: what the call uses beyond plain decode; a backend refuses by it
    features: frozenset[str]

    @property
    def longest_q(self) -> int | None:
        """The bound that the query's tokens leave of `max_q_len`."""
        return None if self.max_q_len is None else min(self.max_q_len, self.total_q)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, eq=False)
class CheckedGqaCall:
    """A checked call, its results allocated."""

    form: GqaForm
    args: GqaArgs
    #: each [pages, kv_heads, page_size, head_dim], or with tokens before heads, as kv_layout says
    keys: Tensor
    values: Tensor
    #: query tokens of each request where they were read on the host
    q_lens: tuple[int, ...] | None
    out: Tensor
    lse: Tensor | None
