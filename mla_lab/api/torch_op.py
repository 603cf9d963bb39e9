"""The decode call under torch.compile: a custom operation that the compiler does not look into.

The operation writes to out and lse, which the traced program allocates, so that it owns no memory
and returns nothing. Its schema follows from the parameter list. Eager calls do not use it: an
operation of torch.library costs more host time than a kernel's launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, get_args

import torch
from torch import Tensor

from ..call.checks import tensors as argument
from ..call.checks.shapes import WIDE
from ..call.decode_args import PARAMETERS, Declared, Rule
from ..core.errors import invalid, invalid_type, unsupported

NAME = "mla_lab::decode"
#: schema types of Python types
_TYPES = {Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str"}


def operation_parameters(parameters: Sequence[Declared]) -> list[Declared]:
    """All but values of one batch, such as a plan, and how the call was made."""
    listed = [p for p in parameters if p.public or p.name == "debug"]
    return [p for p in listed if p.arg.rule is not Rule.SAME]


def scales_of(parameters: Sequence[Declared]) -> list[str]:
    """Numbers that may be tensors: the operation takes each as both."""
    return [p.name for p in parameters if {float, Tensor} <= set(get_args(p.type))]


def schema(parameters: Sequence[Declared]) -> str:
    """The operation's schema: its parameters in their order, then the scales that are tensors."""
    parts, written = [], iter("abcdefgh")
    for p in parameters:
        kinds = get_args(p.type) or (p.type,)
        kind = next(text for python, text in _TYPES.items() if python in kinds)
        if p.name in scales_of(parameters):
            kind = "float"
        if p.arg.written:
            kind += f"({next(written)}!)"
        parts.append(f"{kind}{'?' if NoneType in kinds else ''} {p.name}")
    parts += [f"Tensor? {name}_tensor" for name in scales_of(parameters)]
    return f"({', '.join(parts)}) -> ()"


LISTED = operation_parameters(PARAMETERS)
_NAMES = [p.name for p in LISTED]
_SCALES = scales_of(LISTED)
#: classes of each argument's values
_KINDS = {
    p.name: tuple(kind for kind in get_args(p.type) or (p.type,) if kind in (*_TYPES, NoneType))
    for p in LISTED
}


def define(eager: Callable[..., Any]) -> None:
    """Make the operation; `eager` is the native call that runs it."""

    def run(*values: Any) -> None:
        named = dict(zip(_NAMES, values, strict=False))
        for name, tensor in zip(_SCALES, values[len(_NAMES) :], strict=True):
            named[name] = named[name] if tensor is None else tensor
        eager(**named)

    written = [p.name for p in LISTED if p.arg.written]
    operation = torch.library.custom_op(NAME, run, mutates_args=written, schema=schema(LISTED))
    operation.register_fake(lambda *values: None)


def call(named: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """A call inside a program that torch.compile traces; `named` are all of its arguments.

    Raises Unsupported for a `plan`, which is a value of one batch and no part of a program, and
    InvalidInput for what the schema would take or drop and an eager call refuses.
    """
    if named["plan"] is not None:
        raise unsupported("plan", "a Plan under torch.compile", "None: the backend plans itself")
    if isinstance(named["sinks"], (list, tuple)):
        named["sinks"] = _only(named["sinks"])
    for p in LISTED:
        _check_kind(p.name, named[p.name])
    if named["max_seq_len"] is None and not named["native"]:
        raise invalid_type("max_seq_len", "NoneType", "an int")
    query = named["query"]
    if named["workspace_buffer"] is None and not named["native"]:
        named["workspace_buffer"] = query.new_empty(0, dtype=torch.uint8)
    out, lse = _results(named)
    named["out"], named["lse"] = out, lse
    tensors = []
    for name in _SCALES:
        scale = named[name]
        tensors.append(scale if isinstance(scale, Tensor) else None)
        named[name] = 1.0 if isinstance(scale, Tensor) else float(scale)
    torch.ops.mla_lab.decode(*[named[name] for name in _NAMES], *tensors)
    return (out, lse) if named["return_lse"] and lse is not None else out


def _only(sinks: Sequence[Any]) -> Tensor:
    """The tensor of a list of one."""
    if len(sinks) != 1:
        raise invalid("sinks", f"a list of {len(sinks)}", "a tensor, or a list of one")
    if not isinstance(sinks[0], Tensor):
        got = f"a list of {type(sinks[0]).__name__}"
        raise invalid_type("sinks", got, "a torch.Tensor, or a list of one")
    return sinks[0]


def _check_kind(name: str, value: Any) -> None:
    """The type of an argument: the schema takes True for 1, and float() takes a text."""
    kinds = _KINDS[name]
    if isinstance(value, bool):
        fits = bool in kinds
    elif isinstance(value, int):
        fits = int in kinds or float in kinds
    else:
        fits = isinstance(value, kinds)
    if not fits:
        raise invalid_type(name, type(value).__name__, " or ".join(k.__name__ for k in kinds))


def _results(named: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """out, and lse where it is wanted: the caller's, or new ones."""
    query, out, lse = named["query"], named["out"], named["lse"]
    if query.dim() not in (3, 4):
        raise invalid("query", f"shape {list(query.shape)}", "three or four dimensions")
    argument.integer("kv_lora_rank", named["kv_lora_rank"], 1)
    if out is None:
        dtype = query.dtype if query.dtype in WIDE else torch.bfloat16
        out = query.new_empty((*query.shape[:-1], named["kv_lora_rank"]), dtype=dtype)
    if lse is None and named["return_lse"]:
        tokens = query.shape[0] if query.dim() == 3 else query.shape[0] * query.shape[1]
        lse = query.new_empty((tokens, query.shape[-2]), dtype=torch.float32)
    return out, lse
