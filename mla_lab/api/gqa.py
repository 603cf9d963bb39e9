"""GQA and MQA decode, from arguments to a backend.

    check      arguments -> CheckedGqaCall, or an error that names what was wrong
    choose     the CUDA C++ kernel where it can, torch elsewhere
    run        the backend writes out and lse

The names that engines call are in `contract_gqa`.
"""

from __future__ import annotations

from torch import Tensor

from ..backends.base import gpu_of
from ..backends.cuda import gqa as cuda
from ..backends.cuda.xqa import PLACES
from ..backends.torch import gqa as by_torch
from ..call.gqa_args import GqaArgs, GqaForm
from ..call.gqa_checks import check
from ..core.errors import invalid, invalid_type, unsupported

BACKENDS = ("auto", "cuda", "torch")
ALIASES = {"xqa": "cuda", "trtllm-gen": "auto"}


def decode(args: GqaArgs) -> Tensor | tuple[Tensor, Tensor]:
    """out [num_tokens, heads, head_dim], or (out, lse [num_tokens, heads]) with return_lse.

    Raises InvalidInput, InvalidType or Unsupported before anything is compiled or launched.
    """
    call = check(args)
    runners = {"cuda": cuda.run, "torch": by_torch.run}
    runners[choose(call.form, args.backend)](call)
    if args.return_lse and call.lse is not None:
        return call.out, call.lse
    return call.out


def choose(form: GqaForm, backend: str) -> str:
    """The backend that runs calls of this form: "cuda" or "torch".

    One that is named runs the call or raises its own reason; "auto" is cuda where it can. The
    kernel's entry refuses tensors that are not aligned, by name.
    """
    if not isinstance(backend, str):
        raise invalid_type("backend", type(backend).__name__, "a name (str)")
    if backend not in (*BACKENDS, *ALIASES):
        raise invalid("backend", repr(backend), (*BACKENDS, *ALIASES))
    wanted = ALIASES.get(backend, backend)
    reasons = {"cuda": cuda.reason(form, gpu_of(form.device)), "torch": by_torch.reason(form)}
    if wanted == "auto":
        if not form.aligned:
            reasons["cuda"] = reasons["cuda"] or f"its kernel takes {PLACES}"
        able = [name for name, why in reasons.items() if why is None]
        if able:
            return able[0]
        told = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise unsupported("backend", repr(backend), f"none: {told}")
    if reasons[wanted] is not None:
        other = "torch" if wanted == "cuda" else "cuda"
        able_too = "no backend" if reasons[other] else other
        raise unsupported("backend", repr(backend), f"{reasons[wanted]}; {able_too} can run it")
    return wanted
