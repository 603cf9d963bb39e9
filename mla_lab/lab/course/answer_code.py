"""The code behind an answer: of a notebook's statements those that the checked value depends on.

A student's notebook draws charts and moves sliders; none of that has to run to judge a function.
"""

from __future__ import annotations

import ast
import symtable
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from ..checks import CHECKS


@dataclass(frozen=True)
class Statement:
    """One statement of a cell: names that it binds, names that it uses."""

    cell: int
    node: ast.stmt
    binds: frozenset[str]
    uses: frozenset[str]


@dataclass(frozen=True)
class Answer:
    """What `lab.check(number, value)` is handed, and the statements before it, in order."""

    number: str
    cell: int
    value: ast.expr
    needs: tuple[Statement, ...]


def parsed(source: str) -> ast.Module:
    """A cell without its magics; without statements where it is no Python."""
    lines = [
        "" if line.lstrip().startswith(("%", "!", "?")) else line for line in source.split("\n")
    ]
    for text in (source, "\n".join(lines)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return ast.Module([], [])


def answers(cells: list[str]) -> list[Answer]:
    """The checked answers of a notebook, the last one of an exercise that is checked twice."""
    before: list[Statement] = []
    found: dict[str, Answer] = {}
    for index, source in enumerate(cells):
        for node in parsed(source).body:
            for number, value in _checks(node):
                needed = _needed(before, _names(ast.Expr(value))[1])
                found[number] = Answer(number, index, value, needed)
            binds, uses = _names(node)
            before.append(Statement(index, node, binds, uses))
    return [found[number] for number in CHECKS if number in found]


def _checks(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """(exercise, value) of each `lab.check(...)` in a statement."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or len(call.args) != 2:
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        first = call.args[0]
        if name == "check" and isinstance(first, ast.Constant) and first.value in CHECKS:
            yield str(first.value), call.args[1]


def _names(node: ast.stmt) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the notebook that a statement binds, and that it or its functions use."""
    try:
        table = symtable.symtable(ast.unparse(node), "cell", "exec")
    except (SyntaxError, ValueError, RecursionError):
        return frozenset(), frozenset()
    binds = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    binds |= {s.get_name() for s in table.get_symbols() if s.is_namespace()}
    for part in ast.walk(node):
        # x[0] = 1 and x.y = 1 change x
        if isinstance(part, ast.Subscript | ast.Attribute) and isinstance(part.ctx, ast.Store):
            base: ast.expr = part
            while isinstance(base, ast.Subscript | ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name):
                binds.add(base.id)
    return frozenset(binds), frozenset(_used(table))


def _used(table: symtable.SymbolTable) -> set[str]:
    inner = table.get_type() != "module"
    used = {
        s.get_name()
        for s in table.get_symbols()
        if s.is_referenced() and (s.is_global() or not inner)
    }
    return used.union(*map(_used, table.get_children()))


def _needed(before: list[Statement], names: frozenset[str]) -> tuple[Statement, ...]:
    """Statements that bind `names`, or what those use, until nothing is added."""
    wanted, taken = set(names), set[int]()
    while True:
        new = [i for i, s in enumerate(before) if i not in taken and s.binds & wanted]
        if not new:
            return tuple(before[i] for i in sorted(taken))
        taken.update(new)
        wanted.update(*(before[i].uses for i in new))
