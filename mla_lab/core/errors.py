"""Errors that the package raises.

Every message names the argument, what was got and what is supported, in that order, and is
raised before anything is compiled, loaded or launched.
"""

from __future__ import annotations


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


def invalid(argument: str, got: object, supported: object) -> InvalidInput:
    """An `InvalidInput` with the text of `describe`."""
    return InvalidInput(describe(argument, got, supported))


def invalid_type(argument: str, got: object, supported: object) -> InvalidType:
    """An `InvalidType` with the text of `describe`."""
    return InvalidType(describe(argument, got, supported))


def unsupported(argument: str, got: object, supported: object) -> Unsupported:
    """An `Unsupported` with the text of `describe`."""
    return Unsupported(describe(argument, got, supported))
