"""The calls that serving engines make, by FlashInfer's names and parameter lists.

Code that imports them from `flashinfer.mla` runs on ours by changing the import. Order and defaults
are FlashInfer 0.7.4's and those of its pull requests for ragged queries, XQA, speculative masks and
a CuTe DSL backend; what is ours is keyword-only. Both are the native call (`api.decode`) with that
list, which `call.decode_args` declares.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..call.decode_args import PARAMETERS, DecodeArgs
from ..call.signature import function, public_parameters, typed
from .decode import TARGET

#: what XQA's list ends with, and lacks
_XQA_LAST, _XQA_LACKS = "enable_pdl", ("sparse_mla_top_k", "skip_softmax_threshold_scale_factor")
_PARAMETERS = public_parameters(PARAMETERS)
_LAST = [p.name for p in _PARAMETERS].index(_XQA_LAST)


trtllm_batch_decode_with_kv_cache_mla = typed(
    DecodeArgs,
    function(
        "trtllm_batch_decode_with_kv_cache_mla",
        TARGET,
        _PARAMETERS,
        f"""MLA decode over a paged cache: softmax(bmm1_scale x q k) v x bmm2_scale for each row.

    A cached token is one row of 576 values, all of them its key, the first 512 its value. A
    request's q_len new tokens are the last of its seq_len; without a mask they see their own past
    (causal, bottom-right).

    {(DecodeArgs.__doc__ or "").split(chr(10), 2)[2].strip()}

    Returns out, or (out, lse) with return_lse; rows without a key have lse -inf and out
    0 x bmm2_scale, which is NaN where a scale in memory is not finite.
    Raises InvalidInput, InvalidType or Unsupported before anything runs.
    Source: flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla (FlashInfer 0.7.4).
    """,
        fixed={"native": "False"},
    ),
)

xqa_batch_decode_with_kv_cache_mla: Callable[..., Tensor] = function(
    "xqa_batch_decode_with_kv_cache_mla",
    TARGET,
    [p for p in _PARAMETERS[: _LAST + 1] if p.name not in _XQA_LACKS],
    """MLA decode by the CUDA backend on a GPU, by the torch backend where tensors are on a CPU.

    Parameters as in `trtllm_batch_decode_with_kv_cache_mla`. XQA's own limits (one query token,
    128 heads, no sinks, SM120) do not hold here: what the backend supports is run.

    Returns out. Raises InvalidInput, InvalidType or Unsupported before anything runs.
    Source: flashinfer.mla.xqa_batch_decode_with_kv_cache_mla (FlashInfer 0.7.4).
    """,
    fixed={
        "native": "False",
        "backend": "'cuda' if getattr(query, 'is_cuda', False) else 'torch'",
    },
)
