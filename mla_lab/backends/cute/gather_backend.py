"""`backend="cute-keep-ab-gather"`: tokens fetched one by one, for 64 query heads per CTA.

"cute" takes this kernel where it is the faster one (`keep_ab_gather`); the name runs it wherever it
can, for sparse and for dense calls.
"""

from __future__ import annotations

from ...call.bind import Call
from ...call.form import Features
from ...core.errors import BuildError
from ...core.gpu import Gpu
from ...core.problem import Problem
from . import keep_ab_gather
from .backend import CuteBackend, common_reason
from .catalogue import missing_for
from .device_plan import SelfScheduled


class KeepAbGatherBackend(CuteBackend):
    """MLA decode by keep_ab, each token fetched as it is stored."""

    name = "cute-keep-ab-gather"

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """As `CuteBackend.supports`, with what this kernel lacks."""
        if gpu is None:
            return "the tensors are on a CPU; its kernel runs on a GPU"
        reason = keep_ab_gather.refusal(features, problem, gpu)
        reason = reason or common_reason(features, problem, gpu)
        reason = reason or keep_ab_gather.too_many(problem.total_q, problem)
        return reason or missing_for(keep_ab_gather.config_for(problem), problem, features)

    def plan(self, call: Call, gpu: Gpu | None) -> SelfScheduled:
        """One worker for each place on the card."""
        if gpu is None:
            raise BuildError("plan: got a CPU; supported: a GPU")
        return keep_ab_gather.plan(call.form.bounds, gpu)
