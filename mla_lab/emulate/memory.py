"""Global and shared memory of a machine: bytes, and what is allocated.

Device memory begins at 2^40. A shared address is the CTA's rank in its cluster in bits 24 and up,
and an offset that begins at 1024, as on the card, whose driver has the first KiB.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BASE = 1 << 40
#: bytes of shared memory before a kernel's own
RESERVED = 1024
#: what memory holds that nobody wrote
POISON = 0xCD

Row = np.ndarray


class Region(NamedTuple):
    """An allocation: where it begins behind BASE, bytes, and whose it is."""

    offset: int
    nbytes: int
    name: str


class GlobalMemory:
    """Device memory: bytes, and which 4-byte words belong to an allocation."""

    def __init__(self) -> None:
        self.bytes = np.zeros(1 << 16, np.uint8)
        self.valid = np.zeros(1 << 14, bool)
        self.regions: list[Region] = []
        self._top = 256
        self.views: dict[int, Row] = {}
        self._see()

    def allocate(self, nbytes: int, name: str) -> int:
        """A region at a multiple of 256 bytes, with a gap behind it; its offset."""
        offset = self._top
        self._top = (offset + nbytes + 511) & ~255
        size = self.bytes.size
        while self._top > size:
            size *= 2
        if size > self.bytes.size:
            self.bytes = np.concatenate([self.bytes, np.zeros(size - self.bytes.size, np.uint8)])
            self.valid = np.concatenate([self.valid, np.zeros(size // 4 - self.valid.size, bool)])
            self._see()
        self.regions.append(Region(offset, nbytes, name))
        return offset

    def _see(self) -> None:
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}

    def open(self, offset: int, nbytes: int) -> None:
        """Kernels may use these bytes."""
        self.valid[offset // 4 : (offset + nbytes + 3) // 4] = True

    def describe(self, address: int) -> str:
        """An address by the nearest allocation below it."""
        at = address - BASE
        below = [r for r in self.regions if r.offset <= at]
        if not below:
            return f"{address:#x}"
        region = below[-1]
        return f"{address:#x}, byte {at - region.offset} of {region.name} ({region.nbytes} bytes)"


class SharedMemory:
    """Shared memory of a CTA as arrays of each word size; the first KiB is the driver's."""

    def __init__(self, nbytes: int) -> None:
        self.size = RESERVED + nbytes
        self.bytes = np.full((self.size + 15) // 16 * 16, POISON, np.uint8)
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
