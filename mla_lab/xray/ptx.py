"""Opcode counts of a kernel's PTX, for machines without a disassembler."""

from __future__ import annotations

import re
from collections import Counter

from .opcodes import ptx_class

_ENTRY = re.compile(r"\.entry\s+(\S+?)\s*\(")
_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)(?:\s[^;]*)?;")


def opcodes(ptx: str) -> dict[str, Counter[str]]:
    """Kernel name -> static count of each opcode."""
    kernels: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in ptx.splitlines():
        if found := _ENTRY.search(line):
            current = kernels.setdefault(found[1], Counter())
        elif found := _INSTRUCTION.match(line):
            current[found[1]] += 1
    return kernels


def class_counts(counts: Counter[str]) -> Counter[str]:
    """The same by class, as in `opcodes.PTX_CLASSES`."""
    total: Counter[str] = Counter()
    for opcode, count in counts.items():
        total[ptx_class(opcode)] += count
    return total
