"""The tree stays readable and moves between machines: sizes, names, and no address of one place."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import re

import pytest
from packaging.specifiers import SpecifierSet

from .house import PACKAGE, ROOT, module_name, package_modules, tracked_files

#: beyond these a file or a function is split, without exception
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
#: of a function in `cute/`, whose roles take their tiles and pipelines one by one
MAX_KERNEL_PARAMETERS = 9
#: of a file; a record holds the raw rounds of hundreds of launches
MAX_FILE_BYTES, MAX_RECORD_BYTES = 1_000_000, 2_500_000
BANNED_NAMES = {"helper", "helpers", "misc", "util", "utils", "v2"}
TOP_LEVEL = {"README.md", "data", "kernels", "mla_lab", "notebooks", "pyproject.toml", "tests"}
SMALL_FILES = {
    ".ci",
    ".clang-format",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "conftest.py",
    "requirements-browser.txt",
    "requirements-engines.txt",
    "requirements.txt",
}

# a home, mount or work folder of one machine; an index that one network has
ABSOLUTE_PATH = re.compile(r"(?<![\w./-])/(?:home|root|mnt|Users|work|data|workspace)/\w+")
REGISTRY = re.compile(
    r"--(?:extra-)?index-url|--find-links|--trusted-host|(?:pypi|files)\.[\w.]*\w\.\w+/|"
    r"download\.pytorch|registry\s*=\s*http"
)
TEXT_SUFFIXES = {
    "", ".cfg", ".cu", ".cuh", ".h", ".ini", ".ipynb", ".json", ".jsonl", ".md", ".py",
    ".sh", ".svg", ".toml", ".txt", ".yaml", ".yml",
}  # fmt: skip

PYTHON = [p for p in tracked_files() if p.suffix == ".py"]
CUTE = PACKAGE / "cute"
SOURCES = [p for p in tracked_files() if p.suffix in {".py", ".cu", ".cuh", ".h"}]
THIS = "tests/test_house_files.py"


def relative(path):
    return path.relative_to(ROOT).as_posix()


def functions(source):
    """(name, lines, parameters) of every function, nested ones counted in their parent too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = [n for s in body[:1] + body[-1:] for n in (s.lineno, s.end_lineno or s.lineno)]
            a = node.args
            count = len(
                [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            )
            yield node.name, max(lines, default=0) - min(lines, default=0) + 1, count


def test_the_top_level_is_the_design_card():
    names = {p.relative_to(ROOT).parts[0] for p in tracked_files()}
    assert names - TOP_LEVEL - SMALL_FILES == set()
    assert not TOP_LEVEL - names


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_stay_readable(path):
    assert path.read_text(encoding="utf-8").count("\n") <= MAX_FILE_LINES


@pytest.mark.parametrize("path", [p for p in PYTHON if PACKAGE in p.parents], ids=relative)
def test_functions_stay_readable(path):
    """Lines of the body; signature and docstring are the contract and do not count."""
    found = functions(path.read_text(encoding="utf-8"))
    assert {name: lines for name, lines, _ in found if lines > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", [p for p in PYTHON if CUTE in p.parents], ids=relative)
def test_kernel_functions_take_few_parameters(path):
    found = functions(path.read_text(encoding="utf-8"))
    assert {name: count for name, _, count in found if count > MAX_KERNEL_PARAMETERS} == {}


def test_the_guard_counts_lines_and_parameters():
    source = "def f(a, /, b, *c, d=1, **e):\n    'doc'\n    x = 1\n\n    return x"
    assert list(functions(source)) == [("f", 3, 5)]


def test_names_say_something():
    parts = {part.lower() for p in SOURCES for part in re.split(r"[_./]", relative(p))}
    assert parts & BANNED_NAMES == set()


def test_no_address_of_one_machine():
    found = []
    for path in tracked_files():
        if path.suffix in TEXT_SUFFIXES and relative(path) != THIS:
            text = path.read_text(encoding="utf-8")
            hits = [*ABSOLUTE_PATH.finditer(text), *REGISTRY.finditer(text)]
            found += [f"{relative(path)}: {hit.group(0)}" for hit in hits]
    assert found == []


@pytest.mark.parametrize(
    "text", ["/home/someone/x", "pip --index-url x", "see /work/thing", "--find-links wheels"]
)
def test_the_guard_sees_a_planted_address(text):
    assert ABSOLUTE_PATH.search(text) or REGISTRY.search(text)


def test_files_stay_small():
    def most(name: str) -> int:
        record = name.startswith("data/") and name.endswith(".jsonl")
        return MAX_RECORD_BYTES if record else MAX_FILE_BYTES

    large = {relative(p): p.stat().st_size for p in tracked_files()}
    assert {n: s for n, s in large.items() if s > most(n)} == {}


def test_every_data_file_has_an_origin():
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    inside = [
        p.relative_to(ROOT / "data").as_posix()
        for p in tracked_files()
        if ROOT / "data" in p.parents and p.name != "README.md"
    ]
    assert inside
    assert [name for name in inside if f"`{name}`" not in readme] == []


def test_requirements_are_pinned_and_neutral():
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("requirements*.txt"))]
    pins = [line for text in texts for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][\w.]*", pin) for pin in pins)
    assert "torch==2.13.0" in pins, "without +cpu or +cu: each machine takes its own build"


def test_pinned_packages_take_the_oldest_python():
    """README promises 3.11: a package that asks for 3.11.5 fails on Debian 12, which has 3.11.2."""
    installed, refusing = 0, {}
    for pin in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if not pin.startswith("#"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found = importlib.metadata.metadata(pin.partition("==")[0]).json
                installed += 1
                asked = str(found.get("requires_python", ""))
                if not SpecifierSet(asked).contains("3.11.0"):
                    refusing[pin] = asked
    assert installed > 100 and refusing == {}


def test_no_validation_by_assert():
    """Python -O removes assert; kernels assert at trace time, where -O has no say."""
    for name, path in package_modules().items():
        if ".cute" not in name:
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            assert not [n.lineno for n in nodes if isinstance(n, ast.Assert)], name


def test_errors_are_the_house_s_own():
    """What is raised comes from mla_lab.core.errors; Python's own protocols excepted."""
    # AttributeError: module __getattr__; SystemExit: the command line; NotImplementedError never
    protocol = {"AttributeError", "KeyError", "StopIteration", "SystemExit"}
    builtin = {"Exception", "ValueError", "TypeError", "RuntimeError", "NotImplementedError",
               "OSError", "FileNotFoundError", "IndexError", "AssertionError"}  # fmt: skip
    found = []
    for name, path in package_modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                call = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                raised = call.id if isinstance(call, ast.Name) else ""
                if raised in builtin - protocol and ".cute" not in name:
                    found.append(f"{name}:{node.lineno} raises {raised}")
    assert found == []


def test_modules_are_named_once():
    """module_name is the inverse of the path, so that every guard speaks of the same module."""
    assert module_name(PACKAGE / "plan" / "tile.py") == "mla_lab.plan.tile"
    assert module_name(PACKAGE / "__init__.py") == "mla_lab"
