"""Compiling without a GPU, loading without a compiler.

artifact = compile(config, "sm_90a")     # cached; CuTe DSL or nvcc, no tensor, no GPU
kernel = load(artifact)                  # no cutlass, no nvcc
kernel(*tensors)                         # torch's current stream
"""

from .arch import ARCHS, arch_of, device_arch
from .artifact import Artifact
from .build import compile, compile_all, find
from .loader import Kernel, converted, kernel, load

__all__ = [
    "ARCHS",
    "Artifact",
    "Kernel",
    "arch_of",
    "compile",
    "compile_all",
    "converted",
    "device_arch",
    "find",
    "kernel",
    "load",
]
