"""A pytest fixture: `pytest_plugins = ["mla_lab.emulate.fixture"]` in a conftest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ..jit import Artifact
from .kernel import EmulatedKernel, Options, Run
from .user_kernel import compile_function


@pytest.fixture
def emulated() -> Callable[..., Run]:
    """emulated(kernel, *args): runs a kernel on the CPU with all checks, and fails on a finding.

    kernel: a `@cute.jit` function, an `Artifact` or an `EmulatedKernel`. args: as the kernel takes
    them, tensors on the CPU, written in place. `options` as of `emulate.run`.
    """

    def run(kernel: Any, *args: Any, options: Options | None = None) -> Run:
        wanted = replace(options or Options(), check=True)
        if isinstance(kernel, Artifact):
            kernel = EmulatedKernel.of(kernel)
        elif not isinstance(kernel, EmulatedKernel):
            kernel = compile_function(kernel, args)
        kernel.options = wanted
        kernel(*args)
        if kernel.run.findings:
            pytest.fail("\n".join(map(str, kernel.run.findings)))
        return kernel.run

    return run
