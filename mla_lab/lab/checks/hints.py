"""Shared parts of the checks: the guarded answer of a reader, and the hint for a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ...core.errors import MlaLabError

NOTHING_YET = "Nothing is filled in yet: replace each `...` in the cell above by your answer"


class Hint(MlaLabError):
    """A wrong answer; the message is the hint for the reader."""


class Attempt:
    """A reader's function or value. Calls turn what goes wrong inside into a `Hint`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, *arguments: Any) -> Any:
        """The result for `arguments`. Raises Hint for a stub, an error, or no result at all."""
        if self.value is ...:
            raise Hint(NOTHING_YET)
        if not callable(self.value):
            raise Hint(
                f"A function is expected here, and this is {short(self.value)}: hand it over by "
                "its name, without calling it"
            )
        try:
            result = self.value(*arguments)
        except Exception as error:
            given = ", ".join(map(short, arguments))
            raise Hint(
                f"Called with ({given}) it raised {type(error).__name__}: {error}"
            ) from error
        if _unfinished(result):
            raise Hint(NOTHING_YET)
        if result is None:
            raise Hint("The function returns None: is a `return` missing?")
        return result

    def plain(self) -> Any:
        """The value itself. Raises Hint for a stub."""
        if _unfinished(self.value):
            raise Hint(NOTHING_YET)
        return self.value


Check: TypeAlias = Callable[[Attempt], str]


def _unfinished(value: Any) -> bool:
    return value is ... or (isinstance(value, tuple) and any(part is ... for part in value))


def need(condition: object, hint: str) -> None:
    """Raises Hint with `hint` where the condition does not hold."""
    if not condition:
        raise Hint(hint)


def parts(value: Any, *names: str) -> Sequence[Any]:
    """`value` as so many parts. Raises Hint where it is not a tuple or list of that length."""
    if not isinstance(value, tuple | list) or len(value) != len(names):
        raise Hint(f"Return {len(names)} values, ({', '.join(names)}), in place of {short(value)}")
    return value


def number(value: Any, what: str) -> float:
    """`value` as a number. Raises Hint where it is none; `what` names it."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise Hint(f"{what} should be a number, and is {short(value)}") from error


def truth(value: Any, hint: str) -> bool:
    """`value` as a bool, NumPy's too. Raises Hint with `hint` where it is neither."""
    need(isinstance(value, bool | np.bool_), hint)
    return bool(value)


def short(value: Any) -> str:
    """`value` as it would be typed, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
