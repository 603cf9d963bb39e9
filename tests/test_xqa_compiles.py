"""kernels/xqa compiles for every architecture without a GPU, and spills on none."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from pathlib import Path

import pytest

from mla_lab import jit
from mla_lab.core.errors import BuildError
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.xqa import MLA_DIMS, NATIVE_E4M3, config_for
from mla_lab.xray.sass import disassemble, find_nvdisasm

from .test_cuda_archs import cubin, kinds_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]

#: what is compiled beyond the architecture that is shipped for
ELSEWHERE = tuple(arch for arch in jit.ARCHS if arch != "sm_90a")
#: of this one whole libraries, with their bindings; of the others machine code
WHOLE = "sm_120a"


def builds(arch: str) -> list[KernelConfig]:
    """What ships beside the builds of test_cuda_archs, and GQA in e4m3 and with narrow heads."""
    return [
        config_for(MLA_DIMS, ("bf16", "e4m3"), arch),
        config_for((128, 128), ("e4m3", "e4m3"), arch),
        config_for((64, 64), ("bf16", "bf16"), arch),
    ]


def quiet(_: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def libraries() -> None:
    """Those of `WHOLE` compiled together; each test looks at its own result."""
    with contextlib.suppress(BuildError):
        jit.compile_all(builds(WHOLE), WHOLE, progress=quiet)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("arch", ELSEWHERE)
@pytest.mark.parametrize("idx", range(3), ids=["mla_bf16_e4m3", "gqa_e4m3", "gqa_64"])
def test_compiles_and_does_not_spill(arch: str, idx: int, tmp_path: Path) -> None:
    config = builds(arch)[idx]
    whole = arch == WHOLE
    path = (
        jit.compile(config, arch, progress=quiet).cubin if whole else cubin(config, arch, tmp_path)
    )
    kinds_of(path)
    if find_nvdisasm():
        (code,) = disassemble(path).values()
        count = Counter(i.opcode.partition(".")[0] for i in code)
        assert count["LDGSTS"] > 0
        # ptxas emulates e4m3 products where the matrix units have none by mma.sync
        native = idx == 1 and arch in NATIVE_E4M3
        assert (count["QMMA"] > 0, count["HMMA"] > 0) == (native, not native)
