"""The source files behind a kernel, and their hash: a change in any of them is a new artifact.

CuTe kernels: the entry's module and what it imports from this package, found by reading the
import statements (nothing is executed), without `KernelConfig`, whose values are in the key.
CUDA kernels: the folder's .cu and .cc files and what they include with quotes.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from ..core.errors import BuildError, invalid
from ..core.resources import kernels_dir
from ..cute import registry
from .arch import ARCHS

PACKAGE = Path(__file__).resolve().parents[1]
#: files that a kernel's module imports and that do not change its code
INTERFACE = {PACKAGE / f for f in ("plan/config.py", "core/errors.py", "cute/registry.py")}
#: a file and its time -> what it may take in, which need not be there
Edges = Callable[[Path, int], frozenset[Path]]


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
    if kernel.startswith("cute/"):
        module = PACKAGE.joinpath("cute", *registry.lookup(kernel).module.split("."))
        package = module / "__init__.py"
        root = package if package.is_file() else module.with_suffix(".py")
        if not root.is_file():
            raise BuildError(f"{kernel}: its module {root} is not there; correct cute/registry.py")
        return _closure(root, _python_imports)
    folder = kernels_dir() / kernel.removeprefix("cuda/")
    roots = sorted([*folder.glob("*.cu"), *folder.glob("*.cc")])
    return tuple(sorted({f for root in roots for f in _closure(root, _quoted_includes)}))


def source_hash(kernel: str) -> str:
    """SHA-256 over names and contents of `source_files`."""
    digest = hashlib.sha256()
    for path in source_files(kernel):
        digest.update(f"{_name(path)}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _name(path: Path) -> str:
    """kernels/... or mla_lab/..., in a checkout and in an installed wheel alike."""
    inside = path.is_relative_to(kernels_dir())
    home, name = (kernels_dir(), "kernels") if inside else (PACKAGE, PACKAGE.name)
    return f"{name}/{path.relative_to(home).as_posix()}"


def _closure(root: Path, edges: Edges) -> tuple[Path, ...]:
    seen: set[Path] = set()
    met = {root}
    todo = [root]
    while todo:
        path = todo.pop()
        outside = path.name == "__init__.py" and not path.is_relative_to(PACKAGE / "cute")
        if path in INTERFACE or outside or not path.is_file():
            continue
        seen.add(path)
        new = edges(path, path.stat().st_mtime_ns) - met
        met |= new
        todo += new
    return tuple(sorted(seen))


@lru_cache(maxsize=512)
def _quoted_includes(path: Path, _mtime: int) -> frozenset[Path]:
    names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M)
    bases = (path.parent, kernels_dir())
    return frozenset((base / name).resolve() for name in names for base in bases)


@lru_cache(maxsize=512)
def _python_imports(path: Path, _mtime: int) -> frozenset[Path]:
    """Files of this package that a module may import."""
    found: list[Path] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found += _targets(path, node.level, node.module, [a.name for a in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found += _targets(path, 0, alias.name, [])
    return frozenset(found)


def _targets(path: Path, level: int, module: str | None, names: list[str]) -> list[Path]:
    if level:
        base = path.parents[level - 1]
    elif module and module.split(".")[0] == PACKAGE.name:
        base, module = PACKAGE, ".".join(module.split(".")[1:])
    else:
        return []
    target = base.joinpath(*module.split(".")) if module else base
    inside = [target / name for name in names]
    files = [path.with_suffix(".py") for path in (target, *inside)]
    return files + [path / "__init__.py" for path in (target, *inside)]
