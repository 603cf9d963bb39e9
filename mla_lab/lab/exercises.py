"""Exercises: a stub for the reader, a check beside it, a solution that continuous tests prove.

The stub cell's metadata carries nbmake's `post_cell_execute`: the lines of the solution, ending
in `lab.solved("31.1")`. A reader who runs the stub sees "not attempted"; under nbmake the
solution replaces the stub and the check must pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from typing import Any

from IPython.display import HTML, display

from ..core.errors import MlaLabError, invalid
from .session import current

#: exercises whose solution was injected: their checks must pass
_SOLVED: set[str] = set()


class ExerciseFailed(MlaLabError, AssertionError):
    """The injected solution of an exercise does not pass its own check."""


def solved(exercise: str) -> None:
    """Marks that the solution of `exercise` (such as "31.1") is in place; called by tests."""
    _SOLVED.add(exercise)


def exercise(number: str, attempt: Any, check: Callable[[Any], str]) -> None:
    """Runs `check(attempt)` and shows the verdict.

    `check` returns one sentence of praise that says what was shown, and raises AssertionError
    with a hint where the attempt is wrong. An attempt that is `...`, or returns it, counts as
    not attempted. Raises `ExerciseFailed` only where the injected solution does not pass.
    """
    try:
        verdict = _attempted(attempt, check)
    except Exception as error:
        hint = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if number in _SOLVED:
            raise ExerciseFailed(f"the solution of exercise {number} fails: {hint}") from error
        _show("Not yet", "#D55E00", f"{hint}. Change the cell above and run both again.")
        return
    if verdict is None:
        if number in _SOLVED:
            raise ExerciseFailed(f"the solution of exercise {number} still returns ...")
        way_out = f"lab.reveal({number!r}) shows a solution."
        _show("Not attempted", "#6B6F78", f"Fill in the cell above. {way_out}")
        return
    current().passed.append(number)
    _show("Solved", "#009E73", verdict)


def _attempted(attempt: Any, check: Callable[[Any], str]) -> str | None:
    """The verdict, or None where nothing was attempted."""
    if attempt is ...:
        return None
    try:
        return check(attempt)
    except NotAttempted:
        return None


class NotAttempted(MlaLabError):
    """Raised by `answer` where a stub was left as it is."""


def answer(value: Any) -> Any:
    """`value`, unless it is the stub's `...`; checks pass results through this."""
    if value is ... or (isinstance(value, tuple) and any(v is ... for v in value)):
        raise NotAttempted("not attempted")
    return value


def reveal(number: str) -> None:
    """Shows the hidden solution of an exercise of the open notebook."""
    notebook = json.loads(current().path.read_text())
    for cell in notebook["cells"]:
        lines = cell["metadata"].get("nbmake", {}).get("post_cell_execute", [])
        source = "\n".join(lines)
        if f'lab.solved("{number}")' in source:
            code = source.replace(f'lab.solved("{number}")', "").rstrip()
            display(HTML(f"<pre style='background:#F4F6FA;padding:10px'>{escape(code)}</pre>"))
            return
    raise invalid("number", repr(number), f"an exercise of {current().path.name}")


def _show(word: str, color: str, text: str) -> None:
    display(
        HTML(
            f"<div style='border-left:5px solid {color};padding:4px 10px;margin:4px 0'>"
            f"<b style='color:{color}'>{word}.</b> {escape(text)}</div>"
        )
    )
