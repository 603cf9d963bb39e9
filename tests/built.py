"""What shipped builds take and which instructions they have, of the record or, where it is not of
these sources, of a compiler."""

from __future__ import annotations

from mla_lab import jit, xray
from mla_lab.plan.config import KernelConfig
from mla_lab.verify import shipped_builds
from mla_lab.verify.shipped_builds import BuiltKernel

PRODUCT = "wgmma.mma_async.sync.aligned."


def kernel_of(config: KernelConfig) -> BuiltKernel:
    """The one kernel of a build."""
    found = shipped_builds.of(config)
    if found is None:
        made = xray.inspect(jit.compile(config, "sm_90a"))
        found = tuple(map(shipped_builds.described, made.kernels))
    (kernel,) = found
    return kernel


def ptx_of(config: KernelConfig) -> dict[str, int]:
    """Counts of its PTX instructions that move tiles, multiply them, vote or reduce."""
    found = shipped_builds.ptx_of(config)
    if found is None:
        made = jit.compile(config, "sm_90a")
        found = shipped_builds.instructions(made.ptx.read_text(encoding="utf-8"))
    return found


def products_of(config: KernelConfig) -> set[str]:
    """Shapes and types of its matrix products: "m64n64k16.f32.bf16.bf16"."""
    return {name.removeprefix(PRODUCT) for name in ptx_of(config) if name.startswith(PRODUCT)}


def tensor_copies_of(config: KernelConfig) -> int:
    """How many copies of tensor boxes stand in its code."""
    ptx = ptx_of(config)
    return sum(count for name, count in ptx.items() if name.startswith("cp.async.bulk.tensor."))
