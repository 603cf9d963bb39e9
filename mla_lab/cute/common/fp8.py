"""e4m3: rounding, stores of results, and V^T as operand A of WGMMA (see `swap_ab_sm90`)."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int16, Int32

from .ptx_sm90 import ptx

#: prmt selectors that take two ldmatrix words to rows g and g + 8 of V^T
ORDERS = (0x6240, 0x7351)


def round_two(low: Float32, high: Float32) -> Int16:
    """Two values as e4m3, saturating; `low` in the low byte."""
    return ptx("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};", low, high, out=Int16)


def join_two(low: Int16, high: Int16) -> Int32:
    """Two 16-bit halves as one word."""
    return ptx("mov.b32 {$w0}, { {$r0}, {$r1} };", low, high, out=Int32)


def load_step(base: Int32, offset: int, words: cute.Tensor, at: int) -> None:
    """Operand A of V^T, 64 columns x 32 tokens, to `words[at : at + 4]`. `base` + `offset` is the
    shared-memory address of this lane's row of V: 16 bytes of token `lane`."""
    m0, m1, m2, m3 = ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, "
        f"[{{$r0}}+{offset}];",
        base,
        out=[Int32] * 4,
    )
    for i, (x, y) in enumerate(((m0, m1), (m2, m3))):
        for e, order in enumerate(ORDERS):
            words[at + 2 * i + e] = cute.arch.prmt(x, y, order)


def put_two(dtype: Any, out: cute.Tensor, at: Int32, low: Float32, high: Float32) -> None:
    """Store two neighbouring columns at element `at`, which is even."""
    at = cute.assume(at, divby=2)  # `align` rounds down what is not known to be aligned
    if dtype.width == 8:
        pointer = cute.recast_ptr((out.iterator + at).align(2), dtype=Int16)
        cute.arch.store(pointer, round_two(low, high))
    else:
        pair = cute.make_rmem_tensor(2, dtype)
        pair[0], pair[1] = low.to(dtype), high.to(dtype)
        pointer = (out.iterator + at).align(4)
        cute.autovec_copy(pair, cute.make_tensor(pointer, cute.make_layout(2)))
