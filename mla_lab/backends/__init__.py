"""The backends in the order of "auto", and which of them runs a call.

    choose(form, "auto")    the first backend that can run it, or Unsupported with every reason
    explain(form)           each backend: taken, or its reason

A backend that is named either runs the call or raises its own reason: there is no fallback.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from ..call.form import Form
from ..core.errors import invalid, unsupported
from .base import Backend, Noted, gpu_of

__all__ = [
    "ALIASES",
    "MODULES",
    "NAMES",
    "ORDER",
    "Backend",
    "Verdict",
    "choose",
    "explain",
    "gpu_of",
    "load",
]

#: module and class of each backend; a module is imported at its first use
MODULES: dict[str, str] = {
    "torch": "mla_lab.backends.torch.backend:TorchBackend",
    "cute": "mla_lab.backends.cute.backend:CuteBackend",
    "cuda": "mla_lab.backends.cuda.backend:CudaBackend",
    "cute-keep-ab-gather": "mla_lab.backends.cute.gather_backend:KeepAbGatherBackend",
    "emulate": "mla_lab.backends.emulate.backend:EmulateBackend",
    "emulate_sm100": "mla_lab.backends.emulate.backend:EmulateSm100Backend",
}
#: what "auto" chooses from; the others run where they are named
ORDER = ("cute", "cuda", "torch")
#: other names of the contract
ALIASES = {"xqa": "cuda", "trtllm-gen": "auto", "cute-dsl": "cute"}
NAMES = ("auto", *ORDER, *(name for name in MODULES if name not in ORDER), *ALIASES)


#: of a backend that reads lengths on the host, where they lie on a device
SYNCHRONISES = "each call copies its lengths to the host and waits for them, whatever bounds it has"


class Verdict(NamedTuple):
    """Whether one backend runs a call; reason is None where it can."""

    name: str
    reason: str | None
    taken: bool
    #: what a caller should know where it runs the call
    note: str | None = None

    def __str__(self) -> str:
        said = "taken" if self.taken else self.reason or "could, comes later"
        return f"{self.name}: {said}" + (f" ({self.note})" if self.note else "")


def explain(form: Form) -> tuple[Verdict, ...]:
    """Every backend in the order of "auto", the first that can run the call taken."""
    verdicts: list[Verdict] = []
    for name in ORDER:
        reason = _reason(name, form)
        taken = reason is None and not any(v.taken for v in verdicts)
        verdicts.append(Verdict(name, reason, taken, None if reason else _note(name, form)))
    return tuple(verdicts)


def _note(name: str, form: Form) -> str | None:
    runner = load(name)
    if runner.reads_lengths and not form.on_host:
        return SYNCHRONISES
    if not isinstance(runner, Noted):
        return None
    return runner.note(form.features, form.bounds, gpu_of(form.device))


@lru_cache(maxsize=4096)
def choose(form: Form, name: str) -> Backend:
    """The backend that runs calls of this form.

    Raises InvalidInput for an unknown name, Unsupported with the reasons of those that refuse.
    """
    if name not in NAMES:
        raise invalid("backend", repr(name), NAMES)
    wanted = ALIASES.get(name, name)
    if wanted != "auto":
        reason = _reason(wanted, form)
        if reason is not None:
            raise unsupported("backend", repr(name), _others(form, wanted, reason))
        return load(wanted)
    verdicts = explain(form)
    for verdict in verdicts:
        if verdict.taken:
            return load(verdict.name)
    raise unsupported("backend", repr(name), "none: " + "; ".join(map(str, verdicts)))


def load(name: str) -> Backend:
    """The backend called `name`; one object in a process."""
    module, attribute = MODULES[name].split(":")
    return _instance(module, attribute)


@lru_cache
def _instance(module: str, attribute: str) -> Backend:
    made: Backend = getattr(import_module(module), attribute)()
    return made


def _reason(name: str, form: Form) -> str | None:
    if name not in MODULES:
        return "this build has no such backend"
    return load(name).supports(form.features, form.bounds, gpu_of(form.device))


def _others(form: Form, wanted: str, reason: str) -> str:
    """The reason, and the backends that can run the call instead."""
    able = [name for name in ORDER if name != wanted and _reason(name, form) is None]
    return f"{reason}; {' and '.join(able) or 'no backend'} can run this call"
