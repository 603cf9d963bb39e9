"""Corners of single instructions: subnormal results, NaN, large divisors, atomics of fp32."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from mla_lab.emulate import Fault
from mla_lab.emulate.arithmetic import fma
from mla_lab.emulate.direct import Direct, ptx_kernel

from .test_emulate_instructions import WHOLE, filled, kernel, per_thread


def test_fma_rounds_once_where_fp32_is_subnormal() -> None:
    """2^-127 + 2^-149 and a product just below 2^-150: the sum lies below the middle of two."""
    a, b = (np.array([2.0**-75 * (1 + sign * 2.0**-15)], np.float32) for sign in (1, -1))
    c = np.array([2.0**-127 + 2.0**-149], np.float32)
    assert Fraction(float(a[0])) * Fraction(float(b[0])) < Fraction(1, 2**150)
    assert fma(a, b, c).view(np.uint32) == c.view(np.uint32)
    assert fma(a, -b, -c).view(np.uint32) == (-c).view(np.uint32)


@pytest.mark.parametrize(
    ("kind", "high"), [("s64", -(1 << 31)), ("u64", -(1 << 31)), ("s32", 0), ("u32", 0)]
)
def test_nan_as_a_whole_number(kind: str, high: int) -> None:
    """The PTX ISA on cvt: 1 << 63 of 64 bits, else 0. The upper 32 bits of 64 are looked at."""
    wide = f"cvt.rzi.{kind}.f32 %d3, %r3; shr.u64 %d3, %d3, 32; cvt.u32.u64 %r2, %d3;"
    narrow = f"cvt.rzi.{kind}.f32 %r2, %r3;"
    body = "mov.b32 %r3, 0f7fc00000; " + (wide if kind.endswith("64") else narrow)
    assert torch.equal(per_thread(body, WHOLE), WHOLE * 0 + high)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(6.0, 2.0**126, 6 * 2.0**-126), (2.0**127, 2.0**127, 0.0), (-1.0, 2.0**127, -0.0)],
)
def test_an_approximate_quotient_by_a_large_divisor_is_zero(
    a: float, b: float, expected: float
) -> None:
    divisor = f"mov.b32 %r3, 0f{int(np.float32(b).view(np.uint32)):08x};"
    found = per_thread(divisor + "div.approx.f32 %r2, %r1, %r3;", filled(a))
    assert torch.equal(found, filled(expected))
    assert torch.equal(found.signbit(), filled(expected).signbit())


@pytest.mark.parametrize(("op", "last"), [("add", 64.5), ("min", 0.5), ("max", 2.0), ("exch", 2.0)])
def test_atomics_of_floats(op: str, last: float) -> None:
    kind = "b32" if op == "exch" else "f32"
    body = f"ld.param.u64 %d1, [b]; mov.b32 %r3, 0f40000000; atom.global.{op}.{kind} %r2, [%d1], "
    out = torch.tensor([0.5])
    ptx_kernel(kernel(body + "%r3;"), "k", Direct())(torch.zeros(1), out)
    assert out.item() == last


def test_a_lock_that_nobody_opens_is_reported() -> None:
    """An atomic that changes nothing is no progress."""
    spin = "L: atom.global.cas.b32 %r5, [%d0], 1, 2; setp.ne.s32 %p5, %r5, 1; @%p5 bra L;"
    with pytest.raises(Fault, match="livelock"):
        ptx_kernel(kernel("ld.param.u64 %d0, [a]; " + spin), "k", Direct())(
            torch.zeros(1), torch.zeros(1)
        )
