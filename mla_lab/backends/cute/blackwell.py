"""Calls of the SM100 kernel: which it takes, and how they are launched.

It has been emulated and never run on a card: on one it is taken where `mla-lab doctor --prove` has
passed (`proofs`) or the environment variable `CONSENT` is 1, and its first call of a configuration
is checked against torch (`self_check`).
"""

from __future__ import annotations

import os
from dataclasses import replace

from ...call.form import Features
from ...core.gpu import Gpu
from ...core.problem import Problem
from ...plan.choose import invariant_tile
from ...plan.config import KernelConfig
from ...plan.kernel_costs import recorded_of
from ...plan.launch_modes import FORMATS, KEEP_AB_PERSISTENT, OUTS
from ..base import not_taken
from . import proofs
from .device_plan import PlanOnDevice, SelfScheduled
from .families import SM100, size_reason

#: 1: take the kernel on a card where it is not proved
CONSENT = "MLA_LAB_SM100"
#: words that go with the kernel where no proof of it counts
MARK = "emulated, never run on a card"
#: (tile rows, CTAs of a cluster)
TILE = (128, 2)
#: (query, cache) that it is compiled for
TAKEN = tuple(pair for pair in FORMATS if pair[1] != "fp8_656")
#: features of a call that the SM100 kernel takes
TAKES = frozenset(
    (
        *("ragged", "causal", "mask", "sinks", "lse", "tensor_scales", "context_parallel"),
        *("batch_invariant", "strided_pages", "strided_tables", "pdl", "no_pdl"),
    )
)


def is_blackwell(gpu: Gpu) -> bool:
    """Whether the card is of compute capability 10.0 or 10.3."""
    return proofs.arch(gpu) in SM100.archs


def no_consent(gpu: Gpu) -> str | None:
    """Why the kernel is not taken on this card, or None."""
    if os.environ.get(CONSENT) == "1" or proofs.counts(gpu):
        return None
    return (
        f"the GPU is {gpu.arch}; its kernel for it is {MARK}: `mla-lab doctor --prove` proves it "
        f"here, {CONSENT}=1 takes it without"
    )


def mark(gpu: Gpu | None) -> str | None:
    """`MARK` where a call would launch the kernel on a card without a proof that counts."""
    return MARK if gpu and is_blackwell(gpu) and not proofs.counts(gpu) else None


def refusal(features: Features, problem: Problem) -> str | None:
    """What the kernel lacks for this call, or None."""
    reason = not_taken(features.names(), TAKES, "its SM100 kernel has") or size_reason(problem)
    if reason:
        return reason
    if problem.page_size not in SM100.page_sizes:
        return f"pages of {problem.page_size}; its SM100 kernel has {SM100.page_sizes}"
    formats = (problem.q_dtype, problem.kv_format)
    if formats not in TAKEN or problem.out_dtype not in OUTS[FORMATS[formats]]:
        got = f"query {formats[0]}, cache {formats[1]}, out {problem.out_dtype}"
        return f"{got}; its SM100 kernel takes {', '.join(f'{q} over {kv}' for q, kv in TAKEN)}"
    return None


def config_for(problem: Problem) -> KernelConfig:
    """The kernel, before a call's features and formats are filled in."""
    rows, cluster = TILE
    return KernelConfig(SM100.kernel, tile_rows=rows, cluster=cluster, page_size=problem.page_size)


def plan(
    problem: Problem, total_q: int, gpu: Gpu, features: Features
) -> SelfScheduled | PlanOnDevice:
    """Workers that find their tiles from the lengths; under batch invariance the planner's, in
    pieces of a request's own length.
    """
    config = config_for(problem)
    if not features.batch_invariant:
        return SelfScheduled.of(config, gpu, problem)
    kind = invariant_tile(problem, gpu, recorded_of(KEEP_AB_PERSISTENT.key), TILE, "SM100")
    return PlanOnDevice.of(replace(kind.choice, config=config), problem, total_q)
