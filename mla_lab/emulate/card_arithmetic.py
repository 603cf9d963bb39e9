"""ex2, lg2 and rcp as an H200 computes them, bit for bit.

Each is fixed-point arithmetic on the significand. ex2 and rcp are tables of differences from the
rounded value. lg2 is a polynomial of degree 2 in each of 64 segments, whose coefficients, and the
bits of the square that the card leaves out, follow from its results for all significands.
"""

from __future__ import annotations

import json
import lzma
from functools import lru_cache

import numpy as np

from ..core.resources import data_dir
from .arithmetic import TINY, Row, flush, rcp

#: bits of a significand below the leading one, and of those, the bits inside a segment of lg2
FRACTION, INSIDE = 23, 17
#: lg2 adds in units of 2**-36; its polynomial has two bits more
UNIT, _FINE = 36, 2
#: columns of the square of an offset below this one have no partial products
_COLUMN = 19
_MASK = np.int64((1 << FRACTION) - 1)
#: the NaN that a card's instructions give
NAN = np.uint32(0x7FFFFFFF).view(np.float32)


@lru_cache(maxsize=1)
def card_tables() -> dict[str, Row]:
    """Differences (int8, units in the last place) between an H200's ex2 and rcp and the rounded
    values, for each of the 2^23 significands of arguments in [1, 2).
    """
    tables = {}
    for name in ("ex2", "rcp"):
        path = data_dir() / "runtime" / f"emulate_{name}_ulps.i8.xz"
        tables[name] = np.frombuffer(lzma.decompress(path.read_bytes()), np.int8)
    return tables


@lru_cache(maxsize=1)
def lg2_segments() -> Row:
    """[64, 3] int64: constant, factor of the offset, factor of its square, in units of 2**-38."""
    return np.array(json.loads((data_dir() / "runtime/emulate_lg2.json").read_text()), np.int64)


def card_ex2(x: Row) -> Row:
    """ex2.approx.ftz of fp32: |x| is cut to 23 bits of fraction; where x is negative
    and that no integer, its bits are inverted.
    """
    x = flush(x).astype(np.float64)
    inside = np.clip(np.nan_to_num(x), -256, 256)
    steps = np.trunc(np.abs(inside) * 2.0**FRACTION).astype(np.int64)
    inverted = np.where(steps & _MASK == 0, -steps, ~steps)
    steps = np.where(inside < 0, inverted, steps)
    at = steps & _MASK
    found = _moved(np.exp2(at * 2.0**-FRACTION).astype(np.float32), card_tables()["ex2"][at])
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.ldexp(found.astype(np.float64), (steps >> FRACTION).astype(np.int32))
        return np.where(np.isnan(x), NAN, flush(scaled.astype(np.float32)))


def card_rcp(x: Row) -> Row:
    """rcp.approx.ftz of fp32: the significand of x decides."""
    found = _moved(rcp(x), card_tables()["rcp"][x.view(np.uint32) & np.uint32(_MASK)])
    return np.where(np.isnan(x), NAN, found)


def card_lg2(x: Row) -> Row:
    """lg2.approx.ftz of fp32: exponent plus polynomial in fixed point, cut to 24 bits; a negative
    sum is inverted, not negated.
    """
    x = flush(x)
    bits = x.view(np.uint32).astype(np.int64)
    offset = bits & ((1 << INSIDE) - 1)
    factors = lg2_segments()[(bits & _MASK) >> INSIDE]
    part = factors[:, 0] + factors[:, 1] * offset + factors[:, 2] * _square(offset)
    total = ((bits >> FRACTION) - 127 << UNIT) + (part >> _FINE)
    size = np.where(total < 0, ~total, total)
    cut = np.maximum(np.frexp(size.astype(np.float64))[1] - FRACTION - 1, 0)
    value = np.ldexp((size >> cut << cut).astype(np.float64), -UNIT)
    found = np.where(total < 0, -value, value).astype(np.float32)
    found[x == 1] = 0
    found[x == 0] = -np.inf
    found[np.isposinf(x)] = np.inf
    found[(x < 0) | np.isnan(x)] = NAN
    return found


def _square(offset: Row) -> Row:
    """Square of 17 bits in units of 2**19, without the partial products below one unit."""
    total = np.zeros_like(offset)
    for low in range(INSIDE):
        for high in range(low, INSIDE):
            column = 2 * low if low == high else low + high + 1
            if column >= _COLUMN:
                total += (offset >> low & offset >> high & 1) << column - _COLUMN
    return total


def _moved(rounded: Row, ulps: Row) -> Row:
    normal = np.isfinite(rounded) & (np.abs(rounded) >= TINY)
    bits = rounded.view(np.int32) + np.where(normal, ulps, 0)
    return bits.astype(np.int32).view(np.float32)
