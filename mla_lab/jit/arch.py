"""Architectures that kernels are built for, and which of them a device runs.

Support is looked up in a list when a call is made, never compared by number: an
"a" architecture runs on its own compute capability alone (CUDA C++ Programming Guide,
"Architecture-Specific Features").
"""

from __future__ import annotations

from ..core.errors import unsupported

#: architecture -> the compute capability that runs it
CAPABILITIES: dict[str, tuple[int, int]] = {
    "sm_89": (8, 9),
    "sm_90a": (9, 0),
    "sm_100a": (10, 0),
    "sm_103a": (10, 3),
    "sm_120a": (12, 0),
}
#: that CuTe kernels alone are built for
CUTE_ONLY = ("sm_103a",)
#: that all kernels may be built for
ARCHS = tuple(arch for arch in CAPABILITIES if arch not in CUTE_ONLY)
#: what kernels here were run and proved on; for the others they are compiled, not run
PROVED = ("sm_90a",)


def label(arch: str) -> str:
    """Name of an architecture, marked where kernels were compiled for it and never run."""
    return arch if arch in PROVED else f"{arch} (compiled, not run)"


def check_arch(arch: str) -> str:
    """`arch` if kernels can be built for it, else `Unsupported`."""
    if arch not in CAPABILITIES:
        raise unsupported("arch", repr(arch), tuple(CAPABILITIES))
    return arch


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture to build for a device of this compute capability, else `Unsupported`."""
    for arch, runs_on in CAPABILITIES.items():
        if tuple(capability) == runs_on:
            return arch
    got = f"a device of compute capability {capability[0]}.{capability[1]}"
    known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES.values())
    raise unsupported("device", got, f"compute capability {known}")


def device_arch(index: int | None = None) -> str:
    """The architecture of a CUDA device (torch's current one by default).

    Raises `Unsupported` where torch has no CUDA, the driver is missing or the GPU is unknown.
    """
    import torch

    if torch.version.cuda is None:
        raise unsupported(
            "device",
            "a CPU-only torch",
            "a torch built with CUDA (the CPU path is backend='torch')",
        )
    if not torch.cuda.is_available():
        raise unsupported(
            "device",
            "no usable CUDA driver or GPU",
            "an NVIDIA GPU with its driver (see nvidia-smi)",
        )
    return arch_of(torch.cuda.get_device_capability(index))
