"""Small words for e4m3: rounding, results, and V^T for the matrix unit (see swap_ab's `fp8`)."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int16, Int32

#: bytes of two words that are row g, and row g + 8 of V^T
ORDERS = (0x6240, 0x7351)


def round_two(low: Float32, high: Float32) -> Int16:
    """Two values as e4m3, saturating; `low` in the low byte."""
    return cute.arch.inline_ptx(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Int16],
        read_only_args=[low, high],
    )


def join_two(low: Int16, high: Int16) -> Int32:
    """Two halves as a word."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, { {$r0}, {$r1} };", write_only_types=[Int32], read_only_args=[low, high]
    )


def load_step(base: Int32, offset: int, words: cute.Tensor, at: int) -> None:
    """V^T of 64 columns and 32 tokens to four registers of operand A, from `at` on; this lane's row
    of V, 16 bytes of the token that has its number, lies at `base` + `offset`."""
    m0, m1, m2, m3 = cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, "
        f"[{{$r0}}+{offset}];",
        write_only_types=[Int32] * 4,
        read_only_args=[base],
    )
    for i, (x, y) in enumerate(((m0, m1), (m2, m3))):
        for e, order in enumerate(ORDERS):
            words[at + 2 * i + e] = cute.arch.prmt(x, y, order)


def put_two(dtype: Any, out: cute.Tensor, at: Int32, low: Float32, high: Float32) -> None:
    """Two neighbouring columns of a result, from element `at` on, an even one."""
    at = cute.assume(at, divby=2)  # else `align` computes what it is told
    if dtype.width == 8:
        pointer = cute.recast_ptr((out.iterator + at).align(2), dtype=Int16)
        cute.arch.store(pointer, round_two(low, high))
    else:
        pair = cute.make_rmem_tensor(2, dtype)
        pair[0], pair[1] = low.to(dtype), high.to(dtype)
        pointer = (out.iterator + at).align(4)
        cute.autovec_copy(pair, cute.make_tensor(pointer, cute.make_layout(2)))
