"""What "95 % of the elements within tolerance" lets pass, beside the rule of this project.

A public test of an XQA kernel (FlashInfer 0.7.2, tests/attention/test_xqa_mla_batch_decode.py)
accepts a result of which 95 % of the elements lie within 0.05 of the reference, absolutely or
relatively.
Here mistakes that kernels make are put into an exact decode, and both rules judge what comes out.

Ours: every element counts; the error norm and the greatest error are at most twice those of torch
with the same rounding of weights (`rounded`).

    python -m mla_lab.studies.tolerance_rule > data/records/tolerance.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..core.kv_cache import pack
from ..core.problem import Problem
from ..reference.inputs import DISTRIBUTIONS, DecodeInputs, make_inputs
from ..reference.mla import Result, attend, decode_reference
from ..reference.operands import Operands, operands
from ..reference.tolerance import Error, error

ABSOLUTE, RELATIVE, SHARE = 0.05, 0.05, 0.95
#: weights of at most 1 times this fill e4m3's range and keep 1 exact
WEIGHT_SCALE = 256.0


def share_within(out: Tensor, ref: Tensor) -> float:
    """Share of the elements of `out` within the public tolerance of `ref`."""
    difference = (out - ref).abs()
    near = (difference <= ABSOLUTE) | (difference <= RELATIVE * ref.abs())
    return float(near.double().mean())


def rounded(request: Operands, scale: float, weights: str) -> Tensor:
    """Attention of one request by torch in float32, softmax weights rounded to `weights` (bf16,
    fp16 or e4m3) before they are multiplied, divided by the sum of the rounded ones.

    request: operands in float32. Returns out float32 [q_len, heads, latent].
    """
    part, total = rounded_weights(request, scale, weights)
    return torch.where(total > 0, (part @ request.values) / total, 0.0)


def rounded_weights(request: Operands, scale: float, weights: str) -> tuple[Tensor, Tensor]:
    """Rounded weights, the greatest of a row `WEIGHT_SCALE` or 1, and their sums over the keys."""
    scores = (scale * (request.query @ request.keys.mT)).masked_fill(~request.visible, -torch.inf)
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True)
    part = torch.exp(scores - torch.where(top.isneginf(), 0.0, top))
    if weights == "e4m3":
        part = part * WEIGHT_SCALE
    part = pack(part, weights).float()
    return part, part.sum(-1, keepdim=True)


def rounded_error(inputs: DecodeInputs, weights: str, ref: Result | None = None) -> Error:
    """Error of `rounded`, its output in bf16, against the oracle; sinks are not looked at."""
    ref = ref or decode_reference(inputs)
    scale = float(inputs.bmm1_scale)
    outs = [rounded(one, scale, weights) for one in operands(inputs, torch.float32)]
    out = (torch.cat(outs) * float(inputs.bmm2_scale)).bfloat16()
    return error(out.reshape(ref.out.shape), ref.out)


Mistake = Callable[[Operands, float], Tensor]


def _unseen(request: Operands, begin: int, end: int) -> Operands:
    visible = request.visible.clone()
    visible[..., begin:end] = False
    return replace(request, visible=visible)


def _last_tile(request: Operands, scale: float) -> Tensor:
    kv_len = request.keys.shape[1]
    return attend(_unseen(request, kv_len - 64, kv_len), scale).out


def _lost_split(request: Operands, scale: float) -> Tensor:
    kv_len = request.keys.shape[1]
    return attend(_unseen(request, kv_len // 2, 3 * kv_len // 4), scale).out


def _foreign_page(request: Operands, scale: float) -> Tensor:
    values = request.values.clone()
    values[:, 64:128] = request.values[:, 64:128].flip(-1)
    return attend(replace(request, values=values), scale).out


def _stale_max(request: Operands, scale: float) -> Tensor:
    """The second half's sums are not rescaled when its maximum is another."""
    kv_len = request.keys.shape[1]
    first = attend(_unseen(request, kv_len // 2, kv_len), scale)
    second = attend(_unseen(request, 0, kv_len // 2), scale)
    return (first.out + second.out) / 2


def _one_head(request: Operands, scale: float) -> Tensor:
    out = attend(request, scale).out.clone()
    out[:, 3] = out[:, 4]
    return out


def _early_rounding(request: Operands, scale: float) -> Tensor:
    """e4m3 weights, divided by the sum of those that were not rounded."""
    part, _ = rounded_weights(request, scale, "e4m3")
    exact = torch.exp(
        scale * (request.query @ request.keys.mT) - attend(request, scale).lse.unsqueeze(-1)
    )
    top = exact.amax(-1, keepdim=True)
    return (part @ request.values.float()) * (top / WEIGHT_SCALE)


MISTAKES: dict[str, Mistake] = {
    "none: e4m3 weights, sums of the rounded ones": lambda r, s: rounded(r, s, "e4m3"),
    "e4m3 weights, sums of the unrounded ones": _early_rounding,
    "zeros in place of the result": lambda r, s: torch.zeros_like(attend(r, s).out),
    "the last 64 keys are not read": _last_tile,
    "one of four splits is lost": _lost_split,
    "one page of values is a wrong one": _foreign_page,
    "two halves are averaged without their weights": _stale_max,
    "one head of 16 has its neighbour's result": _one_head,
}


def judge(inputs: DecodeInputs) -> Iterator[dict[str, object]]:
    """A row for every mistake, on one call's inputs."""
    ref = decode_reference(inputs)
    allowed = rounded_error(inputs, "e4m3", ref)
    scale = float(inputs.bmm1_scale)
    for name, mistake in MISTAKES.items():
        outs = [mistake(one, scale).float() for one in operands(inputs, torch.float32)]
        out = torch.cat(outs).bfloat16().reshape(ref.out.shape).to(ref.out)
        found, share = error(out, ref.out), share_within(out, ref.out)
        yield {
            "mistake": name,
            "share_within": round(share, 4),
            "passes_share_rule": share >= SHARE,
            "error": float(f"{found.relative:.2e}"),
            "allowed": float(f"{2 * allowed.relative:.2e}"),
            "passes_here": found.within(allowed),
        }


def main() -> None:
    """Rows for two lengths and two distributions of inputs, as JSON lines."""
    for kv_len in (1024, 8192):
        for distribution in DISTRIBUTIONS[:2]:
            problem = Problem.uniform(2, 1, kv_len, 16, q_dtype="e4m3", kv_format="e4m3")
            case = {"case": f"B2 H16 kv {kv_len} e4m3", "inputs": distribution}
            for row in judge(make_inputs(problem, 1, (), distribution=distribution)):
                sys.stdout.write(json.dumps(case | row) + "\n")


if __name__ == "__main__":
    main()
