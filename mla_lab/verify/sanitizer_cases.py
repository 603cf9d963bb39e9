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


#: fields of a sample beside its problem, features and kernel
OWN = ("more", "batch_invariant", "distribution", "backend")


def _call(
    q_len: int | tuple[int, ...],
    kv_lens: tuple[int, ...],
    heads: int,
    features: str = "",
    kernel: tuple[str, tuple[int, int]] = ("", (0, 0)),
    **named: Any,
) -> Sample:
    """A sample whose requests have `q_len` query tokens each, or as it lists them. `kernel` is mode
    and tile; `named` are fields of the sample or of its problem.
    """
    own = {name: named.pop(name) for name in OWN if name in named}
    q_lens = (q_len,) * len(kv_lens) if isinstance(q_len, int) else q_len
    return Sample(Problem(q_lens, kv_lens, heads, **named), tuple(features.split()), *kernel, **own)


TWO, THREE = (300, 129), (300, 65, 700)
KEEP_64, KEEP_128 = ("keep_ab_persistent", (64, 1)), ("keep_ab_persistent", (128, 2))
LL_16, LL_32 = ("swap_ab_ll", (16, 1)), ("swap_ab_ll", (32, 1))
WALK_16 = ("swap_ab_persistent", (16, 1))
#: keep_ab with tokens that are fetched one by one, which "cute" takes in sparse calls of many heads
GATHER = "cute-keep-ab-gather"
E4M3: dict[str, Any] = {"q_dtype": "e4m3", "kv_format": "e4m3"}
OVER_E4M3: dict[str, Any] = {"kv_format": "e4m3"}
PACKED: dict[str, Any] = {"kv_format": "fp8_656"}
SKIPPING: dict[str, Any] = {
    "more": {"skip_softmax_threshold_scale_factor": 0.5},
    "distribution": "concentrated",
}
#: by name of the feature
CASES: dict[str, Sample] = {
    "plain, few rows": _call(1, LENGTHS, 16),
    "plain, 128 rows": _call(1, (300, 65), 128, "", KEEP_128),
    "dual, swap_ab": _call(1, (700,), 128, "lse"),
    "dual, keep_ab": _call(1, (5000,), 128, "lse"),
    "dual, tokens": _call(3, (330,), 96, "lse"),
    "planner and merges": _call(2, (300,) * 20, 128, "lse"),
    "ragged, lse in base 2": _call(
        (2, 0, 3), (130, 5, 700), 7, "lse max_q_len", LL_16, more={"return_lse_base": "base2"}
    ),
    "ragged, 64 rows": _call((2, 0, 3), (130, 5, 700), 40, "lse ragged", KEEP_64),
    "sinks": _call(2, (300, 0, 129), 7, "lse sinks", WALK_16),
    "sinks, 128 heads": _call(1, TWO, 128, "lse sinks", KEEP_128),
    "device scales": _call(1, (300, 0), 16, "lse device_scales", ("swap_ab_ll_m8", (8, 1))),
    "device scales, 64 rows": _call(1, TWO, 64, "lse device_scales", KEEP_64),
    "tree mask": _call(5, THREE, 3, "lse tree_mask sinks", LL_32),
    "tree mask, cluster": _call(5, (300, 700), 3, "lse tree_mask", ("swap_ab_cluster", (16, 8))),
    "tree mask, pair": _call(5, (300, 700), 6, "lse tree_mask", ("swap_ab_ll_multicast", (16, 1))),
    "tree mask, ragged, 64 rows": _call((8, 3), (700, 64), 24, "lse tree_mask ragged", KEEP_64),
    "sparse": _call((1, 2), (300, 70), 16, "lse sinks ragged", top_k=300),
    "sparse, 128 heads": _call(1, (300,), 128, "lse", top_k=130, batch_invariant=True),
    "sparse bf16, 64 rows": _call(1, THREE, 128, "lse", top_k=330, backend=GATHER),
    # CTAs with several work tiles, of one to six KV tiles each
    "sparse bf16, work tiles of 64 rows": _call(
        1, (400,) * 140, 64, "lse top_k_lens", top_k=330, backend=GATHER
    ),
    "sparse 656 bytes, 64 rows": _call(1, THREE, 128, "lse", top_k=330, **PACKED, backend=GATHER),
    "sparse bf16 over e4m3, 64 rows": _call(
        2, (300, 700), 128, "lse", top_k=130, **OVER_E4M3, backend=GATHER
    ),
    "sparse e4m3, 64 rows": _call(1, THREE, 128, "lse", top_k=330, **E4M3, backend=GATHER),
    # as above; the ring has four stages, and five in e4m3
    "sparse 656 bytes, work tiles of 64 rows": _call(
        1, (400,) * 140, 64, "top_k_lens", top_k=330, **PACKED, backend=GATHER
    ),
    "sparse bf16 over e4m3, work tiles of 64 rows": _call(
        1, (400,) * 140, 64, "top_k_lens", top_k=330, **OVER_E4M3, backend=GATHER
    ),
    "sparse e4m3, work tiles of 64 rows": _call(
        1, (400,) * 140, 64, "top_k_lens", top_k=330, **E4M3, backend=GATHER
    ),
    "sparse, last arriver": _call(1, (300,) * 140, 16, "lse", top_k=130),
    "pages of 1": _call(1, (300, 700), 7, "lse", page_size=1),
    "pages of 1, 64 rows": _call(2, (300, 700), 64, "lse", page_size=1),
    "e4m3, pages of 4, 64 rows": _call(2, (300, 700), 64, page_size=4, **E4M3),
    "e4m3, pages of 1, work tiles of 64 rows": _call(1, (330,) * 140, 64, page_size=1, **E4M3),
    "656 bytes, pages of 4, 64 rows": _call(1, (300, 0, 700), 64, "lse", page_size=4, **PACKED),
    "pages of 4, tree mask": _call(2, (300, 700), 7, "lse tree_mask", page_size=4),
    "pages of 16": _call(1, TWO, 16, "lse", page_size=16),
    "pages of 32": _call(1, TWO, 16, "lse", page_size=32),
    "pages of 128": _call(1, TWO, 16, "lse", page_size=128),
    "strided 4-D cache": _call(2, TWO, 16, "page_gap cache_4d", LL_16),
    "batch invariant": _call(1, (700, 64, 2500), 16, "lse", batch_invariant=True),
    "batch invariant, whole items": _call(1, (1040,) * 132, 16, "lse", batch_invariant=True),
    "batch invariant, whole items of 64 rows": _call(
        1, (2060,) * 132, 128, "lse sinks", batch_invariant=True
    ),
    "skip-softmax": _call((1, 2), (900, 65), 64, "lse ragged", **SKIPPING),
    "fp16": _call(1, TWO, 16, "lse", q_dtype="fp16", kv_format="fp16"),
    "e4m3": _call(1, LENGTHS, 16, "lse", LL_16, **E4M3),
    "e4m3, sinks": _call(2, TWO, 16, "lse sinks", ("swap_ab_persistent", (32, 1)), **E4M3),
    "e4m3, pair of 64 rows": _call(
        1, (300, 700), 128, "", ("swap_ab_ll_multicast", (64, 1)), **E4M3
    ),
    "e4m3, query on M": _call(1, (300, 0), 64, "lse", KEEP_64, **E4M3),
    # two pieces that promote O, in each of two CTAs
    "e4m3, query on M, promoted": _call(1, (2 * PROMOTED_KEYS + 300,), 64, "", KEEP_64, **E4M3),
    "e4m3, query on M, 128 rows": _call(1, TWO, 128, "", KEEP_128, **E4M3),
    "e4m3, tree mask": _call(5, TWO, 6, "lse tree_mask", LL_32, **E4M3),
    "e4m3, pages of 16": _call(2, TWO, 16, "lse sinks", page_size=16, **E4M3),
    "bf16 over e4m3": _call(1, TWO, 16, "lse", LL_16, **OVER_E4M3),
    "bf16 over e4m3, 32 rows": _call(2, TWO, 16, "", LL_32, **OVER_E4M3),
    "bf16 over e4m3, query on M": _call(1, (300, 0), 64, "lse", KEEP_64, **OVER_E4M3),
    "bf16 over e4m3, query on M, 128 rows": _call(1, TWO, 128, "", KEEP_128, **OVER_E4M3),
    "656 bytes, query on M": _call(1, (300, 0), 64, "lse", KEEP_64, **PACKED),
    "656 bytes, query on M, 128 rows": _call(1, TWO, 128, "", KEEP_128, **PACKED),
    "656 bytes": _call(1, TWO, 16, "lse", WALK_16, **PACKED),
    "656 bytes, sinks": _call(1, TWO, 16, "lse sinks", **PACKED),
    "656 bytes, 32 rows": _call(2, TWO, 16, "", LL_32, **PACKED),
    "656 bytes, sparse": _call((1, 2), (300, 70), 16, "lse sinks ragged", top_k=300, **PACKED),
    "656 bytes, sparse, 128 heads": _call(1, (300,), 128, "lse", top_k=130, **PACKED),
    "e4m3, sparse": _call(1, (300, 70), 16, "lse", top_k=300, **E4M3),
    "bf16 over e4m3, sparse": _call(1, TWO, 16, "lse", top_k=300, **OVER_E4M3),
    "e4m3, skip-softmax": _call((1, 2), (900, 65), 16, "lse ragged", **E4M3, **SKIPPING),
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
