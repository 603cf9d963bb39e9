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

    The product is exact in float64. A sum that float64 rounds to the middle of two fp32 numbers,
    or to where fp32 is subnormal and has its middles elsewhere, is rounded to odd instead.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    middle = (total.view(np.uint64) & 0x1FFFFFFF) == 0x10000000
    if some(middle | (np.abs(total) < TINY)):
        total = to_odd(product, c)
    return total.astype(np.float32)


def to_odd(product: Row, c: Row) -> Row:
    """product + c of float64, an inexact sum with its last bit set (rounded to odd): a second
    rounding to fewer bits then gives what one rounding of the exact sum gives.
    """
    total = product + c
    kept = total - product
    lost = (product - (total - kept)) + (c - kept)
    inexact = np.isfinite(total) & (lost != 0)
    bits = total.view(np.uint64)
    cut = np.where((lost < 0) == (total > 0), bits - np.uint64(1), bits) | np.uint64(1)
    return np.where(inexact, cut.view(np.float64), total)


def _odd32(x: Row) -> Row:
    """fp32 of float64, rounded to odd."""
    nearest = x.astype(np.float32)
    bits = nearest.view(np.uint32)
    away = np.abs(nearest.astype(np.float64)) > np.abs(x)
    cut = np.where(away, bits - _ONE, bits) | _ONE
    return np.where(np.isnan(x) | (nearest == x), nearest, cut.view(np.float32))


def extreme(op: str, a: Row, b: Row) -> Row:
    """max or min of fp32: -0.0 is less than +0.0; NaN is left out, or kept by max.NaN, min.NaN."""
    found: Row = _EXTREMES[op](a, b)
    zero = found == 0
    if some(zero):
        of_zeros = a + b if op.startswith("max") else -(-a - b)
        found = np.where(zero & (a == 0) & (b == 0), of_zeros, found)
    return found


_EXTREMES = {"max": np.fmax, "min": np.fmin, "max.NaN": np.maximum, "min.NaN": np.minimum}


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
    """1 / x."""
    return flush((1.0 / flush(x).astype(np.float64)).astype(np.float32))


def rcp_rn(x: Row) -> Row:
    """1 / x as `rcp.rn` without .ftz: subnormal arguments and results count."""
    return (1.0 / x.astype(np.float64)).astype(np.float32)


def rsqrt(x: Row) -> Row:
    """1 / sqrt(x)."""
    return (1.0 / np.sqrt(flush(x).astype(np.float64))).astype(np.float32)


def without_ftz(name: str, approximate: Any, x: Row) -> Row:
    """An approximation whose subnormal arguments and results count: the flushing one on scaled
    arguments, as ptxas writes it."""
    if name == "ex2":
        low = x < -126
        found = approximate(np.where(low, x * np.float32(0.5), x))
        return np.where(low, found * found, found)
    up = np.abs(x) < TINY
    scaled = np.where(up, x * np.float32(2.0**24), x)
    if name == "rcp":
        down = np.abs(x) > np.float32(2.0**126)
        factor = np.where(down, np.float32(0.25), np.where(up, np.float32(2.0**24), np.float32(1)))
        return approximate(x * factor) * factor
    found = approximate(scaled)
    if name == "lg2":
        return np.where(up, found - np.float32(24), found)
    return np.where(up, found * np.float32(2.0**12), found)


def div(a: Row, b: Row) -> Row:
    """Integer quotient towards zero; by zero it is unspecified."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    return (a - np.fmod(a, safe)) // safe


def div_approx(a: Row, b: Row) -> Row:
    """div.approx of fp32, a times 1 / b: zero, or NaN of an infinite a, for |b| beyond 2^126."""
    lost = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    return np.where(lost, a * np.copysign(np.float32(0), b), a / b)


def funnel(low: Row, high: Row, count: Row, right: bool, clamp: bool) -> Row:
    """shf: 32 bits out of 64, shifted by `count` modulo 32, or by 32 at most (clamp)."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    count = count.astype(np.uint64)
    count = np.minimum(count, np.uint64(32)) if clamp else count & np.uint64(31)
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
    bits = x.astype(np.float16).view(np.uint16).astype(np.uint32)
    missing = np.isnan(x)
    return np.where(missing, np.uint32(0x7FFF), bits) if some(missing) else bits


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
    """A rounded fp32 to an integer type, saturating; NaN gives 0, of 64 bits the highest one."""
    limits, whole = np.iinfo(kind), np.nan_to_num(x.astype(np.float64))
    # the largest 64-bit integers are no float64: what reaches them is set by hand
    high, low = whole >= float(limits.max), whole <= float(limits.min)
    inside = np.where(high | low, 0.0, whole).astype(kind)
    found = np.where(high, kind(limits.max), np.where(low, kind(limits.min), inside))
    missing = limits.min if limits.min else limits.max // 2 + 1
    return np.where(np.isnan(x), kind(missing if limits.bits == 64 else 0), found)


_PLAIN: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": lambda a, b: extreme("max", a, b),
    "min": lambda a, b: extreme("min", a, b),
    "max.NaN": lambda a, b: extreme("max.NaN", a, b),
    "min.NaN": lambda a, b: extreme("min.NaN", a, b),
}
_WHOLE = {"add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum}


def packed(op: str, kind: str, *operands: Row) -> Row:
    """An operation on two 16-bit numbers in 32 bits, of fp16, bf16 or integers."""
    if kind in ("u16x2", "s16x2"):
        view = np.uint16 if kind[0] == "u" else np.int16
        return _WHOLE[op](*(x.view(view) for x in operands)).view(np.uint32)
    if op == "abs":
        return operands[0] & np.uint32(0x7FFF7FFF)
    if kind == "f16x2":
        wide = [x.view(np.float16).astype(np.float32) for x in operands]
        if op == "fma":
            return to_odd(_product(*wide[:2]), wide[2]).astype(np.float16).view(np.uint32)
        return _PLAIN[op](*wide).astype(np.float16).view(np.uint32)
    wide = [from_bf16(x.view(np.uint16)) for x in operands]
    if op == "fma":
        found = _odd32(to_odd(_product(*wide[:2]), wide[2]))
        return to_bf16(found).astype(np.uint16).view(np.uint32)
    return to_bf16(_PLAIN[op](*wide)).astype(np.uint16).view(np.uint32)


def fma_down(a: Row, b: Row, c: Row) -> Row:
    """a b + c of fp32, rounded towards minus infinity."""
    product = _product(a, b)
    exact = to_odd(product, c)
    nearest = exact.astype(np.float32)
    above = nearest.astype(np.float64) > exact
    down = np.where(above, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    negative = (exact == 0) & (np.signbit(product) | np.signbit(c))
    return np.where(negative, np.float32(-0.0), down)


def _product(a: Row, b: Row) -> Row:
    """a b, which is exact."""
    found: Row = np.multiply(a, b, dtype=np.float64)
    return found
