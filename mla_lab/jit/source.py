"""The source files behind a kernel, and their hash: a change in any of them is a new artifact.

CuTe kernels: the entry's module and what it imports from this package, found by reading the
import statements (nothing is executed), without `KernelConfig`, whose values are in the key.
CUDA kernels: the folder's .cu and .cc files and what they include with quotes.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..core.errors import BuildError, invalid
from ..core.resources import kernels_dir
from ..cute import registry
from .arch import ARCHS

PACKAGE = Path(__file__).resolve().parents[1]
#: files that a kernel's module imports and that do not change its code
INTERFACE = {
    PACKAGE / f for f in ("plan/config.py", "core/errors.py", "core/problem.py", "cute/registry.py")
}
#: a path's time of change in ns and its bytes; None where nothing is there
Stamp = tuple[int, int] | None


def cuda_kernels() -> tuple[str, ...]:
    """Names ("cuda/...") of the kernels/NAME folders that hold a NAME.cu."""
    folders = sorted(p for p in kernels_dir().glob("*") if (p / f"{p.name}.cu").is_file())
    return tuple(f"cuda/{p.name}" for p in folders)


def supported_archs(kernel: str) -> tuple[str, ...]:
    """Architectures a kernel is written for; `InvalidInput` for an unregistered name."""
    if kernel.startswith("cute/"):
        return registry.lookup(kernel).archs
    if kernel in cuda_kernels():
        return ARCHS
    raise invalid("kernel", repr(kernel), (*registry.KERNELS, *cuda_kernels()))


def source_files(kernel: str) -> tuple[Path, ...]:
    """Every file of this repository that the kernel's code depends on, sorted."""
    return _sources(kernel).files


def source_hash(kernel: str) -> str:
    """SHA-256 over names and contents of `source_files`."""
    return _sources(kernel).digest


@dataclass(frozen=True)
class _Sources:
    """Source files of a kernel as they were read."""

    files: tuple[Path, ...]
    digest: str
    #: state of every path that was looked at, those that are not there included
    stamps: dict[str, Stamp]

    def current(self) -> bool:
        """Whether none of the paths has changed since."""
        return all(_stamp(path) == stamp for path, stamp in self.stamps.items())


#: by the files that a kernel's code starts from: to read some 90 files takes 20 ms, and the choice
#: for a call looks for several builds
_READ: dict[tuple[Path, ...], _Sources] = {}


def _sources(kernel: str) -> _Sources:
    roots = _roots(kernel)
    known = _READ.get(roots)
    if known is None or not known.current():
        known = _READ[roots] = _read(roots)
    return known


def _roots(kernel: str) -> tuple[Path, ...]:
    """Files that the kernel's code starts from."""
    if not kernel.startswith("cute/"):
        folder = kernels_dir() / kernel.removeprefix("cuda/")
        return tuple(sorted([*folder.glob("*.cu"), *folder.glob("*.cc")]))
    module = PACKAGE.joinpath("cute", *registry.lookup(kernel).module.split("."))
    package = module / "__init__.py"
    root = package if package.is_file() else module.with_suffix(".py")
    if not root.is_file():
        raise BuildError(f"{kernel}: its module {root} is not there; correct cute/registry.py")
    return (root,)


def _read(roots: tuple[Path, ...]) -> _Sources:
    seen, stamps = _closure(roots)
    digest = hashlib.sha256()
    for path in seen:
        digest.update(f"{_name(path)}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return _Sources(seen, digest.hexdigest(), stamps)


def _stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _name(path: Path) -> str:
    """kernels/... or mla_lab/..., in a checkout and in an installed wheel alike."""
    inside = path.is_relative_to(kernels_dir())
    home, name = (kernels_dir(), "kernels") if inside else (PACKAGE, PACKAGE.name)
    return f"{name}/{path.relative_to(home).as_posix()}"


def _closure(roots: tuple[Path, ...]) -> tuple[tuple[Path, ...], dict[str, Stamp]]:
    """The roots and what they take in, sorted; and the state of every path that was looked at."""
    seen: set[Path] = set()
    stamps: dict[str, Stamp] = {}
    todo = list(roots)
    while todo:
        path = todo.pop()
        outside = path.name == "__init__.py" and not path.is_relative_to(PACKAGE / "cute")
        if str(path) in stamps or path in INTERFACE or outside:
            continue
        # before the file is read: a change meanwhile is a change since
        stamps[str(path)] = stamp = _stamp(str(path))
        if stamp is not None and path.is_file():
            seen.add(path)
            python = path.suffix == ".py"
            todo += _python_imports(path, stamp) if python else _quoted_includes(path)
    return tuple(sorted(seen)), stamps


def _quoted_includes(path: Path) -> set[Path]:
    names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M)
    bases = (path.parent, kernels_dir())
    return {(base / name).resolve() for name in names for base in bases}


def _python_imports(path: Path, stamp: Stamp) -> set[Path]:
    """Files of this package that a module may import."""
    return {file for statement in _statements(path, stamp) for file in _targets(path, *statement)}


@lru_cache(maxsize=512)
def _statements(path: Path, _stamp: Stamp) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """Import statements of a module: level, module and names."""
    found = []
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", tuple(a.name for a in node.names)))
        elif isinstance(node, ast.Import):
            found += [(0, alias.name, ()) for alias in node.names]
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):  # of statements alone
            todo += getattr(node, block, ())
    return tuple(found)


def _targets(path: Path, level: int, module: str, names: tuple[str, ...]) -> list[Path]:
    """Files that one import statement may load; names of a module that is no package load none."""
    if level:
        base = path.parents[level - 1]
    elif module.split(".")[0] == PACKAGE.name:
        base, module = PACKAGE, ".".join(module.split(".")[1:])
    else:
        return []
    target = base.joinpath(*module.split(".")) if module else base
    found = [target, *(target / name for name in names)] if target.is_dir() else [target]
    return [f for each in found for f in (each.with_suffix(".py"), each / "__init__.py")]
