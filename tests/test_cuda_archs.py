"""CUDA C++ for every architecture: compiled without a GPU, no spills. Run on sm_90a alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mla_lab import jit
from mla_lab.cli import main
from mla_lab.core.resources import kernels_dir
from mla_lab.jit.arch import label
from mla_lab.jit.cubin import read_resources
from mla_lab.jit.cuda_build import gencode
from mla_lab.jit.toolchain import find_nvcc
from mla_lab.plan import KernelConfig
from mla_lab.plan.xqa import MLA_DIMS, config_for
from mla_lab.xray.sass import disassemble, find_nvdisasm

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

LADDER = KernelConfig("cuda/ladder")
#: what is compiled, not run; the builds for Hopper are looked at in test_jit_shipped
BEYOND = [arch for arch in jit.ARCHS if arch != "sm_90a"]
BUILDS = (
    (MLA_DIMS, ("bf16", "bf16")),
    (MLA_DIMS, ("e4m3", "e4m3")),
    ((128, 128), ("bf16", "bf16")),
)


def cubin(config: KernelConfig, arch: str, folder: Path) -> Path:
    """Machine code alone: bindings are the same for every architecture."""
    name = config.kernel.removeprefix("cuda/")
    path = folder / f"{name}.cubin"
    source = [str(kernels_dir() / name / f"{name}.cu"), "-I", str(kernels_dir()), "-o", str(path)]
    defines = [f"-DMLA_{key.upper()}={value}" for key, value in config.options]
    command = [str(find_nvcc()), "-cubin", "-std=c++17", "-O3", "--expt-relaxed-constexpr"]
    subprocess.run([*command, *gencode(arch).split(), *defines, *source], check=True)
    return path


def kinds_of(path: Path) -> dict[str, set[str]]:
    """Kernel -> classes of its instructions; nothing spills. Empty without a disassembler."""
    assert [r.kernel for r in read_resources(path.read_bytes()) if r.stack] == []
    if find_nvdisasm() is None:
        return {}
    kinds = {name: {i.kind for i in lines} for name, lines in disassemble(path).items()}
    assert [name for name, seen in kinds.items() if "local" in seen] == []
    return kinds


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_the_ladder(arch: str, tmp_path: Path) -> None:
    shipped = arch == "sm_90a"  # other tests want that build too
    path = jit.compile(LADDER).cubin if shipped else cubin(LADDER, arch, tmp_path)
    assert len(read_resources(path.read_bytes())) == 15
    kinds = kinds_of(path)
    if kinds:
        products = {name for name, seen in kinds.items() if "matrix" in seen}
        assert len(products) == 6
        assert all("attend" in name for name in products)
        assert not any("step2" in name or "step3" in name for name in products)


@pytest.mark.parametrize("arch", BEYOND)
def test_the_planner(arch: str, tmp_path: Path) -> None:
    kinds_of(cubin(KernelConfig("cuda/planner"), arch, tmp_path))


@pytest.mark.parametrize("arch", BEYOND)
@pytest.mark.parametrize(("dims", "formats"), BUILDS)
def test_the_decode_kernel(
    dims: tuple[int, int], formats: tuple[str, str], arch: str, tmp_path: Path
) -> None:
    kinds = kinds_of(cubin(config_for(dims, formats, arch), arch, tmp_path))
    assert all("matrix" in seen for seen in kinds.values())


@pytest.mark.parametrize("arch", ["sm_89", "sm_120a"])
def test_shared_memory_of_small_cards_is_not_exceeded(
    arch: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The kernel's own assertion: 227 KB are a build for other cards."""
    config = KernelConfig("cuda/xqa", options=(("whole_sm", 1),))
    with pytest.raises(subprocess.CalledProcessError):
        cubin(config, arch, tmp_path)
    assert "what a block may have here" in "".join(capfd.readouterr())


def test_what_was_not_run_is_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    assert label("sm_90a") == "sm_90a"
    assert label("sm_120a") == "sm_120a (compiled, not run)"
    assert main(["compile", "--arch", "sm_120a", "--kernel", "cuda/planner"]) == 0
    assert "1 kernels for sm_120a (compiled, not run)" in capsys.readouterr().out
    assert main(["xray", "--arch", "sm_120a", "--kernel", "cuda/planner"]) == 0
    assert "cuda_planner for sm_120a (compiled, not run)" in capsys.readouterr().out
