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
  the current stream, at the first use of a buffer (`first_use`), once the call was checked. The
  contract's own names do not. A buffer that FlashInfer's own kernels, or others, write after that
  gives wrong results: it must be another one, or be zeroed again.
* `cute_dsl_mla_decode` has its own parameter names, and by default an out of the query's dtype.
  `backend` is no name of FlashInfer's list there: by default "auto" chooses, CuTe kernels first,
  and a given one counts as in the contract's call. A ragged call without any query token returns
  at once there; the contract's names refuse it.

The wrapper with plan and run is `paged_wrapper`'s `BatchMLAPagedAttentionWrapper`. Sparse attention
of other models, and the layers below these names (autotuner, kernel classes), have no counterpart
here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...api import contract, contract_gqa
from ...call.checks import tensors as argument
from ...core import masks
from ...core.errors import InvalidInput, Unsupported, invalid, invalid_type, under_names
from ...plan.workspace import WORD_BYTES
from .before_copy import GQA, MLA, Checks, check_mla, check_no_rows
from .first_use import clear_once
from .paged_wrapper import BatchMLAPagedAttentionWrapper
from .wrapper_plan import SIXTEEN_BITS

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

COUNTERS = "multi_ctas_kv_counter_buffer"
COUNTER_ALIGNMENT = 16
#: parameters of the contract's call that its CuTe DSL entry names otherwise, or lacks
NOT_OF_CUTE_DSL = ("qk_nope_head_dim", "bmm1_scale", "bmm2_scale")
OF_CUTE_DSL = {"bmm1_scale": "softmax_scale", "bmm2_scale": "output_scale"}
#: arguments that True permits and does not require
WISHES = ("enable_pdl", "use_fp16_softmax")


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


def _with_any_workspace(call: Callable[P, R], checks: Checks) -> Callable[P, R]:
    """`call`, which zeroes counters and LL partials of a workspace at its first use."""
    plain: Callable[..., R] = call
    positional = [
        p.name
        for p in inspect.signature(call).parameters.values()
        if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]

    @wraps(call)
    def run(*args: P.args, **named: P.kwargs) -> R:
        given: dict[str, Any] = dict(named)
        if args:
            first = positional[: len(args)]
            if len(args) > len(positional) or any(name in named for name in first):
                return call(*args, **named)  # Python says what is wrong with the list
            given.update(zip(first, args, strict=True))
        if given.get(COUNTERS) is not None:
            _check_counters(given.pop(COUNTERS), given)
        given = _taken(call, checks, given)
        others = _tensors(given) if torch.compiler.is_compiling() else []
        clear_once(given.get("workspace_buffer"), lambda: checks.before_clear(call, given), others)
        return plain(**given)

    run.__module__ = __name__  # where pickle finds it
    return run


def _tensors(given: Mapping[str, Any]) -> list[Tensor]:
    """Tensors of a call, but for its workspace."""
    values = [value for name, value in given.items() if name != "workspace_buffer"]
    parts = [v for value in values if isinstance(value, (list, tuple)) for v in value]
    return [value for value in (*values, *parts) if isinstance(value, Tensor)]


def _taken(call: Callable[..., Any], checks: Checks, given: dict[str, Any]) -> dict[str, Any]:
    """The contract's arguments; tensors that FlashInfer would copy are copied, once checked."""
    given |= {name: None for name in WISHES if given.get(name) is True}
    query, sinks = given.get("query"), given.get("sinks")
    if isinstance(sinks, (list, tuple)) and len(sinks) == 1 and isinstance(sinks[0], Tensor):
        sinks = sinks[0]
    if isinstance(sinks, Tensor):
        argument.tensor("sinks", sinks)
        if isinstance(query, Tensor):
            argument.tensor("query", query)
        if isinstance(query, Tensor) and query.dim() > 1 and sinks.shape != query.shape[-2:-1]:
            got = f"shape {tuple(sinks.shape)}"
            raise invalid("sinks", got, f"shape (num_qo_heads,) = ({query.shape[-2]},)")
        if sinks.dtype in SIXTEEN_BITS:
            given["sinks"] = sinks.float()
    if not isinstance(query, Tensor):
        return given
    modular = query.dim() == 4 and query.shape[1] > 1 and given.get("cute_dsl_impl") == "modular"
    # a sparse row sees its slots alone: the contract says what is wrong
    if modular and given.get("mask") is None and not given.get("sparse_mla_top_k"):
        given["cute_dsl_impl"] = "auto"
    else:
        modular = False
    apart = query.dim() > 0 and not query.is_contiguous() and query.stride(-1) == 1
    if (apart or modular) and not torch.compiler.is_compiling():  # there the call alone checks
        checks.before_copy(call, given)
    if modular:
        batch, q_len = query.shape[:2]
        seen = torch.ones(batch, q_len, q_len, dtype=torch.bool, device=query.device)
        given["mask"] = masks.pack(seen)
    if apart:
        given["query"] = query.contiguous()
    return given


def _check_counters(buffer: object, named: Mapping[str, Any]) -> None:
    """FlashInfer's checks of a counter buffer: one word for each head and request at least."""
    buffer = argument.tensor(COUNTERS, buffer)
    if not buffer.is_contiguous():
        got = f"strides {list(buffer.stride())}"
        raise invalid(COUNTERS, got, f"{COUNTERS} must be contiguous")
    if not torch.compiler.is_compiling() and buffer.data_ptr() % COUNTER_ALIGNMENT:
        got = f"address 0x{buffer.data_ptr():x}"
        raise invalid(COUNTERS, got, f"{COUNTERS} must be {COUNTER_ALIGNMENT}-byte aligned")
    query, lengths = named.get("query"), named.get("seq_lens")
    if isinstance(query, Tensor) and isinstance(lengths, Tensor):
        argument.tensor("query", query)
        argument.tensor("seq_lens", lengths)
    if isinstance(query, Tensor) and query.dim() > 1 and isinstance(lengths, Tensor):
        least = WORD_BYTES * lengths.numel() * query.shape[-2]
        if buffer.nbytes < least:
            got = f"{buffer.nbytes} bytes"
            raise invalid(COUNTERS, got, f"{COUNTERS} is too small: {least} bytes or more")


trtllm_batch_decode_with_kv_cache_mla = _with_any_workspace(
    contract.trtllm_batch_decode_with_kv_cache_mla, MLA
)
xqa_batch_decode_with_kv_cache_mla = _with_any_workspace(
    contract.xqa_batch_decode_with_kv_cache_mla, MLA
)
trtllm_batch_decode_with_kv_cache = _with_any_workspace(
    contract_gqa.trtllm_batch_decode_with_kv_cache, GQA
)
xqa_batch_decode_with_kv_cache = _with_any_workspace(
    contract_gqa.xqa_batch_decode_with_kv_cache, GQA
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

    out, out_dtype: default a new out of `out_dtype`, else of the query's dtype (bf16 under e4m3);
    an out of another dtype than a given `out_dtype` is refused, where FlashInfer takes the out's.
    A new lse of a dense call is [batch, q_len, heads]. Other parameters, and what raises, as in
    `contract.trtllm_batch_decode_with_kv_cache_mla`.
    Source: flashinfer.cute_dsl.attention.cute_dsl_mla_decode (FlashInfer 0.7.2).
    """
    for name in NOT_OF_CUTE_DSL:
        if name in named:
            raise invalid_type(name, "a value", "no such argument: see softmax_scale, output_scale")
    _check_own(query, kv_lora_rank, out, out_dtype, named.get("lse"))
    given = {
        **named,
        "query": query,
        "kv_cache": kv_cache,
        "workspace_buffer": workspace_buffer,
        "qk_nope_head_dim": kv_lora_rank,  # plays no part
        "kv_lora_rank": kv_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "max_seq_len": max_seq_len,
        "bmm1_scale": softmax_scale,
        "bmm2_scale": output_scale,
    }
    try:
        return _decode_own(given, out, out_dtype)
    except (InvalidInput, Unsupported) as error:
        dtype_of_out = {} if out_dtype is None or out is not None else {"out": "out_dtype"}
        raise under_names(error, OF_CUTE_DSL | dtype_of_out) from None


def _decode_own(
    given: dict[str, Any], out: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor | tuple[Tensor, Tensor]:
    """`cute_dsl_mla_decode` by the contract's arguments, but for out."""
    query = given["query"]
    none = not query.shape[0] and isinstance(given.get("cum_seq_lens_q"), Tensor)
    if none:
        _check_no_rows_written(query, out, given.get("lse"))
        check_no_rows(contract.trtllm_batch_decode_with_kv_cache_mla, {**given, "out": out})
    elif not query.is_contiguous():
        check_mla(contract.trtllm_batch_decode_with_kv_cache_mla, {**given, "out": out})
    if out is None:
        eight_bit = query.dtype is torch.float8_e4m3fn
        dtype = out_dtype or (torch.bfloat16 if eight_bit else query.dtype)
        out = query.new_empty((*query.shape[:-1], given["kv_lora_rank"]), dtype=dtype)
    if given.get("return_lse") and given.get("lse") is None and (none or query.dim() == 4):
        given["lse"] = query.new_empty(query.shape[:-1], dtype=torch.float32)
    if none:
        return (out, given["lse"]) if given.get("return_lse") else out
    result: Tensor | tuple[Tensor, Tensor] = trtllm_batch_decode_with_kv_cache_mla(**given, out=out)
    return result


def _check_no_rows_written(query: Tensor, *results: object) -> None:
    """Results of a call without a query token have no row either."""
    for name, given in zip(("out", "lse"), results, strict=True):
        if isinstance(given, Tensor) and given.dim() and len(given):
            got = f"shape {list(given.shape)}"
            raise invalid(name, got, f"no row, as the query of shape {list(query.shape)}")


def _check_own(
    query: object, kv_lora_rank: object, out: object, out_dtype: object, lse: object
) -> None:
    """What results are made from, and what the contract's call is not given."""
    query = argument.tensor("query", query)
    if query.dim() not in (3, 4):
        raise invalid("query", f"shape {list(query.shape)}", "three or four dimensions")
    argument.integer("kv_lora_rank", kv_lora_rank, 1, max(1, query.shape[-1]))
    for name, given in (("out", out), ("lse", lse)):
        if isinstance(given, Tensor) and not argument.tensor(name, given).is_contiguous():
            raise invalid(name, f"strides {list(given.stride())}", f"{name} must be contiguous")
    if out_dtype is None:
        return
    if not isinstance(out_dtype, torch.dtype):
        raise invalid_type("out_dtype", repr(out_dtype), "a torch.dtype")
    if isinstance(out, Tensor) and out.dtype is not out_dtype:
        raise invalid_type("out_dtype", out_dtype, f"None, or the dtype of out, {out.dtype}")


#: FlashInfer has these names in two modules
mla = decode = sys.modules[__name__]
