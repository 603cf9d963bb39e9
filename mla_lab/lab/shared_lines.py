"""Lines of code that the SM100 kernel has in common with the Hopper kernels, counted from source.

A kernel's code is its own folder, and what that uses of other modules of `mla_lab/cute`: top-level
definitions, followed by name, not by annotation. Blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

from ..core.markdown import markdown_table
from ..jit.source import PACKAGE

CUTE = PACKAGE / "cute"
OURS = ("mla_sm100",)
HOPPER = ("keep_ab_sm90", "swap_ab_sm90")
#: a definition: its file and name
Definition = tuple[Path, str]


@cache
def _defined(path: Path) -> dict[str, ast.stmt]:
    """Top-level definitions of a module by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                found |= {name.id: node for name in names if isinstance(name, ast.Name)}
    return found


@cache
def _imported(path: Path) -> dict[str, Definition]:
    """Names that a module takes from other modules of `mla_lab/cute`."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            package = base / "__init__.py"
            module = package if package.is_file() else base.with_suffix(".py")
            if module.is_file() and module.is_relative_to(CUTE):
                for alias in node.names:
                    found[alias.asname or alias.name] = (module, alias.name)
    return found


def _names(node: ast.AST) -> set[str]:
    """Names in a definition, those of annotations left out."""
    found, todo = set(), [node]
    while todo:
        one = todo.pop()
        found |= {one.id} if isinstance(one, ast.Name) else set()
        for field, value in ast.iter_fields(one):
            if field not in ("annotation", "returns"):
                each = value if isinstance(value, list) else [value]
                todo += [child for child in each if isinstance(child, ast.AST)]
    return found


@cache
def reached(folders: tuple[str, ...]) -> frozenset[Definition]:
    """Definitions of some folders of `mla_lab/cute`, and of what they use."""
    files = [path for folder in folders for path in (CUTE / folder).rglob("*.py")]
    todo = [(path, name) for path in files for name in _defined(path)]
    seen: set[Definition] = set()
    while todo:
        path, name = one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if name not in _defined(path):
            todo += [_imported(path)[name]] if name in _imported(path) else []
            continue
        used = _names(_defined(path)[name])
        todo += [(path, other) for other in used if other in _defined(path)]
        todo += [_imported(path)[other] for other in used if other in _imported(path)]
    return frozenset(one for one in seen if one[1] in _defined(one[0]))


def _lines(definition: Definition) -> set[int]:
    """Lines of a definition that hold code."""
    path, name = definition
    node = _defined(path)[name]
    found: set[int] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
            continue
        if isinstance(each, ast.expr | ast.stmt | ast.arg | ast.keyword) and not _is_text(each):
            found |= {each.lineno, each.end_lineno or each.lineno}
    return found


def _is_text(node: ast.AST) -> bool:
    """A docstring, or a string that goes over several lines."""
    several = isinstance(node, ast.Constant) and node.end_lineno != node.lineno
    return several or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def counts() -> dict[str, tuple[int, int]]:
    """Folder of `mla_lab/cute` -> lines that the SM100 kernel uses, those that Hopper's use too."""
    ours, theirs = reached(OURS), reached(HOPPER)
    lines: dict[Path, set[int]] = {}
    shared: dict[Path, set[int]] = {}
    for one in ours:
        lines.setdefault(one[0], set()).update(_lines(one))
        if one in theirs:
            shared.setdefault(one[0], set()).update(_lines(one))
    totals: Counter[str] = Counter()
    common: Counter[str] = Counter()
    for path, numbers in lines.items():
        totals[path.relative_to(CUTE).parts[0]] += len(numbers)
        common[path.relative_to(CUTE).parts[0]] += len(shared.get(path, ()))
    return {folder: (totals[folder], common[folder]) for folder in sorted(totals)}


def table() -> str:
    """Markdown: lines by folder, and their sum."""
    found = counts()
    rows = [(f"`{folder}`", f"{lines:,}", f"{both:,}") for folder, (lines, both) in found.items()]
    lines, both = map(sum, zip(*found.values(), strict=True))
    rows.append(("all", f"{lines:,}", f"{both:,} ({both / lines:.0%})"))
    names = ("folder of `mla_lab/cute`", "lines of the SM100 kernel:", "also Hopper's:")
    return markdown_table(names, rows)
