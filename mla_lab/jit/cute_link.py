"""From the object that the CuTe DSL exports to a library that stands alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from .failure import CompileFailure
from .toolchain import find_cxx

STATIC_RUNTIME = "libcuda_dialect_runtime_static.a"

#: The generated host code reports CUDA errors through this one function of the DSL's 43 MB
#: runtime library; everything else that it calls is in a static archive of 70 KB. With the
#: function defined here a kernel library stands alone (it finds cudart in the process).
SHIM = r"""
#include <stdint.h>
#include <stdio.h>
const char* cudaGetErrorName(int);
const char* cudaGetErrorString(int);
typedef void (*set_error)(const char* kind, const char** parts, int32_t num_parts);
__attribute__((visibility("hidden"))) void CuteDSLRT_TVMFFISetRaisedCudaError(set_error raise,
                                                                             int32_t code) {
  const char* parts[] = {"CUDA error in a kernel launch: ", cudaGetErrorName(code), ", ",
                         cudaGetErrorString(code)};
  if (raise) raise("RuntimeError", parts, 4);
}
"""


def link(obj: Path, library: Path, runtime: list[str]) -> list[str]:
    """Link `obj` into `library`; returns the names of libraries that must be loaded before it.

    `runtime` lists the libraries that the DSL names for its objects: its shared runtime, tvm-ffi.
    The static archive beside the shared one is preferred; the shared one remains the fallback.
    """
    tvm_ffi = [p for p in runtime if "tvm_ffi" in Path(p).name]
    shared = [p for p in runtime if p not in tvm_ffi]
    common = [str(find_cxx()), "-shared", "-o", str(library), str(obj)]
    archives = [Path(p).with_name(STATIC_RUNTIME) for p in shared]
    if archives and archives[0].is_file():
        shim = obj.with_name("shim.c")
        shim.write_text(SHIM)
        sources = ["-x", "c", "-O2", "-fPIC", str(shim), "-x", "none", str(archives[0])]
        _run([*common, *sources, "-Wl,--exclude-libs,ALL", "-ldl", *tvm_ffi])
        shim.unlink()
        if not _unresolved(library):
            return []
    _run([*common, *shared, *tvm_ffi])
    return [Path(p).name for p in shared]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompileFailure(f"{command[0]}: could not link a kernel library", done.stderr)
    return done.stdout


def _unresolved(library: Path) -> list[str]:
    """Undefined symbols that neither cudart nor tvm-ffi nor libc will resolve."""
    listing = _run(["nm", "-D", "--undefined-only", str(library)])
    names = [line.split()[-1] for line in listing.splitlines()]
    return [n for n in names if re.match(r"CuteDSLRT_|_cuda|_cu[A-Z]|cuda_dialect", n)]
