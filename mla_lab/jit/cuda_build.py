"""CUDA C++ kernels: nvcc for the .cu file, the host compiler for the binding, ninja for both.

A folder kernels/NAME holds NAME.cu (kernels and their launch functions, no framework) and
binding.cc (tvm-ffi: checks arguments, finds the stream, calls the launch function). Nothing is
linked against libcuda; the CUDA runtime is the one already in the process.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from ..core.errors import BuildError
from ..core.resources import kernels_dir
from ..plan.config import KernelConfig
from .failure import failure
from .toolchain import NVCC_WHEELS, find_cxx, find_ninja, find_nvcc, nvcc_release

#: `--keep` leaves the PTX and the cubin of the very compilation that the library holds
NINJA = """\
rule nvcc
  command = {nvcc} -c $in -o $out -std=c++17 -O3 --expt-relaxed-constexpr -lineinfo {gencode} \
-Xcompiler -fPIC -Xcompiler -fvisibility=hidden -I {kernels} {defines} --keep --keep-dir .
rule cxx
  command = {cxx} -c $in -o $out -std=c++17 -O2 -fPIC -fvisibility=hidden -I {kernels} \
{includes} {defines}
rule link
  command = {cxx} -shared $in -o $out -L {tvm_ffi} -ltvm_ffi

build kernel.o: nvcc {source}
build binding.o: cxx {binding}
build kernel.so: link kernel.o binding.o
"""


def flags(arch: str) -> str:
    """Commands of a build, with names in place of a machine's paths and a build's own options."""
    return NINJA + gencode(arch)


def gencode(arch: str) -> str:
    """nvcc's option for machine code of one architecture, without PTX."""
    return f"-gencode arch=compute_{arch.removeprefix('sm_')},code={arch}"


def include_folder(nvcc: Path) -> Path:
    """Headers of the CUDA runtime that belong to an nvcc."""
    done = subprocess.run([str(nvcc), "--dryrun", "-x", "cu", "-"], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.*)$", done.stderr, re.M)
    for root in (Path(top[1]) if top else nvcc, nvcc.resolve().parents[1]):
        if (root / "include" / "cuda_runtime_api.h").is_file():
            return root / "include"
    raise BuildError(
        f"cuda_runtime_api.h: not found beside {nvcc}; install the whole CUDA toolkit, or "
        f"`pip install {NVCC_WHEELS}`"
    )


def build(config: KernelConfig, arch: str, folder: Path) -> dict[str, Any]:
    """Compile kernels/NAME into `folder`: kernel.so, kernel.ptx, kernel.cubin."""
    work = folder / "work"
    work.mkdir()
    (work / "build.ninja").write_text(_ninja_file(config, arch, work))
    command = [str(find_ninja()), "-C", str(work), "-v", "-j2"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = done.stdout + done.stderr
        raise failure(config, arch, _first_error(words), words)
    name = config.kernel.removeprefix("cuda/")
    _keep(work, f"{name}*.cubin", folder / "kernel.cubin")
    _keep(work, f"{name}*.ptx", folder / "kernel.ptx")
    (work / "kernel.so").rename(folder / "kernel.so")
    functions = _exported(kernels_dir() / name / "binding.cc")
    for leftover in work.iterdir():
        leftover.unlink()
    work.rmdir()
    return {"functions": functions, "needs": []}


def _ninja_file(config: KernelConfig, arch: str, work: Path) -> str:
    import tvm_ffi

    nvcc = find_nvcc()
    nvcc_release(nvcc)
    includes = [include_folder(nvcc), tvm_ffi.libinfo.find_include_path()]
    includes.append(tvm_ffi.libinfo.find_dlpack_include_path())
    name = config.kernel.removeprefix("cuda/")
    source = kernels_dir() / name
    return NINJA.format(
        nvcc=nvcc,
        cxx=find_cxx(),
        gencode=gencode(arch),
        kernels=kernels_dir(),
        includes=" ".join(f"-I {path}" for path in includes),
        defines=" ".join(f"-DMLA_{key.upper()}={value}" for key, value in config.options),
        tvm_ffi=Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent,
        source=source / f"{name}.cu",
        binding=source / "binding.cc",
    )


def _keep(work: Path, pattern: str, target: Path) -> None:
    found = sorted(work.glob(pattern))
    if len(found) != 1:
        raise BuildError(f"nvcc: left {len(found)} files {pattern}; supported: one per kernel")
    found[0].rename(target)


def _exported(binding: Path) -> list[str]:
    """Functions that a binding exports, in its order."""
    return re.findall(r"TVM_FFI_DLL_EXPORT_TYPED_FUNC\((\w+),", binding.read_text())


def _first_error(words: str) -> str:
    lines = [line for line in words.splitlines() if re.search(r"\berror\b", line)]
    return lines[0] if lines else "ninja failed"
