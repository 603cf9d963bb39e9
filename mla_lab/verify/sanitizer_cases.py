"""Small calls that use each feature once, for a sanitizer: `python -m
mla_lab.verify.sanitizer_cases`.

    compute-sanitizer --tool memcheck python -m mla_lab.verify.sanitizer_cases
    compute-sanitizer --tool racecheck --kernel-name kernel_substring=kernel_cutlass \\
        python -m mla_lab.verify.sanitizer_cases "sinks, 128 heads"

Racecheck needs a process for each name, and a filter that includes every CuTe kernel: where it
excludes one whose CTAs access each other's shared memory, the tool itself (2025.3.1) fails with
"failed to handle a hardware exception", even for a kernel of ten lines. Inputs are made on the
host, so that few other kernels run. Every out and lse is compared with the oracle, since the
tool's timing may reveal races.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..api.decode import decode
from ..backends.cute.families import config_for
from ..core.errors import MlaLabError, invalid
from ..core.gpu import H200, Gpu
from ..core.problem import Problem
from ..plan import Plan, plan_on
from ..plan.launch_modes import LAUNCH_MODES, in_waves
from ..plan.promotion import PROMOTED_KEYS
from ..reference.inputs import DecodeInputs, make_inputs
from ..reference.mla import decode_reference
from ..reference.tolerance import lse_error, rel_error
from .cases import WORKSPACE_BYTES
from .limits import WEIGHTS, limits_of

LENGTHS = (300, 0, 65, 700)
#: bound on the relative error; rounding out to bf16 alone gives 1.7e-3
TOLERANCE = 5e-3


@dataclass(frozen=True)
class Sample:
    """One call; `mode` and `tile` select its kernel, or `backend` does; empty leaves that to the
    call.
    """

    problem: Problem
    features: tuple[str, ...] = ()
    mode: str = ""
    tile: tuple[int, int] = (0, 0)
    #: fields of the inputs
    more: dict[str, Any] = field(default_factory=dict)
    batch_invariant: bool = False
    distribution: str = "gauss"
    backend: str = ""


def _uniform(q_len: int, kv_lens: Sequence[int], heads: int, **named: Any) -> Problem:
    return Problem((q_len,) * len(kv_lens), tuple(kv_lens), heads, **named)


TWO = (300, 129)
#: keep_ab with tokens that are fetched one by one, which "cute" takes in sparse calls of many heads
GATHER = "cute-keep-ab-gather"
EIGHT = {"q_dtype": "e4m3", "kv_format": "e4m3"}
RAGGED = Problem((2, 0, 3), (130, 5, 700), 7)
#: by name of the feature
CASES: dict[str, Sample] = {
    "plain, few rows": Sample(_uniform(1, LENGTHS, 16)),
    "plain, 128 rows": Sample(_uniform(1, (300, 65), 128), (), "keep_ab_persistent", (128, 2)),
    "dual, swap_ab": Sample(_uniform(1, (700,), 128), ("lse",)),
    "dual, keep_ab": Sample(_uniform(1, (5000,), 128), ("lse",)),
    "dual, tokens": Sample(_uniform(3, (330,), 96), ("lse",)),
    "planner and merges": Sample(_uniform(2, (300,) * 20, 128), ("lse",)),
    "ragged, lse in base 2": Sample(
        RAGGED, ("lse", "max_q_len"), "swap_ab_ll", (16, 1), {"return_lse_base": "base2"}
    ),
    "ragged, 64 rows": Sample(
        replace(RAGGED, heads=40), ("lse", "ragged"), "keep_ab_persistent", (64, 1)
    ),
    "sinks": Sample(_uniform(2, (300, 0, 129), 7), ("lse", "sinks"), "swap_ab_persistent", (16, 1)),
    "sinks, 128 heads": Sample(
        _uniform(1, TWO, 128), ("lse", "sinks"), "keep_ab_persistent", (128, 2)
    ),
    "device scales": Sample(
        _uniform(1, (300, 0), 16), ("lse", "device_scales"), "swap_ab_ll_m8", (8, 1)
    ),
    "device scales, 64 rows": Sample(
        _uniform(1, TWO, 64), ("lse", "device_scales"), "keep_ab_persistent", (64, 1)
    ),
    "tree mask": Sample(
        _uniform(5, (300, 65, 700), 3), ("lse", "tree_mask", "sinks"), "swap_ab_ll", (32, 1)
    ),
    "tree mask, cluster": Sample(
        _uniform(5, (300, 700), 3), ("lse", "tree_mask"), "swap_ab_cluster", (16, 8)
    ),
    "tree mask, pair": Sample(
        _uniform(5, (300, 700), 6), ("lse", "tree_mask"), "swap_ab_ll_multicast", (16, 1)
    ),
    "tree mask, ragged, 64 rows": Sample(
        Problem((8, 3), (700, 64), 24),
        ("lse", "tree_mask", "ragged"),
        "keep_ab_persistent",
        (64, 1),
    ),
    "sparse": Sample(Problem((1, 2), (300, 70), 16, top_k=300), ("lse", "sinks", "ragged")),
    "sparse, 128 heads": Sample(
        _uniform(1, (300,), 128, top_k=130), ("lse",), batch_invariant=True
    ),
    "sparse bf16, 64 rows": Sample(
        _uniform(1, (300, 65, 700), 128, top_k=330), ("lse",), backend=GATHER
    ),
    # CTAs with several work tiles, of one to six KV tiles each
    "sparse bf16, work tiles of 64 rows": Sample(
        _uniform(1, (400,) * 140, 64, top_k=330), ("lse", "top_k_lens"), backend=GATHER
    ),
    "sparse 656 bytes, 64 rows": Sample(
        _uniform(1, (300, 65, 700), 128, top_k=330, kv_format="fp8_656"), ("lse",), backend=GATHER
    ),
    "sparse bf16 over e4m3, 64 rows": Sample(
        _uniform(2, (300, 700), 128, top_k=130, kv_format="e4m3"), ("lse",), backend=GATHER
    ),
    "sparse e4m3, 64 rows": Sample(
        _uniform(1, (300, 65, 700), 128, top_k=330, **EIGHT), ("lse",), backend=GATHER
    ),
    # as above; the ring has four stages, and five in e4m3
    "sparse 656 bytes, work tiles of 64 rows": Sample(
        _uniform(1, (400,) * 140, 64, top_k=330, kv_format="fp8_656"),
        ("top_k_lens",),
        backend=GATHER,
    ),
    "sparse bf16 over e4m3, work tiles of 64 rows": Sample(
        _uniform(1, (400,) * 140, 64, top_k=330, kv_format="e4m3"), ("top_k_lens",), backend=GATHER
    ),
    "sparse e4m3, work tiles of 64 rows": Sample(
        _uniform(1, (400,) * 140, 64, top_k=330, **EIGHT), ("top_k_lens",), backend=GATHER
    ),
    "sparse, last arriver": Sample(_uniform(1, (300,) * 140, 16, top_k=130), ("lse",)),
    "pages of 1": Sample(_uniform(1, (300, 700), 7, page_size=1), ("lse",)),
    "pages of 1, 64 rows": Sample(_uniform(2, (300, 700), 64, page_size=1), ("lse",)),
    "e4m3, pages of 4, 64 rows": Sample(_uniform(2, (300, 700), 64, page_size=4, **EIGHT)),
    "e4m3, pages of 1, work tiles of 64 rows": Sample(
        _uniform(1, (330,) * 140, 64, page_size=1, **EIGHT)
    ),
    "656 bytes, pages of 4, 64 rows": Sample(
        _uniform(1, (300, 0, 700), 64, page_size=4, kv_format="fp8_656"), ("lse",)
    ),
    "pages of 4, tree mask": Sample(_uniform(2, (300, 700), 7, page_size=4), ("lse", "tree_mask")),
    "pages of 16": Sample(_uniform(1, TWO, 16, page_size=16), ("lse",)),
    "pages of 32": Sample(_uniform(1, TWO, 16, page_size=32), ("lse",)),
    "pages of 128": Sample(_uniform(1, TWO, 16, page_size=128), ("lse",)),
    "strided 4-D cache": Sample(
        _uniform(2, TWO, 16), ("page_gap", "cache_4d"), "swap_ab_ll", (16, 1)
    ),
    "batch invariant": Sample(_uniform(1, (700, 64, 2500), 16), ("lse",), batch_invariant=True),
    "batch invariant, whole items": Sample(
        _uniform(1, (1040,) * 132, 16), ("lse",), batch_invariant=True
    ),
    "batch invariant, whole items of 64 rows": Sample(
        _uniform(1, (2060,) * 132, 128), ("lse", "sinks"), batch_invariant=True
    ),
    "skip-softmax": Sample(
        Problem((1, 2), (900, 65), 64),
        ("lse", "ragged"),
        more={"skip_softmax_threshold_scale_factor": 0.5},
        distribution="concentrated",
    ),
    "fp16": Sample(_uniform(1, TWO, 16, q_dtype="fp16", kv_format="fp16"), ("lse",)),
    "e4m3": Sample(_uniform(1, LENGTHS, 16, **EIGHT), ("lse",), "swap_ab_ll", (16, 1)),
    "e4m3, sinks": Sample(
        _uniform(2, TWO, 16, **EIGHT), ("lse", "sinks"), "swap_ab_persistent", (32, 1)
    ),
    "e4m3, pair of 64 rows": Sample(
        _uniform(1, (300, 700), 128, **EIGHT), (), "swap_ab_ll_multicast", (64, 1)
    ),
    "e4m3, query on M": Sample(
        _uniform(1, (300, 0), 64, **EIGHT), ("lse",), "keep_ab_persistent", (64, 1)
    ),
    # two pieces that promote O, in each of two CTAs
    "e4m3, query on M, promoted": Sample(
        _uniform(1, (2 * PROMOTED_KEYS + 300,), 64, **EIGHT), (), "keep_ab_persistent", (64, 1)
    ),
    "e4m3, query on M, 128 rows": Sample(
        _uniform(1, TWO, 128, **EIGHT), (), "keep_ab_persistent", (128, 2)
    ),
    "e4m3, tree mask": Sample(
        _uniform(5, TWO, 6, **EIGHT), ("lse", "tree_mask"), "swap_ab_ll", (32, 1)
    ),
    "e4m3, pages of 16": Sample(_uniform(2, TWO, 16, page_size=16, **EIGHT), ("lse", "sinks")),
    "bf16 over e4m3": Sample(
        _uniform(1, TWO, 16, kv_format="e4m3"), ("lse",), "swap_ab_ll", (16, 1)
    ),
    "bf16 over e4m3, 32 rows": Sample(
        _uniform(2, TWO, 16, kv_format="e4m3"), (), "swap_ab_ll", (32, 1)
    ),
    "bf16 over e4m3, query on M": Sample(
        _uniform(1, (300, 0), 64, kv_format="e4m3"), ("lse",), "keep_ab_persistent", (64, 1)
    ),
    "bf16 over e4m3, query on M, 128 rows": Sample(
        _uniform(1, TWO, 128, kv_format="e4m3"), (), "keep_ab_persistent", (128, 2)
    ),
    "656 bytes, query on M": Sample(
        _uniform(1, (300, 0), 64, kv_format="fp8_656"), ("lse",), "keep_ab_persistent", (64, 1)
    ),
    "656 bytes, query on M, 128 rows": Sample(
        _uniform(1, TWO, 128, kv_format="fp8_656"), (), "keep_ab_persistent", (128, 2)
    ),
    "656 bytes": Sample(
        _uniform(1, TWO, 16, kv_format="fp8_656"), ("lse",), "swap_ab_persistent", (16, 1)
    ),
    "656 bytes, sinks": Sample(_uniform(1, TWO, 16, kv_format="fp8_656"), ("lse", "sinks")),
    "656 bytes, 32 rows": Sample(
        _uniform(2, TWO, 16, kv_format="fp8_656"), (), "swap_ab_ll", (32, 1)
    ),
    "656 bytes, sparse": Sample(
        Problem((1, 2), (300, 70), 16, kv_format="fp8_656", top_k=300), ("lse", "sinks", "ragged")
    ),
    "656 bytes, sparse, 128 heads": Sample(
        _uniform(1, (300,), 128, kv_format="fp8_656", top_k=130), ("lse",)
    ),
    "e4m3, sparse": Sample(_uniform(1, (300, 70), 16, top_k=300, **EIGHT), ("lse",)),
    "bf16 over e4m3, sparse": Sample(_uniform(1, TWO, 16, kv_format="e4m3", top_k=300), ("lse",)),
    "e4m3, skip-softmax": Sample(
        Problem((1, 2), (900, 65), 16, q_dtype="e4m3", kv_format="e4m3"),
        ("lse", "ragged"),
        more={"skip_softmax_threshold_scale_factor": 0.5},
        distribution="concentrated",
    ),
}


def inputs_of(case: Sample) -> DecodeInputs:
    """A case's inputs on the host."""
    made = make_inputs(
        case.problem, 1, case.features, distribution=case.distribution, workspace_bytes=8
    )
    return replace(made, **case.more)


def plan_of(case: Sample, sms: int) -> Plan | None:
    """A plan for the kernel that a case names."""
    mode = next((mode for mode in LAUNCH_MODES if mode.name == case.mode), None)
    if mode is None:
        return None
    config = config_for(mode, case.tile)
    return plan_on(
        config,
        case.problem,
        num_workers=sms // case.tile[1],
        policy="fixed",
        schedule="grid" if mode.formula else "persistent",
        num_splits=1 if in_waves(replace(config, q_dtype=case.problem.q_dtype)) else 2,
    )


def run(name: str, workspace: torch.Tensor, backend: str) -> list[tuple[float, float]]:
    """Run the call twice, the second time as a replay; returns the errors of out and of lse, where
    the call has that, each with its bound.
    """
    case = CASES[name]
    gpu = Gpu.here() if workspace.is_cuda else None
    inputs = inputs_of(case)
    expected = decode_reference(replace(inputs, skip_softmax_threshold_scale_factor=None))
    eight = (case.problem.q_dtype, case.problem.kv_format) in WEIGHTS
    limits = limits_of(inputs, expected)
    allowed = limits.rel_error if eight else TOLERANCE
    named: dict[str, Any] = {
        key: value.to(workspace.device) if isinstance(value, torch.Tensor) else value
        for key, value in inputs.contract_args().items()
        if key != "workspace_buffer"
    }
    named |= {"plan": plan_of(case, (gpu or H200).sms), "batch_invariant": case.batch_invariant}
    if case.backend and backend == "cute":
        backend = case.backend
    for _ in range(2):
        result = decode(**named, workspace_buffer=workspace, backend=backend)
    out, lse = result if isinstance(result, tuple) else (result, None)
    found = [(rel_error(out.cpu(), expected.out), allowed)]
    if lse is not None:
        found.append((lse_error(lse.cpu(), expected.lse), limits.lse_error))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named calls, or all; 1 if one is wrong or refused."""
    parser = argparse.ArgumentParser(prog="mla_lab.verify.sanitizer_cases", description=__doc__)
    parser.add_argument("names", nargs="*", help="of " + "; ".join(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="cute")
    args = parser.parse_args(argv)
    names = args.names or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise invalid("names", unknown, tuple(CASES))
    workspace = torch.zeros(WORKSPACE_BYTES // 4, dtype=torch.uint8, device=args.device)
    failed = 0
    for name in names:
        try:
            found = run(name, workspace, args.backend)
        except MlaLabError as refusal:
            failed += 1
            _tell(f"{name}: refused: {refusal}")
            continue
        right = all(error <= allowed for error, allowed in found)
        failed += not right
        errors = ", of lse ".join(f"{error:.1e}" for error, _ in found)
        _tell(f"{name}: {'ok' if right else 'wrong'}, error {errors}")
    return 1 if failed else 0


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
