"""`backend="cute-widened"`: 656-byte tokens under a bf16 query, widened to bf16 once per cluster.

The kernel is `cute.keep_ab_sm90.widened`, sparse and dense. Its workers find their tiles from the
lengths; in a sparse call each query token is a request of top_k tokens. No record says yet for
which calls it is the faster one, so that "auto" and "cute" never choose it.
"""

from __future__ import annotations

from typing import Any

from ...call.bind import Call
from ...call.form import Features
from ...core.errors import BuildError
from ...core.gpu import Gpu
from ...core.problem import Problem
from ...plan import KernelConfig
from ..cuda.ops import MAX_BATCH
from .backend import CuteBackend, common_reason
from .catalogue import missing_for
from .device_plan import SelfScheduled

ARCH = "sm_90a"
#: values of the kernel's option `gather`
PAGED, SPARSE = 1, 2
#: features that the kernel lacks, and their names in a call
LACKS = {
    "mask": "draft masks",
    "skip_softmax": "skip_softmax_threshold_scale_factor",
    "batch_invariant": "batch_invariant",
    "context_parallel": "enable_dcp",
    "planned": "plan: its workers find their tiles themselves",
}


class WidenedBackend(CuteBackend):
    """MLA decode over 656-byte tokens by the widening kernel."""

    name = "cute-widened"

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """As `CuteBackend.supports`, with what this kernel lacks."""
        if gpu is None:
            return "the tensors are on a CPU; its kernel runs on a GPU"
        if gpu.arch != ARCH:
            return f"the GPU is {gpu.arch}; its kernel is for {ARCH}"
        formats = (problem.q_dtype, problem.kv_format)
        if formats != ("bf16", "fp8_656"):
            return f"{formats[0]} over {formats[1]}; its kernel takes bf16 over fp8_656"
        for name, words in LACKS.items():
            if getattr(features, name):
                return f"its kernel has no {words}"
        reason = common_reason(features, problem, gpu)
        if reason:
            return reason
        if problem.top_k and problem.total_q > MAX_BATCH:
            return f"{problem.total_q} query tokens of a sparse call; it takes up to {MAX_BATCH}"
        return missing_for(config_for(problem), problem, features)

    def plan(self, call: Call, gpu: Gpu | None) -> SelfScheduled:
        """One worker for each place on the card."""
        if gpu is None:
            raise BuildError("plan: got a CPU; supported: a GPU")
        return SelfScheduled.of(config_for(call.form.bounds), gpu, call.form.bounds.latent_dim)


def config_for(problem: Problem) -> KernelConfig:
    """A cluster of two where the rows that share their tokens are more than one CTA takes."""
    rows = problem.heads * (1 if problem.top_k else max(problem.q_lens))
    tile: dict[str, Any] = {"tile_rows": 64, "cluster": 1}
    if rows > tile["tile_rows"]:
        tile = {"tile_rows": 128, "cluster": 2}
    gather = (("gather", SPARSE if problem.top_k else PAGED),)
    return KernelConfig("cute/keep_ab_sm90", **tile, options=gather)
