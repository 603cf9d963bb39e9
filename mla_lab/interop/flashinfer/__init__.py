"""FlashInfer's decode names on our calls: the import is all that a program changes.

    from mla_lab.flashinfer_names import trtllm_batch_decode_with_kv_cache_mla
    import mla_lab.flashinfer_names as flashinfer    # flashinfer.mla.x, flashinfer.decode.x

Semantics are those of `api.contract`. For existing programs these names accept more:

* `multi_ctas_kv_counter_buffer` is checked and not used: our counters lie in the workspace.
* A query with gaps between its tokens, and sinks in 16 bits, are copied, as FlashInfer's CuTe DSL
  entry does, after the call was checked; the contract's own names refuse them, since they never
  copy a caller's tensor.
* `enable_pdl=True` counts as None: programmatic dependent launch where the backend has it. So does
  `use_fp16_softmax=True`, which permits an fp16 softmax: ours is fp32.
* `cute_dsl_impl="modular"`, whose draft tokens all see each other, becomes a full draft mask.
* FlashInfer needs a zeroed workspace only for kernels with semaphores, and its own tests pass
  `torch.empty`. Our merge counters and LL partials must start at zero: these names zero them, on
  the current stream, at the first use of a buffer (`first_use`). The contract's own names do not.
* `cute_dsl_mla_decode` has its own parameter names, and by default an out of the query's dtype. It
  has no `backend`: "auto" chooses, CuTe kernels first. A ragged call without any query token
  returns at once there; the contract's names refuse it.

The wrapper with plan and run is `paged_wrapper`'s `BatchMLAPagedAttentionWrapper`. Sparse attention
of other models, and the layers below these names (autotuner, kernel classes), have no counterpart
here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...api import contract, contract_gqa
from ...core import masks
from ...core.errors import invalid, invalid_type
from ...plan.workspace import WORD_BYTES
from .before_copy import SIXTEEN_BITS, check_gqa, check_mla
from .first_use import clear_once
from .paged_wrapper import BatchMLAPagedAttentionWrapper

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAHeadDimensions",
    "MLALayerDimensions",
    "cute_dsl_mla_decode",
    "decode",
    "deepseek_mla_dimensions",
    "mla",
    "smaller_mla_dimensions",
    "supported_mla_layer_dimensions",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]

P = ParamSpec("P")
R = TypeVar("R")

#: where `workspace_buffer` stands in the contract's lists
WORKSPACE_POSITION = 2
COUNTERS = "multi_ctas_kv_counter_buffer"
COUNTER_ALIGNMENT = 16
#: arguments that True permits and does not require
WISHES = ("enable_pdl", "use_fp16_softmax")

Check = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], None]


@dataclass(frozen=True)
class MLAHeadDimensions:
    """Channels of a head before the absorption, and the rank of the compressed cache."""

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


@dataclass(frozen=True)
class MLALayerDimensions:
    """A layer: channels of its heads, and their number."""

    head_dimensions: MLAHeadDimensions
    num_heads: int


deepseek_mla_dimensions = MLAHeadDimensions(128, 64, 128, 512)
#: supported by the torch backend only
smaller_mla_dimensions = MLAHeadDimensions(64, 64, 128, 256)
supported_mla_layer_dimensions = [
    MLALayerDimensions(deepseek_mla_dimensions, 128),
    MLALayerDimensions(deepseek_mla_dimensions, 64),
    MLALayerDimensions(smaller_mla_dimensions, 32),
]


def _with_any_workspace(call: Callable[P, R], check: Check) -> Callable[P, R]:
    """`call`, which zeroes counters and LL partials of a workspace at its first use.

    check: refuses what `call` would refuse once the query is contiguous.
    """

    @wraps(call)
    def run(*args: P.args, **named: P.kwargs) -> R:
        buffer: Any = named.get("workspace_buffer")
        if buffer is None and len(args) > WORKSPACE_POSITION:
            buffer = args[WORKSPACE_POSITION]
        clear_once(buffer)
        if named.get(COUNTERS) is not None:
            _check_counters(named.pop(COUNTERS), named)
        return call(*_taken(call, check, args, named), **named)

    return run


def _taken(
    call: Callable[..., Any], check: Check, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """The contract's arguments; tensors that FlashInfer would copy are copied, after `check`."""
    named |= {name: None for name in WISHES if named.get(name) is True}
    query: Any = named.get("query", args[0] if args else None)
    sinks = named.get("sinks")
    if isinstance(sinks, Tensor):
        if isinstance(query, Tensor) and sinks.shape != query.shape[-2:-1]:
            got = f"shape {tuple(sinks.shape)}"
            raise invalid("sinks", got, f"shape (num_qo_heads,) = ({query.shape[-2]},)")
        named["sinks"] = sinks.float() if sinks.dtype in SIXTEEN_BITS else sinks
    drafts = isinstance(query, Tensor) and query.dim() == 4 and query.shape[1] > 1
    modular = drafts and named.get("cute_dsl_impl") == "modular" and named.get("mask") is None
    if modular:
        named["cute_dsl_impl"] = "auto"
    apart = isinstance(query, Tensor) and not query.is_contiguous() and query.stride(-1) == 1
    if apart or modular:
        check(call, args, named)
    if modular:
        batch, q_len = query.shape[:2]
        seen = torch.ones(batch, q_len, q_len, dtype=torch.bool, device=query.device)
        named["mask"] = masks.pack(seen)
    if apart and "query" in named:
        named["query"] = query.contiguous()
    elif apart:
        args = (query.contiguous(), *args[1:])
    return args


def _check_counters(buffer: object, named: Mapping[str, Any]) -> None:
    """FlashInfer's checks of a counter buffer: one word for each head and request at least."""
    if not isinstance(buffer, Tensor):
        raise invalid_type(COUNTERS, type(buffer).__name__, "a torch.Tensor")
    if not buffer.is_contiguous():
        got = f"strides {list(buffer.stride())}"
        raise invalid(COUNTERS, got, f"{COUNTERS} must be contiguous")
    if buffer.data_ptr() % COUNTER_ALIGNMENT:
        got = f"address 0x{buffer.data_ptr():x}"
        raise invalid(COUNTERS, got, f"{COUNTERS} must be {COUNTER_ALIGNMENT}-byte aligned")
    query, lengths = named.get("query"), named.get("seq_lens")
    if isinstance(query, Tensor) and isinstance(lengths, Tensor):
        least = WORD_BYTES * lengths.numel() * query.shape[-2]
        if buffer.nbytes < least:
            got = f"{buffer.nbytes} bytes"
            raise invalid(COUNTERS, got, f"{COUNTERS} is too small: {least} bytes or more")


trtllm_batch_decode_with_kv_cache_mla = _with_any_workspace(
    contract.trtllm_batch_decode_with_kv_cache_mla, check_mla
)
xqa_batch_decode_with_kv_cache_mla = _with_any_workspace(
    contract.xqa_batch_decode_with_kv_cache_mla, check_mla
)
trtllm_batch_decode_with_kv_cache = _with_any_workspace(
    contract_gqa.trtllm_batch_decode_with_kv_cache, check_gqa
)
xqa_batch_decode_with_kv_cache = _with_any_workspace(
    contract_gqa.xqa_batch_decode_with_kv_cache, check_gqa
)


def cute_dsl_mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    softmax_scale: float,
    output_scale: float = 1.0,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **named: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """The decode call under the parameter names of FlashInfer's CuTe DSL entry.

    out, out_dtype: default a new out of `out_dtype`, else of the query's dtype (bf16 under e4m3).
    A new lse of a dense call is [batch, q_len, heads]. Other parameters, and what raises, as in
    `contract.trtllm_batch_decode_with_kv_cache_mla`.
    Source: flashinfer.cute_dsl.attention.cute_dsl_mla_decode (FlashInfer 0.7.2).
    """
    for name, given in (("out", out), ("lse", named.get("lse"))):
        if isinstance(given, Tensor) and not given.is_contiguous():
            raise invalid(name, f"strides {list(given.stride())}", f"{name} must be contiguous")
    if isinstance(query, Tensor) and not query.is_contiguous():
        dims = (kv_lora_rank, kv_lora_rank, qk_rope_head_dim)
        listed = (query, kv_cache, workspace_buffer, *dims, block_tables, seq_lens, max_seq_len)
        ragged = {name: named.get(name) for name in ("cum_seq_lens_q", "max_q_len")}
        check_mla(contract.trtllm_batch_decode_with_kv_cache_mla, listed, ragged)
    if out is None and isinstance(query, Tensor):
        eight_bit = query.dtype is torch.float8_e4m3fn
        dtype = out_dtype or (torch.bfloat16 if eight_bit else query.dtype)
        out = query.new_empty((*query.shape[:-1], kv_lora_rank), dtype=dtype)
    if named.get("return_lse") and named.get("lse") is None and query.dim() == 4:
        named["lse"] = query.new_empty(query.shape[:-1], dtype=torch.float32)
    if out is not None and not query.shape[0] and named.get("cum_seq_lens_q") is not None:
        lse = named.get("lse", query.new_empty(query.shape[:-1], dtype=torch.float32))
        return (out, lse) if named.get("return_lse") else out
    return trtllm_batch_decode_with_kv_cache_mla(
        query,
        kv_cache,
        workspace_buffer,
        kv_lora_rank,  # plays no part
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        out=out,
        bmm1_scale=softmax_scale,
        bmm2_scale=output_scale,
        **named,
    )


#: FlashInfer has these names in two modules
mla = decode = sys.modules[__name__]
