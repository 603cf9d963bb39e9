"""Errors of the CUDA kernel and of torch with the same rounding, side by side:
`python -m mla_lab.studies.xqa_rounding RECORD`.

Caches are dequantised exactly, so the errors are of rounding softmax weights and results alone:
torch computes in float32 with weights rounded to the kernel's type (see `verify.limits`), the
oracle in float64. One JSON line a case, all elements.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..api import decode
from ..api.contract_gqa import trtllm_batch_decode_with_kv_cache
from ..bench.environment import environment
from ..core.problem import Problem
from ..core.revision import check_record
from ..reference.gqa import decode_gqa_reference, gqa_operands
from ..reference.inputs import DecodeInputs, make_inputs
from ..reference.inputs_gqa import GqaInputs, GqaShape, make_gqa_inputs
from ..reference.mla import decode_reference
from ..reference.operands import Operands, operands
from ..reference.tolerance import ALLOWED_RATIO, Error, error
from ..verify.limits import TOPS, rounded_attention
from . import gqa_decode

FORM = "rounding 1"
DISTRIBUTIONS = ("gauss", "heavy_tailed")
#: (query, cache) -> type of the rounded softmax weights on GPUs without e4m3 MMA
WEIGHTS = {
    ("bf16", "bf16"): "bf16",
    ("fp16", "fp16"): "fp16",
    ("e4m3", "e4m3"): "fp16",
    ("bf16", "e4m3"): "fp16",
}
WORKSPACE_BYTES = 64 << 20
Inputs = DecodeInputs | GqaInputs
Shape = Problem | GqaShape
Run = Callable[[Inputs], Tensor]


CASES: tuple[Shape, ...] = (
    Problem.uniform(4, 1, 1024, 16),
    Problem.uniform(4, 1, 8192, 16),
    Problem.uniform(2, 1, 4096, 128),
    GqaShape.uniform(2, 4, 4096, 64, 8),
    GqaShape.uniform(2, 1, 4096, 32, 4, head_dim=64),
)


def name_of(case: Shape) -> str:
    """Name of equal requests as in the benchmark."""
    if isinstance(case, GqaShape):
        return gqa_decode.name_of(case)
    return f"b{case.batch}_q{case.q_lens[0]}_h{case.heads}_kv{case.kv_lens[0]}"


def inputs_of(case: Shape, formats: tuple[str, str], distribution: str, device: str) -> Inputs:
    """Inputs of a case in the query's and the cache's format."""
    named: dict[str, Any] = {"distribution": distribution, "device": device}
    named["workspace_bytes"] = WORKSPACE_BYTES
    shape = replace(case, q_dtype=formats[0], kv_format=formats[1])
    if isinstance(shape, GqaShape):
        return make_gqa_inputs(shape, 1, (), **named)
    return make_inputs(shape, 1, (), **named)


def by_kernel(inputs: Inputs) -> Tensor:
    """The CUDA backend's result, in bf16."""
    out = None
    if inputs.query.dtype is torch.float8_e4m3fn:
        width = 512 if isinstance(inputs, DecodeInputs) else inputs.query.shape[-1]
        shape = (*inputs.query.shape[:-1], width)
        out = torch.empty(shape, dtype=torch.bfloat16, device=inputs.query.device)
    arguments = inputs.contract_args()
    if isinstance(inputs, GqaInputs):
        result = trtllm_batch_decode_with_kv_cache(**arguments, out=out, backend="cuda")
    else:
        result = decode.decode(**arguments, out=out, backend="cuda")
    return result[0] if isinstance(result, tuple) else result


def by_torch(inputs: Inputs, weights: str) -> Tensor:
    """The same call in float32 with rounded weights, [tokens, heads, width]."""
    scale, top = float(inputs.bmm1_scale), TOPS[0] if weights == "e4m3" else 1.0
    outs = [
        torch.cat([rounded_attention(one, scale, weights, top).out for one in heads], dim=1)
        for heads in _requests(inputs)
    ]
    return torch.cat(outs) * float(inputs.bmm2_scale)


def _requests(inputs: Inputs) -> Iterator[list[Operands]]:
    """For each request, one set of operands a KV head."""
    if isinstance(inputs, GqaInputs):
        yield from gqa_operands(inputs, torch.float32)
    else:
        yield from ([one] for one in operands(inputs, torch.float32))


def judge(
    case: Shape,
    formats: tuple[str, str],
    distribution: str,
    *,
    device: str = "cuda",
    run: Run = by_kernel,
) -> dict[str, Any]:
    """One case: both errors against the float64 oracle, and their ratio."""
    inputs, weights = inputs_of(case, formats, distribution, device), WEIGHTS[formats]
    ref, out = _oracle(inputs), run(inputs)
    ours = error(out.reshape(ref.shape), ref)
    theirs = error(by_torch(inputs, weights).to(out.dtype).reshape(ref.shape), ref)
    return {
        "case": name_of(case),
        "query": formats[0],
        "cache": formats[1],
        "weights": weights,
        "out": str(out.dtype).removeprefix("torch."),
        "inputs": distribution,
        "error": _short(ours),
        "torch_error": _short(theirs),
        "times_torch": [round(a / b, 3) for a, b in zip(ours, theirs, strict=True)],
        "within": ours.within(theirs, ALLOWED_RATIO),
    }


def _oracle(inputs: Inputs) -> Tensor:
    if isinstance(inputs, GqaInputs):
        return decode_gqa_reference(inputs).out
    return decode_reference(inputs).out


def _short(one: Error) -> dict[str, float]:
    return {name: float(f"{value:.3e}") for name, value in one._asdict().items()}


def measure(cases: Iterable[Shape], path: Path, progress: Callable[[str], object]) -> None:
    """Appends a line for every case, format and distribution to `path`."""
    check_record(path)
    here = {"form": FORM, "environment": environment(torch.device("cuda"))}
    with path.open("a", encoding="utf-8") as file:
        for case in cases:
            for formats in WEIGHTS:
                for distribution in DISTRIBUTIONS:
                    row = judge(case, formats, distribution)
                    file.write(json.dumps({**here, **row}) + "\n")
                    words = (row["case"], *formats, distribution, row["times_torch"], row["within"])
                    progress(" ".join(str(word) for word in words))


def main() -> None:
    """Judge every case into the record that is named."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.studies.xqa_rounding")
    parser.add_argument("record", type=Path, help="JSON lines, appended to")
    record = parser.parse_args().record
    measure(CASES, record, lambda text: sys.stderr.write(f"{text}\n"))


if __name__ == "__main__":
    main()
