"""Error bounds of a result, case by case.

16-bit operands: the error of rounding out, plus that of P in 16 bits with exact row sums. fp8
cache: twice torch's error with the same rounding, i.e. float32 attention whose softmax weights are
rounded to `WEIGHTS` and divided by the sum of the rounded weights; for the lse of a 16-bit query
also the error of scores that are sums of e4m3 products. The rounding grid of the weights depends on
the row max so far, which every split has its own of, so torch's error is the largest over several
grids.

Skip-softmax adds twice its factor: a dropped mass d changes the weights by d and their sum by d.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..bench.checks import compare
from ..call.decode_args import DecodeArgs
from ..core import kv_cache as formats
from ..reference.inputs import DecodeInputs
from ..reference.mla import Result, add_sinks, in_base
from ..reference.operands import Operands, operands
from ..reference.tolerance import ALLOWED_RATIO, lse_error

#: error beyond that of rounding the oracle's out once, relative to its norm: P in 16 bits
BEYOND_ROUNDING = 2.5e-3
#: elements may round to the other neighbour where results differ slightly before rounding
ROUNDING_SLACK = 1.1
#: bound of the worst row over the bound of the whole
ROW_FACTOR = 4.0
#: error of lse relative to max(1, |lse|)
LSE_TOLERANCE = 2e-5
#: (query, cache) -> type of the rounded softmax weights
WEIGHTS = {
    ("e4m3", "e4m3"): "e4m3",
    ("bf16", "e4m3"): "bf16",
    ("fp16", "e4m3"): "bf16",
    ("bf16", "fp8_656"): "bf16",
}
#: error of lse where scores are sums of e4m3 products, of which tensor cores keep about 14 bits
LSE_OF_TWO_TERMS = 2e-3
#: error of lse where every e4m3 weight of a row rounds in the same direction by half an ulp
LSE_OF_EIGHT_BITS = -math.log1p(-(2.0**-4))
#: positions of a row's largest weight between two powers of two
TOPS = tuple(256.0 * 2.0 ** (-place / 8) for place in range(8))


class Limits(NamedTuple):
    """Bounds on relative error, on the worst row's, and on the error of lse."""

    rel_error: float
    worst_row: float
    lse_error: float


def limits_of(inputs: DecodeInputs, expected: Result) -> Limits:
    """Bounds for a call whose oracle result is `expected`, without skip-softmax."""
    dropped = 2 * (inputs.skip_softmax_threshold_scale_factor or 0.0)
    weights = WEIGHTS.get((inputs.problem.q_dtype, inputs.problem.kv_format))
    if weights is not None:
        rel, row, lse = twice_torch(inputs, expected, inputs.problem.out_dtype, weights)
        return Limits(rel + dropped, row + ROW_FACTOR * dropped, lse + dropped)
    rounded = formats.pack(expected.out, inputs.problem.out_dtype).to(expected.out)
    rounding = compare([(rounded.float(), expected.out)])
    rel = ROUNDING_SLACK * rounding.rel_error + BEYOND_ROUNDING + dropped
    row = ROW_FACTOR * max(rel, ROUNDING_SLACK * rounding.worst_row)
    return Limits(rel, row, LSE_TOLERANCE + dropped)


def twice_torch(
    call: DecodeArgs, expected: Result, out_dtype: str, weights: str, tops: Sequence[float] = TOPS
) -> Limits:
    """Twice the largest errors of torch with rounded weights over the `tops`. The bound of lse also
    covers e4m3 weights that all round in one direction, and the scores of a 16-bit query.
    """
    errors = [rounded_error(call, expected, out_dtype, weights, top) for top in tops]
    rel, row, lse = (ALLOWED_RATIO * max(each) for each in zip(*errors, strict=True))
    off = min(lse, LSE_OF_EIGHT_BITS) if weights == "e4m3" else LSE_OF_TWO_TERMS
    return Limits(rel, row, off + LSE_TOLERANCE)


def rounded_error(
    call: DecodeArgs, expected: Result, out_dtype: str, weights: str, top: float
) -> Limits:
    """Errors of torch with rounded weights, the largest of each row at `top` of the grid."""
    out, lse = rounded(call, weights, top)
    found = compare([(formats.pack(out, out_dtype).float(), expected.out)])
    return Limits(found.rel_error, found.worst_row, lse_error(lse, expected.lse))


def rounded(call: DecodeArgs, weights: str, top: float) -> Result:
    """The call in float32 with rounded softmax weights, without skip-softmax; out unrounded."""
    scale = float(call.bmm1_scale)
    parts = [rounded_attention(one, scale, weights, top) for one in operands(call, torch.float32)]
    lse = torch.cat([part.lse for part in parts])
    out = add_sinks(torch.cat([part.out for part in parts]), lse, call.sinks)
    out = (out * float(call.bmm2_scale)).reshape(*call.query.shape[:-1], call.kv_lora_rank)
    return Result(out, in_base(lse, call.return_lse_base))


def rounded_attention(request: Operands, scale: float, dtype: str, top: float) -> Result:
    """Of one request: out [q_len, heads, latent] and natural lse [q_len, heads] in float32."""
    scores = (scale * (request.query @ request.keys.mT)).masked_fill(~request.visible, -math.inf)
    if not scores.shape[-1]:
        return Result(scores @ request.values, scores.sum(-1) - math.inf)
    greatest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - greatest.clamp_min(torch.finfo(scores.dtype).min)) * top
    weights = formats.pack(weights, dtype).float()
    total: Tensor = weights.sum(-1, keepdim=True)
    out = (weights @ request.values) / total.masked_fill(total == 0, 1)
    return Result(out, (greatest + torch.log(total / top)).squeeze(-1))
