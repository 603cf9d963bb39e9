"""The source tree as data, for the tests that guard it."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mla_lab"


class Import(NamedTuple):
    """One imported module, as an absolute dotted name, and where it stands."""

    importer: str
    target: str
    line: int
    #: inside a function: it happens at the first call, not at import
    lazy: bool
    #: for type checkers alone: it never happens
    types: bool


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files that git would commit: tracked ones, and new ones that are not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return tuple(sorted(p for n in set(listed.split("\0")) if n and (p := ROOT / n).is_file()))


def module_name(path: Path) -> str:
    """`mla_lab.plan.tile` for its file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def package_modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    return {module_name(p): p for p in sorted(PACKAGE.rglob("*.py"))}


def _is_type_checking(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def _walk(node: ast.AST, lazy: bool, types: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, lazy, types
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk(child, lazy or inside, types or _is_type_checking(child))


def _targets(node: ast.AST, importer: str, is_package: bool, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = importer.split(".")
            keep = len(parts) - node.level + is_package
            base = ".".join([*parts[:keep], *([node.module] if node.module else [])])
        for alias in node.names:
            # `from . import x` names a module, `from .x import y` a thing inside one
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def imports_of(path: Path, known: set[str] | None = None) -> list[Import]:
    """Imports of one file, those inside functions and for type checkers too."""
    importer = module_name(path) if path.is_relative_to(ROOT) else path.stem
    return imports_in(
        path.read_text(encoding="utf-8"),
        importer,
        is_package=path.name == "__init__.py",
        known=set(package_modules()) if known is None else known,
    )


def imports_in(source: str, importer: str, *, is_package: bool, known: set[str]) -> list[Import]:
    """As `imports_of`, of source text."""
    return [
        Import(importer, target, getattr(node, "lineno", 0), lazy, types)
        for node, lazy, types in _walk(ast.parse(source), lazy=False, types=False)
        for target in _targets(node, importer, is_package, known)
    ]
