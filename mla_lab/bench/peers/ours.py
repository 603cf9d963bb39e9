"""This package's own backends, through the native call."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...api import decode
from ...backends.cute.device_plan import Formula, SelfScheduled
from ...backends.cute.token_gather import formula_for, gathers
from ...call.decode_args import native_args
from ...core import kv_cache as formats
from ...core.errors import unsupported
from ...core.gpu import H200, Gpu
from ...plan import Plan, choose
from ...plan.pricing import Choice
from ...reference.inputs import DecodeInputs
from ..cases import Case
from ..rotation import Rotation
from ..timers import Launch
from .base import PeerBase, Prepared


class Ours(PeerBase):
    """`mla_lab.api.decode.decode` with a plan that all copies share; "auto" or one backend."""

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend
        self.name = "mla-lab" if backend == "auto" else f"mla-lab-{backend}"

    def available(self, device: torch.device) -> str | None:
        if self.backend == "auto" or self.backend in backends.MODULES:
            return None
        return f"backend: got {self.backend}, supported: {', '.join(backends.MODULES)}"

    def prepare(self, rotation: Rotation) -> Prepared:
        """As `Peer.prepare`. Raises Unsupported with the backend's reason."""
        first = rotation.copies[0]
        arguments = native_arguments(first, rotation.case.batch_invariant)
        call, runner = decode.prepare(native_args(**arguments, backend=self.backend))
        if rotation.device.type == "cuda" and runner.name == "torch" and self.backend == "auto":
            # its time is listed under its own name; here it would pass for a kernel's
            raise unsupported("backend", "auto, which has no kernel for this call", "mla-lab-torch")
        # it splits by a formula in each launch: there is no plan to share
        if runner.name == "cuda":
            return Prepared(self._launches(rotation), notes={"backend": runner.name})
        gpu = backends.gpu_of(rotation.device) or H200
        fetched = runner.name == "cute" and gathers(rotation.case.problem)
        fetched = fetched or runner.name == "cute-keep-ab-gather"
        own = runner.plan(call, gpu) if fetched else None
        if isinstance(own, Formula | SelfScheduled):  # a gather of single tokens takes no plan
            config = own.config
            notes = {"kernel": config.name(), "tile_rows": config.tile_rows}
            return Prepared(self._launches(rotation), notes={"backend": runner.name, **notes})

        def plan() -> Plan:
            return _choice(rotation.case, gpu, runner.name).plan(rotation.case.problem)

        shared = plan()
        launches = self._launches(rotation, shared)
        planned = None
        if not runner.reads_lengths:  # the plan is made on the device, in the same graph
            planned = self._launches(rotation)
        choice = _choice(rotation.case, gpu, runner.name)
        notes = {"backend": runner.name, **describe_plan(shared), **describe_choice(choice)}
        return Prepared(launches, plan=plan, planned_launches=planned, notes=notes)

    def _launches(self, rotation: Rotation, plan: Plan | None = None) -> tuple[Launch, ...]:
        """Native calls of all copies. plan: None leaves it to the call."""
        case, name = rotation.case, self.backend
        return tuple(native_launch(copy, case, plan, name) for copy in rotation.copies)


class Gathered(PeerBase):
    """ "cute" by the kernel that gathers tokens, also where another one is chosen for the call."""

    name = "mla-lab-cute-gathered"

    def refuses(self, case: Case) -> str | None:
        return None if gathers(case.problem) else "a call that is run page by page"

    def prepare(self, rotation: Rotation) -> Prepared:
        """As `Peer.prepare`; arguments are checked and the workspace bound once."""
        problem, gpu = rotation.case.problem, backends.gpu_of(rotation.device) or H200
        plan = formula_for(problem, problem.total_q, gpu, rotation.case.batch_invariant)
        launches = tuple(
            prepared_launch(copy, rotation.case, plan, "cute") for copy in rotation.copies
        )
        return Prepared(launches, notes={"kernel": plan.config.name()})


def native_launch(
    copy: DecodeInputs, case: Case, plan: Plan | None = None, backend: str = "auto"
) -> Launch:
    """A native call as a launch. plan: None leaves it to the call."""
    arguments = native_arguments(copy, case.batch_invariant)
    out = poisoned_out(copy)

    def launch() -> Tensor:
        decode.decode(**arguments, out=out, plan=plan, backend=backend)
        return out

    return launch


def prepared_launch(copy: DecodeInputs, case: Case, plan: Plan | Formula, backend: str) -> Launch:
    """The backend's `run` as a launch; arguments are checked and the workspace bound here, once."""
    arguments = native_arguments(copy, case.batch_invariant)
    out = poisoned_out(copy)
    own = None if isinstance(plan, Formula) else plan
    given = native_args(**arguments, out=out, plan=own, backend=backend)
    call, runner = decode.prepare(given)
    checked = plan if isinstance(plan, Formula) else decode.make_plan(call, runner)
    workspace = decode.allocate(call, checked)

    def launch() -> Tensor:
        runner.run(call, checked, workspace)
        return out

    return launch


def _choice(case: Case, gpu: Gpu, backend: str) -> Choice:
    """Build and splits for known lengths, as a serving engine would choose them once a step."""
    costs = None
    if backend == "cute":
        from ...backends.cute import families

        costs = families.costs()
    return choose(case.problem, gpu, case.batch_invariant, costs)


def poisoned_out(copy: DecodeInputs) -> Tensor:
    """Output `query.shape[:-1] + (latent,)` filled with NaN, to detect unwritten elements."""
    shape = (*copy.query.shape[:-1], copy.kv_lora_rank)
    dtype = formats.DTYPES[copy.problem.out_dtype]
    return torch.full(shape, float("nan"), dtype=dtype, device=copy.query.device)


def native_arguments(copy: DecodeInputs, batch_invariant: bool) -> dict[str, Any]:
    """The native call's arguments: of the dims the latent and rope ones only."""
    arguments = copy.contract_args()
    arguments.pop("qk_nope_head_dim", None)
    return {**arguments, "batch_invariant": batch_invariant}


def describe_choice(choice: Choice) -> dict[str, Any]:
    """Knobs and cost model that reproduce the plan."""
    return {"knobs": dict(choice.knobs), "model": asdict(choice.model)}


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Kernel, cuts and counts of a plan, for a record's notes."""
    return {
        "kernel": plan.config.name() if plan.config else None,
        "policy": plan.policy,
        "schedule": plan.schedule,
        "tile_rows": plan.tile_rows,
        "tile_kv": plan.tile_kv,
        "tiles": plan.num_tiles,
        "workers": plan.num_workers,
        "partials": plan.num_slots,
    }
