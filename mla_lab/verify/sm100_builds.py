"""The SM100 kernel as compiled for sm_100a and sm_103a: what each plain build takes of an SM.

A build is "ok" where no register is spilled, shared and tensor memory are within an SM's, and no
second CTA fits beside it, which would wait for the first one's tensor memory.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..core.gpu import B200
from ..core.revision import Revision
from ..jit import Artifact, compile_all
from ..jit.shipped import SM100
from ..xray import KernelReport, inspect
from .emulated import digest_of_code
from .record import Progress, Row, write_anew

ARCHS = ("sm_100a", "sm_103a")
#: columns of tensor memory of an SM; an allocation is a power of two from 32
TENSOR_COLUMNS = 512
#: registers that a thread may have
MOST_REGISTERS = 255
#: opcodes that a row counts
COUNTED = ("UTCHMMA", "UTCQMMA", "UTCBAR", "LDTM", "STTM", "UTMALDG", "SYNCS", "MUFU.EX2")
_ALLOCATION = re.compile(r"tcgen05\.alloc\S*\s+\[\S+\], (%r\d+|\d+);")


def tensor_columns(ptx: str) -> int:
    """Columns that a kernel's PTX allocates, -1 where that is no constant."""
    found = 0
    for value in _ALLOCATION.findall(ptx):
        if value.startswith("%"):
            moved = re.search(rf"mov\.[bu]32\s+{value}, (\d+);", ptx)
            value = moved[1] if moved else "-1"
        if int(value) < 0:
            return -1
        found += int(value)
    return found


def status(kernel: KernelReport, columns: int) -> str:
    """ "ok", or "wrong" where something does not fit or was spilled."""
    used = kernel.resources
    fits = used.shared <= B200.smem_per_block and 0 < columns <= TENSOR_COLUMNS
    fits = fits and 2 * used.shared > B200.smem_per_sm
    kept = used.stack == 0 and kernel.spills == 0 and used.registers <= MOST_REGISTERS
    return "ok" if fits and kept else "wrong"


def row(artifact: Artifact) -> Row:
    """The row of a build for one architecture."""
    report = inspect(artifact)
    kernel, columns = report.kernels[0], tensor_columns(report.ptx())
    used = kernel.resources
    return {
        "kind": "case",
        "name": f"{artifact.config.name()} {artifact.arch}",
        "status": status(kernel, columns),
        "registers": used.registers,
        "by_role": {role.name: role.registers for role in kernel.roles},
        "stack": used.stack,
        "local": kernel.spills,
        "shared_bytes": used.shared,
        "tensor_columns": columns,
        "opcodes": {name: kernel.count(name) for name in COUNTED} if report.has_sass else {},
        "ptx": digest_of_code(artifact.ptx.read_text()),
        "toolchain": artifact.toolchain,
        "commit": Revision.here().commit,
    }


def run(path: Path, say: Progress) -> list[Row]:
    """Compile every plain build for both architectures; the record is written anew."""
    artifacts = [made for arch in ARCHS for made in compile_all(SM100, arch, progress=say)]
    rows = [row(artifact) for artifact in artifacts]
    for each in rows:
        say(f"{each['status']} {each['name']} {each['registers']} registers")
    return write_anew(path, "sm100 builds", rows)
