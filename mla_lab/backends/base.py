"""What a backend is: a name, a reason when it says no, and a way to run a plan."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ..call.decode_args import Arguments, Call, Features
from ..call.workspace import Workspace
from ..core.gpu import H200, Gpu
from ..core.problem import Problem
from ..plan import Plan, WorkspaceLayout, choose
from ..plan.kernel_costs import KEEP_AB_ROWS, recorded_of


class Planned(Protocol):
    """A `Plan`, or what a backend takes in its place."""

    @property
    def workspace(self) -> WorkspaceLayout:
        """What of the caller's buffer it needs."""
        ...


class Repeat(Protocol):
    """Does a call again for the tensors of another one of the same form, plan and workspace.

    Raises ValueError, before anything runs, for tensors of another dtype, rank, device or layout.
    """

    def __call__(self, given: Arguments, out: Tensor, lse: Tensor | None) -> None: ...


class Backend(Protocol):
    """Runs decode calls.

    `supports` sees a call's bounds, never its lengths: the choice must hold for every launch of
    a captured graph.
    """

    name: str
    #: plans on the host from lengths that it reads there; on a GPU that synchronises
    reads_lengths: bool

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """None if the backend can run such a call on `gpu` (None: a CPU), else the reason."""
        ...

    def plan(self, call: Call, gpu: Gpu | None) -> Planned:
        """The plan of a call that brings none."""
        ...

    def run(self, call: Call, plan: Any, workspace: Workspace) -> Repeat | None:
        """Writes the call's out and lse by the caller's `Plan` or one of this backend's; merges
        where it has partials. Returns what repeats the call, where that spares anything.
        """
        ...


@lru_cache
def gpu_of(device: torch.device) -> Gpu | None:
    """The card that a device is, None for a CPU."""
    return Gpu.here(device.index or 0) if device.type == "cuda" else None


@lru_cache(maxsize=256)
def plan_for(problem: Problem, gpu: Gpu | None, batch_invariant: bool) -> Plan:
    """The plan of known lengths; without a GPU the one that an H200 would get.

    Every layer of a step asks for the same plan, so that the last ones are remembered. Under batch
    invariance by one rule for all requests, whatever kernels there are.
    """
    costs = (recorded_of(KEEP_AB_ROWS),) if batch_invariant else None
    return choose(problem, gpu or H200, batch_invariant, costs).plan(problem)
