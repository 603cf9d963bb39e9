"""Marks of notebooks, and skips with their reason, for tests/ and notebooks/ alike.

A notebook says what it needs in its metadata: `mla_lab: {requires: ["gpu"], marks: ["slow"]}`.
Both lists become marks of the test that nbmake makes of it.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from functools import cache
from pathlib import Path

import pytest

NOTEBOOK_MARKS = {"compiler", "gpu", "slow"}
# the last cell of a notebook then fails where it took too long or sent too much
os.environ["MLA_LAB_BUDGET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Browser tests run only on request: they need a Chromium on the machine."""
    parser.addoption("--run-browser", action="store_true", help="run tests marked browser")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """tests/gpu without a GPU, unless it is named: 2,500 tests that are skipped one by one."""
    gpu = collection_path == Path(__file__).parent / "tests" / "gpu"
    return True if gpu and not has_hopper() else None


def pytest_report_header() -> str | None:
    """What is left out."""
    return None if has_hopper() else "tests/gpu is left out: needs a CUDA device of capability 9.0"


def pytest_configure(config: pytest.Config) -> None:
    """Kernels of notebooks are forked: items of nbmake have no fixtures."""
    if config.getoption("nbmake", False) and "MLA_LAB_LONG" not in os.environ:
        from tests.forked_kernels import launch_kernel

        patch = pytest.MonkeyPatch()
        config.add_cleanup(patch.undo)
        module = "jupyter_client.provisioning.local_provisioner"
        patch.setattr(f"{module}.launch_kernel", launch_kernel)


def notebook_marks(path: Path) -> list[str]:
    """Marks that the metadata of the notebook at `path` asks for."""
    metadata = json.loads(path.read_text(encoding="utf-8")).get("metadata", {}).get("mla_lab", {})
    marks = [*metadata.get("requires", ()), *metadata.get("marks", ())]
    if unknown := set(marks) - NOTEBOOK_MARKS:
        raise pytest.UsageError(
            f"{path.name}: metadata mla_lab names {sorted(unknown)}; "
            f"supported: {sorted(NOTEBOOK_MARKS)}"
        )
    return marks


@cache
def has_hopper() -> bool:
    """Whether a CUDA device of compute capability 9.0 is here."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@cache
def has_compiler() -> bool:
    """Whether CuTe kernels can be compiled here."""
    from importlib.util import find_spec

    return find_spec("cutlass") is not None and shutil.which("g++") is not None


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end: the garbage collector need not go through them
    again and again, which took a sixth of the tests' time.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark notebooks, then skip what this machine or this run cannot do."""
    for item in items:
        if item.path.suffix == ".ipynb":
            for mark in notebook_marks(item.path):
                item.add_marker(mark)
        if item.get_closest_marker("gpu") and not has_hopper():
            reason = "needs a CUDA device of compute capability 9.0"
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("compiler") and not has_compiler():
            item.add_marker(pytest.mark.skip(reason="needs the CuTe DSL and g++"))
        if item.get_closest_marker("browser") and not config.getoption("--run-browser"):
            item.add_marker(pytest.mark.skip(reason="runs only with --run-browser"))
