"""Error of a result, and its bound.

The rule, after FlashAttention's tests: the error against the oracle is at most twice that of
torch's scaled_dot_product_attention in the same precision on the same inputs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..call.decode_args import DecodeArgs
from ..core.errors import invalid
from .inputs import DecodeInputs
from .mla import Result, add_sinks, decode_reference
from .operands import Operands, operands

#: bound on the error over torch's error
ALLOWED_RATIO = 2.0
#: bound on the error of lse relative to max(1, |lse|) in float32
LSE_TOLERANCE = 1e-5


class Error(NamedTuple):
    """Distance of a result from the oracle; infinite where one is finite and the other not."""

    #: ||out - ref|| / ||ref|| over all elements
    relative: float
    #: greatest absolute difference of one element
    greatest: float

    def within(self, baseline: Error, ratio: float = ALLOWED_RATIO, floor: float = 1e-6) -> bool:
        """True if both figures are finite, and at most `ratio` x the baseline's + `floor` (fp32
        rounding).
        """
        return all(
            math.isfinite(mine) and mine <= ratio * other + floor
            for mine, other in zip(self, baseline, strict=True)
        )


def error(out: Tensor, ref: Tensor) -> Error:
    """Error of `out` against `ref` of the same shape, taken in ref's dtype; -inf equals -inf.

    Raises InvalidInput where the shapes differ (broadcasting would hide a mistake).
    """
    if out.shape != ref.shape:
        raise invalid("out", f"shape {tuple(out.shape)}", tuple(ref.shape))
    out = out.to(ref)
    difference = torch.where(out == ref, 0.0, out - ref)  # inf - inf would be NaN
    if not bool(difference.isfinite().all()):
        return Error(math.inf, math.inf)
    size = torch.where(ref.isfinite(), ref, 0.0).norm()
    relative = difference.norm() / size if size > 0 else difference.norm()
    greatest = difference.abs().max() if difference.numel() else difference.sum()
    return Error(float(relative), float(greatest))


def rel_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref||, infinite for a NaN."""
    return error(out, ref).relative


def lse_error(lse: Tensor, ref: Tensor) -> float:
    """Greatest |lse - ref| / max(1, |ref|); infinite unless the -inf rows are the same ones."""
    ref = ref.reshape(lse.shape)
    scale = torch.where(ref.isfinite(), ref.abs(), 1.0).clamp_min(1.0)
    return error(lse.to(ref) / scale, ref / scale).greatest


def sdpa(call: DecodeArgs, dtype: torch.dtype) -> Tensor:
    """Plain attention by torch's scaled_dot_product_attention: `dtype` [total_q, heads, latent].

    Pages, masks and ranks as in the call; without sinks, output scale and skip-softmax.
    """
    outs = [_sdpa_request(request, float(call.bmm1_scale)) for request in operands(call, dtype)]
    return torch.cat(outs)


def sdpa_error(inputs: DecodeInputs, ref: Result | None = None) -> Error:
    """Error of torch SDPA on these inputs, in the query's precision (bf16 for e4m3 queries).

    Sinks and output scale, which SDPA lacks, multiply its result, which is then rounded to the
    same precision again, as a torch program would. ref: the oracle's result with natural lse
    and without skip-softmax, if it is at hand.
    """
    plain = replace(inputs, return_lse_base=None, skip_softmax_threshold_scale_factor=None)
    ref = decode_reference(plain) if ref is None else ref
    eight_bit = inputs.query.dtype is torch.float8_e4m3fn
    dtype = torch.bfloat16 if eight_bit else inputs.query.dtype
    out = add_sinks(sdpa(inputs, dtype).to(ref.out), ref.lse, inputs.sinks)
    out = (out * float(inputs.bmm2_scale)).to(dtype)
    return error(out.reshape(ref.out.shape), ref.out)


def _sdpa_request(request: Operands, scale: float) -> Tensor:
    q_len, heads, _ = request.query.shape
    shape = (q_len, 1, -1, -1)
    out = scaled_dot_product_attention(
        request.query.unsqueeze(1),
        request.keys.unsqueeze(1).expand(shape),
        request.values.unsqueeze(1).expand(shape),
        attn_mask=request.visible.unsqueeze(1).expand(-1, -1, heads, -1),
        scale=scale,
    )
    # torch leaves rows without a key to the backend; the contract says 0
    return out.squeeze(1).masked_fill(~request.visible.any(-1, keepdim=True), 0.0)
