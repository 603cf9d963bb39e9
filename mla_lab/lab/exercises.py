"""Exercises: a stub for the reader, a hidden check, a solution that tests prove.

The stub cell's metadata carries nbmake's `post_cell_execute`: the lines of the solution, ending
in `lab.solved("31.1")`. Under nbmake the solution replaces the stub and its check must pass; a
reader's own answer gets a verdict, and a right one is stored (`progress`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from html import escape
from typing import Any

from IPython.display import HTML, display

from ..core.errors import MlaLabError, invalid
from . import progress
from .checks import CHECKS, Attempt, Hint
from .session import current
from .style import GREEN, PAGE_TINT, RED

#: exercises whose solution was injected: their checks must pass
_SOLVED: set[str] = set()


class ExerciseFailed(MlaLabError, AssertionError):
    """The injected solution of an exercise does not pass its own check."""


@dataclass(frozen=True)
class Verdict:
    """Result of a check: right or not, and a sentence for the reader."""

    passed: bool
    sentence: str


def judge(number: str, attempt: Any) -> Verdict:
    """Verdict on the answer to exercise `number` ("31.1"). Raises InvalidInput for no exercise."""
    if number not in CHECKS:
        raise invalid("number", repr(number), tuple(CHECKS))
    try:
        return Verdict(True, CHECKS[number](Attempt(attempt)))
    except Hint as hint:
        return Verdict(False, f"{hint}.".replace("?.", "?"))
    except Exception as error:  # an answer of an unexpected type
        form = f"{type(error).__name__}: {error}"
        return Verdict(False, f"The answer has another form than the exercise asks for ({form}).")


def check(number: str, attempt: Any) -> None:
    """Show the verdict on a reader's answer and store a solved exercise.

    Raises ExerciseFailed only where an injected solution does not pass.
    """
    verdict = judge(number, attempt)
    if number in _SOLVED and not verdict.passed:
        raise ExerciseFailed(f"the solution of exercise {number} fails: {verdict.sentence}")
    if not verdict.passed:
        way_out = f"Change the cell above and run both; lab.reveal({number!r}) shows a solution."
        _show("Not yet", RED, f"{verdict.sentence} {way_out}")
        return
    if number not in current().passed:
        current().passed.append(number)
    kept = number in _SOLVED or progress.keep(number)
    lost = "" if kept else f" ({progress.path()} cannot be written: set {progress.VARIABLE}.)"
    _show("Solved", GREEN, verdict.sentence + lost)


def solved(exercise: str) -> None:
    """Marks that the solution of `exercise` (such as "31.1") is in place; called by tests."""
    _SOLVED.add(exercise)


def reveal(number: str) -> None:
    """Shows the solution of an exercise of the open notebook, of a kernel the functions."""
    mark = f'lab.solved("{number}")'
    for cell in json.loads(current().path.read_text(encoding="utf-8"))["cells"]:
        source = "\n".join(cell["metadata"].get("nbmake", {}).get("post_cell_execute", []))
        if mark in source:
            code = escape(_solution(number) or source.replace(mark, "").rstrip())
            display(HTML(f"<pre style='background:{PAGE_TINT};padding:10px'>{code}</pre>"))
            return
    raise invalid("number", repr(number), f"an exercise of {current().path.name}")


def _solution(number: str) -> str:
    """The author's functions of a step of notebooks 60 to 69, else empty."""
    from .steps import STEPS
    from .steps.text import solution_text

    step = STEPS.get(number.split(".")[0])
    return solution_text(step) if step else ""


def _coded(text: str) -> str:
    """HTML of a sentence; what stands in backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _show(word: str, color: str, text: str) -> None:
    display(
        HTML(
            f"<div style='border-left:5px solid {color};padding:4px 10px;margin:4px 0'>"
            f"<b>{word}.</b> {_coded(text)}</div>"
        )
    )
