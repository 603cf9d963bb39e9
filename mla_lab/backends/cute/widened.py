"""`backend="cute-widened"`: 656-byte tokens under a bf16 query, widened to bf16 once per cluster.

The kernel is `cute.keep_ab_sm90.widened`, sparse and dense. Its workers find their tiles from the
lengths. "cute" takes it by consent where it is the faster one (see `widening`), this name wherever
it can run.
"""

from __future__ import annotations

from ...call.bind import Call
from ...call.form import Features
from ...core.errors import BuildError
from ...core.gpu import Gpu
from ...core.problem import Problem
from . import widening
from .backend import CuteBackend, common_reason
from .catalogue import missing_for
from .device_plan import SelfScheduled


class WidenedBackend(CuteBackend):
    """MLA decode over 656-byte tokens by the widening kernel."""

    name = "cute-widened"

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """As `CuteBackend.supports`, with what this kernel lacks."""
        if gpu is None:
            return "the tensors are on a CPU; its kernel runs on a GPU"
        reason = widening.refusal(features, problem, gpu)
        reason = reason or common_reason(features, problem, gpu)
        reason = reason or widening.too_many(problem.total_q, problem)
        return reason or missing_for(widening.config_for(problem), problem, features)

    def plan(self, call: Call, gpu: Gpu | None) -> SelfScheduled:
        """One worker for each place on the card."""
        if gpu is None:
            raise BuildError("plan: got a CPU; supported: a GPU")
        return widening.plan(call.form.bounds, gpu)
