"""Tensor maps in the card's own 128 bytes, as the host code of CuTe kernels encodes them.

| 32-bit word | content |
|---|---|
| 0, 1 | global address |
| 2 | bits 4-6 rank - 1; 7-10 element type; 13-14 swizzle: none, 32, 64, 128 bytes |
| 3-6, 7 | strides of dimensions 1 to 4 in units of 16 bytes; their bits 32-35, a nibble each |
| 8-12 | sizes - 1 |
| 13, 14 | element strides - 1 in 24 bits, box 0 - 1 in 8; boxes 1 to 4 - 1, a byte each |

The layout was found by encoding maps that differ in one property each.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np

from ..core.errors import unsupported
from .memory import BASE, GlobalMemory, SharedMemory
from .tiles import swizzle

ITEM_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 9: 8, 10: 2}
#: the map's swizzle -> that of matrix descriptors
_MODES = (0, 3, 2, 1)


class TensorMap:
    """A decoded map: tiles of `box` elements from a tensor of `sizes`, dimension 0 fastest."""

    def __init__(self, raw: bytes) -> None:
        words = struct.unpack("<32I", raw)
        self.base = words[0] | words[1] << 32
        self.rank = (words[2] >> 4 & 7) + 1
        high = [words[7] >> 4 * i & 15 for i in range(4)]
        self.strides = [(words[3 + i] | high[i] << 32) << 4 for i in range(self.rank - 1)]
        self.sizes = [words[8 + i] + 1 for i in range(self.rank)]
        boxes = [words[13] >> 24, *(words[14] >> 8 * i & 255 for i in range(4))]
        self.box = [n + 1 for n in boxes[: self.rank]]
        if words[13] & 0xFFFFFF or words[2] >> 7 & 15 not in ITEM_BYTES:
            raise unsupported("tensor map", "element strides or an unknown type", "tiled maps")
        self.item = ITEM_BYTES[words[2] >> 7 & 15]
        self.swizzle = _MODES[words[2] >> 13 & 3]
        self.nbytes = int(np.prod(self.box)) * self.item

    def read(self, memory: GlobalMemory, places: list[int]) -> tuple[np.ndarray, int]:
        """Bytes of the box at element coordinates, zeros outside the tensor; and the first address
        that belongs to no allocation, or -1.
        """
        out = np.zeros([*self.box[::-1], self.item], np.uint8)
        low = [max(0, -x) for x in places]
        high = [min(b, n - x) for b, n, x in zip(self.box, self.sizes, places, strict=True)]
        wrong = -1
        if all(end > begin for begin, end in zip(low, high, strict=True)):
            steps = [self.item, *self.strides]
            at = self.base - BASE
            at += sum((x + by) * s for x, by, s in zip(places, low, steps, strict=True))
            shape = [end - begin for begin, end in zip(low, high, strict=True)]
            last = at + sum((n - 1) * s for n, s in zip(shape, steps, strict=True)) + self.item
            if at < 0 or last > memory.bytes.size:
                return out.reshape(-1), BASE + at
            wrong = self._outside(memory.valid, at, shape, steps)
            view = np.lib.stride_tricks.as_strided(
                memory.bytes[at:], [*shape[::-1], self.item], [*steps[::-1], 1], writeable=False
            )
            inside = zip(low[::-1], high[::-1], strict=True)
            out[tuple(slice(begin, end) for begin, end in inside)] = view
        return out.reshape(-1), wrong

    def _outside(self, valid: np.ndarray, at: int, shape: list[int], steps: list[int]) -> int:
        words = -(-(at % 4 + shape[0] * self.item) // 4)
        counts, strides = [words, *shape[1:]], [1, *(s // 4 for s in steps[1:])]
        flags = np.lib.stride_tricks.as_strided(
            valid[at // 4 :], counts[::-1], strides[::-1], writeable=False
        )
        if flags.all():
            return -1
        first = np.unravel_index(int(flags.argmin()), flags.shape)[::-1]
        return BASE + at // 4 * 4 + 4 * int(sum(i * s for i, s in zip(first, strides, strict=True)))

    def write(self, shared: SharedMemory, offset: int, data: np.ndarray) -> None:
        """The box at an offset of shared memory, swizzled, in units of 16 bytes."""
        units = shared.views[8].reshape(-1, 2)
        units[_units(offset, data.size // 16, self.swizzle)] = data.view(np.uint64).reshape(-1, 2)


@lru_cache(maxsize=4096)
def _units(offset: int, count: int, mode: int) -> np.ndarray:
    return swizzle(offset + 16 * np.arange(count), mode) >> 4
