"""Tensor maps of the emulator: which bytes a box has, at and beyond the edges of a tensor."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from mla_lab.core.errors import Unsupported
from mla_lab.emulate.memory import BASE, GlobalMemory
from mla_lab.emulate.tensor_map import TensorMap

#: rows and columns of 2 bytes, and of a box
ROWS, COLUMNS = 10, 24
BOX_ROWS, BOX_COLUMNS = 4, 8
BF16 = 10


def encoded(base: int, element_strides: int = 0, kind: int = BF16) -> bytes:
    """A map of two dimensions, columns first, without a swizzle."""
    words = [0] * 32
    words[0], words[1] = base & 0xFFFFFFFF, base >> 32
    words[2] = 1 << 4 | kind << 7
    words[3] = COLUMNS * 2 // 16
    words[8], words[9] = COLUMNS - 1, ROWS - 1
    words[13] = element_strides | BOX_COLUMNS - 1 << 24
    words[14] = BOX_ROWS - 1
    return struct.pack("<32I", *words)


@pytest.mark.parametrize(
    ("column", "row"),
    [
        (0, 0),
        (8, 3),
        (16, 6),
        (20, 0),
        (0, 8),
        (20, 8),
        (-4, 2),
        (4, -3),
        (-4, -3),
        (22, 9),
        (1, 0),
    ],
)
def test_elements_outside_of_the_tensor_are_zeros(column: int, row: int) -> None:
    memory = GlobalMemory()
    at = memory.allocate(ROWS * COLUMNS * 2, "t")
    memory.open(at, ROWS * COLUMNS * 2)
    values = np.arange(1, 1 + ROWS * COLUMNS, dtype=np.uint16).reshape(ROWS, COLUMNS)
    memory.bytes[at : at + values.nbytes] = values.view(np.uint8).reshape(-1)
    found, wrong = TensorMap(encoded(BASE + at)).read(memory, [column, row])
    padded = np.zeros((ROWS + 8, COLUMNS + 16), np.uint16)
    padded[4 : 4 + ROWS, 8 : 8 + COLUMNS] = values
    box = padded[4 + row : 4 + row + BOX_ROWS, 8 + column : 8 + column + BOX_COLUMNS]
    assert wrong == -1
    assert np.array_equal(found.view(np.uint16).reshape(BOX_ROWS, BOX_COLUMNS), box)


def test_a_box_far_outside_reads_nothing() -> None:
    memory = GlobalMemory()
    found, wrong = TensorMap(encoded(BASE + 256)).read(memory, [COLUMNS, 0])
    assert wrong == -1 and not found.any()


def test_the_first_address_of_no_allocation_is_told() -> None:
    """The tensor's last two rows were freed."""
    memory = GlobalMemory()
    at = memory.allocate(ROWS * COLUMNS * 2, "t")
    memory.open(at, (ROWS - 2) * COLUMNS * 2)
    tensor = TensorMap(encoded(BASE + at))
    assert tensor.read(memory, [8, 4])[1] == -1
    assert tensor.read(memory, [8, 6])[1] == BASE + at + ((ROWS - 2) * COLUMNS + 8) * 2


@pytest.mark.parametrize("change", [{"element_strides": 1}, {"kind": 13}])
def test_other_maps_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(Unsupported, match="tensor map: got element strides or an unknown type"):
        TensorMap(encoded(BASE, **change))
