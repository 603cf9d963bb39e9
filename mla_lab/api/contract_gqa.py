"""GQA and MQA decode by FlashInfer's names and parameter lists.

Order and defaults are FlashInfer's; what is ours is keyword-only. The semantics of the two names
are one: a token sees its own past (causal, bottom-right) unless a mask says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter
from numbers import Integral
from typing import Any

from torch import Tensor

from ..call.gqa_args import GQA_PARAMETERS, GqaArgs
from ..call.signature import Target, function, public_parameters, typed
from ..core.errors import InvalidInput, Unsupported, invalid, under_names
from .gqa import decode

_PARAMETERS = public_parameters(GQA_PARAMETERS)
#: XQA's list: fewer parameters, two with another default, one with another name
_XQA_LACKS = (
    *("out_dtype", "o_sf_scale", "o_sf_vec_size", "backend", "max_q_len", "cum_seq_lens_q"),
    *("skip_softmax_threshold_scale_factor", "uses_shared_paged_kv_idx", "lse", "return_lse"),
    *("bmm1_scale_log2", "multi_ctas_kv_counter_buffer", "enable_block_sparse_attention"),
    *("cp_world", "cp_rank", "causal_seqlens_kv_global", "bf16q_fp8kv_transform_mode"),
    *("request_order", "request_order_plan", "sparse_top_k", "length_aware_schedule"),
    "batch_invariant",
)
_XQA = [
    p.replace(default="NHD") if p.name == "kv_layout" else p
    for p in _PARAMETERS
    if p.name not in _XQA_LACKS
]
_XQA.append(
    Parameter(
        "q_cu_seq_lens", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Tensor | None
    )
)


#: of ours: what errors of XQA's call name them
XQA_NAMES = {"cum_seq_lens_q": "q_cu_seq_lens", "max_q_len": "q_len_per_req"}


def _xqa(args: GqaArgs) -> Any:
    ragged = args.cum_seq_lens_q is not None
    q_len = args.max_q_len if ragged else args.q_len_per_req
    unknown = ragged and q_len is None
    # what is no number of tokens is left to the checks
    if args.mask is None and (unknown or (isinstance(q_len, Integral) and q_len > 1)):
        raise invalid("mask", f"None with q_len_per_req {q_len}", "packed uint16 rows")
    try:
        return decode(args)
    except (InvalidInput, Unsupported) as error:
        raise under_names(error, XQA_NAMES) from None


trtllm_batch_decode_with_kv_cache = typed(
    GqaArgs,
    function(
        "trtllm_batch_decode_with_kv_cache",
        Target(GqaArgs, decode),
        _PARAMETERS,
        f"""GQA or MQA decode over a paged cache: softmax(bmm1_scale x q k) v x bmm2_scale.

    Query head h reads KV head h // (heads / kv_heads). Tensors lie on one device; only out, lse and
    workspace_buffer are written, and none is copied.

    {(GqaArgs.__doc__ or "").split(chr(10), 2)[2].strip()}

    Returns out, or (out, lse) with return_lse; rows without a key have out 0 and lse -inf.
    Raises InvalidInput, InvalidType or Unsupported before anything runs.
    Source: flashinfer.decode.trtllm_batch_decode_with_kv_cache (FlashInfer 0.7.4).
    """,
    ),
)

xqa_batch_decode_with_kv_cache: Callable[..., Tensor] = function(
    "xqa_batch_decode_with_kv_cache",
    Target(GqaArgs, _xqa),
    _XQA,
    """GQA or MQA decode by the CUDA kernel on a GPU, by torch where tensors are on a CPU.

    Parameters as in `trtllm_batch_decode_with_kv_cache`, except: kv_layout is "NHD" by default;
    more than one new token in a request needs a mask, as XQA does; q_cu_seq_lens is that name's
    cum_seq_lens_q, and q_len_per_req then the bound of a request's query tokens.

    Returns out. Raises InvalidInput, InvalidType or Unsupported before anything runs.
    Source: flashinfer.decode.xqa_batch_decode_with_kv_cache (FlashInfer 0.7.4).
    """,
    fixed={
        "backend": "'cuda' if getattr(query, 'is_cuda', False) else 'torch'",
        "q_len_per_req": "q_len_per_req if q_cu_seq_lens is None else None",
        "max_q_len": "None if q_cu_seq_lens is None else q_len_per_req",
        "cum_seq_lens_q": "q_cu_seq_lens",
    },
)
