"""kernels/xqa compiles for every architecture without a GPU, and spills on none."""

from __future__ import annotations

import contextlib
import shutil

import pytest

from mla_lab import jit, xray
from mla_lab.core.errors import BuildError
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.xqa import MLA_DIMS, NATIVE_E4M3, config_for
from mla_lab.xray.sass import find_nvdisasm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]

#: what is compiled beyond the architecture that is shipped for
ELSEWHERE = tuple(arch for arch in jit.ARCHS if arch != "sm_90a")


def builds(arch: str) -> list[KernelConfig]:
    """What ships beside the builds of test_cuda_archs, and GQA in e4m3 and with narrow heads."""
    return [
        config_for(MLA_DIMS, ("bf16", "e4m3"), arch),
        config_for((128, 128), ("e4m3", "e4m3"), arch),
        config_for((64, 64), ("bf16", "bf16"), arch),
    ]


def quiet(_: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module", params=ELSEWHERE)
def arch(request: pytest.FixtureRequest) -> str:
    with contextlib.suppress(BuildError):
        jit.compile_all(builds(request.param), request.param, progress=quiet)
    return str(request.param)


@pytest.mark.parametrize("idx", range(3), ids=["mla_bf16_e4m3", "gqa_e4m3", "gqa_64"])
def test_compiles_and_does_not_spill(arch: str, idx: int) -> None:
    seen = xray.inspect(jit.compile(builds(arch)[idx], arch, progress=quiet))
    (kernel,) = seen.kernels
    assert (kernel.resources.stack, kernel.spills) == (0, 0)
    if find_nvdisasm():
        assert kernel.count("LDGSTS") > 0
        # ptxas emulates e4m3 products where the matrix units have none by mma.sync
        native = idx == 1 and arch in NATIVE_E4M3
        assert (kernel.count("QMMA") > 0, kernel.count("HMMA") > 0) == (native, not native)
