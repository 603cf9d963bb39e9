"""`backend="emulate"`: what the CuTe backend would launch on an H200, on tensors of a CPU.

Builds, schedules, workspace and launch arguments are those of `backends.cute`; only the launch
itself goes to `mla_lab.emulate`, which runs the compiled PTX. The first call of a form compiles its
kernel (about 10 s), and one call takes seconds, so that `MAX_SCORES` bounds a problem.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ... import jit
from ...call.bind import Call
from ...call.form import Features
from ...call.workspace import Workspace
from ...core.errors import BuildError
from ...core.gpu import H200, Gpu
from ...core.problem import Problem
from ...emulate import EmulatedKernel
from ...jit.toolchain import find_cxx
from ...plan import KernelConfig
from ..base import Replay
from ..cute.backend import CuteBackend
from ..cute.launch import Launch

#: query rows x KV tokens of a call at most, of its bounds: about ten seconds
MAX_SCORES = 1 << 21


class EmulateBackend(CuteBackend):
    """MLA decode by CuTe kernels whose PTX runs on the CPU."""

    name = "emulate"

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """The device and the size first, then what the CuTe backend says of an H200."""
        if gpu is not None:
            return "the tensors are on a GPU; it takes those of a CPU"
        if features.batch_invariant:
            return "batch_invariant: the planner kernel ahead of it is not emulated"
        kv = problem.top_k or max(problem.kv_lens)
        scores = sum(problem.q_lens) * problem.heads * kv
        if scores > MAX_SCORES:
            return f"{scores} scores (query rows x bound of KV tokens); at most {MAX_SCORES}"
        return _no_compiler() or super().supports(features, problem, H200)

    def plan(self, call: Call, gpu: Gpu | None) -> Any:
        """The CuTe backend's, of an H200."""
        return super().plan(call, H200)

    def run(self, call: Call, plan: Any, workspace: Workspace) -> Replay:
        """Runs the call and returns what repeats it; Fault where the kernel cannot go on."""
        launch = EmulatedLaunch.of(call, plan, workspace, H200)
        launch(call.args, call.out, call.lse)
        return launch.repeat


class EmulatedLaunch(Launch):
    """A launch whose attention kernel is emulated."""

    @staticmethod
    def kernel_of(config: KernelConfig, device: torch.device) -> Callable[..., None]:
        """The kernel of a build for `sm_90a`, compiled at its first use."""
        return _kernel(config)


@lru_cache(maxsize=64)
def _kernel(config: KernelConfig) -> Callable[..., None]:
    return EmulatedKernel.of(jit.compile(config, H200.arch))


def _no_compiler() -> str | None:
    """Why launches cannot be had from the host code of a build, or None."""
    try:
        find_cxx()
    except BuildError as error:
        return f"{error}; recorded calls run without: mla-lab emulate --recorded"
    return None
