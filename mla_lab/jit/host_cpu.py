"""The level of a machine's processor, as host code of a compiled kernel needs it.

The CuTe DSL compiles the host code of a launch for the processor that it runs on, AVX-512 included;
it has no option for another one of x86-64. On a processor of a lower level that code ends the
process with an illegal instruction. So the level is part of a toolchain's versions: builds of a
cache that machines share, of a bundle or of a wheel are used where the processor has their level.
The levels are those of the x86-64 psABI.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

BASE, X86 = "x86-64", "x86_64"
#: level -> what /proc/cpuinfo names of it, beside that of the levels above in this table
LEVELS = {
    "x86-64-v2": ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"),
    "x86-64-v3": ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"),
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
}


def level_of(flags: frozenset[str]) -> str:
    """The highest level whose features, and those of all levels below, are among `flags`."""
    found = BASE
    for level, features in LEVELS.items():
        if not flags.issuperset(features):
            break
        found = level
    return found


@cache
def host_cpu() -> str:
    """Level of this machine's processor: "x86-64-v3"; of another architecture, its name."""
    machine = platform.machine()
    if machine != X86:
        return machine
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return BASE
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return level_of(frozenset(flags.split()))


def runs_here(level: str) -> bool:
    """Whether this machine's processor executes host code that was compiled for `level`."""
    levels = [BASE, *LEVELS]
    here = host_cpu()
    if level in levels and here in levels:
        return levels.index(level) <= levels.index(here)
    return level == here
