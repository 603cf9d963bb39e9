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
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..backends.base import Planned, Replay
from ..call.bind import Call
from ..call.checks.form_cache import look
from ..call.checks.overlap import byte_range
from ..call.decode_args import MAX_SCALE, PARAMETERS, Declared, DecodeArgs, Rule

#: queries and plans of recorded calls; a new plan in every step makes them many, and then all are
#: dropped
MAX_RECORDED = 256
#: calls of one query shape and plan that are kept, such as those over several caches, the latest
#: first
MAX_ALIKE = 16

Result = Tensor | tuple[Tensor, Tensor]
Player = Callable[[DecodeArgs], Result | None]


class Recorded(NamedTuple):
    """A recorded call: what replays it, and all that it is compared by."""

    player: Player
    compared: tuple[object, ...]


_RECORDED: dict[object, tuple[Recorded, ...]] = {}
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
        for recorded in _RECORDED.get((id(args.plan), args.query.shape), ()):
            if recorded.player is not _last:
                result = _play(recorded.player, args)
                if result is not None:
                    _last = recorded.player
                    return result
    except ValueError:
        _last = None  # its kernel refuses the tensors: another one may take them
        return replay(args)
    except (AttributeError, TypeError, IndexError, RuntimeError):
        pass  # an argument is wrong, or the launch failed: the full checks and a full run say why
    return None


def _play(player: Player, args: DecodeArgs) -> Result | None:
    try:
        return player(args)
    except ValueError:
        return None


def record(call: Call, planned: Planned, launch: Replay) -> None:
    """Keep `launch` for calls like `call`, as long as the workspace that it uses lives."""
    args = call.args
    uses = bool(planned.workspace.nbytes)
    if isinstance(args.sinks, (list, tuple)) or (uses and args.workspace_buffer is None):
        return
    exact, any_bound = args.plan is not None, getattr(planned, "any_bound", False)
    # a kernel that takes pages of any size does not compare the size
    sized = getattr(planned, "any_page", False) or not (exact or any_bound)
    kinds = tuple(_kind(p, getattr(args, p.name), uses, any_bound, sized) for p in PARAMETERS)
    expected: dict[str, Any] = {"launch": launch, "form": call.form}
    for p in PARAMETERS:
        expected |= _expected(p, getattr(args, p.name), exact)
    key = (id(args.plan), args.query.shape)
    compared = _compared(args, kinds, expected)
    if uses:
        gone = compared
        expected["workspace_buffer"] = ref(args.workspace_buffer, lambda _: _drop(key, gone))
    _drop(key, compared)
    if key not in _RECORDED and len(_RECORDED) >= MAX_RECORDED:
        clear()
    player = player_factory(PARAMETERS, kinds, tuple(expected))(**expected)
    others = _RECORDED.get(key, ())
    _RECORDED[key] = (Recorded(player, compared), *others[: MAX_ALIKE - 1])


def _compared(
    args: DecodeArgs, kinds: tuple[Kind, ...], expected: dict[str, Any]
) -> tuple[object, ...]:
    """What two recorded calls of a query shape and plan differ in, beside addresses and scales."""
    apart = {"launch", "workspace_buffer"}
    apart |= {p.name for p in PARAMETERS if p.arg.rule in (Rule.SCALE, Rule.POSITIVE_SCALE)}
    apart |= {name for name in expected if name.endswith(("_begin", "_end"))}
    values = tuple((name, value) for name, value in expected.items() if name not in apart)
    return kinds, id(args.workspace_buffer), values


def clear() -> None:
    """Drop every recorded call: the next of each kind is checked in full."""
    global _last
    _RECORDED.clear()
    _last = None


def _drop(key: object, compared: tuple[object, ...]) -> None:
    """Drop a call whose workspace is gone, or that is recorded anew."""
    global _last
    kept = tuple(r for r in _RECORDED.pop(key, ()) if r.compared != compared)
    if kept:
        _RECORDED[key] = kept
    _last = None


def _kind(
    p: Declared, value: object, uses_workspace: bool, any_bound: bool = False, sized: bool = True
) -> Kind:
    if p.arg.rule is Rule.SAME:
        return "same"
    if any_bound and p.arg.rule is Rule.TABLES and isinstance(value, Tensor):
        return "table"
    if any_bound and p.arg.rule is Rule.BOUND and value is not None:
        return "free"
    if value is None or isinstance(value, bool):
        return repr(value)
    if p.arg.rule is Rule.WORKSPACE:
        return "used" if uses_workspace else "unused"
    if not isinstance(value, Tensor):
        return "number"
    if p.arg.rule is Rule.PAGES:
        kind = "tensor" if value.is_contiguous() else "strided"
        return f"{kind} pages" if sized else kind
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
#: kinds of tensors: by their shape, or by a rule of its own
TENSOR_KINDS = ("tensor", "vector", "strided", "tensor pages", "strided pages", "table")
_TENSORS = {
    "tensor": "a.{n}.shape == {n}",
    "vector": "a.{n}.numel() == {n}_count",
    "strided": "",
}
#: alignment of the tensors that vector loads and stores stream
LARGE = 16
_WHOLE = "(size := a.{n}.nbytes) and a.{n}.is_contiguous()"
_STRIDED = "(size := a.{n}.shape[0] * a.{n}.stride(0) * {n}_bytes)"
_PAGE = "a.{n}.shape[-2] == {n}[-2]"
#: offsets into a table have 32 bits
_TABLE = "len(t := a.{n}.shape) == 2 and t[0] == {n}[0] and t[0] * a.{n}.stride(0) < 1 << 31"
_CONDITIONS: dict[tuple[Rule, Kind], str] = {
    (Rule.SAME, "same"): "a.{n} is {n}",
    (Rule.EQUAL, "number"): "(a.{n} is {n} or (type(a.{n}) is {n}_type and a.{n} == {n}))",
    (Rule.TABLES, "table"): f"{_TABLE} and t[1]",
    (Rule.BOUND, "free"): "type(a.{n}) is {n}_type and a.{n} >= 0",
    (Rule.BOUND, "number"): "type(a.{n}) is {n}_type and {n}_low < a.{n} <= {n}_high",
    (Rule.SCALE, "number"): f"type(a.{{n}}) is {{n}}_type and -{MAX_SCALE} < a.{{n}} < {MAX_SCALE}",
    (Rule.POSITIVE_SCALE, "number"): f"type(a.{{n}}) is {{n}}_type and 0.0 < a.{{n}} < {MAX_SCALE}",
    (Rule.WORKSPACE, "used"): "a.{n} is {n}()",
    (Rule.WORKSPACE, "unused"): "(a.{n} is {n}() or look(a.{n}) == {n}_look)",
    (Rule.PAGES, "tensor"): _WHOLE,
    (Rule.PAGES, "tensor pages"): f"{_WHOLE} and {_PAGE}",
    (Rule.PAGES, "strided"): _STRIDED,
    (Rule.PAGES, "strided pages"): f"{_STRIDED} and {_PAGE}",
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
        found.append((kind in TENSOR_KINDS, text))
    return [text for _, text in sorted(found, key=lambda entry: entry[0])]


def _apart(parameters: tuple[Declared, ...], kinds: tuple[Kind, ...]) -> list[str]:
    """Statements that leave the player where a tensor may overlap a result that the caller gives,
    or a large one the workspace. Lengths and tables inside the workspace, which is the recorded
    call's own, are seen by the full checks alone.
    """
    pairs = list(zip(parameters, kinds, strict=True))
    tensors = {p.name: p for p, kind in pairs if kind in TENSOR_KINDS}
    if not any(p.arg.written for p in tensors.values()):
        tensors = {name: p for name, p in tensors.items() if p.arg.alignment >= LARGE}
    large = [name for name, p in tensors.items() if p.arg.written or p.arg.alignment >= LARGE]
    written = [name for name, p in tensors.items() if p.arg.written]
    used = [p.name for p, kind in pairs if kind == "used"]
    if not written and not used:
        return []
    ends = {name: f"{name}_at + {name}_size" for name in tensors}
    for name, p in tensors.items():
        if p.arg.rule is Rule.PAGES:
            ends[name] = f"{name}_at + size"
        elif p.arg.rule is Rule.TABLES:
            ends[name] = f"{name}_at + a.{name}.shape[0] * a.{name}.stride(0) * {name}_bytes"
    lines = [f"{name}_at = a.{name}.data_ptr()" for name in tensors]
    for name in written:
        others = [n for n in tensors if n != name and (n not in written or n < name)]
        hits = [f"({name}_at < {ends[n]} and {n}_at < {ends[name]})" for n in others]
        lines.append(f"if {' or '.join(hits)}: return None")
    for name in used:
        hits = [f"({name}_begin < {ends[n]} and {n}_at < {name}_end)" for n in large]
        lines.append(f"if {' or '.join(hits)}: return None")
    return lines
