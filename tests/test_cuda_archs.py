"""CUDA C++ for every architecture: compiled without a GPU, no spills. Run on sm_90a alone.

What nvcc makes of builds for other architectures than Hopper is on record; they are compiled here
where the record is not of today's sources and compiler.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mla_lab import jit
from mla_lab.cli import main
from mla_lab.jit.arch import label
from mla_lab.plan import KernelConfig
from mla_lab.plan.xqa import NATIVE_E4M3, config_for
from mla_lab.verify import cuda_archs, shipped_builds
from mla_lab.verify.cuda_archs import ELSEWHERE, LADDER, PLANNER, XQA
from mla_lab.verify.shipped_builds import BuiltKernel
from mla_lab.xray.opcodes import sass_class

from .needs import needs_nvcc


def kernels_of(config: KernelConfig, arch: str, folder: Path) -> tuple[BuiltKernel, ...]:
    """What a build compiles to; nothing spills."""
    found = shipped_builds.of(config) if arch == "sm_90a" else cuda_archs.of(config, arch)
    if found is None:
        if shutil.which("nvcc") is None:
            pytest.skip("no record of these sources (mla-lab verify builds), no nvcc")
        found = cuda_archs.compiled(config, arch, folder)
    assert found and all(kernel.stack == kernel.local == 0 for kernel in found)
    return found


def has_products(kernel: BuiltKernel) -> bool:
    return any(sass_class(opcode) == "matrix" for opcode in kernel.opcodes)


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_the_ladder(arch: str, tmp_path: Path) -> None:
    found = kernels_of(LADDER, arch, tmp_path)
    assert len(found) == 15
    if all(kernel.opcodes for kernel in found):
        products = {kernel.name for kernel in found if has_products(kernel)}
        assert len(products) == 6
        assert all("attend" in name for name in products)
        assert not any("step2" in name or "step3" in name for name in products)


@pytest.mark.parametrize("arch", ELSEWHERE)
def test_the_planner(arch: str, tmp_path: Path) -> None:
    kernels_of(PLANNER, arch, tmp_path)


@pytest.mark.parametrize("arch", ELSEWHERE)
@pytest.mark.parametrize(("dims", "formats"), XQA)
def test_the_decode_kernel(
    dims: tuple[int, int], formats: tuple[str, str], arch: str, tmp_path: Path
) -> None:
    (kernel,) = kernels_of(config_for(dims, formats, arch), arch, tmp_path)
    if kernel.opcodes:
        assert kernel.opcodes["LDGSTS"] > 0
        # ptxas emulates e4m3 products where the matrix units have none by mma.sync
        native = formats == ("e4m3", "e4m3") and arch in NATIVE_E4M3
        products = tuple(kernel.opcodes.get(name, 0) > 0 for name in ("QMMA", "HMMA"))
        assert products == (native, not native)


@needs_nvcc
def test_the_record_has_what_nvcc_makes_of_these_sources(tmp_path: Path) -> None:
    recorded = cuda_archs.of(PLANNER, "sm_89")
    if recorded is None:
        pytest.skip("no record of these sources and compilers: mla-lab verify builds --elsewhere")
    made = cuda_archs.compiled(PLANNER, "sm_89", tmp_path)
    for row, kernel in zip(recorded, made, strict=True):
        assert row == (kernel if kernel.opcodes else replace(kernel, opcodes=row.opcodes))


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_89", "sm_120a"])
def test_shared_memory_of_small_cards_is_not_exceeded(
    arch: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The kernel's own assertion: 227 KB are a build for other cards."""
    config = KernelConfig("cuda/xqa", options=(("whole_sm", 1),))
    with pytest.raises(subprocess.CalledProcessError):
        cuda_archs.cubin(config, arch, tmp_path)
    assert "what a block may have here" in "".join(capfd.readouterr())


@needs_nvcc
def test_what_was_not_run_is_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    assert label("sm_90a") == "sm_90a"
    assert label("sm_120a") == "sm_120a (compiled, not run)"
    assert main(["compile", "--arch", "sm_120a", "--kernel", "cuda/planner"]) == 0
    assert "1 kernels for sm_120a (compiled, not run)" in capsys.readouterr().out
    assert main(["xray", "--arch", "sm_120a", "--kernel", "cuda/planner"]) == 0
    assert "cuda_planner for sm_120a (compiled, not run)" in capsys.readouterr().out
