"""The process that runs a student's code: `python -m mla_lab.lab.course.worker`.

stdin: a JSON object with `notebook`, `skip` (exercises that were tried before) and `seconds`.
stdout: JSON lines, `begun` before an exercise is judged and its verdict after. What the student's
code prints is dropped. Limits of memory, file size and processor time are set first; this is no
sandbox against an attack.
"""

from __future__ import annotations

import ast
import builtins
import json
import linecache
import os
import resource
import sys
from pathlib import Path
from typing import Any, TextIO

from ..exercises import judge
from ..steps.kernel import StepKernel
from .answer_code import Answer, answers
from .submission import Unreadable, code_cells, plain

#: bytes of address space and of a written file
MEMORY, FILE = 16 << 30, 64 << 20


def limit(seconds: int) -> None:
    """Limits of this process, before foreign code runs."""
    cpu = 4 * seconds
    for what, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _no_input(prompt: object = "") -> str:
    raise EOFError("an answer has nobody to ask")


def value_of(answer: Answer, cells: list[str], name: str) -> Any:
    """The value that was handed to the check. Raises whatever the student's code raises."""
    names: dict[str, Any] = {"__name__": "__main__"}
    failed: Exception | None = None
    for statement in answer.needs:
        file = f"{name} cell {statement.cell}"
        source = cells[statement.cell]
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        try:
            exec(compile(ast.Module([statement.node], []), file, "exec"), names)
        except Exception as error:  # a later statement may bind the name all the same
            failed = failed or error
    try:
        return eval(compile(ast.Expression(answer.value), name, "eval"), names)
    except NameError:
        if failed is not None:
            raise failed from None
        raise


def verdict(answer: Answer, cells: list[str], name: str) -> tuple[bool, str]:
    """(passed, sentence) of one answer, whatever its code does."""
    try:
        value = value_of(answer, cells, name)
        if isinstance(value, StepKernel) and not value.functions:
            return False, "This is the author's kernel (lab.solution), not the student's."
        found = judge(answer.number, value)
    except BaseException as error:  # an answer may even raise SystemExit
        shown = f"{type(error).__name__}: {plain(error, 120)}"
        return False, f"The code before the check stopped with {shown}."
    return bool(found.passed), plain(found.sentence)


def main(request: dict[str, Any], out: TextIO) -> None:
    """Judges the exercises of one notebook that are not skipped."""

    def say(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    path = Path(request["notebook"])
    try:
        cells = code_cells(path)
    except Unreadable as error:
        say(problem=str(error))
        return
    for answer in answers(cells):
        if answer.number in request["skip"]:
            continue
        say(begun=answer.number)
        passed, sentence = verdict(answer, cells, path.name)
        say(number=answer.number, passed=passed, sentence=sentence)
    say(done=True)


if __name__ == "__main__":
    asked = json.loads(sys.stdin.readline())
    own = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    builtins.input = _no_input
    limit(int(asked["seconds"]))
    main(asked, own)
    own.flush()
    # threads or exit handlers of the student's code have no say
    os._exit(0)
