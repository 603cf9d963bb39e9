"""Repeated calls: checked once, then launched again after a comparison of their arguments.

The layers of a step, and steps of equal shapes, make the same call with other tensors. What a
backend returned for the first of them launches it again. The comparison is written from the
parameter list (`call.decode_args`), by the rule of each argument, so that nothing that the checks
depend on is left out. What the kernel's entry checks of each tensor is left to it: rank, dtype,
device, contiguity and alignment. Whatever differs, and whatever the entry refuses, takes the full
checks, which say why.

Debug mode is decided when a call is recorded: a replay does not read the environment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..backends.base import Planned, Replay
from ..call.bind import Call
from ..call.checks.form_cache import look
from ..call.checks.overlap import byte_range
from ..call.decode_args import MAX_SCALE, PARAMETERS, Declared, DecodeArgs, Rule

#: recorded calls; a new plan in every step makes them many, and then all are dropped
MAX_RECORDED = 256

Result = Tensor | tuple[Tensor, Tensor]
Player = Callable[[DecodeArgs], Result | None]

_RECORDED: dict[object, Player] = {}
#: the call that was replayed last; the layers of a step repeat it
_last: Player | None = None

#: what an argument is compared by: a singleton, a tensor, a number, or a workspace that the launch
#: uses
Kind = str


def replay(args: DecodeArgs) -> Result | None:
    """The results of a call like a recorded one, or None where there is no such call."""
    global _last
    try:
        if _last is not None:
            result = _last(args)
            if result is not None:
                return result
        player = _RECORDED.get((id(args.plan), args.query.shape))
        if player is not None and player is not _last:
            result = player(args)
            if result is not None:
                _last = player
                return result
    except (AttributeError, TypeError, ValueError, RuntimeError):
        pass  # an argument is wrong, or the launch failed: the full checks and a full run say why
    return None


def record(call: Call, planned: Planned, launch: Replay) -> None:
    """Keep `launch` for calls like `call`, as long as the workspace that it uses lives."""
    args = call.args
    uses = bool(planned.workspace.nbytes)
    if isinstance(args.sinks, (list, tuple)) or (uses and args.workspace_buffer is None):
        return
    kinds = tuple(_kind(p, getattr(args, p.name), uses) for p in PARAMETERS)
    expected: dict[str, Any] = {"launch": launch, "form": call.form}
    for p in PARAMETERS:
        value = getattr(args, p.name)
        expected |= _expected(p, value, exact=args.plan is not None)
    key = (id(args.plan), args.query.shape)
    if uses:
        expected["workspace_buffer"] = ref(args.workspace_buffer, lambda _: _drop(key))
    if len(_RECORDED) >= MAX_RECORDED:
        clear()
    _drop(key)
    _RECORDED[key] = player_factory(PARAMETERS, kinds, tuple(expected))(**expected)


def clear() -> None:
    """Drop every recorded call: the next of each kind is checked in full."""
    global _last
    _RECORDED.clear()
    _last = None


def _drop(key: object) -> None:
    """Drop a call whose workspace is gone, or that is recorded anew."""
    global _last
    _RECORDED.pop(key, None)
    _last = None


def _kind(p: Declared, value: object, uses_workspace: bool) -> Kind:
    if p.arg.rule is Rule.SAME:
        return "same"
    if value is None or isinstance(value, bool):
        return repr(value)
    if p.arg.rule is Rule.WORKSPACE:
        return "used" if uses_workspace else "unused"
    if not isinstance(value, Tensor):
        return "number"
    if p.arg.rule is Rule.PAGES and not value.is_contiguous():
        return "strided"
    return "vector" if value.dim() == 1 else "tensor"


def _expected(p: Declared, value: Any, exact: bool) -> dict[str, Any]:
    """The values that a comparison by `p`'s rule reads, by their names in it."""
    name = p.name
    found: dict[str, Any] = {f"{name}_type": type(value), name: value}
    if isinstance(value, Tensor):
        begin, end = byte_range(value)
        found |= {name: value.shape, f"{name}_begin": begin, f"{name}_size": end - begin}
        found |= {f"{name}_count": value.numel(), f"{name}_bytes": value.element_size()}
        if p.arg.rule is Rule.WORKSPACE:
            found |= {name: ref(value), f"{name}_look": look(value), f"{name}_end": end}
    elif p.arg.rule is Rule.BOUND and value is not None:
        # a plan is checked against the bound itself; a backend's own counts the next power of two
        high = value if exact or value < 1 else 1 << (value - 1).bit_length()
        low = value - 1 if exact or value < 1 else high // 2
        found |= {f"{name}_low": low, f"{name}_high": high}
    return found


#: kinds of arguments that are compared by identity
_SINGLETONS = ("None", "True", "False")
#: conditions by rule and kind; {n} is an argument's name, `a` holds those of the call
#: alignment of the tensors that vector loads and stores stream
LARGE = 16
_TENSORS = {
    "tensor": "a.{n}.shape == {n}",
    "vector": "a.{n}.numel() == {n}_count",
    "strided": "",
}
_CONDITIONS: dict[tuple[Rule, Kind], str] = {
    (Rule.SAME, "same"): "a.{n} is {n}",
    (Rule.EQUAL, "number"): "(a.{n} is {n} or (type(a.{n}) is {n}_type and a.{n} == {n}))",
    (Rule.BOUND, "number"): "type(a.{n}) is {n}_type and {n}_low < a.{n} <= {n}_high",
    (Rule.SCALE, "number"): f"type(a.{{n}}) is {{n}}_type and -{MAX_SCALE} < a.{{n}} < {MAX_SCALE}",
    (Rule.POSITIVE_SCALE, "number"): f"type(a.{{n}}) is {{n}}_type and 0.0 < a.{{n}} < {MAX_SCALE}",
    (Rule.WORKSPACE, "used"): "a.{n} is {n}()",
    (Rule.WORKSPACE, "unused"): "(a.{n} is {n}() or look(a.{n}) == {n}_look)",
    (Rule.PAGES, "tensor"): "(size := a.{n}.nbytes) and a.{n}.is_contiguous()",
    (Rule.PAGES, "strided"): "(size := a.{n}.shape[0] * a.{n}.stride(0) * {n}_bytes)",
}

_TEXT = """
def factory({names}):
    def player(a):
        if not (
            {conditions}
        ):
            return None
        {apart}
        first = a.out
        if first is None:
            first = empty(form.out_shape, dtype=form.out_dtype, device=form.device)
        second = a.lse
        if not a.return_lse:
            launch(a, first, second)
            return first
        if second is None:
            second = empty(form.lse_shape, dtype=float32, device=form.device)
        launch(a, first, second)
        return first, second
    return player
"""


@lru_cache(maxsize=256)
def player_factory(
    parameters: tuple[Declared, ...], kinds: tuple[Kind, ...], names: tuple[str, ...]
) -> Callable[..., Player]:
    """What makes the players of calls whose arguments are of these kinds, from values by name."""
    scope: dict[str, Any] = {"look": look, "empty": torch.empty, "float32": torch.float32}
    text = _TEXT.format(
        names=", ".join(names),
        conditions="\n            and ".join(comparison(parameters, kinds)),
        apart="\n        ".join(_apart(parameters, kinds)),
    )
    exec(compile(text, "<comparison of a repeated call>", "exec"), scope)
    factory: Callable[..., Player] = scope["factory"]
    return factory


def comparison(parameters: tuple[Declared, ...], kinds: tuple[Kind, ...]) -> list[str]:
    """One condition for each argument, those of tensors last: they cost most."""
    found: list[tuple[bool, str]] = []
    for p, kind in zip(parameters, kinds, strict=True):
        text = _CONDITIONS.get((p.arg.rule, kind), _TENSORS.get(kind, ""))
        text = f"a.{p.name} is {kind}" if kind in _SINGLETONS else text.format(n=p.name)
        found.append((kind in _TENSORS, text))
    return [text for _, text in sorted(found, key=lambda entry: entry[0])]


def _apart(parameters: tuple[Declared, ...], kinds: tuple[Kind, ...]) -> list[str]:
    """Statements that leave the player where the query, the cache or a result may overlap a result
    or the workspace. The few bytes of other tensors are compared in the full checks alone.
    """
    pairs = list(zip(parameters, kinds, strict=True))
    tensors = {
        p.name: p
        for p, kind in pairs
        if kind in _TENSORS and (p.arg.written or p.arg.alignment >= LARGE)
    }
    written = [name for name, p in tensors.items() if p.arg.written]
    used = [p.name for p, kind in pairs if kind == "used"]
    if not written and not used:
        return []
    ends = {name: f"{name}_at + {name}_size" for name in tensors}
    for name, p in tensors.items():
        if p.arg.rule is Rule.PAGES:
            ends[name] = f"{name}_at + size"
    lines = [f"{name}_at = a.{name}.data_ptr()" for name in tensors]
    for name in written:
        others = [n for n in tensors if n != name and (n not in written or n < name)]
        hits = [f"({name}_at < {ends[n]} and {n}_at < {ends[name]})" for n in others]
        lines.append(f"if {' or '.join(hits)}: return None")
    for name in used:
        hits = [f"({name}_begin < {ends[n]} and {n}_at < {name}_end)" for n in tensors]
        lines.append(f"if {' or '.join(hits)}: return None")
    return lines
