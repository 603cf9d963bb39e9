"""Bytes of machine code of a build's kernels.

A launch whose code is in no cache of the SM, as in a step whose other kernels have run since, has
about the first 104 KB fetched for it; what lies behind them is fetched where it is executed, at 0.3
to 1 us a KB. So code that few launches execute does not belong in front, executed or not. The
table has times of keep_ab with 64 rows of bf16, padded ahead of its warps' roles with code that no
thread executes (H200, 2026-11-29, by hand, one card: 128 heads, behind its own replay and in a
step, us):

| bytes of code | 16 requests of 1,024 tokens | 4 of 4,096 |
|---:|---:|---:|
| 87,936 | 15.8, 19.9 | 16.1, 19.9 |
| 102,912 | 15.8, 20.2 | 16.1, 19.9 |
| 105,856 | 15.8, 22.2 | 16.0, 22.1 |
| 108,032 | 15.8, 22.6 | 16.0, 22.6 |
| 109,952 | 16.0, 23.4 | 16.1, 23.3 |
| 112,128 to 117,312 | 15.9, 23.7 | 16.0, 23.5 |

The same holds with ten further kernels between two calls. The rule by which CTAs find their tiles,
which one layer of a step executes, is therefore a function behind the kernel's own code
(`cute.common.outlined`). The build of the table has 86.5 KB ahead of it.

Code that a launch does execute is fast within the first 128 KiB; code past them is fetched anew by
each launch, whichever mainloop the launch executes. Two mainloops in one kernel show it, of which a
launch runs one (keep_ab with 64 rows of bf16, 1 request, 128 heads, H200, 2026-11-24, medians of 9
replays, us; `data/notes/kernel_attempts.jsonl`):

| keep_ab's mainloop lies at | 1,024 tokens | 8,192 | 65,536 |
|---|---:|---:|---:|
| 24 to 124 KiB, alone in its kernel | 10.3 | 14.3 | 35.3 |
| 8 to 106 KiB, swap_ab behind it | 10.4 | 14.3 | 35.2 |
| 98 to 194 KiB, swap_ab before it | 10.6 | 15.4 | 37.5 |

ptxas lays code out in the order of the control flow, so that a branch that is rarely taken stays
where it is.
"""

from __future__ import annotations

from .cubin import functions, sections

#: bytes from which on a launch was seen to be slower by 1 % and more
ROOM = 132 << 10
#: part of the name of a subroutine of ptxas
SUBROUTINE = "__internal_"


def code_bytes(elf: bytes) -> dict[str, int]:
    """Bytes of machine code of each kernel in a cubin, by name: up to the first function that was
    not inlined, all of which lie behind it. ptxas's own subroutines, of divisions for one, count as
    the kernel's."""
    text, found = ".text.", {}
    for section in sections(elf):
        kernel = section.name.removeprefix(text)
        if kernel != section.name:
            own = [f for f in functions(elf) if f.section == section.name and f.offset]
            behind = [f.offset for f in own if SUBROUTINE not in f.name]
            found[kernel] = min([section.size, *behind])
    return found
