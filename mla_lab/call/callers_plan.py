"""The caller's plan was made for this call, and is one that kernels can walk."""

from __future__ import annotations

from weakref import WeakValueDictionary

from ..core.errors import invalid
from ..plan import Plan
from ..plan.check import check_plan
from ..plan.promotion import promoted_slots
from .bind import Call

#: plans that a form keeps as fitting its bounds, before it drops all
MAX_FITTING_PLANS = 64

#: plans whose tiles were checked, by id
_CHECKED: WeakValueDictionary[int, Plan] = WeakValueDictionary()


def check_callers_plan(call: Call) -> None:
    """Raise InvalidInput unless `call.args.plan` covers this call; once for equal bounds."""
    plan = call.args.plan
    if plan is None:
        return
    # bounds are the same for every layer of a step: its plan is checked once
    once = not call.lengths_known
    fitting, key = call.form.fitting_plans, (id(plan), call.args.max_seq_len)
    if once and fitting.get(key) is plan:
        return
    _check(plan, call)
    if once:
        if len(fitting) >= MAX_FITTING_PLANS:
            fitting.clear()
        fitting[key] = plan


def _check(plan: Plan, call: Call) -> None:
    """Refuse a plan for another batch, heads, dims or query tokens, and under batch invariance one
    of other lengths, or that looks at the batch. Otherwise a plan's key lengths need not be this
    call's: its last split of a row tile takes the rest of the keys.
    """
    made, here = plan.problem, call.problem
    for name in ("batch", "heads", "latent_dim", "rope_dim", "top_k"):
        if getattr(made, name) != getattr(here, name):
            raise invalid("plan", f"one for {name} {getattr(made, name)}", getattr(here, name))
    known = call.lengths_known or not call.features.ragged
    _check_lengths("q_lens", made.q_lens, here.q_lens, known)
    if call.features.batch_invariant:
        _check_lengths("kv_lens", made.kv_lens, here.kv_lens, call.lengths_known)
    if call.features.batch_invariant and plan.policy != "fixed_size":
        raise invalid("plan", f"policy {plan.policy!r} with batch_invariant", "'fixed_size'")
    _check_formats(plan, call)
    if _CHECKED.get(id(plan)) is not plan:
        check_plan(plan)
        _CHECKED[id(plan)] = plan


def _check_formats(plan: Plan, call: Call) -> None:
    """Refuse a plan whose workspace has no room for the O that this call's kernel promotes. In
    other respects formats need not be those that a plan was made for."""
    made, here = (
        promoted_slots(problem, plan.tile_rows, plan.num_workers, plan.config)
        for problem in (plan.problem, call.problem)
    )
    if plan.schedule == "persistent" and here > made:
        got, own = (f"{p.q_dtype} over {p.kv_format}" for p in (plan.problem, call.problem))
        raise invalid("plan", f"one for {got}", f"one for {own}: its workspace has promoted O")


def _check_lengths(name: str, made: tuple[int, ...], here: tuple[int, ...], known: bool) -> None:
    """A plan's lengths are this call's, or where those stay on a device within their bounds."""
    for request, (planned, own) in enumerate(zip(made, here, strict=True)):
        if planned > own or (known and planned != own):
            limit = f"this call's {own}" if known else f"up to this call's bound, {own}"
            raise invalid("plan", f"{name}[{request}] of {planned}", limit)
