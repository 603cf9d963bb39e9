"""Bytes of machine code of a build's kernels.

A launch of much code takes longer in all of its phases, whether it reaches the code or not. The
split keep_ab kernel over bf16 on an H200 (2026-11-23, medians of 9 replays, a process for each
build, 1 request of 8,192 tokens and 16 of 4,096, 128 heads; `data/notes/kernel_attempts.jsonl`):

| bytes | us | |
|---:|---:|---|
| 121,088 | 13.8, 32.6 | a plan in memory alone (6277a6a) |
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
