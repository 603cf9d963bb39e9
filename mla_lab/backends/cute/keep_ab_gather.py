"""Calls whose tokens are fetched one by one for 64 rows of heads (`fp8.producer_gather`).

The kernel is keep_ab's over eight bits, of one CTA: each fetches the tokens of its tiles as they
are stored, so that a call of more than 64 heads fetches them once for every 64. Sparse calls, where
each query token is a request of its own, and dense ones with pages of any size.
"""

from __future__ import annotations

from ...call.form import Features
from ...core.gpu import Gpu
from ...core.problem import Problem
from ...plan import KernelConfig
from ..base import not_taken
from . import widening

ARCH, PAGED, SPARSE = widening.ARCH, widening.PAGED, widening.SPARSE
TAKES = widening.TAKES
#: (query, cache) formats of its builds
FORMATS = (("bf16", "fp8_656"), ("bf16", "e4m3"), ("e4m3", "e4m3"))


def refusal(features: Features, problem: Problem, gpu: Gpu) -> str | None:
    """What the kernel lacks for a call, or None."""
    if gpu.arch != ARCH:
        return f"the GPU is {gpu.arch}; its kernel is for {ARCH}"
    if (problem.q_dtype, problem.kv_format) not in FORMATS:
        taken = ", ".join(f"{query} over {cache}" for query, cache in FORMATS)
        return f"{problem.q_dtype} over {problem.kv_format}; its kernel takes {taken}"
    return not_taken(features.names(), TAKES, "its kernel has")


def config_for(problem: Problem) -> KernelConfig:
    """64 rows a CTA."""
    gather = (("gather", SPARSE if problem.top_k else PAGED),)
    return KernelConfig("cute/keep_ab_sm90", tile_rows=64, cluster=1, options=gather)
