"""Matrix operands: swizzles, shared-memory descriptors, and which thread holds which element.

From the PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "Swizzling Modes".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from ..core.errors import unsupported
from .arithmetic import E4M3, from_bf16

T = TypeVar("T")
#: bytes of an operand's element
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "e4m3": 1}
#: a descriptor's swizzle mode -> bytes of an atom's row, and the address bits that are flipped
SPANS = {0: 16, 1: 128, 2: 64, 3: 32}
FLIPS = {0: 0, 1: 0x70, 2: 0x30, 3: 0x10}


def swizzle(address: np.ndarray, mode: int) -> np.ndarray:
    """Where bytes at unswizzled shared addresses lie."""
    return address ^ (address >> 3 & FLIPS[mode])


@lru_cache(maxsize=4096)
def operand_bytes(
    descriptor: int, rows: int, depth: int, element: int, transposed: bool
) -> np.ndarray:
    """Shared-memory offsets [rows, depth] of an operand's elements of `element` bytes.

    transposed: elements along the rows (M or N) follow each other, not those along K.
    """
    if descriptor >> 49 & 7:
        raise unsupported("wgmma descriptor", f"base offset {descriptor >> 49 & 7}", "0")
    start = (descriptor & 0x3FFF) << 4
    leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    mode = descriptor >> 62 & 3
    span = SPANS[mode]
    r, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if transposed:
        if mode == 0:  # here the leading one is that along K
            leading, stride = stride, leading
        wide = span // element
        linear = r % wide * element + r // wide * leading + k % 8 * span + k // 8 * stride
    elif mode == 0:
        b = k * element
        linear = r % 8 * 16 + r // 8 * stride + b % 16 + b // 16 * leading
    else:
        linear = r % 8 * span + r // 8 * stride + k * element
    return swizzle(start + linear, mode)


@lru_cache(maxsize=4096)
def operand_words(
    descriptor: int, rows: int, depth: int, element: int, transposed: bool
) -> np.ndarray:
    """Distinct 4-byte words that `operand_bytes` touches."""
    return np.unique(operand_bytes(descriptor, rows, depth, element, transposed) >> 2)


@lru_cache(maxsize=4096)
def quarter_words(
    descriptor: int, quarter: int, depth: int, element: int, transposed: bool
) -> np.ndarray:
    """Words of the 16 rows of A that one warp of four multiplies."""
    every = operand_bytes(descriptor, 64, depth, element, transposed)
    return np.unique(every[16 * quarter : 16 * quarter + 16] >> 2)


def decode(memory: dict[int, np.ndarray], offsets: np.ndarray, kind: str) -> np.ndarray:
    """fp32 values of elements at byte offsets."""
    if kind == "e4m3":
        return E4M3[memory[1][offsets]]
    halves = memory[2][offsets >> 1]
    return from_bf16(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)


def values(words: np.ndarray, kind: str) -> np.ndarray:
    """fp32 values of packed 32-bit words [...]; the elements of a word become a last axis."""
    words = np.ascontiguousarray(words)
    if kind == "e4m3":
        return E4M3[words.view(np.uint8).reshape(*words.shape, 4)]
    halves = words.view(np.uint16).reshape(*words.shape, 2)
    return from_bf16(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)


def a_fragment(registers: np.ndarray, kind: str) -> np.ndarray:
    """A of wgmma and mma.m16 from four registers [4, threads]: [threads / 2, K].

    Register 2 k' + h of lane l holds row 8 h + l / 4 of its warp's 16, and K elements at
    l % 4 of half k'.
    """
    warps = registers.shape[1] // 32
    parts = values(registers.reshape(2, 2, warps, 8, 4), kind)  # half, h, warp, row, quad, element
    return parts.transpose(2, 1, 3, 0, 4, 5).reshape(16 * warps, -1)


def b_fragment(registers: np.ndarray, kind: str) -> np.ndarray:
    """B of mma.m16n8 from two registers [2, threads]: [warps, 8, K]."""
    warps = registers.shape[1] // 32
    parts = values(registers.reshape(2, warps, 8, 4), kind)  # half, warp, column, quad, element
    return parts.transpose(1, 2, 0, 3, 4).reshape(warps, 8, -1)


def accumulator(registers: np.ndarray) -> np.ndarray:
    """Registers [N / 2, threads] to a matrix [threads / 2, N].

    Register 4 j + 2 h + e of lane l: row 8 h + l / 4, column 8 j + 2 (l % 4) + e.
    """
    columns, warps = registers.shape[0] * 2, registers.shape[1] // 32
    parts = registers.reshape(columns // 8, 2, 2, warps, 8, 4)
    return parts.transpose(3, 1, 4, 0, 5, 2).reshape(16 * warps, columns)


def accumulator_registers(matrix: np.ndarray) -> np.ndarray:
    """The inverse of `accumulator`."""
    rows, columns = matrix.shape
    warps = rows // 16
    parts = matrix.reshape(warps, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(parts).reshape(columns // 2, 32 * warps)


def _exponent(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, -10000, np.frexp(x)[1] - 1)


def card_product(x: np.ndarray, y: np.ndarray, c: np.ndarray, bits: int) -> np.ndarray:
    """One wgmma of an H200: x [M, K] times y [N, K] transposed, added to c [M, N], in fp32.

    Products and accumulator are cut towards zero to a multiple of 2^(e - bits), e the largest
    exponent among them (products not normalised), and added exactly. The sum is cut, not rounded:
    to fp32 for 16-bit operands (bits 25), to 13 fraction bits for e4m3 (bits 13). Recorded outputs
    of an H200, 3.1 million of bf16 and 0.26 million each of fp16 and e4m3, follow it bit for bit.
    """
    a, b, c = x.astype(np.float64)[:, None, :], y.astype(np.float64)[None], c.astype(np.float64)
    largest = np.maximum((_exponent(a) + _exponent(b)).max(-1), _exponent(c))
    unit = np.ldexp(1.0, bits - np.maximum(largest, -500))
    products = np.trunc(a * b * unit[..., None])
    total = (products.sum(-1) + np.trunc(c * unit)) / unit
    kept = 23 if bits > 23 else bits
    scale = np.ldexp(1.0, kept + 1 - np.frexp(total)[1])
    return (np.trunc(total * scale) / scale).astype(np.float32)


def chains(products: Sequence[T], adds: Callable[[T, T], bool]) -> Iterator[slice]:
    """Runs of products of which each `adds` to the accumulators of the run's first."""
    begin = 0
    for end in range(1, len(products) + 1):
        if end == len(products) or not adds(products[begin], products[end]):
            yield slice(begin, end)
            begin = end


def accumulate(
    numbers: str,
    total: np.ndarray,
    lefts: list[np.ndarray],
    rights: list[np.ndarray],
    card_bits: int = 0,
) -> np.ndarray:
    """`total` [M, N] and products of [M, K] and [N, K] in fp32, in numbers of `machine`."""
    if numbers == "fast":
        product = np.concatenate(lefts, 1) @ np.concatenate(rights, 1).T
        return np.asarray(total + product)
    for x, y in zip(lefts, rights, strict=True):
        if numbers == "card":
            total = card_product(x, y, total, card_bits)
        else:
            total = (total + x.astype(np.float64) @ y.astype(np.float64).T).astype(np.float32)
    return total
