"""Where elements of matrix operands lie in shared memory, by the PTX ISA's canonical layouts."""

from __future__ import annotations

import numpy as np
import pytest

from mla_lab.emulate.tiles import operand_bytes, swizzle

ROWS, DEPTH = 32, 16


@pytest.mark.parametrize(("mode", "chunks"), [(0, 1), (3, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("transposed", [False, True])
def test_layouts_of_16_bits(mode: int, chunks: int, transposed: bool) -> None:
    """MN-major ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO)) without a swizzle, with one of c chunks
    ((T,c,m),(8,k)):((1,T,LBO),(cT,SBO)); K-major ((8,m),(T,2k)):((1T,SBO),(1,LBO)), and
    ((8,m),(T,2k)):((cT,SBO),(1,T)). T is 8 elements; offsets are in bytes.
    """
    leading, stride = 0x1000, 0x4000
    descriptor = leading >> 4 << 16 | stride >> 4 << 32 | mode << 62
    found = operand_bytes(descriptor, ROWS, DEPTH, 2, transposed)
    for row in range(ROWS):
        for k in range(DEPTH):
            if transposed:
                rest, of_rows, of_k = row // 8, leading, stride
                if mode == 0:
                    of_rows, of_k = stride, leading
                at = 2 * (row % 8) + 16 * (rest % chunks) + rest // chunks * of_rows
                at += 16 * chunks * (k % 8) + k // 8 * of_k
            else:
                at = 16 * chunks * (row % 8) + row // 8 * stride + 2 * (k % 8)
                at += k // 8 * (leading if mode == 0 else 16)
            assert found[row, k] == swizzle(np.array(at), mode)
