"""The unit that executes an instruction, from its SASS or PTX opcode, and the opcodes of PTX.

SASS names as nvdisasm prints them (CUDA Binary Utilities, "Instruction Set Reference").
"""

from __future__ import annotations

import re
from collections import Counter

#: class -> what the opcode begins with; the first class that matches counts
SASS_CLASSES: dict[str, tuple[str, ...]] = {
    "matrix": ("HGMMA", "QGMMA", "IGMMA", "BGMMA", "UTC?MMA", "HMMA", "QMMA", "OMMA", "IMMA"),
    "tma": ("UTMA", "UBLK", "UBLKPF"),
    "tensor memory": ("UTCATOMSWS", "UTCBAR", "UTCCP", "LDTM", "STTM"),
    "local": ("LDL", "STL"),
    "shared": ("LDS", "STS", "STAS", "ATOMS", "LDGSTS", "MOVM"),
    "global": ("LDG", "STG", "LD.", "ST.", "ATOM", "RED", "LDGDEPBAR"),
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
    "shared": ("ld.shared", "st.shared", "st.async", "ldmatrix", "stmatrix", "atom.shared"),
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


def _pattern(classes: dict[str, tuple[str, ...]]) -> re.Pattern[str]:
    """One alternation with a group a class; "?" in a prefix is any one letter."""
    groups = []
    for i, prefixes in enumerate(classes.values()):
        alternatives = "|".join(re.escape(p).replace(r"\?", r"\w") for p in prefixes)
        groups.append(f"(?P<c{i}>{alternatives})")
    return re.compile("|".join(groups))


_SASS, _PTX = _pattern(SASS_CLASSES), _pattern(PTX_CLASSES)


def sass_class(opcode: str) -> str:
    """Class of a SASS opcode with its modifiers, e.g. "HGMMA.64x64x16.F32.BF16"."""
    return _class(_SASS, SASS_CLASSES, opcode)


def ptx_class(opcode: str) -> str:
    """Class of a PTX opcode with its modifiers, e.g. "wgmma.mma_async.sync.aligned..."."""
    return _class(_PTX, PTX_CLASSES, opcode)


def _class(pattern: re.Pattern[str], classes: dict[str, tuple[str, ...]], opcode: str) -> str:
    found = pattern.match(opcode)
    if found is None or found.lastgroup is None:
        return OTHER
    return list(classes)[int(found.lastgroup[1:])]


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
