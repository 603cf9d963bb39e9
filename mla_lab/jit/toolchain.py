"""Paths and versions of the compilers on this machine; `BuildError` with a remedy without them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from ..core.errors import BuildError
from ..core.installed import version_of
from .host_cpu import host_cpu

#: CUDA releases whose nvcc supports every architecture of `arch.ARCHS`
NVCC_RELEASES = ((12, 8), (12, 9), (13, 0), (13, 1), (13, 2), (13, 3), (13, 4), (13, 5))
#: what nvcc consists of on PyPI
NVCC_WHEELS = "nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl"


def package_dir(name: str) -> Path | None:
    """Folder of an installed package, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def nvidia_file(relative: str) -> Path | None:
    """A file that one of NVIDIA's wheels installed, e.g. "cu*/bin/nvcc"."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        found = sorted(Path(root).glob(relative))
        if found:
            return found[0]
    return None


def find_nvcc() -> Path:
    """nvcc from PATH, then CUDA_HOME or CUDA_PATH, then NVIDIA's PyPI package."""
    candidates = [shutil.which("nvcc")]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(str(Path(os.environ[variable]) / "bin" / "nvcc"))
    for relative in ("cu*/bin/nvcc", "cuda_nvcc/bin/nvcc"):
        candidates.append(str(nvidia_file(relative) or ""))
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate)
    raise BuildError(
        "nvcc: not found on PATH, in CUDA_HOME or as a Python package; install the CUDA toolkit "
        f"or `pip install {NVCC_WHEELS}`, or use a prebuilt bundle (`mla-lab bundle`)"
    )


def find_program(name: str, way_out: str) -> Path:
    """A program on PATH or beside this Python, else a `BuildError` with the way out."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name) or shutil.which(name, path=beside)
    if found is None:
        raise BuildError(f"{name}: not found on PATH; {way_out}")
    return Path(found)


def find_cxx() -> Path:
    """The host C++ compiler: $CXX, else g++."""
    return find_program(
        os.environ.get("CXX", "g++"), "install a C++17 compiler (g++) or set CXX, or use a bundle"
    )


def find_ninja() -> Path:
    """ninja, from PATH or from the PyPI package."""
    return find_program("ninja", "`pip install ninja`")


@lru_cache(maxsize=8)
def _output(program: str, *arguments: str) -> str:
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{program}: could not be run ({error}); reinstall it") from None
    return done.stdout + done.stderr


def nvcc_release(nvcc: Path) -> tuple[int, int]:
    """CUDA release of an nvcc, checked against those that support our architectures."""
    match = re.search(r"release (\d+)\.(\d+)", _output(str(nvcc), "--version"))
    if match is None:
        raise BuildError(f"nvcc: {nvcc} does not state its release; supported: CUDA {_releases()}")
    release = (int(match[1]), int(match[2]))
    if release not in NVCC_RELEASES:
        raise BuildError(
            f"nvcc: got CUDA {release[0]}.{release[1]} ({nvcc}); supported: CUDA {_releases()}; "
            "put such an nvcc first on PATH or set CUDA_HOME"
        )
    return release


def _releases() -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in NVCC_RELEASES)


def _version(distribution: str) -> str | None:
    """Version of an installed distribution; it is read again once something was installed."""
    return _version_at(distribution, tuple(map(_changed, sys.path)))


def _changed(folder: str) -> int:
    """When a folder of `sys.path` last gained or lost a file, in ns."""
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=64)
def _version_at(distribution: str, _changes: tuple[int, ...]) -> str | None:
    return version_of(distribution)


def cute_versions() -> dict[str, str]:
    """Versions that decide what the CuTe DSL generates; `BuildError` where it is missing."""
    dsl = _version("nvidia-cutlass-dsl")
    if dsl is None:
        raise BuildError(
            "cutlass: the CuTe DSL is not installed; `pip install 'mla-lab[compile]'`, "
            "or use a prebuilt bundle (`mla-lab bundle`)"
        )
    flavours = [f for f in ("cu13", "cu12") if _version(f"nvidia-cutlass-dsl-libs-{f}")]
    flavour = flavours[0] if flavours else "unknown"
    return {"cutlass-dsl": dsl, "flavour": flavour, "cpu": host_cpu(), **_common()}


def cuda_versions() -> dict[str, str]:
    """Versions that decide what nvcc and the host compiler generate."""
    nvcc = find_nvcc()
    major, minor = nvcc_release(nvcc)
    exact = re.search(r"V(\d+\.\d+\.\d+)", _output(str(nvcc), "--version"))
    return {"nvcc": exact[1] if exact else f"{major}.{minor}", **_common()}


def _common() -> dict[str, str]:
    tvm_ffi = _version("apache-tvm-ffi")
    if tvm_ffi is None:
        raise BuildError("tvm_ffi: not installed; `pip install apache-tvm-ffi`")
    return {"tvm-ffi": tvm_ffi, "cxx": _output(str(find_cxx()), "-dumpfullversion").strip()}


def versions(kernel: str) -> dict[str, str]:
    """Toolchain versions behind a kernel of this name ("cute/..." or "cuda/...")."""
    return cute_versions() if kernel.startswith("cute/") else cuda_versions()


def missing(kernel: str) -> str | None:
    """Why a kernel of this name cannot be compiled here; None where it can."""
    try:
        versions(kernel)
    except BuildError as error:
        return str(error)
    return None
