"""Bytes of machine code of a build's kernels.

The first 128 KiB of a kernel's code are fast: what lies behind them is fetched anew in each launch,
at its first execution, whatever of the kernel a launch executes. Two mainloops in one kernel show
it, of which a launch runs one (keep_ab with 64 rows of bf16, 1 request, 128 heads, H200,
2026-11-24, medians of 9 replays, us; `data/notes/kernel_attempts.jsonl`):

| keep_ab's mainloop lies at | 1,024 tokens | 8,192 | 65,536 |
|---|---:|---:|---:|
| 24 to 124 KiB, alone in its kernel | 10.3 | 14.3 | 35.3 |
| 8 to 106 KiB, swap_ab behind it | 10.4 | 14.3 | 35.2 |
| 98 to 194 KiB, swap_ab before it | 10.6 | 15.4 | 37.5 |

So code that is rarely executed belongs behind the rest. ptxas keeps the order of the branches in
the source. Before that was known, the split kernel was timed at several sizes (H200, 2026-11-23, 1
request of 8,192 tokens and 16 of 4,096, 128 heads):

| bytes | us | |
|---:|---:|---|
| 127,872 | 13.8, 32.3 | kept words, without the rule itself |
| 136,320 | 14.0, 32.7 | the same, and 8 KB that no thread reaches behind its end |
| 149,760 | 14.4, 33.6 | the rule once |
| 182,144 | 15.3, 35.5 | the rule three times, by the size of the batch (290fee6) |
"""

from __future__ import annotations

from .cubin import sections

#: bytes from which on a launch was seen to be slower by 1 % and more
ROOM = 132 << 10


def code_bytes(elf: bytes) -> dict[str, int]:
    """Bytes of machine code of each kernel in a cubin, by name."""
    text = ".text."
    return {s.name.removeprefix(text): s.size for s in sections(elf) if s.name.startswith(text)}
