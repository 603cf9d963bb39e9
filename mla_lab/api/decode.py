"""The native call: one MLA decode step over a paged cache, as a line of verbs.

    validate   arguments -> Form (shapes) -> Call (lengths, results)
    plan       Call -> Plan, a value that every layer of a step can share
    allocate   Plan's layout -> Workspace, named slices of the caller's buffer
    compile    inside the backend, cached, never for a tensor's values
    launch     the backend runs the plan's tiles
    merge      where the plan has partials, inside the launch

An equal call with other tensors takes none of these steps again: `repeats`.

Names and meanings are those of `contract.trtllm_batch_decode_with_kv_cache_mla`; the contract's
functions are this one behind FlashInfer's parameter lists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends.base import Backend, Planned
from ..call.checks import bind, form_of
from ..call.decode_args import Arguments, Call, Form
from ..call.workspace import Workspace
from ..core.errors import invalid, invalid_type
from ..plan import Plan
from . import replay as repeats
from . import torch_op as compiled

#: `Arguments` of a tuple of all its fields, in a third less time than its own constructor
_ARGUMENTS: Callable[[tuple[Any, ...]], Arguments] = partial(tuple.__new__, Arguments)
#: told of each call that is checked in full (equal ones that are repeated are not)
OBSERVERS: list[Callable[[Arguments, Form], None]] = []
#: any other value than empty or 0 is debug mode
DEBUG_VARIABLE = "MLA_LAB_DEBUG"
#: plans that a form remembers as checked before it forgets all
MAX_FITTING_PLANS = 64


def decode(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int | None = None,
    workspace_buffer: Tensor | None = None,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | Sequence[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    return_lse_base: str | None = None,
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    mask: Tensor | None = None,
    batch_invariant: bool = False,
    plan: Plan | None = None,
    backend: str = "auto",
    debug: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new tokens over their requests' cached tokens, in the absorbed form of MLA.

    Parameters, shapes and units are documented at `contract.trtllm_batch_decode_with_kv_cache_mla`.
    Different here:

    max_seq_len: None takes what block_tables can name.
    workspace_buffer: None allocates what the plan needs, in every call.
    debug: check every value, such as page ids; on a GPU the checks copy to the host, which
        synchronises. None: as the environment variable MLA_LAB_DEBUG says.

    Returns out `query.shape[:-1] + (kv_lora_rank,)`, or (out, lse) with return_lse.
    Raises InvalidInput (wrong type or dtype: InvalidType, which is a TypeError too) or Unsupported,
    before anything is compiled, loaded or launched.
    """
    values = (
        query,
        kv_cache,
        block_tables,
        seq_lens,
        max_seq_len,
        workspace_buffer,
        kv_lora_rank,
        qk_rope_head_dim,
        sparse_mla_top_k,
        out,
        bmm1_scale,
        bmm2_scale,
        sinks,
        skip_softmax_threshold_scale_factor,
        enable_pdl,
        is_var_seq,
        uses_shared_paged_kv_idx,
        lse,
        return_lse,
        return_lse_base,
        cum_seq_lens_q,
        max_q_len,
        enable_dcp,
        cp_world,
        cp_rank,
        causal_seqlens_kv_global,
        mask,
        batch_invariant,
        plan,
    )
    if torch.compiler.is_compiling():
        return compiled.call(Arguments(*values), backend)
    given = _ARGUMENTS(values)
    done = None if debug else repeats.again(given, backend)
    if done is not None:
        return done
    call, runner = validate(given, backend, debug)
    for observe in OBSERVERS:
        observe(given, call.form)
    tiles = make_plan(call, runner)
    workspace = allocate(call, tiles)
    repeat = runner.run(call, tiles, workspace)
    if repeat is not None and not in_debug_mode(debug):
        repeats.remember(call, backend, tiles, repeat)
    if return_lse and call.lse is not None:
        return call.out, call.lse
    return call.out


def explain(*arguments: Any, **named: Any) -> tuple[backends.Verdict, ...]:
    """What each backend says to a call: taken, or the reason why not.

    Takes `decode`'s arguments but backend and debug; checks them, and runs nothing.
    """
    return backends.explain(form_of(Arguments(*arguments, **named)))


def validate(given: Arguments, backend: str, debug: bool | None) -> tuple[Call, Backend]:
    """The checked call, and the backend that will run it."""
    form = form_of(given)
    if not isinstance(backend, str):
        raise invalid_type("backend", type(backend).__name__, "a name (str)")
    runner = backends.choose(form, backend)
    debug = in_debug_mode(debug)
    return bind(given, form, reads_lengths=runner.reads_lengths, debug=debug), runner


def in_debug_mode(debug: bool | None) -> bool:
    """What the caller says, or else the environment."""
    if debug is None:
        return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    return debug


def make_plan(call: Call, runner: Backend) -> Planned:
    """The caller's plan if it was made for this call, else the backend's own."""
    plan = call.given.plan
    if plan is None:
        return runner.plan(call, backends.gpu_of(call.form.device))
    if call.lengths_known:
        _check_plan(plan, call)
        return plan
    # bounds are the same for every layer of a step: its plan is checked once
    fitting, key = call.form.fitting_plans, (id(plan), call.given.max_seq_len)
    if fitting.get(key) is not plan:
        _check_plan(plan, call)
        if len(fitting) >= MAX_FITTING_PLANS:
            fitting.clear()
        fitting[key] = plan
    return plan


def allocate(call: Call, plan: Planned) -> Workspace:
    """Slices of the caller's buffer, or of one of our own where none was given."""
    return Workspace.of(plan.workspace, call.given.workspace_buffer, call.form.device)


def _check_plan(plan: Plan, call: Call) -> None:
    """Refuse a plan for another batch, heads, dims or query tokens, and under batch invariance one
    of other lengths, or that looks at the batch. Else a plan's key lengths need not be this call's:
    its last split of a row tile takes what there is.
    """
    made, here = plan.problem, call.problem
    for name in ("batch", "heads", "latent_dim", "rope_dim", "top_k"):
        if getattr(made, name) != getattr(here, name):
            raise invalid("plan", f"one for {name} {getattr(made, name)}", getattr(here, name))
    known = call.lengths_known or not call.features.ragged
    _check_plan_lengths("q_lens", made.q_lens, here.q_lens, known)
    if call.features.batch_invariant:
        _check_plan_lengths("kv_lens", made.kv_lens, here.kv_lens, call.lengths_known)
    if call.features.batch_invariant and plan.policy != "fixed_size":
        raise invalid("plan", f"policy {plan.policy!r} with batch_invariant", "'fixed_size'")


def _check_plan_lengths(
    name: str, made: tuple[int, ...], here: tuple[int, ...], known: bool
) -> None:
    """A plan's lengths are this call's, or where those stay on a device within their bounds."""
    for request, (planned, own) in enumerate(zip(made, here, strict=True)):
        if planned > own or (known and planned != own):
            limit = f"this call's {own}" if known else f"up to this call's bound, {own}"
            raise invalid("plan", f"{name}[{request}] of {planned}", limit)


compiled.define(decode)
