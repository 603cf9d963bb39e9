"""The unit that executes an instruction, from its SASS or PTX opcode, and the opcodes of PTX.

SASS names as nvdisasm prints them (CUDA Binary Utilities, "Instruction Set Reference").
"""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase
from functools import cache

#: class -> what the opcode begins with, "?" any one letter; the longest that matches counts
SASS_CLASSES: dict[str, tuple[str, ...]] = {
    "matrix": ("HGMMA", "QGMMA", "IGMMA", "BGMMA", "UTC?MMA", "HMMA", "QMMA", "OMMA", "IMMA"),
    "tma": ("UTMA", "UBLK", "UBLKPF"),
    "tensor memory": ("UTCATOMSWS", "UTCBAR", "UTCCP", "LDTM", "STTM"),
    "local": ("LDL", "STL"),
    "shared": ("LDS", "STS", "STAS", "ATOMS", "LDGSTS", "MOVM"),
    "global": ("LDG", "STG", "LD.", "ST.", "ATOM", "RED"),
    "barrier": (
        "BAR",
        "SYNCS",
        "UCGABAR",
        "MEMBAR",
        "FENCE",
        "ERRBAR",
        "CGAERRBAR",
        "WARPGROUP",
        "DEPBAR",
        "LDGDEPBAR",
        "ARRIVES",
        "ACQBULK",
        "PREEXIT",
        "CCTL",
        "WARPSYNC",
        "NANOSLEEP",
    ),
    "special function": ("MUFU",),
    "shuffle": ("SHFL", "REDUX", "VOTE", "MATCH"),
    "register file": ("USETMAXREG",),
}
PTX_CLASSES: dict[str, tuple[str, ...]] = {
    "matrix": ("wgmma.mma_async", "mma.sync", "tcgen05.mma"),
    "tma": ("cp.async.bulk", "cp.reduce.async.bulk", "prefetch.tensormap"),
    "tensor memory": (
        *("tcgen05.ld", "tcgen05.st", "tcgen05.alloc", "tcgen05.dealloc"),
        *("tcgen05.relinquish", "tcgen05.cp", "tcgen05.shift"),
    ),
    "local": ("ld.local", "st.local"),
    "shared": (
        *("ld.shared", "st.shared", "st.async", "ldmatrix", "stmatrix", "atom.shared"),
        "cp.async",
    ),
    "global": ("ld.global", "st.global", "atom", "red"),
    "barrier": (
        "bar",
        "mbarrier",
        "membar",
        "fence",
        "wgmma.fence",
        "wgmma.commit",
        "wgmma.wait",
        "tcgen05.commit",
        "tcgen05.fence",
        "tcgen05.wait",
        "griddepcontrol",
        "cp.async.commit",
        "cp.async.mbarrier",
        "cp.async.wait",
        "nanosleep",
    ),
    "special function": ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos"),
    "shuffle": ("shfl", "redux", "vote", "match"),
    "register file": ("setmaxnreg",),
}
OTHER = "other"
_ENTRY = re.compile(r"\.entry\s+(\S+?)\s*\(")
_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)(?:\s[^;]*)?;")


#: of a PTX access, what stands between its name and its state space
_ORDER = re.compile(
    r"(?<=^ld|^st)(?:\.(?:weak|volatile|relaxed|acquire|release|cta|cluster|gpu|sys))+"
)


@cache
def sass_class(opcode: str) -> str:
    """Class of a SASS opcode with its modifiers, e.g. "HGMMA.64x64x16.F32.BF16"."""
    return _class(SASS_CLASSES, opcode)


@cache
def ptx_class(opcode: str) -> str:
    """Class of a PTX opcode with its modifiers, e.g. "wgmma.mma_async.sync.aligned..."."""
    return _class(PTX_CLASSES, _ORDER.sub("", opcode))


def _class(classes: dict[str, tuple[str, ...]], opcode: str) -> str:
    found = {p: kind for kind, own in classes.items() for p in own if fnmatchcase(opcode, f"{p}*")}
    # the longest beginning: REDUX is no RED
    return found[max(found, key=len)] if found else OTHER


def ptx_opcodes(ptx: str) -> dict[str, Counter[str]]:
    """Kernel name -> static count of each opcode, for machines without a disassembler."""
    kernels: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in ptx.splitlines():
        if found := _ENTRY.search(line):
            current = kernels.setdefault(found[1], Counter())
        elif found := _INSTRUCTION.match(line):
            current[found[1]] += 1
    return kernels


def ptx_class_counts(counts: Counter[str]) -> Counter[str]:
    """The same by class, as in `PTX_CLASSES`."""
    total: Counter[str] = Counter()
    for opcode, count in counts.items():
        total[ptx_class(opcode)] += count
    return total
