"""Kernels compile for sm_90a without a GPU, and none spills registers: a sample with every format
and every value of every field, with MLA_LAB_LONG=1 every value in every format (`mla-lab compile`
builds all that ships)."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mla_lab import jit, xray
from mla_lab.core.errors import BuildError
from mla_lab.cute import registry
from mla_lab.jit.build import canonical
from mla_lab.jit.shipped import sample, shipped
from mla_lab.plan.config import KernelConfig
from mla_lab.studies import machine_code
from mla_lab.xray.sass import find_nvdisasm

from .lasting_worker import LastingWorker
from .shared_builds import SHARED
from .spills import allowed_stack, most_code

#: kernels whose speed rests on these instructions: a build without them is another kernel
MUST_HAVE = {"cute/keep_ab_sm90": ("HGMMA", "UTMALDG"), "cute/swap_ab_sm90": ("HGMMA", "UTMALDG")}
#: where the cache has eight bits the matrix unit takes them
EIGHT_BITS = {"HGMMA": "QGMMA"}

SAMPLE = sample("sm_90a", each_format="MLA_LAB_LONG" in os.environ, first=SHARED)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]


def quiet(_: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def compiled() -> None:
    """The sample compiled together, into the user's cache; each test looks at its own result."""
    with contextlib.suppress(BuildError):
        jit.compile_all(SAMPLE, "sm_90a", progress=quiet)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("config", SAMPLE, ids=KernelConfig.name)
def test_compiles_and_does_not_spill(config: KernelConfig) -> None:
    seen = xray.inspect(jit.compile(config, "sm_90a", progress=quiet))
    assert seen.kernels
    for kernel in seen.kernels:
        allowed = allowed_stack(config)
        assert kernel.resources.stack <= allowed, kernel.name
        assert allowed or kernel.spills == 0, kernel.name
        assert 0 < kernel.code_bytes <= most_code(config), kernel.name
        if find_nvdisasm():
            for opcode in MUST_HAVE.get(config.kernel, ()):
                if config.kv_format in ("e4m3", "fp8_656"):
                    opcode = EIGHT_BITS.get(opcode, opcode)
                assert kernel.count(opcode) > 0, f"{kernel.name} has no {opcode}"


SHIPPED = {config.kernel for config in shipped("sm_90a")}


def codes(cubin: bytes) -> list[bytes]:
    """Machine code of the kernels, without lines and paths, which a cached build has from the
    checkout that it came from.
    """
    return sorted(machine_code.codes(cubin))


@pytest.mark.parametrize(
    "kernel",
    [
        name
        for name, line in registry.KERNELS.items()
        if "mask" in dict(line.ignores) and name in SHIPPED
    ],
)
def test_an_ignored_mask_does_not_change_the_code(kernel: str, tmp_path: Path) -> None:
    config = next(c for c in shipped("sm_90a") if c.kernel == kernel)
    causal = replace(config, mask="causal")
    assert canonical(causal) == config
    worker = LastingWorker("sm_90a")
    worker.build(causal, tmp_path)
    worker.close()
    made = (tmp_path / "kernel.cubin").read_bytes()
    assert codes(made) == codes(jit.compile(config, "sm_90a", progress=quiet).cubin.read_bytes())


@pytest.mark.parametrize("each_format", [False, True])
def test_the_sample_has_every_value_and_every_format(each_format: bool) -> None:
    def values(configs: list[KernelConfig]) -> set[tuple[object, ...]]:
        return {
            (c.kernel, (c.q_dtype, c.kv_format) if each_format else "", name, str(value))
            for c in configs
            for name, value in (
                *c.as_dict().items(),
                *c.options,
                ("formats", (c.q_dtype, c.kv_format)),
            )
            if name != "options"
        }

    for first in ((), SHARED):
        found = sample(each_format=each_format, first=first)
        assert values(found) == values(shipped())
        assert len(found) < len(shipped()) / (1 if each_format else 3)
        assert set(found) <= set(shipped())


def test_names_are_unique() -> None:
    names = [config.name() for config in shipped("sm_90a")]
    assert len(names) == len(set(names))
