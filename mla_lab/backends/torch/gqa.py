"""GQA calls in torch operations, on a CPU or any device: one request at a time, in float32.

The arithmetic is the oracle's (`reference.gqa`) in float32; a float64 call keeps float64. Each
request is computed alone, so that its bits do not depend on the batch.

Lengths and offsets that lie on a device are read here, unchecked. As in the kernel, rows of a
request that lies outside of the call's tensors are NaN, and nothing else is touched.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ...call.gqa_args import CheckedGqaCall, GqaArgs, GqaForm
from ...core import kv_cache as formats
from ...reference.gqa import decode_gqa_reference, q_begins
from ..base import fill_with_nan, not_taken

#: features of a call that it takes
TAKES = frozenset(
    ("mask", "sinks", "lse", "window", "skip_softmax", "separate_tables", "batch_invariant")
)


def reason(form: GqaForm) -> str | None:
    """None if torch can run such a call, else why not."""
    if "pdl" in form.features:
        return "enable_pdl=True: torch operations have no programmatic dependent launch"
    return not_taken(sorted(form.features), TAKES, "its operations have")


def run(call: CheckedGqaCall) -> None:
    """Write the call's results."""
    run_into(call, call.out, call.lse)


def run_into(call: CheckedGqaCall, out: Tensor, lse: Tensor | None) -> None:
    """Write the call's results into other tensors of the same shapes."""
    form, args = call.form, call.args
    dtype = torch.float64 if form.q_dtype == "fp64" else torch.float32
    with torch.inference_mode(), torch.autocast(form.device.type, enabled=False):
        spans = _spans(call)
        if spans is None:
            result = decode_gqa_reference(args, dtype=dtype)
            out.copy_(formats.pack(result.out, form.out_dtype))
            if lse is not None:
                lse.copy_(result.lse)
            return
        fill_with_nan(out, lse)
        for request, (begin, end) in spans.items():
            result = decode_gqa_reference(_alone(args, request, begin, end), dtype=dtype)
            out[begin:end] = formats.pack(result.out, form.out_dtype)
            if lse is not None:
                lse[begin:end] = result.lse


def _spans(call: CheckedGqaCall) -> dict[int, tuple[int, int]] | None:
    """None where every request lies inside of the call's tensors. Else the requests that do, and
    the first query token and end of each: these neither fall nor leave [0, total_q], the block
    table names all keys, and a row of the mask has a column for each query token.
    """
    form, args = call.form, call.args
    lengths, sums = args.seq_lens.tolist(), q_begins(args)
    named = args.block_tables.shape[-1] * form.page_size
    widest = form.total_q if args.mask is None else 16 * args.mask.shape[-1]
    inside = {
        b: (begin, end)
        for b, (begin, end) in enumerate(pairwise(sums))
        if 0 <= begin <= end <= min(form.total_q, begin + widest) and lengths[b] <= named
    }
    whole = len(inside) == form.batch and (sums[0], sums[-1]) == (0, form.total_q)
    return None if whole and min(lengths) >= 0 else {b: s for b, s in inside.items() if s[0] < s[1]}


def _alone(args: GqaArgs, request: int, begin: int, end: int) -> GqaArgs:
    """The call of one request, of query tokens `begin` to `end`. A length below 0 counts as 0."""
    return replace(
        args,
        query=args.query[begin:end],
        seq_lens=args.seq_lens[request : request + 1].clamp_min(0),
        block_tables=args.block_tables[request : request + 1],
        cum_seq_lens_q=None,
        q_len_per_req=end - begin,
        mask=None if args.mask is None else args.mask.flatten(0, -2)[begin:end],
    )
