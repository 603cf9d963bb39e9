"""Every shipped build for sm_90a as it is compiled here: registers, stack, machine code, opcodes,
and the PTX instructions that move tiles, multiply them, vote or reduce.

A row has the hash of its build's sources and the versions of its compilers. `current` gives the
rows that are of today's sources and compilers: a test of them need not compile all builds anew.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from ..bench.records import grouped
from ..core.errors import BuildError
from ..core.markdown import markdown_table
from ..core.resources import data_dir
from ..jit import Artifact, compile_all
from ..jit.shipped import shipped
from ..jit.source import source_hash
from ..jit.toolchain import versions
from ..plan.config import KernelConfig
from ..xray import KernelReport, inspect, serializes
from .record import Progress, Row, read, write_anew

RECORD = "records/builds.jsonl"
ARCH = "sm_90a"
#: PTX instructions that a row counts, by their full names
COUNTED = re.compile(r"\b(?:wgmma\.mma_async|cp\.async|ldmatrix|stmatrix|vote|red|atom)\.[\w.:]+")
#: of a toolchain, what generates device code
COMPILERS = ("cutlass-dsl", "flavour", "nvcc")


@dataclass(frozen=True)
class BuiltKernel:
    """What one kernel of a build takes: registers and stack bytes of a thread, `local` instructions
    that access local memory, `shared` bytes of a CTA, bytes of machine code, and how many
    instructions each opcode has, by its first word: "HGMMA".
    """

    name: str
    registers: int
    stack: int
    local: int
    shared: int
    code_bytes: int
    opcodes: dict[str, int]


def described(kernel: KernelReport) -> BuiltKernel:
    """What of a kernel's report goes into a row."""
    used = kernel.resources
    opcodes: Counter[str] = Counter()
    for opcode, count in kernel.opcodes.items():
        opcodes[opcode.partition(".")[0]] += count
    taken = (used.registers, used.stack, kernel.spills, used.shared, kernel.code_bytes)
    return BuiltKernel(kernel.name, *taken, dict(sorted(opcodes.items())))


def instructions(ptx: str) -> dict[str, int]:
    """How often each instruction of `COUNTED` stands in a build's PTX."""
    return dict(sorted(Counter(COUNTED.findall(ptx)).items()))


def row(artifact: Artifact) -> Row:
    """The row of a build; "wrong" where a kernel spills or its MMAs are serialized."""
    kernels = [described(kernel) for kernel in inspect(artifact).kernels]
    slow = any(kernel.stack or serializes(kernel.opcodes) for kernel in kernels)
    return {
        "kind": "case",
        "name": artifact.config.name(),
        "status": "wrong" if slow else "ok",
        "source": source_hash(artifact.config.kernel),
        "toolchain": artifact.toolchain,
        "kernels": [asdict(kernel) for kernel in kernels],
        "ptx": instructions(artifact.ptx.read_text(encoding="utf-8")),
    }


def run(path: Path, say: Progress) -> list[Row]:
    """Compile what is missing of all shipped builds; the record is written anew."""
    artifacts = compile_all(shipped(ARCH), ARCH, progress=say)
    return write_anew(path, "builds", [row(artifact) for artifact in artifacts])


@cache
def current() -> dict[str, Row]:
    """Build's name -> its row, of the rows that are of today's sources and, where there are
    compilers, of today's compilers.
    """
    return {each["name"]: each for each in of_today(RECORD, shipped(ARCH))}


def of_today(record: str, configs: Iterable[KernelConfig]) -> Iterator[Row]:
    """Rows of a record below `data/` that are of these builds, of today's sources and compilers."""
    path = data_dir() / record
    kernels = {config.name(): config.kernel for config in configs}
    for each in read(path)[1:] if path.exists() else []:
        kernel = kernels.get(each["name"])
        if kernel and each["source"] == source_hash(kernel) and same_compilers(kernel, each):
            yield each


def of(config: KernelConfig) -> tuple[BuiltKernel, ...] | None:
    """Kernels of a build by `current`; None where the record does not have it."""
    found = current().get(config.name())
    return kernels_of(found) if found else None


def kernels_of(each: Row) -> tuple[BuiltKernel, ...]:
    """The kernels of a row."""
    return tuple(BuiltKernel(**one) for one in each["kernels"])


def same_compilers(kernel: str, each: Row) -> bool:
    """Whether the row is of this machine's compilers, or there are none here."""
    here = _compilers(kernel)
    return here is None or here == {name: each["toolchain"].get(name) for name in COMPILERS}


@cache
def _compilers(kernel: str) -> dict[str, str | None] | None:
    try:
        found = versions(kernel)
    except BuildError:
        return None
    return {name: found.get(name) for name in COMPILERS}


def table(rows: Sequence[Row]) -> str:
    """Kernel by kernel: builds, registers, machine code, and how many have a stack."""
    head, cases = rows[0], rows[1:]
    kernels = {config.name(): config.kernel for config in shipped(ARCH)}
    known = (each for each in cases if each["name"] in kernels)
    by_kernel = grouped(known, lambda each: kernels[each["name"]])
    lines = [(name, *_figures(group)) for name, group in by_kernel.items()]
    names = ("kernel", "builds:", "registers:", "machine code, B:", "with a stack:", "stack, B:")
    return f"{made_of(head)}.\n\n{markdown_table(names, lines)}"


def made_of(head: Row) -> str:
    """Commit and date of a record of builds."""
    env = head["environment"]
    return f"commit {(env['commit'] or 'unknown')[:9]}, {env['date']}"


def _figures(group: Iterable[Row]) -> tuple[str, ...]:
    """Cells of builds of one kernel; a range where they differ."""
    largest = list(map(kernels_of, group))
    registers = _range(max(k.registers for k in each) for each in largest)
    code = _range(max(k.code_bytes for k in each) for each in largest)
    stacks = [stack for each in largest if (stack := max(k.stack for k in each))]
    return (str(len(largest)), registers, code, str(len(stacks)), _range(stacks) if stacks else "")


def _range(values: Iterable[int]) -> str:
    found = sorted(values)
    return f"{found[0]:,}" if found[0] == found[-1] else f"{found[0]:,} to {found[-1]:,}"
