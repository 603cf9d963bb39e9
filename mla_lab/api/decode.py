"""The native call: one MLA decode step over a paged cache.

    replay     a call like an earlier one is launched at once (`api.replay`)
    check      arguments -> Form, what shapes and flags tell (`call.checks`)
    select     Form -> the backend that runs the call (`backends`)
    bind       Form -> Call: lengths where they may be read, results (`call.bind`)
    plan       Call -> Plan, a value that every layer of a step can share
    run        the backend compiles (once), launches and merges

The functions of the contract are the same under FlashInfer's parameter list (`api.contract`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends.base import Backend, Planned
from ..call.bind import Call, bind
from ..call.callers_plan import check_callers_plan
from ..call.checks import form_of
from ..call.checks.values import check_numbers
from ..call.decode_args import INTEGERS, PARAMETERS, DecodeArgs, made_plain
from ..call.form import Form
from ..call.signature import Target, function, native_parameters
from ..call.workspace import Workspace
from ..core.errors import invalid_type
from . import torch_op
from .replay import record, replay

#: called with each call that is checked in full (a replayed one is not)
OBSERVERS: list[Callable[[DecodeArgs, Form], None]] = []
#: any other value than empty or 0 is debug mode
DEBUG_VARIABLE = "MLA_LAB_DEBUG"

Result = Tensor | tuple[Tensor, Tensor]


def run(args: DecodeArgs) -> Result:
    """Check, plan and run a call, outside of what torch.compile compiles. Where a program cannot be
    traced whole, Dynamo would also compile the functions below, and run the arithmetic of plans,
    which is NumPy's, with dtypes of torch's.
    """
    # without that module nothing is compiled, and importing it takes seconds
    if "torch._dynamo" in sys.modules:
        return _disabled()(args)
    return run_untraced(args)


@cache
def _disabled() -> Callable[[DecodeArgs], Result]:
    disabled: Callable[[DecodeArgs], Result] = torch.compiler.disable(run_untraced)
    return disabled


def run_untraced(args: DecodeArgs) -> Result:
    """Check the call in full, run it, and record it for replays where the backend can repeat it."""
    if made_plain(args, INTEGERS):  # a recorded call has plain integers
        result = replay(args)
        if result is not None:
            return result
    call, runner = prepare(args)
    for observe in OBSERVERS:
        observe(args, call.form)
    plan = make_plan(call, runner)
    launch = runner.run(call, plan, allocate(call, plan))
    if launch is not None and not in_debug_mode(args.debug):
        record(call, plan, launch)
    if args.return_lse and call.lse is not None:
        return call.out, call.lse
    return call.out


def prepare(args: DecodeArgs) -> tuple[Call, Backend]:
    """The checked call, and the backend that will run it."""
    form = form_of(args)
    if not isinstance(args.backend, str):
        raise invalid_type("backend", type(args.backend).__name__, "a name (str)")
    runner = backends.choose(form, args.backend)
    debug = in_debug_mode(args.debug)
    return bind(args, form, reads_lengths=runner.reads_lengths, debug=debug), runner


def in_debug_mode(debug: bool | None) -> bool:
    """What the caller says, or else the environment."""
    if debug is None:
        return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    return debug


def make_plan(call: Call, runner: Backend) -> Planned:
    """The caller's plan, which must be made for this call, where the backend follows it, else the
    backend's own.
    """
    check_callers_plan(call)
    if call.args.plan is None or not runner.follows_plans:
        return runner.plan(call, backends.gpu_of(call.form.device))
    return call.args.plan


def allocate(call: Call, plan: Planned) -> Workspace:
    """Slices of the caller's buffer; of the native call that gave none, zeroed memory of its own.

    Raises InvalidInput where the buffer is too small, of no bytes in the contract's call without.
    """
    buffer = call.args.workspace_buffer
    if buffer is None and not call.args.native:
        buffer = call.args.seq_lens.new_empty(0, dtype=torch.uint8)
    return Workspace.of(plan.workspace, buffer, call.form.device)


#: what each public function does with its arguments
TARGET = Target(DecodeArgs, run, replay, torch_op.call)

decode: Callable[..., Any] = function(
    "decode",
    TARGET,
    native_parameters(PARAMETERS),
    f"""Attention of new tokens over their requests' cached tokens, in the absorbed form of MLA.

    {(DecodeArgs.__doc__ or "").split(chr(10), 2)[2].strip()}
    debug: check every value, such as page ids; on a GPU the checks copy to the host, which
        synchronises. None: as the environment variable MLA_LAB_DEBUG says.

    Returns out `query.shape[:-1] + (kv_lora_rank,)`, or (out, lse) with return_lse.
    Raises InvalidInput (wrong type or dtype: InvalidType, which is a TypeError too) or Unsupported,
    before anything is compiled, loaded or launched.
    """,
)


def _explained(args: DecodeArgs) -> tuple[backends.Verdict, ...]:
    form = form_of(args)
    check_numbers(args)
    return backends.explain(form)


explain: Callable[..., tuple[backends.Verdict, ...]] = function(
    "explain",
    Target(DecodeArgs, _explained),
    native_parameters(PARAMETERS),
    """For each backend: that it runs the call, or the reason why not, and whether it synchronises.

    Takes `decode`'s arguments (backend and debug have no effect); checks them, but for values of
    tensors, and runs nothing.
    """,
)

torch_op.define(decode)
