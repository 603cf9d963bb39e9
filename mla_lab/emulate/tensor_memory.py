"""Tensor memory of SM100: allocation, and the loads and stores of warps.

128 lanes of 512 columns of 32 bits a CTA; an address is lane << 16 | column. Warp w of a CTA may
touch lanes 32 (w % 4) to 32 (w % 4) + 31. PTX ISA, "Tensor Memory".
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .access import st_shared
from .findings import fault
from .gang import Gang, Mask, lanes_of
from .parts import CtaLike
from .writer import BLOCKED

Row = np.ndarray
LANES, COLUMNS = 128, 512
#: what tensor memory holds that nobody wrote: a NaN
POISON = 0x7FC0DEAD
#: shape -> (lanes that a warp's access covers, 32-bit registers of .x1)
SHAPES = {"32x32b": (32, 1), "16x64b": (16, 1), "16x128b": (16, 2), "16x256b": (16, 4)}
SHAPES["16x32bx2"] = (16, 1)


class TensorMemory:
    """A CTA's tensor memory, and which of its columns are allocated."""

    def __init__(self) -> None:
        self.words = np.full((LANES, COLUMNS), POISON, np.uint32)
        self.floats = self.words.view(np.float32)
        self.owned = np.zeros(COLUMNS, bool)
        #: first column -> columns of each allocation
        self.blocks: dict[int, int] = {}
        self.relinquished = False

    def find(self, count: int) -> int:
        """The first column of so many free ones, -1 where there are none."""
        for first in range(0, COLUMNS - count + 1, count):
            if not self.owned[first : first + count].any():
                return first
        return -1

    def check(self, g: Gang, first: int, count: int, pc: int) -> None:
        """Raises Fault where a column was not allocated."""
        if first + count > COLUMNS or not self.owned[first : first + count].all():
            allocated = [f"{b} to {b + n - 1}" for b, n in sorted(self.blocks.items())]
            text = f"columns {first} to {first + count - 1} of tensor memory; allocated are "
            raise fault(g, pc, "tensor memory", text + (", ".join(allocated) or "none"))


def tensor_memory_of(cta: CtaLike) -> TensorMemory:
    """The CTA's tensor memory, made when it is first used."""
    if cta.tensor is None:
        cta.tensor = TensorMemory()
    found: TensorMemory = cta.tensor
    return found


def _one(row: Row, m: Mask) -> int:
    return int(row[0 if m is True else int(m.argmax())])


def tcgen05_alloc(g: Gang, address: Row, columns: Row, m: Mask, after: int, pc: int) -> int:
    """tcgen05.alloc: writes the first column's address to shared memory; waits for free columns."""
    tensor, count = tensor_memory_of(g.cta), _one(columns, m)
    if count & count - 1 or not 32 <= count <= COLUMNS:
        raise fault(g, pc, "tensor memory", f"an allocation of {count} columns: 32, 64, ... 512")
    if tensor.relinquished:
        raise fault(g, pc, "tensor memory", "an allocation behind relinquish_alloc_permit")
    first = tensor.find(count)
    if first < 0:
        return BLOCKED
    tensor.owned[first : first + count] = True
    tensor.words[:, first : first + count] = POISON
    tensor.blocks[first] = count
    one = np.zeros(g.n, bool)
    one[lanes_of(g, m)[0]] = True
    st_shared(g, address, [np.full(g.n, first, np.uint32)], 4, one, pc)
    g.machine.checker.tensor.allocated(g, first, count, pc)
    return after


def tcgen05_dealloc(g: Gang, address: Row, columns: Row, m: Mask, pc: int) -> None:
    """tcgen05.dealloc"""
    tensor, first, count = tensor_memory_of(g.cta), _one(address, m), _one(columns, m)
    if tensor.blocks.get(first) != count:
        text = f"no allocation of {count} columns at {first}; there are {tensor.blocks}"
        raise fault(g, pc, "tensor memory", text)
    g.machine.checker.tensor.freed(g, first, count, pc)
    tensor.owned[first : first + count] = False
    del tensor.blocks[first]
    g.machine.progress += 1


def tcgen05_relinquish(g: Gang) -> None:
    """tcgen05.relinquish_alloc_permit"""
    tensor_memory_of(g.cta).relinquished = True


@lru_cache(maxsize=256)
def places_of(shape: str, registers: int, split: int) -> tuple[Row, Row]:
    """Lane and column, behind an access's address, of each register of each thread of a warp.

    Arrays [registers, 32]. split: columns between the halves of 16x32bx2. 32x32b is the ISA's
    text; the others are figures there, and what CuTe's copy atoms say here.
    """
    t, r = np.arange(32)[None, :], np.arange(registers)[:, None]
    if shape == "32x32b":
        lane, column = t + 0 * r, r + 0 * t
    elif shape == "16x32bx2":
        lane, column = t % 16 + 0 * r, r + split * (t // 16)
    elif shape == "16x64b":
        lane, column = 8 * (t % 2) + t // 4 + 0 * r, t // 2 % 2 + 2 * r
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)
    else:
        lane, column = t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)
    return lane, column


def _located(
    g: Gang, address: Row, shape: tuple[str, int], count: int, m: Mask, pc: int
) -> tuple[TensorMemory, Row, Row]:
    """Tensor memory, lanes and columns [registers, active threads] of a warp's access."""
    tensor = tensor_memory_of(g.cta)
    active = lanes_of(g, m)
    at = address[active].astype(np.int64)
    first, column = at >> 16, at & 0xFFFF
    lane_by, column_by = places_of(shape[0], count, shape[1])
    quarter = (g.first + active) // 32 % 4 * 32
    inside = first - quarter
    if ((inside < 0) | (inside + SHAPES[shape[0]][0] > 32) | (inside % 16 != 0)).any():
        wrong = int(((inside < 0) | (inside + SHAPES[shape[0]][0] > 32)).argmax())
        text = f"lane {first[wrong]} of tensor memory: this warp may touch lanes "
        text += f"{quarter[wrong]} to {quarter[wrong] + 31}"
        raise fault(g, pc, "tensor memory", text)
    thread = g.lane[active]
    columns = column + column_by[:, thread]
    low = int(columns.min())
    tensor.check(g, low, int(columns.max()) + 1 - low, pc)
    return tensor, first + lane_by[:, thread], columns


def tcgen05_ld(
    g: Gang, out: list[Row], address: Row, shape: tuple[str, int], m: Mask, pc: int
) -> None:
    """tcgen05.ld; `shape` is its name and the split of 16x32bx2."""
    tensor, lanes, columns = _located(g, address, shape, len(out), m, pc)
    g.machine.checker.tensor.load(g, lanes, columns, pc)
    active, found = lanes_of(g, m), tensor.words[lanes, columns]
    for row, value in zip(out, found, strict=True):
        row[active] = value


def tcgen05_st(
    g: Gang, address: Row, values: list[Row], shape: tuple[str, int], m: Mask, pc: int
) -> None:
    """tcgen05.st"""
    tensor, lanes, columns = _located(g, address, shape, len(values), m, pc)
    g.machine.checker.tensor.store(g, lanes, columns, pc)
    active = lanes_of(g, m)
    tensor.words[lanes, columns] = np.stack([row[active] for row in values])
    g.machine.progress += 1
