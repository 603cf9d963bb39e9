"""Machine code of a cubin as instructions, with the source lines they came from.

NVIDIA's disassembler (nvdisasm: PATH, the CUDA toolkit, or `nvidia-cuda-nvdisasm` from PyPI)
does the work; without it `Unsupported` says so, and PTX remains.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import BuildError, unsupported
from ..jit.toolchain import nvidia_file
from .opcodes import sass_class

_SECTION = re.compile(r"^\.text\.(\S+):$")
_LABEL = re.compile(r"^([.$]\S+):$")
_SOURCE = re.compile(r'//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction; `source` is (file, line) where the compiler recorded one, `labels`
    are those before it.
    """

    address: int
    opcode: str
    operands: str
    predicate: str
    source: tuple[str, int] | None
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Its class, as in `opcodes.SASS_CLASSES`."""
        return sass_class(self.opcode)

    def __str__(self) -> str:
        text = f"{self.predicate} {self.opcode} {self.operands}".strip()
        return f"{self.address:05x}  {text}"


def find_nvdisasm() -> Path | None:
    """The disassembler, or None."""
    found = shutil.which("nvdisasm") or nvidia_file("cu*/bin/nvdisasm")
    toolkit = Path("/usr/local/cuda/bin/nvdisasm")
    if found is None and toolkit.is_file():
        found = toolkit
    return Path(found) if found else None


def disassemble(cubin: Path) -> dict[str, list[Instruction]]:
    """Kernel name -> its instructions, in the order of their addresses."""
    tool = find_nvdisasm()
    if tool is None:
        raise unsupported("sass", "no nvdisasm", "`pip install nvidia-cuda-nvdisasm`; PTX always")
    done = subprocess.run(
        [str(tool), "-c", "-gi", str(cubin)], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise BuildError(f"nvdisasm: could not read {cubin} ({words}); install a newer one")
    return parse(done.stdout)


def parse(listing: str) -> dict[str, list[Instruction]]:
    """Read nvdisasm's `-c -gi` listing."""
    kernels: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    source: tuple[str, int] | None = None
    labels: tuple[str, ...] = ()
    for line in listing.splitlines():
        if found := _INSTRUCTION.match(line):
            address, predicate, opcode, operands = found.groups()
            place = int(address, 16)
            current.append(Instruction(place, opcode, operands, predicate or "", source, labels))
            labels = ()
        elif found := _SOURCE.search(line):
            source = (found[1], int(found[2]))
        elif found := _SECTION.match(line):
            current = kernels.setdefault(found[1], [])
            source, labels = None, ()
        elif found := _LABEL.match(line):
            labels = (*labels, found[1])
    return kernels
