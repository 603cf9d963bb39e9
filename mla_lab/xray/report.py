"""Resources and instruction counts of a compiled kernel as values; `render` makes text of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..core.errors import BuildError
from ..jit.artifact import Artifact
from ..jit.code_size import code_bytes
from ..jit.cubin import KernelResources
from . import sass
from .opcodes import ptx_class_counts, ptx_opcodes
from .roles import Role, roles
from .sass import Instruction

#: resources of a kernel, and what a difference calls them
FACTS = {
    "registers": "registers",
    "stack": "stack",
    "static_shared": "static shared memory",
    "dynamic_shared": "dynamic shared memory",
    "barriers": "named barriers",
}


#: `WARPGROUP` instructions per wgmma from which on they are taken for serialized, which have two;
#: and MMAs from which on that can be told: a loop over one may well have two
SERIAL, LEAST_MMAS = 1.5, 8


def serializes(opcodes: Mapping[str, int]) -> bool:
    """True where each wgmma has an arrive and a wait of its own, by counts of opcodes. ptxas does
    so to all of a kernel where the registers of one role do not suffice for its MMAs in flight;
    neither registers nor local memory show it."""
    products = sum(n for op, n in opcodes.items() if op.startswith(("HGMMA", "QGMMA")))
    waits = sum(n for op, n in opcodes.items() if op.startswith("WARPGROUP"))
    return products >= LEAST_MMAS and waits >= SERIAL * products


@dataclass(frozen=True)
class KernelReport:
    """One kernel of an artifact. `instructions` is empty where no disassembler is installed, and
    `code_bytes` (of machine code) 0 where there is no cubin."""

    name: str
    resources: KernelResources
    instructions: tuple[Instruction, ...]
    ptx_opcodes: Counter[str]
    code_bytes: int = 0

    @cached_property
    def opcodes(self) -> Counter[str]:
        """Static count of each SASS opcode."""
        return Counter(i.opcode for i in self.instructions)

    @cached_property
    def classes(self) -> Counter[str]:
        """Instructions by class: SASS, or PTX where there is no SASS."""
        if not self.instructions:
            return ptx_class_counts(self.ptx_opcodes)
        return Counter(i.kind for i in self.instructions)

    @property
    def serialized(self) -> bool:
        """See `serializes`."""
        return serializes(self.opcodes)

    @property
    def spills(self) -> int:
        """Accesses to local memory, which a kernel here should not have: spilled registers."""
        if self.instructions:
            return self.classes["local"]
        return self.classes["local"] or int(self.resources.stack > 0)

    def count(self, prefix: str) -> int:
        """Instructions whose opcode begins with `prefix`, e.g. "HGMMA" or "UTMALDG"."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(prefix))

    @cached_property
    def mbarriers(self) -> int:
        """Instructions in PTX that initialise mbarriers: one for each, where none is in a loop."""
        return sum(n for op, n in self.ptx_opcodes.items() if op.startswith("mbarrier.init"))

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """Roles of a tcgen05 kernel, each with the registers that its code names."""
        return roles(self.instructions)


@dataclass(frozen=True)
class Report:
    """Reports of the kernels of an artifact."""

    artifact: Artifact
    kernels: tuple[KernelReport, ...]

    @property
    def has_sass(self) -> bool:
        """Whether the kernels were disassembled."""
        return any(k.instructions for k in self.kernels)

    def ptx(self) -> str:
        """The PTX text."""
        return self.artifact.ptx.read_text()


@dataclass(frozen=True)
class Change:
    """A fact that differs between two kernels."""

    fact: str
    before: int
    after: int


def inspect(artifact: Artifact) -> Report:
    """Resources and PTX of an artifact, and its SASS where nvdisasm is installed.

    Raises `BuildError` for an artifact without PTX, as a wheel of kernels holds them.
    """
    if not artifact.ptx.is_file():
        raise BuildError(
            f"xray: {artifact.folder} has no PTX, which a wheel of kernels leaves out; uninstall "
            "the wheel where you compile"
        )
    texts = ptx_opcodes(artifact.ptx.read_text())
    return Report(artifact, kernel_reports(artifact.cubin, artifact.resources, texts))


def kernel_reports(
    cubin: Path, resources: Iterable[KernelResources], texts: Mapping[str, Counter[str]]
) -> tuple[KernelReport, ...]:
    """A report of each kernel of a cubin; `texts` has the opcodes of its PTX, by symbol."""
    code = sass.disassemble(cubin) if sass.find_nvdisasm() else {}
    sizes = code_bytes(cubin.read_bytes())
    return tuple(
        KernelReport(
            name=short_name(r.kernel),
            resources=r,
            instructions=tuple(code.get(r.kernel, ())),
            ptx_opcodes=texts.get(r.kernel, Counter()),
            code_bytes=sizes.get(r.kernel, 0),
        )
        for r in resources
    )


def compare(before: KernelReport, after: KernelReport) -> list[Change]:
    """Facts that differ: resources first, then opcodes (SASS, else PTX) by size of change."""
    facts = [
        Change(words, _number(before, name), _number(after, name)) for name, words in FACTS.items()
    ]
    facts.append(Change("mbarriers", before.mbarriers, after.mbarriers))
    counts = [k.opcodes if k.instructions else k.ptx_opcodes for k in (before, after)]
    moved = [Change(op, counts[0][op], counts[1][op]) for op in {*counts[0], *counts[1]}]
    moved.sort(key=lambda c: (-abs(c.after - c.before), c.fact))
    total = Change("instructions", counts[0].total(), counts[1].total())
    size = Change("bytes of machine code", before.code_bytes, after.code_bytes)
    return [c for c in [*facts, size, total, *moved] if c.before != c.after]


def _number(report: KernelReport, name: str) -> int:
    return getattr(report.resources, name) or 0


def short_name(symbol: str) -> str:
    """A kernel's readable name: C++ demangled, the DSL's without the types of its arguments."""
    if symbol.startswith("_Z"):
        filter_tool = shutil.which("c++filt")
        if filter_tool is None:
            return symbol
        done = subprocess.run([filter_tool, symbol], capture_output=True, text=True)
        plain = done.stdout.strip().replace("(anonymous namespace)::", "")
        return plain.split("(")[0].removeprefix("void ") or symbol
    name = symbol.removeprefix("kernel_").removeprefix("cutlass_")
    return re.split(r"_(?=[A-Z])|_tensor|_object", name)[0]
