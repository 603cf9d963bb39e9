"""Which calls the kernel that widens 656-byte tokens runs (`cute.keep_ab_sm90.widened`).

It takes sparse and dense calls of a bf16 query. "cute" chooses it for sparse calls, where the
record `data/records/h200_widened.jsonl` has it ahead of the kernel that gathers (`token_gather`):
by heads and query tokens, which a call's form tells. Each query token is a request of its own, so
that tiles have its heads as rows.
"""

from __future__ import annotations

from typing import Any

from ...call.form import Features
from ...core.gpu import Gpu
from ...core.problem import Problem
from ...plan import KernelConfig
from ..base import not_taken
from ..cuda.ops import MAX_BATCH
from .catalogue import missing_for
from .device_plan import SelfScheduled

ARCH = "sm_90a"
#: values of the option `gather`
PAGED, SPARSE = 1, 2
#: features of a call that the kernel takes; its workers find their tiles themselves
TAKES = frozenset(
    (
        *("ragged", "causal", "sinks", "lse", "sparse", "top_k_lens", "tensor_scales"),
        *("strided_pages", "strided_tables", "pdl", "no_pdl"),
    )
)
#: (heads above, query tokens from which on it is the faster one)
AHEAD = ((64, 2), (32, 4))


def refusal(features: Features, problem: Problem, gpu: Gpu) -> str | None:
    """What the kernel lacks for a call, or None."""
    if gpu.arch != ARCH:
        return f"the GPU is {gpu.arch}; its kernel is for {ARCH}"
    formats = (problem.q_dtype, problem.kv_format)
    if formats != ("bf16", "fp8_656"):
        return f"{formats[0]} over {formats[1]}; its kernel takes bf16 over fp8_656"
    return not_taken(features.names(), TAKES, "its kernel has")


def too_many(total_q: int, problem: Problem) -> str | None:
    """Why a sparse call has too many query tokens, each of which is a request, or None."""
    if problem.top_k and total_q > MAX_BATCH:
        return f"{total_q} query tokens of a sparse call; it takes up to {MAX_BATCH}"
    return None


def takes(heads: int, total_q: int) -> bool:
    """Whether the record has it ahead for sparse calls of so many heads and query tokens."""
    least = next((tokens for above, tokens in AHEAD if heads > above), None)
    return least is not None and total_q >= least


def is_ahead(problem: Problem, total_q: int, gpu: Gpu, features: Features) -> bool:
    """Whether "cute" takes the kernel: a sparse call for which the record has it ahead, and whose
    build can be had.
    """
    if not problem.top_k or refusal(features, problem, gpu) or too_many(total_q, problem):
        return False
    if not takes(problem.heads, total_q):
        return False
    return missing_for(config_for(problem), problem, features) is None


def plan(problem: Problem, gpu: Gpu) -> SelfScheduled:
    """One worker for each place on the card."""
    return SelfScheduled.of(config_for(problem), gpu, problem.latent_dim)


def config_for(problem: Problem) -> KernelConfig:
    """A cluster of two where the rows that share their tokens are more than one CTA takes."""
    rows = problem.heads * (1 if problem.top_k else max(problem.q_lens))
    tile: dict[str, Any] = {"tile_rows": 64, "cluster": 1}
    if rows > tile["tile_rows"]:
        tile = {"tile_rows": 128, "cluster": 2}
    options = (("gather", SPARSE if problem.top_k else PAGED), ("widen", 1))
    return KernelConfig("cute/keep_ab_sm90", **tile, options=options)
