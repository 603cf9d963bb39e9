"""Errors that the package raises.

Every message names the argument, what was got and what is supported, in that order, and is
raised before anything is compiled, loaded or launched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


class MlaLabError(Exception):
    """Base of every error that mla_lab raises on purpose."""


class InvalidInput(MlaLabError, ValueError):
    """A value that no backend could accept: wrong shape, range, device or length."""


class InvalidType(InvalidInput, TypeError):
    """An argument of the wrong type or dtype (also an `InvalidInput`)."""


class Unsupported(MlaLabError, NotImplementedError):
    """A legal call that the chosen backend, device or build cannot run."""


class BuildError(MlaLabError, RuntimeError):
    """A kernel could not be compiled, loaded or verified."""


class DeviceLost(MlaLabError, RuntimeError):
    """An error inside a kernel: the device takes no more work from this process."""


def describe(argument: str, got: object, supported: object) -> str:
    """Text of an error message: argument, got, supported."""
    return f"{argument}: got {got}; supported: {supported}"


def under_names(
    error: InvalidInput | Unsupported, names: Mapping[str, str]
) -> InvalidInput | Unsupported:
    """The error of an inner call with the parameter names of the outer one, by `names`. The
    argument itself is renamed; in the rest of the message names with an underscore are.
    """
    argument, colon, rest = str(error).partition(": ")
    for inner, outer in names.items():
        if "_" in inner:
            rest = re.sub(rf"\b{inner}\b", outer, rest)
    return type(error)(names.get(argument, argument) + colon + rest)


def invalid(argument: str, got: object, supported: object) -> InvalidInput:
    """An `InvalidInput` with the text of `describe`."""
    return InvalidInput(describe(argument, got, supported))


def invalid_type(argument: str, got: object, supported: object) -> InvalidType:
    """An `InvalidType` with the text of `describe`."""
    return InvalidType(describe(argument, got, supported))


def unsupported(argument: str, got: object, supported: object) -> Unsupported:
    """An `Unsupported` with the text of `describe`."""
    return Unsupported(describe(argument, got, supported))
