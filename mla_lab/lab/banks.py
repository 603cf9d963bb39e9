"""Banks of shared memory: conflicts, and their removal by a swizzle.

Shared memory has 32 banks of 4 bytes; a warp's 16-byte accesses are served eight lanes at a time,
one 128-byte row of banks. Lanes of such a group that access different words of one bank are
serialised (CUDA C++ Programming Guide, compute capability 5.x and later).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import invalid
from .layout import Swizzle

NUM_BANKS = 32
BANK_BYTES = 4
#: bytes of one access, and lanes that are served at once
VECTOR_BYTES = 16
GROUP_LANES = 8

#: the swizzles that CuTe's K-major atoms use, by bytes of a row; they act on byte offsets
ATOMS = {16: Swizzle(0, 4, 3), 32: Swizzle(1, 4, 3), 64: Swizzle(2, 4, 3), 128: Swizzle(3, 4, 3)}


def bank_of(byte: int) -> int:
    """The bank that holds a byte."""
    return byte // BANK_BYTES % NUM_BANKS


def turns(offsets: Sequence[int], width: int = VECTOR_BYTES) -> int:
    """Bank-conflict degree of one group of accesses: 1 is conflict-free.

    `offsets` are byte offsets of up to eight lanes, `width` bytes each. Equal words are one access.
    """
    if len(offsets) > GROUP_LANES:
        raise invalid("offsets", f"{len(offsets)} lanes", f"at most {GROUP_LANES}")
    words: dict[int, set[int]] = {}
    for offset in offsets:
        for byte in range(offset, offset + width, BANK_BYTES):
            words.setdefault(bank_of(byte), set()).add(byte // BANK_BYTES)
    return max(map(len, words.values()), default=0)


def column(row_bytes: int, chunk: int, rows: int = GROUP_LANES) -> list[int]:
    """Byte offsets of one 16-byte column over `rows` rows: how a matrix unit reads 8 x 8 tiles."""
    return [row * row_bytes + chunk * VECTOR_BYTES for row in range(rows)]


def worst_column(row_bytes: int, swizzle: Callable[[int], int]) -> int:
    """Turns of the worst 16-byte column of an eight-row atom, after the swizzle."""
    chunks = row_bytes // VECTOR_BYTES
    return max(turns([swizzle(b) for b in column(row_bytes, c)]) for c in range(chunks))


def worst_row(row_bytes: int, swizzle: Callable[[int], int]) -> int:
    """Turns of writing the atom front to back, eight vectors at a time, as a bulk copy does."""
    starts = range(0, GROUP_LANES * row_bytes, GROUP_LANES * VECTOR_BYTES)
    return max(
        turns([swizzle(start + lane * VECTOR_BYTES) for lane in range(GROUP_LANES)])
        for start in starts
    )
