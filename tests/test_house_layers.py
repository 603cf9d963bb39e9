"""Imports point down: notebooks, lab and cli, bench and its kin, decode, backends, kernels, plan,
and at the bottom the numbers of a problem.

Lazy imports, and those for type checkers alone, count as much as those at the top of a module: a
circle through a function or an annotation is a circle.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

from .house import Import, imports_in, imports_of, package_modules

#: layers from the top; a room may import lower ones, and its own layer while no circle forms
LAYERS = (
    {"cli", "lab", "__main__", "flashinfer_names", "flash_mla_names"},
    {"studies", "verify"},
    {"simulate"},
    {"bench", "interop", "xray"},
    {"api"},
    {"backends"},
    {"emulate"},
    {"cute", "jit"},
    {"call", "plan", "reference"},
    {"workload"},
    {"core"},
)
#: folders and files right under `mla_lab/`, `__init__.py` too
MOST_ROOMS = 22
RANK = {room: rank for rank, rooms in enumerate(reversed(LAYERS)) for room in rooms}

#: rooms that need NumPy and the standard library alone to be imported; torch may come with a call
NUMPY_ONLY = {"plan", "workload"}
#: the modules of `core` that hold numbers alone, and what each of them may import beside
NUMPY_ONLY_CORE = {
    "errors": set(),
    "resources": {"errors"},
    "dims": set(),
    "problem": {"dims", "errors"},
    "gpu": {"errors", "problem", "resources"},
    "models": {"dims", "errors", "problem"},
}
#: third-party packages and the rooms that may import them; those not named are free
OWNERS = {
    "cutlass": {"cute", "emulate"},
    "IPython": {"lab"},
    "ipywidgets": {"lab"},
    "jupyterlab": {"lab"},
    "plotly": {"lab"},
    "ray": {"bench", "cli"},
    "vllm": {"interop", "studies"},
    "sglang": {"interop", "studies"},
    "flashinfer": {"bench"},
    "flash_mla": {"bench"},
}


def room(module: str) -> str:
    """`plan` for `mla_lab.plan.tile`; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def part(module: str) -> str:
    """A room's folder or file: `mla_lab.lab.explorers` for `mla_lab.lab.explorers.plan`."""
    return ".".join(module.split(".")[:3])


@cache
def all_imports() -> list[Import]:
    return [imp for path in package_modules().values() for imp in imports_of(path)]


def inside(imports: list[Import]) -> list[Import]:
    """Imports of one room by another."""
    return [
        imp
        for imp in imports
        if imp.target.split(".")[0] == "mla_lab"
        and room(imp.importer)
        and room(imp.importer) != room(imp.target)
    ]


def upward(imports: list[Import]) -> list[str]:
    """Imports that break a layer, each as a sentence."""
    wrong = []
    for imp in inside(imports):
        here, there = room(imp.importer), room(imp.target)
        # the package's own __init__ holds the version and the exported names
        if there and RANK[there] > RANK[here]:
            wrong.append(f"{imp.importer}:{imp.line} imports {imp.target}")
    return wrong


def core_module(module: str) -> str:
    """`gpu` for `mla_lab.core.gpu`; empty outside `core`."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["core"] and len(parts) > 2 else ""


def beyond_numbers(imports: list[Import]) -> list[str]:
    """Imports inside `core` that a module of numbers must not make, each as a sentence."""
    return [
        f"{imp.importer}:{imp.line} imports {imp.target}"
        for imp in imports
        if (allowed := NUMPY_ONLY_CORE.get(core_module(imp.importer))) is not None
        and core_module(imp.target) not in {"", *allowed}
    ]


def light(imp: Import) -> bool:
    """The importer promises that importing it loads NumPy alone."""
    return room(imp.importer) in NUMPY_ONLY or core_module(imp.importer) in NUMPY_ONLY_CORE


def circles(imports: list[Import], name: Callable[[str], str] = room) -> list[list[str]]:
    """Circles among rooms (or whatever `name` makes of a module): what is left without those that
    import no remaining one, and those that no remaining one imports.
    """
    edges: dict[str, set[str]] = {}
    for imp in inside(imports) if name is room else imports:
        if name(imp.importer) != name(imp.target):
            edges.setdefault(name(imp.importer), set()).add(name(imp.target))
    left = set(edges)
    while True:
        imported = set().union(*(edges[r] for r in left))
        free = {r for r in left if not edges[r] & left or r not in imported}
        if not free:
            return [sorted(left)] if left else []
        left -= free


def misplaced(imports: list[Import]) -> list[str]:
    """Third-party imports outside the room that owns them."""
    wrong = []
    for imp in imports:
        owners = OWNERS.get(imp.target.split(".")[0])
        if owners is not None and not imp.types and room(imp.importer) not in owners:
            wrong.append(f"{imp.importer}:{imp.line} imports {imp.target}")
    return wrong


def heavy(imports: list[Import]) -> list[str]:
    """Module-level imports beyond NumPy in rooms that promise none."""
    allowed = set(sys.stdlib_module_names) | {"mla_lab", "numpy"}
    return [
        f"{imp.importer}:{imp.line} imports {imp.target}"
        for imp in imports
        if light(imp) and not imp.lazy and not imp.types and imp.target.split(".")[0] not in allowed
    ]


def test_every_room_has_a_layer():
    rooms = {room(module) for module in package_modules()}
    assert rooms - {""} == set(RANK), "name its layer in LAYERS"
    assert len(rooms) <= MOST_ROOMS


def test_imports_point_down():
    assert upward(all_imports()) == []


def test_no_circles_among_rooms():
    assert circles(all_imports()) == []


def test_no_circles_among_modules():
    modules = package_modules()
    assert circles([imp for imp in all_imports() if imp.target in modules], str) == []


def test_no_circles_among_the_parts_of_a_room():
    modules = package_modules()
    inner = [
        imp
        for imp in all_imports()
        if imp.target in modules and room(imp.importer) == room(imp.target)
    ]
    assert circles(inner, part) == []


def test_nothing_in_the_package_imports_its_face():
    """`mla_lab/__init__.py` hands on names of its rooms: an import of it would look upwards."""
    assert [imp for imp in all_imports() if imp.target == "mla_lab" != imp.importer] == []


def test_modules_of_numbers_import_no_other():
    assert beyond_numbers(all_imports()) == []


def test_third_parties_stay_in_their_room():
    assert misplaced(all_imports()) == []


def test_numbers_need_only_numpy():
    assert heavy(all_imports()) == []


def test_models_and_problem_never_touch_torch():
    torch = [
        imp
        for imp in all_imports()
        if imp.target.split(".")[0] == "torch"
        and not imp.types
        and light(imp)
        and core_module(imp.importer) != "gpu"
    ]
    assert torch == []


KNOWN = {
    "mla_lab",
    "mla_lab.plan",
    "mla_lab.api.decode",
    "mla_lab.jit",
    "mla_lab.cute",
    "mla_lab.core.gpu",
}


@pytest.mark.parametrize(
    ("module", "source", "check"),
    [
        ("mla_lab.plan.x", "from ..api.decode import decode", upward),
        ("mla_lab.plan.x", "def f():\n    from ..api import decode", upward),
        ("mla_lab.plan.x", "import mla_lab.api.decode", upward),
        ("mla_lab.core.gpu", "from ..plan import make_plan", upward),
        ("mla_lab.core.problem", "from .gpu import Gpu", beyond_numbers),
        ("mla_lab.jit.x", "def f():\n    import cutlass.cute", misplaced),
        ("mla_lab.plan.x", "import torch", heavy),
        ("mla_lab.core.gpu", "if True:\n    import torch", heavy),
    ],
)
def test_the_guard_sees_a_planted_import(module, source, check):
    assert check(imports_in(source, module, is_package=False, known=KNOWN))


def test_the_guard_sees_a_planted_circle():
    there = imports_in("from ..cute import a", "mla_lab.jit.x", is_package=False, known=KNOWN)
    back = imports_in("from ..jit import b", "mla_lab.cute.x", is_package=False, known=KNOWN)
    assert circles(there) == []
    assert circles(there + back) == [["cute", "jit"]]


def test_the_guard_sees_a_planted_circle_of_modules():
    known = {"mla_lab.plan.a", "mla_lab.plan.b"}
    there = imports_in("from .b import f", "mla_lab.plan.a", is_package=False, known=known)
    lazy = "def g():\n    from . import a"
    back = imports_in(lazy, "mla_lab.plan.b", is_package=False, known=known)
    assert circles(there, str) == []
    assert circles(there + back, str) == [sorted(known)]


def test_the_guard_counts_what_is_only_for_type_checkers():
    """It has an arrow; whether another package is there does not matter to it."""
    head = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
    found = {
        line: imports_in(head + line, "mla_lab.plan.x", is_package=False, known=KNOWN)
        for line in ("from ..api.decode import decode", "import torch", "import cutlass")
    }
    assert [bool(upward(imports)) for imports in found.values()] == [True, False, False]
    assert not any(heavy(imports) or misplaced(imports) for imports in found.values())


LIGHT = "import sys, {module}; print(*sorted(m for m in sys.modules if '.' not in m))"


def loaded_by(module: str) -> set[str]:
    """Top-level modules in a fresh process after the import."""
    command = [sys.executable, "-c", LIGHT.format(module=module)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_package_imports_lightly():
    assert not loaded_by("mla_lab") & {"cutlass", "torch", "IPython", "jupyterlab", "plotly"}


@pytest.mark.parametrize("module", ["mla_lab.cli", "mla_lab.api.decode", "mla_lab.api.contract"])
def test_no_compiler_and_no_notebook_before_they_are_needed(module):
    unwanted = {"cutlass", "IPython", "ipywidgets", "jupyterlab", "plotly", "triton"}
    if module != "mla_lab.cli":
        unwanted -= {"triton"}  # torch itself may bring it
    assert not loaded_by(module) & unwanted
