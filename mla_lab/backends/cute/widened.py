"""Backends that run one kernel of 64 rows of heads whose tokens are fetched one by one.

    "cute-widened"          656-byte tokens, widened to bf16 once per cluster (`widening`)
    "cute-keep-ab-gather"   eight-bit tokens as they are stored (`keep_ab_gather`)

Both take sparse and dense calls, and their workers find their tiles from the lengths. "cute" takes
the first where it is the faster one; these names run wherever the kernel can.
"""

from __future__ import annotations

from types import ModuleType

from ...call.bind import Call
from ...call.form import Features
from ...core.errors import BuildError
from ...core.gpu import Gpu
from ...core.problem import Problem
from . import keep_ab_gather, widening
from .backend import CuteBackend, common_reason
from .catalogue import missing_for
from .device_plan import SelfScheduled


class WidenedBackend(CuteBackend):
    """MLA decode over 656-byte tokens by the widening kernel."""

    name = "cute-widened"
    #: module with `refusal` and `config_for`
    kernel: ModuleType = widening

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """As `CuteBackend.supports`, with what this kernel lacks."""
        if gpu is None:
            return "the tensors are on a CPU; its kernel runs on a GPU"
        reason = self.kernel.refusal(features, problem, gpu)
        reason = reason or common_reason(features, problem, gpu)
        reason = reason or widening.too_many(problem.total_q, problem)
        return reason or missing_for(self.kernel.config_for(problem), problem, features)

    def plan(self, call: Call, gpu: Gpu | None) -> SelfScheduled:
        """One worker for each place on the card."""
        if gpu is None:
            raise BuildError("plan: got a CPU; supported: a GPU")
        config = self.kernel.config_for(call.form.bounds)
        return SelfScheduled.of(config, gpu, call.form.bounds.latent_dim)


class KeepAbGatherBackend(WidenedBackend):
    """MLA decode over eight-bit tokens by keep_ab, each fetched as it is stored."""

    name = "cute-keep-ab-gather"
    kernel = keep_ab_gather
