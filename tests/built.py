"""What shipped builds take and which instructions they have, of the record or, where it is not of
these sources, of a compiler: then of a sample of builds alone, as all take an hour."""

from __future__ import annotations

import os
from functools import cache

import pytest

from mla_lab import jit, xray
from mla_lab.jit import Artifact
from mla_lab.jit.shipped import sample
from mla_lab.plan.config import KernelConfig
from mla_lab.verify import shipped_builds
from mla_lab.verify.shipped_builds import BuiltKernel

from .shared_builds import SHARED

PRODUCT = "wgmma.mma_async.sync.aligned."


@cache
def sampled() -> list[KernelConfig]:
    """Builds with every format and every value of every field; with MLA_LAB_LONG=1 every value in
    every format."""
    return sample("sm_90a", each_format="MLA_LAB_LONG" in os.environ, first=SHARED)


def compiled(config: KernelConfig) -> Artifact:
    """A build of the sample; the test of another one is skipped."""
    if config not in sampled():
        pytest.skip("no record of these sources (mla-lab verify builds), not in the sample")
    return jit.compile(config, "sm_90a")


def kernel_of(config: KernelConfig) -> BuiltKernel:
    """The one kernel of a build."""
    found = shipped_builds.of(config)
    if found is None:
        made = xray.inspect(compiled(config))
        found = tuple(map(shipped_builds.described, made.kernels))
    (kernel,) = found
    return kernel


def ptx_of(config: KernelConfig) -> dict[str, int]:
    """Counts of its PTX instructions that move tiles, multiply them, vote or reduce."""
    if row := shipped_builds.current().get(config.name()):
        found: dict[str, int] = row["ptx"]
        return found
    return shipped_builds.instructions(compiled(config).ptx.read_text(encoding="utf-8"))


def products_of(config: KernelConfig) -> set[str]:
    """Shapes and types of its matrix products: "m64n64k16.f32.bf16.bf16"."""
    return {name.removeprefix(PRODUCT) for name in ptx_of(config) if name.startswith(PRODUCT)}


def tensor_copies_of(config: KernelConfig) -> int:
    """How many copies of tensor boxes stand in its code."""
    ptx = ptx_of(config)
    return sum(count for name, count in ptx.items() if name.startswith("cp.async.bulk.tensor."))
