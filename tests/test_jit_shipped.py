"""Kernels compile for sm_90a without a GPU, none spills registers, and ptxas serializes the MMAs of
none: all that ship, as recorded of these sources. Where there is no such record, a sample is
compiled, with every format and every value of every field, with MLA_LAB_LONG=1 every value in every
format."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from mla_lab import jit, xray
from mla_lab.core.errors import BuildError
from mla_lab.cute import registry
from mla_lab.jit.build import canonical
from mla_lab.jit.shipped import CUTE, SM100, sample, shipped
from mla_lab.plan.config import KernelConfig
from mla_lab.verify import shipped_builds

from .built import sampled
from .needs import needs_cxx, needs_nvcc
from .shared_builds import SHARED
from .spills import most_code

#: kernels whose speed rests on these instructions: a build without them is another kernel
MUST_HAVE = {"cute/keep_ab_sm90": ("HGMMA", "UTMALDG"), "cute/swap_ab_sm90": ("HGMMA", "UTMALDG")}
#: where the cache has eight bits the matrix unit takes them
EIGHT_BITS = {"HGMMA": "QGMMA"}

SAMPLE = sampled()

pytestmark = [
    pytest.mark.slow,
    needs_cxx,
    needs_nvcc,
]


def quiet(_: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def compiled() -> None:
    """What of the sample has no current row, compiled together; each test looks at its own."""
    missing = [config for config in SAMPLE if shipped_builds.of(config) is None]
    with contextlib.suppress(BuildError):
        jit.compile_all(missing, "sm_90a", progress=quiet)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("config", shipped("sm_90a"), ids=KernelConfig.name)
def test_compiles_and_does_not_spill(config: KernelConfig) -> None:
    """As recorded of these sources; without a record of them a sample is compiled."""
    kernels = shipped_builds.of(config)
    if kernels is None:
        if config not in SAMPLE:
            pytest.skip("no record of these sources (mla-lab verify builds), not in the sample")
        seen = xray.inspect(jit.compile(config, "sm_90a", progress=quiet))
        kernels = tuple(map(shipped_builds.described, seen.kernels))
    assert kernels
    for kernel in kernels:
        assert kernel.stack == kernel.local == 0, kernel.name
        assert not xray.serializes(kernel.opcodes), f"{kernel.name}: its MMAs are serialized"
        assert 0 < kernel.code_bytes <= most_code(config), kernel.name
        if kernel.opcodes:
            for opcode in MUST_HAVE.get(config.kernel, ()):
                if config.kv_format in ("e4m3", "fp8_656"):
                    opcode = EIGHT_BITS.get(opcode, opcode)
                assert opcode in kernel.opcodes, f"{kernel.name} has no {opcode}"


@pytest.mark.parametrize("config", SHARED, ids=KernelConfig.name)
def test_the_record_has_what_a_compiler_makes_of_these_sources(config: KernelConfig) -> None:
    """For builds that other tests compile anyway."""
    recorded = shipped_builds.of(config)
    if recorded is None:
        pytest.skip("no record of these sources and compilers: mla-lab verify builds")
    artifact = jit.compile(config, "sm_90a", progress=quiet)
    made = xray.inspect(artifact)
    text = artifact.ptx.read_text(encoding="utf-8")
    assert shipped_builds.current()[config.name()]["ptx"] == shipped_builds.instructions(text)
    for row, kernel in zip(recorded, map(shipped_builds.described, made.kernels), strict=True):
        assert row == (kernel if kernel.opcodes else replace(kernel, opcodes=row.opcodes))


class OnlyTree:
    """A mask that only says that it is no tree."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        assert other == "tree", f"the kernel looks for {other!r}"
        return False


@pytest.mark.parametrize(
    "kernel", [name for name, line in registry.KERNELS.items() if "mask" in dict(line.ignores)]
)
def test_an_ignored_mask_does_not_change_the_code(kernel: str) -> None:
    """A kernel is traced from its entry, and the entry cannot tell the two masks apart."""
    found = [c for c in (*CUTE, *SM100) if c.kernel == kernel and c.mask != "tree"]
    assert found
    for config in found:
        causal, plain = (replace(config, mask=mask) for mask in ("causal", "none"))
        assert canonical(causal) == canonical(plain)
        object.__setattr__(plain, "mask", OnlyTree())
        assert registry.entry(plain).args


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
