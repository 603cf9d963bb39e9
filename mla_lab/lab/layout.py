"""CuTe's layout algebra in a page of Python: shapes, strides, and functions between integers.

A layout maps a coordinate to an offset: offset = sum(coordinate x stride). A coordinate may be
one integer, which then counts column by column, leftmost mode fastest (colexicographic), as
CuTe does (CUTLASS documentation, media/docs/cpp/cute/02_layout_algebra.md).
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from math import prod
from typing import Any

from ..core.errors import invalid

IntTuple = int | tuple["IntTuple", ...]


def flatten(value: IntTuple) -> tuple[int, ...]:
    """The integers of a nested tuple, left to right."""
    if isinstance(value, int):
        return (value,)
    return tuple(i for part in value for i in flatten(part))


def _same_form(a: IntTuple, b: IntTuple) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int)
    return len(a) == len(b) and all(_same_form(x, y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Layout:
    """`shape:stride`, two integer tuples of one form."""

    shape: IntTuple
    stride: IntTuple

    def __post_init__(self) -> None:
        if not _same_form(self.shape, self.stride):
            raise invalid("stride", self.stride, f"the same form as the shape {self.shape}")
        if any(s < 1 for s in flatten(self.shape)):
            raise invalid("shape", self.shape, "extents of 1 or more")

    @classmethod
    def of(cls, text: str) -> Layout:
        """Reads `(4,(2,3)):(6,(1,2))`; a shape alone gets column-major strides."""
        shape, _, stride = text.replace(" ", "").partition(":")
        parsed = _parse(shape)
        return cls(parsed, _parse(stride) if stride else compact(parsed))

    @property
    def modes(self) -> tuple[Layout, ...]:
        """The top-level modes."""
        if isinstance(self.shape, int) or isinstance(self.stride, int):
            return (self,)
        return tuple(Layout(s, d) for s, d in zip(self.shape, self.stride, strict=True))

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return prod(flatten(self.shape))

    @property
    def cosize(self) -> int:
        """One more than the largest offset."""
        pairs = zip(flatten(self.shape), flatten(self.stride), strict=True)
        return 1 + sum((s - 1) * d for s, d in pairs)

    def __call__(self, *coordinate: IntTuple) -> int:
        """Offset of an integer, or of one coordinate per mode."""
        if len(coordinate) == 1:
            return _offset(coordinate[0], self.shape, self.stride)
        return _offset(tuple(coordinate), self.shape, self.stride)

    def offsets(self) -> list[int]:
        """Offsets of 0 .. size - 1."""
        return [self(i) for i in range(self.size)]

    def __str__(self) -> str:
        return f"{_show(self.shape)}:{_show(self.stride)}"


def _parse(text: str) -> IntTuple:
    if not re.fullmatch(r"[0-9(),]+", text):
        raise invalid("layout", repr(text), "integers, commas and parentheses: (4,(2,3)):(6,(1,2))")
    try:
        value: Any = ast.literal_eval(text)
    except (SyntaxError, ValueError) as error:
        raise invalid("layout", repr(text), "balanced parentheses") from error
    if not isinstance(value, int | tuple):
        raise invalid("layout", repr(text), "integers or tuples of them")
    return value


def _show(value: IntTuple) -> str:
    return str(value).replace(" ", "").replace(",)", ")")


def compact(shape: IntTuple, step: int = 1) -> IntTuple:
    """Column-major strides of `shape`, the first of `step`: each mode steps over all modes to its
    left.
    """
    if isinstance(shape, int):
        return step
    steps = [step * prod(flatten(shape[:i])) for i in range(len(shape))]
    return tuple(compact(part, first) for part, first in zip(shape, steps, strict=True))


def _offset(coordinate: IntTuple, shape: IntTuple, stride: IntTuple) -> int:
    if isinstance(shape, int) or isinstance(stride, int):
        if not isinstance(coordinate, int) or not isinstance(stride, int):
            raise invalid("coordinate", coordinate, f"an integer for the mode {shape}")
        return coordinate * stride
    if isinstance(coordinate, int):
        total = 0
        for s, d in zip(shape[:-1], stride[:-1], strict=True):
            extent = prod(flatten(s))
            total += _offset(coordinate % extent, s, d)
            coordinate //= extent
        return total + _offset(coordinate, shape[-1], stride[-1])
    if len(coordinate) != len(shape):
        raise invalid("coordinate", coordinate, f"{len(shape)} parts, or one integer")
    parts = zip(coordinate, shape, stride, strict=True)
    return sum(_offset(c, s, d) for c, s, d in parts)


def coalesce(layout: Layout) -> Layout:
    """The same function with the fewest modes: contiguous neighbours are joined."""
    modes: list[tuple[int, int]] = []
    for extent, step in zip(flatten(layout.shape), flatten(layout.stride), strict=True):
        if extent == 1:
            continue
        if modes and modes[-1][0] * modes[-1][1] == step:
            modes[-1] = (modes[-1][0] * extent, modes[-1][1])
        else:
            modes.append((extent, step))
    return _from_modes(modes or [(1, 0)])


def compose(outer: Layout, inner: Layout) -> Layout:
    """`outer` after `inner`: the layout i -> outer(inner(i)), in the form of `inner`.

    Where `inner`'s strides do not divide `outer`'s shape there is no such layout: InvalidInput.
    As in CuTe each mode of `inner` is composed alone, so its modes must not carry into each
    other: (2,2):(2,2) reaches 2 twice and gets another function.
    """
    if not isinstance(inner.shape, int):
        parts = [compose(outer, mode) for mode in inner.modes]
        return Layout(tuple(p.shape for p in parts), tuple(p.stride for p in parts))
    flat = coalesce(outer)
    extents, steps = list(flatten(flat.shape)), list(flatten(flat.stride))
    skip, need = flatten(inner.stride)[0], inner.shape
    if skip == 0:
        return Layout(need, 0)
    modes: list[tuple[int, int]] = []
    for i, (extent, step) in enumerate(zip(extents, steps, strict=True)):
        last = i == len(extents) - 1
        if not last and skip % extent == 0:
            skip //= extent
            continue
        if not last and extent % skip:
            raise invalid("inner", str(inner), f"strides that divide the shape of {outer}")
        left = need if last else min(need, extent // skip)
        if need % left:
            raise invalid("inner", str(inner), f"extents that divide the shape of {outer}")
        modes.append((left, step * skip))
        need, skip = need // left, 1
        if need == 1:
            break
    return _from_modes(modes)


def _from_modes(modes: list[tuple[int, int]]) -> Layout:
    modes = [m for m in modes if m[0] != 1] or modes[:1]
    if len(modes) == 1:
        return Layout(*modes[0])
    return Layout(tuple(m[0] for m in modes), tuple(m[1] for m in modes))


def complement(layout: Layout, cosize: int) -> Layout:
    """The layout of the offsets that `layout` does not reach, up to `cosize`."""
    pairs = sorted(
        (d, s)
        for s, d in zip(flatten(layout.shape), flatten(layout.stride), strict=True)
        if s > 1 and d > 0
    )
    modes, reached = [], 1
    for step, extent in pairs:
        if step % reached:
            raise invalid("layout", str(layout), "strides that nest, one a multiple of the next")
        modes.append((step // reached, reached))
        reached = step * extent
    modes.append((-(-cosize // reached), reached))
    return coalesce(Layout(tuple(m[0] for m in modes), tuple(m[1] for m in modes)))


def divide(layout: Layout, tiler: Layout) -> Layout:
    """`((inside a tile), (which tile))`: `layout` divided into tiles (CuTe's logical_divide)."""
    rest = complement(tiler, layout.size)
    both = Layout((tiler.shape, rest.shape), (tiler.stride, rest.stride))
    return compose(layout, both)


def tile_2d(layout: Layout, tiles: tuple[int, int]) -> Layout:
    """A matrix divided by `tiles`: ((row in tile, column in tile), (tile row, tile column))."""
    rows, columns = (
        divide(mode, Layout(extent, 1)) for mode, extent in zip(layout.modes, tiles, strict=True)
    )
    (r0, r1), (c0, c1) = rows.modes, columns.modes
    return Layout(
        ((r0.shape, c0.shape), (r1.shape, c1.shape)),
        ((r0.stride, c0.stride), (r1.stride, c1.stride)),
    )


@dataclass(frozen=True)
class Swizzle:
    """XORs `bits` bits of an offset into lower ones: CuTe's `Swizzle<bits, base, shift>`.

    `base` low bits stay (the vector), the `bits` above them are flipped by the `bits` that lie
    `shift` higher.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or self.shift < self.bits:
            raise invalid("swizzle", self, "bits and base of 0 or more, shift at least bits")

    def __call__(self, offset: int) -> int:
        mask = ((1 << self.bits) - 1) << (self.base + self.shift)
        return offset ^ ((offset & mask) >> self.shift)
