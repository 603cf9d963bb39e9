"""What a backend has: a name, a reason for each call it refuses, and a way to run a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..call.bind import Call
from ..call.decode_args import DecodeArgs
from ..call.form import Features
from ..call.workspace import Workspace
from ..core.errors import invalid
from ..core.gpu import H200, Gpu
from ..core.kv_cache import POISON_BYTE
from ..core.problem import Problem
from ..plan import Plan, WorkspaceLayout, choose
from ..plan.kernel_costs import recorded_of
from ..plan.launch_modes import KEEP_AB_PERSISTENT

#: of a call with a skip-softmax factor, by a kernel without that option. The definition leaves a
#: kernel free to skip nothing: no split skips its first tile
SKIPS_NOTHING = "no tile is skipped: the result is exact"


#: what a call that uses a feature says for it; a feature that is not here goes by its own name
IN_A_CALL = {
    "mask": "draft masks",
    "sparse": "sparse_mla_top_k: sparse calls",
    "skip_softmax": "skip_softmax_threshold_scale_factor",
    "nonpositive_scale": "bmm1_scale of 0 or less: scores are masked before they are scaled",
    "separate_tables": "uses_shared_paged_kv_idx=False: a table of its own for values",
    "context_parallel": "enable_dcp",
    "strided_query": "query whose rows lie apart",
    "planned": "plan of the caller's",
}


class Planned(Protocol):
    """A `Plan`, or what a backend takes in its place.

    One with `any_bound` true is the plan of every call that differs in its bound of key lengths
    alone: in `max_seq_len`, or in the pages that a table row can name. The kernel of one with
    `any_page` true takes pages of any size.
    """

    @property
    def workspace(self) -> WorkspaceLayout:
        """The bytes that it needs in the caller's buffer."""
        ...


class Replay(Protocol):
    """Launches a recorded call for other tensors of the same form, plan and workspace.

    Raises ValueError, before anything runs, for tensors of another dtype, rank, device or layout.
    """

    def __call__(self, args: DecodeArgs, out: Tensor, lse: Tensor | None, /) -> None: ...


class Backend(Protocol):
    """Runs decode calls.

    `supports` gets a call's bounds, not its lengths: the choice must hold for every launch of a
    captured graph.
    """

    name: str
    #: plans on the host from lengths that it reads there; on a GPU that synchronises
    reads_lengths: bool
    #: runs a caller's plan as it is; otherwise it makes its own, within the same bounds
    follows_plans: bool

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """None if the backend can run such a call on `gpu` (None: a CPU), else the reason."""
        ...

    def plan(self, call: Call, gpu: Gpu | None) -> Planned:
        """The plan of a call that brings none."""
        ...

    def run(self, call: Call, plan: Any, workspace: Workspace) -> Replay | None:
        """Write the call's out and lse by the caller's `Plan` or one of this backend's.

        Returns what launches the call for other tensors, or None where a replay saves nothing.
        """
        ...


@runtime_checkable
class Noted(Protocol):
    """A backend whose launches of some calls carry a note, which `explain` shows."""

    def note(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """What a caller should know of such calls on `gpu` (None: a CPU), or None."""
        ...


def not_taken(used: Iterable[str], takes: frozenset[str], kernel: str) -> str | None:
    """Why a call is refused that uses a feature outside `takes`, or None.

    A backend lists what it takes, so that it refuses a feature that it does not read.
    """
    name = next((name for name in used if name not in takes), None)
    return name and f"{kernel} no {IN_A_CALL.get(name, name)}"


def believes_max_q_len(ragged: bool, max_q_len: int | None, total_q: int) -> bool:
    """Whether a grid that has rows for `max_q_len` tokens of each request may lack some."""
    return ragged and max_q_len is not None and max_q_len < total_q


def fill_with_nan(out: Tensor, lse: Tensor | None) -> None:
    """Ahead of a launch that leaves rows out where a bound is too small: they are NaN then."""
    out.fill_(math.nan)
    if lse is not None:
        lse.fill_(math.nan)


def fill_longer_with_nan(args: DecodeArgs, most: int, out: Tensor, lse: Tensor | None) -> None:
    """Behind a launch of a ragged call: NaN in the rows of requests with more than `most` query
    tokens. Reads no value on the host."""
    begins: Tensor = args.cum_seq_lens_q  # type: ignore[assignment]
    token = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    request = torch.searchsorted(begins[1:-1], token, right=True)
    longer = (begins.diff() > most)[request]
    if out.element_size() == 1:  # e4m3; torch fills bytes alone on every device
        out.view(torch.uint8).masked_fill_(longer.view(-1, 1, 1), POISON_BYTE)
    else:
        out.masked_fill_(longer.view(-1, 1, 1), math.nan)
    if lse is not None:
        lse.masked_fill_(longer.view(-1, 1), math.nan)


@lru_cache
def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU of a CUDA device, None for a CPU."""
    return Gpu.here(device.index or 0) if device.type == "cuda" else None


def is_elsewhere(device: torch.device) -> bool:
    """Whether `device` is a GPU other than the current one."""
    return device.type == "cuda" and device.index not in (None, torch.cuda.current_device())


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current GPU, on which a CUDA C++ module launches whatever memory its
    pointers are of. Does nothing for a CPU, and where it is the current one.
    """
    return torch.cuda.device(device) if is_elsewhere(device) else nullcontext()


@lru_cache(maxsize=256)
def plan_for(problem: Problem, gpu: Gpu | None, batch_invariant: bool) -> Plan:
    """The plan of known lengths; without a GPU the one that an H200 would get.

    Cached, since every layer of a step needs the same plan. Under batch invariance one rule holds
    for all requests, whatever builds there are.
    """
    costs = (recorded_of(KEEP_AB_PERSISTENT.key),) if batch_invariant else None
    return choose(problem, gpu or H200, batch_invariant, costs).plan(problem)


def refuse_capture(name: str, what: str, device: torch.device) -> None:
    """InvalidInput inside a capture: what is done once must not be recorded into a graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        got = f"{what} during the capture of a CUDA graph"
        raise invalid(name, got, "one equal call before the capture")
