"""Every shipped configuration compiles for sm_90a without a GPU, and none spills registers."""

from __future__ import annotations

import shutil

import pytest

from mla_lab import jit, xray
from mla_lab.jit.shipped import shipped
from mla_lab.plan.config import KernelConfig
from mla_lab.xray.sass import find_nvdisasm

#: kernels whose speed rests on these instructions: a build without them is another kernel
MUST_HAVE = {"cute/q_m": ("HGMMA", "UTMALDG"), "cute/kv_m": ("HGMMA", "UTMALDG")}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]


@pytest.fixture(scope="module")
def artifacts() -> dict[KernelConfig, jit.Artifact]:
    """All of them, from the user's cache where they are there."""
    configs = shipped("sm_90a")
    built = jit.compile_all(configs, "sm_90a", progress=lambda _: None)
    return dict(zip(configs, built, strict=True))


@pytest.mark.parametrize("config", shipped("sm_90a"), ids=KernelConfig.name)
def test_compiles_and_does_not_spill(
    artifacts: dict[KernelConfig, jit.Artifact], config: KernelConfig
) -> None:
    seen = xray.inspect(artifacts[config])
    assert seen.kernels
    for kernel in seen.kernels:
        assert (kernel.name, kernel.resources.stack, kernel.spills) == (kernel.name, 0, 0)
        if find_nvdisasm():
            for opcode in MUST_HAVE.get(config.kernel, ()):
                assert kernel.count(opcode) > 0, f"{kernel.name} has no {opcode}"


def test_names_are_unique() -> None:
    names = [config.name() for config in shipped("sm_90a")]
    assert len(names) == len(set(names))
