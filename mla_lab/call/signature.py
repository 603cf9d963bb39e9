"""Public functions whose parameters are the fields of a class of arguments.

The text of each function is written from the list and compiled once, so that a call costs one
Python frame: it fills an object of the class, and hands it on. Signature, defaults and annotations
are those of a function written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import Parameter
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

from .decode_args import REQUIRED, Declared

P = ParamSpec("P")

_KEYWORD, _BOTH = Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD


class Target(NamedTuple):
    """What a public function does with its arguments."""

    #: the class of arguments
    arguments: type
    #: runs a call
    run: Callable[[Any], Any]
    #: the result of a call like an earlier one, or None
    replay: Callable[[Any], Any] | None = None
    #: runs a call that torch.compile traces
    traced: Callable[[Any], Any] | None = None


def public_parameters(parameters: Sequence[Declared]) -> list[Parameter]:
    """The parameters of FlashInfer's call, in its order."""
    return [
        Parameter(
            p.name, _KEYWORD if p.keyword_only else _BOTH, default=p.default, annotation=p.type
        )
        for p in parameters
        if p.public
    ]


def native_parameters(parameters: Sequence[Declared]) -> list[Parameter]:
    """Those without a default by position, then all others by keyword."""
    listed = []
    for p in parameters:
        default = p.arg.native if p.default is REQUIRED else p.default
        kind = _BOTH if default is REQUIRED else _KEYWORD
        if p.public or p.name == "debug":
            listed.append(Parameter(p.name, kind, default=default, annotation=p.type))
    return sorted(listed, key=lambda p: p.kind)


def function(
    name: str,
    target: Target,
    signature: Sequence[Parameter],
    doc: str,
    fixed: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """A function with `signature` that fills the target's arguments and hands them on.

    fixed: expressions of fields that `signature` lacks, by name; other fields take their default.
    """
    scope: dict[str, Any] = {"new": object.__new__, **target._asdict()}
    scope |= {"is_compiling": torch.compiler.is_compiling}
    lines = [f"def {name}{_signature_text(signature, scope)}:"]
    values = {p.name: p.name for p in signature}
    values |= fixed or {}
    wanted = {f.name: f.default for f in fields(target.arguments)}
    for missing in wanted.keys() - values.keys():
        values[missing] = f"default_{missing}"
        scope[values[missing]] = wanted[missing]
    if target.traced is not None:
        listed = ", ".join(f"{key!r}: {values[key]}" for key in wanted)
        lines += ["    if is_compiling():", f"        return traced({{{listed}}})"]
    lines += ["    args = new(arguments)", *(f"    args.{key} = {values[key]}" for key in wanted)]
    if target.replay is None:
        lines.append("    return run(args)")
    else:
        lines += ["    result = replay(args)", "    return run(args) if result is None else result"]
    exec(compile("\n".join(lines), f"<parameters of {name}>", "exec"), scope)
    made: Callable[..., Any] = scope[name]
    made.__doc__ = doc
    made.__module__ = sys._getframe(1).f_globals["__name__"]  # as namedtuple does: pickle finds it
    made.__annotations__ = {p.name: p.annotation for p in signature}
    return made


def typed(
    arguments: Callable[P, Any], made: Callable[..., Any]
) -> Callable[P, Tensor | tuple[Tensor, Tensor]]:
    """`made`, which has the parameters of the class `arguments`, for a type checker."""
    return made


def _signature_text(signature: Sequence[Parameter], scope: dict[str, Any]) -> str:
    """(a, b=default_b, *, c=default_c), the defaults put into `scope`."""
    parts: list[str] = []
    for p in signature:
        if p.kind is _KEYWORD and "*" not in parts:
            parts.append("*")
        if p.default is REQUIRED:
            parts.append(p.name)
        else:
            scope[f"given_{p.name}"] = p.default
            parts.append(f"{p.name}=given_{p.name}")
    return "(" + ", ".join(parts) + ")"
