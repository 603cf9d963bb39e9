"""`backend="emulate"`: what the CuTe backend would launch on an H200, on tensors of a CPU; and
`backend="emulate_sm100"`: what it would launch on a Blackwell card of few SMs.

Builds, schedules, workspace and launch arguments are those of `backends.cute`; only the launch
itself goes to `mla_lab.emulate`, which runs the compiled PTX. The first call of a form compiles its
kernel (about 15 s), and one call takes seconds, so that `MAX_SCORES` bounds a problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ... import jit
from ...call.bind import Call
from ...call.form import Features
from ...call.workspace import Workspace
from ...core.errors import BuildError
from ...core.gpu import B200, H200, Gpu
from ...core.problem import Problem
from ...emulate import EmulatedKernel, Options
from ...jit.toolchain import find_cxx
from ...plan import KernelConfig
from ..base import Replay
from ..cute.backend import CuteBackend, sm100_reason
from ..cute.families import arch_of
from ..cute.launch import Launch

#: query rows x KV tokens of a call at most, of its bounds: about ten seconds
MAX_SCORES = 1 << 21


class EmulateBackend(CuteBackend):
    """MLA decode by CuTe kernels whose PTX runs on the CPU."""

    name = "emulate"
    #: the card whose launches are run
    gpu: Gpu = H200

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """The device and the size first, then what the CuTe backend says of an H200."""
        if gpu is not None:
            return "the tensors are on a GPU; it takes those of a CPU"
        kv = problem.top_k or max(problem.kv_lens)
        scores = sum(problem.q_lens) * problem.heads * kv
        if scores > MAX_SCORES:
            return f"{scores} scores (query rows x bound of KV tokens); at most {MAX_SCORES}"
        return _no_compiler() or self.lacks(features, problem)

    def lacks(self, features: Features, problem: Problem) -> str | None:
        """What the CuTe backend says on the card."""
        return super().supports(features, problem, self.gpu)

    def plan(self, call: Call, gpu: Gpu | None) -> Any:
        """The CuTe backend's, on the card."""
        return super().plan(call, self.gpu)

    def run(self, call: Call, plan: Any, workspace: Workspace) -> None:
        """Runs the call; Fault where the kernel cannot go on. Nothing repeats it: of tensors on a
        CPU each call checks the values."""
        super().run(call, plan, workspace)

    def launch(self, call: Call, plan: Any, workspace: Workspace) -> Replay:
        """As the CuTe backend's, on the card."""
        launch = EmulatedLaunch.of(call, plan, workspace, self.gpu)
        launch(call.args, call.out, call.lse)
        return launch.repeat


class EmulateSm100Backend(EmulateBackend):
    """MLA decode by the SM100 kernel, on a card of 8 SMs: a B200's would be mostly idle here."""

    name = "emulate_sm100"
    gpu = replace(B200, name="B200, 8 SMs", sms=8)

    def lacks(self, features: Features, problem: Problem) -> str | None:
        """What the kernel lacks; here it needs nobody's consent."""
        return sm100_reason(problem, features, self.gpu)


class EmulatedLaunch(Launch):
    """A launch whose attention kernel is emulated."""

    @staticmethod
    def kernel_of(config: KernelConfig, device: torch.device) -> Callable[..., None]:
        """The kernel of a build, compiled at its first use."""
        return _kernel(config)


#: how launches run, and the list that takes the build of each
_RUNNING: ContextVar[tuple[Options, list[KernelConfig]] | None] = ContextVar("running")


@contextmanager
def running(options: Options) -> Iterator[list[KernelConfig]]:
    """In this block launches run with `options`; the builds that they take come into the list."""
    taken: list[KernelConfig] = []
    token = _RUNNING.set((options, taken))
    try:
        yield taken
    finally:
        _RUNNING.reset(token)


def _kernel(config: KernelConfig) -> Callable[..., None]:
    options, taken = _RUNNING.get(None) or (Options(), [])
    taken.append(config)
    return _made(config, options)


@lru_cache(maxsize=64)
def _made(config: KernelConfig, options: Options) -> Callable[..., None]:
    return EmulatedKernel.of(jit.compile(config, arch_of(config)), options)


def _no_compiler() -> str | None:
    """Why launches cannot be had from the host code of a build, or None."""
    try:
        find_cxx()
    except BuildError as error:
        return f"{error}; recorded calls run without: mla-lab emulate --recorded"
    return None
