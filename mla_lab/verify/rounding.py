"""Errors of the CuTe kernels over an fp8 cache and of torch with the same rounding, side by side:
`python -m mla_lab.verify.rounding RECORD`.

Each launch mode that ships for a format runs whole requests, so that one worker accumulates all
keys and no merge reduces the error of the tensor cores' accumulation. Both are compared with the
float64 oracle on the dequantised inputs. Torch is float32 attention with softmax weights rounded as
in the format (see `limits`), at the worst of several positions of the rounding grid. A query four
times too large makes scores and their errors four times as large. One JSON line a case, all
elements.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..api.decode import decode
from ..backends.cute.families import config_for
from ..bench.checks import compare
from ..core import kv_cache as formats
from ..core.errors import MlaLabError
from ..core.gpu import H200
from ..core.problem import Problem
from ..core.revision import check_record
from ..plan import Plan, plan_on
from ..plan.launch_modes import E4M3, KEEP_AB_PERSISTENT, SWAP_AB_LL, SWAP_AB_LL_MULTICAST
from ..plan.launch_modes import FORMATS as OPERANDS
from ..plan.promotion import PROMOTED_KEYS
from ..reference.inputs import DISTRIBUTIONS, DecodeInputs, make_inputs
from ..reference.mla import Result, decode_reference
from ..reference.tolerance import lse_error
from .limits import TOPS, WEIGHTS, Limits, rounded_error
from .record import environment_today

FORMATS = (("e4m3", "e4m3"), ("bf16", "e4m3"), ("bf16", "fp8_656"))
KV_LENS = (64, 1024, 8192, 16384, 65536)
#: scale factors of the query
TIMES = (1, 4)
BATCH, HEADS = 2, 128
#: keep_ab whose tokens are fetched one by one finds its work itself: a plan is not for it
GATHER, GATHERED = "cute-keep-ab-gather", "keep_ab 64 rows, gather"
MODES = (SWAP_AB_LL, SWAP_AB_LL_MULTICAST, KEEP_AB_PERSISTENT)
WORKSPACE_BYTES = 64 << 20
Run = Callable[[DecodeInputs, Plan | None], Result]


def plans(problem: Problem) -> Iterator[tuple[str, Plan | None]]:
    """(name, plan of whole requests) of every kernel for the problem's formats; None for GATHERED,
    which gets a request for each CTA.
    """
    for mode in MODES:
        for tile in mode.tiles_for(problem.q_dtype, problem.kv_format):
            plan = plan_on(
                config_for(mode, tile),
                problem,
                num_workers=H200.workers(tile[1]),
                policy="none",
                schedule="grid" if mode.formula else "persistent",
            )
            name = mode.kernel.removeprefix("cute/").removesuffix("_sm90")
            yield f"{name} {tile[0]} rows", plan
    yield GATHERED, None


def by_kernel(inputs: DecodeInputs, plan: Plan | None) -> Result:
    """Out in bf16, and lse."""
    arguments: dict[str, Any] = inputs.contract_args()
    if plan is None:
        arguments |= _listed(inputs)
    shape = (*arguments["query"].shape[:-1], inputs.kv_lora_rank)
    out = torch.empty(shape, dtype=torch.bfloat16, device=inputs.query.device)
    backend = "cute" if plan else GATHER
    found = Result(*decode(**arguments, out=out, plan=plan, backend=backend))
    return Result(found.out[:BATCH], found.lse[:BATCH])


def _listed(inputs: DecodeInputs) -> dict[str, Any]:
    """The same requests as a sparse call that lists every token, so often that each CTA has one."""
    tokens = torch.arange(max(inputs.problem.kv_lens), device=inputs.query.device)
    page = inputs.problem.page_size
    pages = inputs.block_tables[:, tokens // page]
    slots = (pages * page + tokens % page).int().unsqueeze(1)
    times = H200.sms * 64 // (BATCH * HEADS)
    return {
        "query": inputs.query.repeat(times, 1, 1, 1),
        "block_tables": slots.repeat(times, 1, 1),
        "seq_lens": inputs.seq_lens.repeat(times),
        "sparse_mla_top_k": len(tokens),
    }


def made(query: str, cache: str, distribution: str, kv_len: int, times: int, device: str) -> Any:
    """Inputs of a call with lse, the query scaled by `times`."""
    problem = Problem.uniform(BATCH, 1, kv_len, HEADS, q_dtype=query, kv_format=cache)
    inputs = make_inputs(
        problem,
        1,
        ("lse",),
        distribution=distribution,
        device=device,
        workspace_bytes=WORKSPACE_BYTES,
    )
    return replace(inputs, query=formats.pack(inputs.query.float() * times, query))


def judge(inputs: DecodeInputs, times: int, run: Run = by_kernel) -> Iterator[dict[str, Any]]:
    """A row for each kernel: its errors, torch's, and their ratio."""
    problem, expected = inputs.problem, decode_reference(inputs)
    weights = WEIGHTS[problem.q_dtype, problem.kv_format]
    each = [rounded_error(inputs, expected, "bf16", weights, top) for top in TOPS]
    torch_s = Limits(*map(max, zip(*each, strict=True)))
    for kernel, plan in plans(problem):
        row = {
            "query": problem.q_dtype,
            "cache": problem.kv_format,
            "kernel": kernel,
            "kv_len": max(problem.kv_lens),
            "query_times": times,
            "weights": weights,
        }
        try:
            found = run(inputs, plan)
        except MlaLabError as error:
            yield {**row, "status": "refused", "reason": str(error)[:260]}
            continue
        compared = compare([(found.out.float(), expected.out)])
        if compared.nonfinite:
            reason = f"{compared.nonfinite} elements are not finite"
            yield {**row, "status": "wrong", "reason": reason}
            continue
        ours = Limits(compared.rel_error, compared.worst_row, lse_error(found.lse, expected.lse))
        figures = {
            "error": _short(ours.rel_error),
            "torch_error": _short(torch_s.rel_error),
            "times_torch": round(ours.rel_error / torch_s.rel_error, 3),
            "worst_row_times_torch": round(ours.worst_row / torch_s.worst_row, 3),
            "lse_error": _short(ours.lse_error),
            "torch_lse_error": _short(torch_s.lse_error),
        }
        yield {**row, "status": "ok", **figures}


def worst_of(
    found: Iterable[Mapping[str, Any]], figure: str = "times_torch"
) -> dict[tuple[str, str, str, bool], float]:
    """The largest error relative to torch's, or another figure, by query, cache, kernel, and
    whether keep_ab accumulates e4m3 over more than `PROMOTED_KEYS` keys, which it promotes;
    infinite with a result that is not finite, or none.
    """
    worst: dict[tuple[str, str, str, bool], float] = {}
    for row in found:
        e4m3 = OPERANDS[row["query"], row["cache"]] == E4M3 and row["kernel"].startswith("keep_ab")
        key = row["query"], row["cache"], row["kernel"], e4m3 and row["kv_len"] > PROMOTED_KEYS
        worst[key] = max(worst.get(key, 0.0), row.get(figure, math.inf))
    return worst


def _short(value: float) -> float:
    return float(f"{value:.3e}")


def rows(device: str, kv_lens: Sequence[int] = KV_LENS, run: Run = by_kernel) -> Iterator[Any]:
    """Every format, distribution, length and size of the query."""
    for query, cache in FORMATS:
        for distribution in DISTRIBUTIONS:
            for kv_len in kv_lens:
                for times in TIMES:
                    inputs = made(query, cache, distribution, kv_len, times, device)
                    for row in judge(inputs, times, run):
                        yield {**row, "inputs": distribution}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the record; 1 if a kernel's error exceeds twice torch's."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.verify.rounding")
    parser.add_argument("record", type=Path, help="JSON lines, written anew")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    check_record(args.record)
    found = []
    with args.record.open("w", encoding="utf-8") as file:
        here = environment_today(args.device)
        first = {"kind": "run", "what": "rounding", "environment": here}
        file.write(json.dumps(first) + "\n")
        for row in rows(args.device):
            file.write(json.dumps({"kind": "case", **row}) + "\n")
            found.append(row)
    worst = worst_of(found)
    for (*name, beyond), times in worst.items():
        words = f", beyond {PROMOTED_KEYS} keys" if beyond else ""
        sys.stdout.write(f"{' '.join(name)}{words}: at most {times:.2f} times torch's error\n")
    return int(max(worst.values()) > 2)


if __name__ == "__main__":
    sys.exit(main())
