"""Partials in 16 bits: powers of two that take values into the range of fp16, whatever that of V.

Magnitudes down to 2**-29 of the greatest keep 11 bits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.ptx_sm90 import float_of_exponent

#: biased exponents: the least of a bound, and that of 2**15
LEAST, HIGHEST = 31, 142


def exponent_within(value: Float32) -> Int32:
    """The biased exponent of a bound on magnitudes, at least `LEAST`."""
    bound = cute.make_rmem_tensor(1, Float32)
    bound[0] = value
    return cutlass.max((cute.recast_tensor(bound, Int32)[0] >> 23) & 255, LEAST)


def scales_within(value: Float32) -> tuple[Float32, Float32]:
    """Powers of two that take magnitudes up to `value` below 2**15, and back."""
    exponent = exponent_within(value)
    return float_of_exponent(127 + HIGHEST - 1 - exponent), float_of_exponent(
        127 - HIGHEST + 1 + exponent
    )
