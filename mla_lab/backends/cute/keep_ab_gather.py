"""Which calls fetch their tokens one by one for 64 rows of heads (keep_ab's `producer_gather`).

The kernel is keep_ab for 16-bit or 8-bit caches, with a cluster size of 1. Each CTA fetches its own
tokens, so that a call with more than 64 heads fetches each token once per 64 heads. It takes sparse
calls, where each query token is a request of its own, and dense ones with pages of any size.
"cute" chooses it for sparse calls of more heads than `SWAP_AB_HEADS`, where the records
`h200_sparse.jsonl` and `h200_sparse_bf16.jsonl` in `data/records` have it ahead of swap_ab's gather
(`token_gather`) between the other kernels of a step; and for dense calls of more rows than one row
tile of that kernel, each of which fetches all tokens. With pages of one token, 8,192 of them, it
takes 0.58 of that kernel's time for 64 requests of 128 heads and 0.66 for 4 in bf16, 0.45 and 0.69
in e4m3, 0.35 and 0.51 over 656 bytes; for one request of 1,024 tokens 1.15 (H200, 2026-11-29,
`data/notes/kernel_attempts.jsonl`).
"""

from __future__ import annotations

from dataclasses import replace

from ...call.form import Features
from ...core.gpu import Gpu
from ...core.problem import Problem
from ...jit.shipped import GATHER, PAGED
from ...plan import KernelConfig
from ...plan.launch_modes import FORMATS, KEEP_AB_PERSISTENT
from ..base import not_taken
from ..cuda.ops import MAX_BATCH
from .catalogue import able_as_shipped, missing_for
from .device_plan import SelfScheduled
from .token_gather import tall_rows

ARCH = "sm_90a"
#: features of a call that the kernel takes; its workers find their tiles themselves
TAKES = frozenset(
    (
        *("ragged", "causal", "sinks", "lse", "sparse", "top_k_lens", "tensor_scales"),
        *("strided_pages", "strided_tables", "pdl", "no_pdl"),
    )
)
#: the most heads of a sparse call that swap_ab's gather takes: one row tile of 16 rows. With 32 and
#: more it has up to 121 KB of code, which a step fetches anew in each layer: the record's cases
#: take more in a step than by keep_ab; behind its own replay a call of few tokens takes up to 4.1
#: us less (656 bytes, H200, 2026-11-30, `h200_sparse.jsonl`). Over bf16 keep_ab takes 0.63 to 0.84
#: of swap_ab's time from 32 heads on, and 0.55 to 0.79 in a step (H200, 2026-11-29,
#: `h200_sparse_bf16.jsonl`). Other formats, not timed, follow
SWAP_AB_HEADS = 16


def refusal(features: Features, problem: Problem, gpu: Gpu) -> str | None:
    """What the kernel lacks for a call, or None."""
    if gpu.arch != ARCH:
        return f"the GPU is {gpu.arch}; its kernel is for {ARCH}"
    if (problem.q_dtype, problem.kv_format) not in FORMATS:
        taken = ", ".join(f"{query} over {cache}" for query, cache in FORMATS)
        return f"{problem.q_dtype} over {problem.kv_format}; its kernel takes {taken}"
    return not_taken(features.names(), TAKES, "its kernel has")


def too_many(total_q: int, problem: Problem) -> str | None:
    """Why a sparse call has too many query tokens, each of which is a request, or None."""
    if problem.top_k and total_q > MAX_BATCH:
        return f"{total_q} query tokens of a sparse call; it takes up to {MAX_BATCH}"
    return None


def takes(heads: int) -> bool:
    """Whether the record has it ahead for sparse calls of so many heads."""
    return heads > SWAP_AB_HEADS


def is_ahead(problem: Problem, total_q: int, gpu: Gpu, features: Features) -> bool:
    """Whether "cute" takes the kernel: a call for which the record has it ahead, and whose build
    can be had; of a dense call, ships.
    """
    if refusal(features, problem, gpu) or too_many(total_q, problem):
        return False
    config = config_for(problem)
    if problem.top_k:
        return takes(problem.heads) and missing_for(config, problem, features) is None
    rows = problem.heads * max(problem.q_lens, default=0)
    return rows > tall_rows(problem) and able_as_shipped(problem, features)(config)


def plan(problem: Problem, gpu: Gpu) -> SelfScheduled:
    """One worker for each place on the card."""
    planned = SelfScheduled.of(config_for(problem), gpu, problem)
    return replace(planned, any_bound=not problem.top_k)


def config_for(problem: Problem) -> KernelConfig:
    """64 rows a CTA."""
    options = GATHER if problem.top_k else PAGED
    return KernelConfig(KEEP_AB_PERSISTENT.kernel, tile_rows=64, options=options)
