"""Reader's functions that are plain arithmetic, called as Python with the names of their module.

The numbers are read off the module's text, so that these checks need neither compiler nor DSL.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from .catalogue import FOLDER
from .text import module_text

_STEPS = "mla_lab.cute.steps."
#: types of the DSL that plain arithmetic may name
_TYPES = {"Int32": int, "Int64": int}


@cache
def constants_of(path: Path) -> dict[str, int]:
    """Whole numbers that a step's module names at its top, such as THREADS: its own, and those that
    it imports from other steps.
    """
    known: dict[str, Any] = {}
    for node in ast.parse(module_text(path)).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_STEPS):
            theirs = constants_of(FOLDER / f"{(node.module or '').removeprefix(_STEPS)}.py")
            known |= {a.name: theirs[a.name] for a in node.names if a.name in theirs}
        elif isinstance(node, ast.Assign):
            code = compile(ast.Module([node], []), path.name, "exec")
            try:
                exec(code, {"__builtins__": {}}, known)
            except NameError:  # it is made by the DSL, and no number
                continue
    return {name: value for name, value in known.items() if isinstance(value, int)}


def imported_numbers(path: Path) -> dict[str, int]:
    """Those that come from other steps: the module's own text lacks their values."""
    nodes = [n for n in ast.parse(module_text(path)).body if isinstance(n, ast.ImportFrom)]
    known = constants_of(path)
    return {a.name: known[a.name] for node in nodes for a in node.names if a.name in known}


def in_module(function: Callable[..., Any], path: Path, **more: Any) -> Callable[..., Any]:
    """`function` of a cell; names in it mean `more` or the numbers of the module at `path`, as in
    the compiled text, and only then what they are in the cell.
    """
    if not isinstance(function, FunctionType):
        return function
    names = {**function.__globals__, **_TYPES, **constants_of(path), **more}
    code, defaults = function.__code__, function.__defaults__
    return FunctionType(code, names, function.__name__, defaults, function.__closure__)
