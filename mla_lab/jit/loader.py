"""`load`: an artifact as a callable kernel. Imports no cutlass and needs no compiler."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ..core.errors import BuildError
from ..plan.config import KernelConfig
from .artifact import Artifact
from .build import compile
from .toolchain import nvidia_file, package_dir

#: newest first; kernel libraries use what these have in common
CUDART_MAJORS = (13, 12)
#: kept for the life of the process: kernel libraries resolve their symbols in them
_preloaded: dict[str, ctypes.CDLL] = {}
_lock = threading.Lock()


class Kernel:
    """A loaded kernel. `launch` is the tvm-ffi function itself: tensors in, torch's stream."""

    __slots__ = ("_module", "artifact", "launch")

    def __init__(self, artifact: Artifact, module: Any) -> None:
        self.artifact = artifact
        self._module = module
        self.launch: Callable[..., Any] = module[artifact.functions[0]]

    def function(self, name: str) -> Callable[..., Any]:
        """Another exported function of the same library."""
        if name not in self.artifact.functions:
            raise BuildError(f"function: got {name!r}; supported: {self.artifact.functions}")
        found: Callable[..., Any] = self._module[name]
        return found

    def __call__(self, *args: Any) -> None:
        self.launch(*args)


def load(artifact: Artifact) -> Kernel:
    """Load the library into this process. No GPU is needed until the first launch."""
    try:
        import tvm_ffi
    except ImportError:
        raise BuildError("tvm_ffi: not installed; `pip install apache-tvm-ffi`") from None
    with _lock:
        _preload_cudart()
        for name in artifact.needs:
            _preload(name, _runtime_candidates(name))
    try:
        module = tvm_ffi.load_module(str(artifact.library))
        return Kernel(artifact, module)
    except (OSError, RuntimeError, AttributeError) as error:
        raise BuildError(
            f"{artifact.library}: could not be loaded ({error}); delete {artifact.folder} "
            "to have it compiled again"
        ) from None


def converted(entry: Callable[..., Any], value: Any) -> Any:
    """A tensor as the entry of a loaded kernel reads it, so that no call converts it; any other
    value, and one for any other callable, as it is. It shares the memory of `value`.
    """
    module = sys.modules.get("tvm_ffi")
    if module is None or not isinstance(entry, module.Function) or not hasattr(value, "__dlpack__"):
        return value
    return module.from_dlpack(value)


@cache  # never unloaded: a captured graph launches it
def kernel(config: KernelConfig, arch: str) -> Kernel:
    """The loaded kernel of a configuration, compiled if need be and cached in this process."""
    return load(compile(config, arch))


def _preload_cudart() -> None:
    """Make the CUDA runtime's symbols visible: the copy in this process (torch's), or another."""
    if "cudart" in _preloaded:
        return
    names = [f"libcudart.so.{major}" for major in CUDART_MAJORS]
    tries = [(name, os.RTLD_NOLOAD) for name in names]
    for major, name in zip(CUDART_MAJORS, names, strict=True):
        wheels = (nvidia_file(f"cu{major}/lib/{name}"), nvidia_file(f"cuda_runtime/lib/{name}"))
        places = [name, *filter(None, wheels), f"/usr/local/cuda/lib64/{name}"]
        tries += [(str(place), 0) for place in places]
    for path, flag in tries:
        with contextlib.suppress(OSError):
            _preloaded["cudart"] = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL | flag)
            return
    raise BuildError(
        "libcudart.so: no CUDA runtime in this process, as a Python package or in /usr/local/cuda; "
        "install a torch with CUDA, or `pip install nvidia-cuda-runtime`"
    )


def _preload(name: str, candidates: list[Path]) -> None:
    if name in _preloaded:
        return
    for candidate in (name, *map(str, candidates)):
        with contextlib.suppress(OSError):
            _preloaded[name] = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
            return
    raise BuildError(
        f"{name}: not found on LD_LIBRARY_PATH or in nvidia-cutlass-dsl; add its folder to "
        "LD_LIBRARY_PATH"
    )


def _runtime_candidates(name: str) -> list[Path]:
    root = package_dir("nvidia_cutlass_dsl")
    return sorted(root.glob(f"cu*/lib/{name}"), reverse=True) if root else []
