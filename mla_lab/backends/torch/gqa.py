"""GQA calls in torch operations, on a CPU or any device: one request at a time, in float32.

The arithmetic is the oracle's (`reference.gqa`) in float32; a float64 call keeps float64. Each
request is computed alone, so that its bits do not depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...call.gqa_args import CheckedGqaCall, GqaForm
from ...core import kv_cache as formats
from ...reference.gqa import decode_gqa_reference
from ..base import not_taken

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
    dtype = torch.float64 if call.form.q_dtype == "fp64" else torch.float32
    with torch.inference_mode(), torch.autocast(call.form.device.type, enabled=False):
        result = decode_gqa_reference(call.args, dtype=dtype)
        out.copy_(formats.pack(result.out, call.form.out_dtype))
        if lse is not None:
            lse.copy_(result.lse)
