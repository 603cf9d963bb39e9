"""Arithmetic of single instructions on rows of threads, bit for bit where PTX fixes the result.

`fma.rn` rounds once. Approximations (ex2, lg2, rcp, rsqrt) are correctly rounded here; PTX lets the
card differ by one or two units in the last place, and `card_tables` holds how an H200 does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..core.kv_cache import pack

Row = np.ndarray

TINY = np.float32(2.0**-126)
#: value of each e4m3 byte
E4M3: Row = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
_U16, _ONE = np.uint32(16), np.uint32(1)


def some(flags: Row) -> bool:
    """Whether any of a few flags is set; `flags.any()` takes ten times as long."""
    return 1 in flags.tobytes()


def fma(a: Row, b: Row, c: Row) -> Row:
    """a b + c of fp32 in one rounding.

    The product is exact in float64. A sum that float64 rounds to the middle of two fp32 numbers is
    moved to the side on which the exact one lies.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    bits = total.view(np.uint64)
    middle = (bits & 0x1FFFFFFF) == 0x10000000
    if some(middle):
        kept = total - product
        lost = (product - (total - kept)) + (c - kept)
        away = (lost > 0) == (total > 0)
        moved = np.where(away, bits + np.uint64(1), bits - np.uint64(1)).view(np.float64)
        total = np.where(middle & (lost != 0), moved, total)
    return total.astype(np.float32)


def flush(x: Row) -> Row:
    """Subnormals to zero of the same sign."""
    small = np.abs(x) < TINY
    return np.where(small, np.copysign(np.float32(0), x), x) if some(small) else x


def ex2(x: Row) -> Row:
    """2 to the power x."""
    return flush(np.exp2(flush(x).astype(np.float64)).astype(np.float32))


def lg2(x: Row) -> Row:
    """Logarithm of base 2."""
    return np.log2(flush(x).astype(np.float64)).astype(np.float32)


def rcp(x: Row) -> Row:
    """1 / x; rounds correctly, as `rcp.rn` must."""
    return flush((1.0 / flush(x).astype(np.float64)).astype(np.float32))


def rsqrt(x: Row) -> Row:
    """1 / sqrt(x)."""
    return (1.0 / np.sqrt(flush(x).astype(np.float64))).astype(np.float32)


def div(a: Row, b: Row) -> Row:
    """Integer quotient towards zero; by zero it is unspecified."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    return (a - np.fmod(a, safe)) // safe


def funnel(low: Row, high: Row, count: Row, right: bool) -> Row:
    """shf.wrap: 32 bits out of 64, shifted by `count` modulo 32."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    count = count.astype(np.uint64) & np.uint64(31)
    shifted = both >> count if right else both << count >> np.uint64(32)
    return shifted.astype(np.uint32)


def prmt(a: Row, b: Row, selector: Row) -> Row:
    """Four bytes chosen from eight, each perhaps replaced by its sign."""
    n = max(a.size, b.size, selector.size)
    both = np.empty((n, 2), np.uint32)
    both[:, 0], both[:, 1] = a, b
    picks, signs = _picks(n, selector.tobytes())
    chosen = both.view(np.uint8).reshape(-1)[picks]
    if signs is not None:
        chosen = np.where(signs, np.uint8(0) - (chosen >> np.uint8(7)), chosen)
    return chosen.view(np.uint32).reshape(n)


@lru_cache(maxsize=512)
def _picks(n: int, selector: bytes) -> tuple[Row, Row | None]:
    """Which of 8 n bytes the 4 n of a `prmt` are, and where their signs are wanted, if anywhere."""
    shifts = np.arange(0, 16, 4, dtype=np.uint32)
    nibbles = np.frombuffer(selector, np.uint32)[:, None] >> shifts & np.uint32(15)
    picks = np.arange(n)[:, None] * 8 + (nibbles & np.uint32(7))
    signs = np.broadcast_to(nibbles >= 8, picks.shape)
    return picks, signs if signs.any() else None


def bfi(a: Row, b: Row, at: Row, count: Row) -> Row:
    """`count` low bits of `a` put into `b` at bit `at`."""
    kind, bits = b.dtype.type, 8 * b.itemsize
    at, count = at & np.uint32(255), np.minimum(count & np.uint32(255), bits)
    ones = np.where(count >= bits, ~kind(0), (kind(1) << count.astype(kind)) - kind(1))
    mask = np.where(at >= bits, kind(0), ones << np.minimum(at, bits - 1).astype(kind))
    return (b & ~mask) | (a << np.minimum(at, bits - 1).astype(kind) & mask)


def shift(value: Row, count: Row, left: bool) -> Row:
    """Shifts by more than the width give zeros, or copies of the sign."""
    bits = 8 * value.itemsize
    if left or value.dtype.kind == "u":
        amount = np.minimum(count, bits - 1).astype(value.dtype)
        moved = value << amount if left else value >> amount
        return np.where(count >= bits, value.dtype.type(0), moved)
    return value >> np.minimum(count, bits - 1).astype(value.dtype)


def dp2a(a: Row, b: Row, c: Row, high: bool, signed: tuple[bool, bool]) -> Row:
    """Two 16-bit numbers of `a` times two bytes of `b`, plus `c`."""
    halves = a.view(np.int16 if signed[0] else np.uint16).reshape(-1, 2).astype(np.int64)
    quarters = b.view(np.int8 if signed[1] else np.uint8).reshape(-1, 4).astype(np.int64)
    picked = quarters[:, 2:] if high else quarters[:, :2]
    return (c.astype(np.int64) + (halves * picked).sum(1)).astype(np.uint32)


def to_bf16(x: Row) -> Row:
    """Bits of the nearest bf16, as uint32."""
    bits = x.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + (bits >> _U16 & _ONE)) >> _U16
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded)


def to_f16(x: Row) -> Row:
    """Bits of the nearest fp16, as uint32."""
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def to_e4m3(x: Row) -> Row:
    """Bits of the nearest e4m3, as uint32; beyond 448 it saturates."""
    return pack(torch.tensor(x), "e4m3").view(torch.uint8).numpy().astype(np.uint32)


def from_bf16(bits: Row) -> Row:
    """fp32 of bf16 bits in any unsigned type."""
    return (bits.astype(np.uint32) << _U16).view(np.float32)


def e4m3x2_to_f16x2(pair: Row) -> Row:
    """Two e4m3 in 16 bits to two fp16 in 32."""
    low = to_f16(E4M3[pair & 255])
    return low | to_f16(E4M3[pair >> 8]) << _U16


def f16x2_to_e4m3x2(pair: Row) -> Row:
    """Two fp16 in 32 bits to two e4m3 in 16."""
    return to_e4m3(pair.view(np.float16).astype(np.float32)).reshape(-1, 2) @ np.array([1, 256])


def to_integer(x: Row, kind: Any) -> Row:
    """A rounded fp32 to an integer type, saturating; NaN gives 0."""
    limits = np.iinfo(kind)
    return np.clip(np.nan_to_num(x.astype(np.float64)), limits.min, limits.max).astype(kind)


_PLAIN: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.fmax,
    "min": np.fmin,
}
_PLAIN |= {"fma": fma}
_WHOLE = {"add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum}


def packed(op: str, kind: str, *operands: Row) -> Row:
    """An operation on two 16-bit numbers in 32 bits, of fp16, bf16 or integers."""
    if kind in ("u16x2", "s16x2"):
        view = np.uint16 if kind[0] == "u" else np.int16
        return _WHOLE[op](*(x.view(view) for x in operands)).view(np.uint32)
    if kind == "f16x2":
        wide = [x.view(np.float16).astype(np.float32) for x in operands]
        return _PLAIN[op](*wide).astype(np.float16).view(np.uint32)
    wide = [from_bf16(x.view(np.uint16)) for x in operands]
    return to_bf16(_PLAIN[op](*wide)).astype(np.uint16).view(np.uint32)


def fma_down(a: Row, b: Row, c: Row) -> Row:
    """a b + c of fp32, rounded towards minus infinity."""
    nearest = fma(a, b, c)
    exact = a.astype(np.float64) * b + c
    above = nearest.astype(np.float64) > exact
    return np.where(above, np.nextafter(nearest, np.float32(-np.inf)), nearest)
