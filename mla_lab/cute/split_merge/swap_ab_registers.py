"""Merges of a row tile in few pieces: a share is long then, so a thread takes several of its units
at a time, all of their partials on the way together. One after the other each unit would wait for
L2 on its own: 3 us for two pieces of 16 rows in place of 1.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.ptx_sm90 import fresh_thread, load2, read4_relaxed, write4_relaxed
from ..swap_ab_sm90.epilogue_store import (
    NUM_SPLITS,
    OUT_ROW,
    ROWS,
    SLOT,
    SPLIT,
    column,
    store_unit,
    unit_place,
    unit_words,
)
from ..swap_ab_sm90.params import CONSUMERS, Shape
from ..swap_ab_sm90.shared_storage import Global

#: pieces of a row tile at most, and units of a thread at a time
FEW, ROUNDS = 4, 4
#: units of a share that all threads take at a time
PASS = ROUNDS * CONSUMERS


@cute.jit
def load_few(
    c: cutlass.Constexpr[Shape], g: Global, part: cute.Tensor, more: cute.Tensor, rank: Int32,
    base: Int32, end: Int32,
):  # fmt: skip
    """Partials of this thread's units of [base, end): piece k of its r-th at FEW r + k."""
    slot = more[SLOT] - more[SPLIT]
    for r in cutlass.range_constexpr(ROUNDS):
        at = cutlass.min(base + r * CONSUMERS + fresh_thread(), end - 1)
        for k in cutlass.range_constexpr(FEW):
            if k < more[NUM_SPLITS]:
                words = unit_words(c, g, slot + k, rank, at)
                cute.autovec_copy(words, part[None, FEW * r + k])


@cute.jit
def lack_few(part: cute.Tensor, more: cute.Tensor, base: Int32, end: Int32):
    """1 where a partial that goes by mail is not here yet."""
    missing = Int32(0)
    for r in cutlass.range_constexpr(ROUNDS):
        inside = base + r * CONSUMERS + fresh_thread() < end
        for k in cutlass.range_constexpr(FEW):
            lacking = inside & (k < more[NUM_SPLITS]) & lacks_word(part, FEW * r + k)
            missing = Int32(1) if lacking else missing
    return missing


def lacks_word(part: cute.Tensor, k: int):
    """Whether one of the four words is not here."""
    return (part[0, k] == 0) | (part[1, k] == 0) | (part[2, k] == 0) | (part[3, k] == 0)


@cute.jit
def ask_few(
    c: cutlass.Constexpr[Shape], g: Global, part: cute.Tensor, more: cute.Tensor, base: Int32,
    end: Int32,
):  # fmt: skip
    """`load_few` for partials that go by mail: those that are not here yet, and nobody else's."""
    slot = more[SLOT] - more[SPLIT]
    for r in cutlass.range_constexpr(ROUNDS):
        unit = base + r * CONSUMERS + fresh_thread()
        for k in cutlass.range_constexpr(FEW):
            if (unit < end) & (k < more[NUM_SPLITS]) & lacks_word(part, FEW * r + k):
                place = unit_words(c, g, slot + k, Int32(0), unit).iterator
                words = read4_relaxed(place)
                for e in cutlass.range_constexpr(4):
                    part[e, FEW * r + k] = words[e]


@cute.jit
def clear_few(c: cutlass.Constexpr[Shape], g: Global, more: cute.Tensor, base: Int32, end: Int32):
    """Leave zeros for the next launch in what `ask_few` has taken."""
    slot = more[SLOT] - more[SPLIT]
    for r in cutlass.range_constexpr(ROUNDS):
        unit = base + r * CONSUMERS + fresh_thread()
        for k in cutlass.range_constexpr(FEW):
            if (unit < end) & (k < more[NUM_SPLITS]):
                place = unit_words(c, g, slot + k, Int32(0), unit).iterator
                write4_relaxed(place, (0, 0, 0, 0))


@cute.jit
def store_few(
    c: cutlass.Constexpr[Shape], g: Global, part: cute.Tensor, tables: cute.Pointer,
    per_pair: cutlass.Constexpr[int], tail: cute.Tensor, more: cute.Tensor, rank: Int32,
    begin: Int32, base: Int32, end: Int32,
):  # fmt: skip
    """Add each unit's partials in split order, and write it. `tables`: weights of the row pairs
    from that of unit `begin` on, `per_pair` floats each."""
    for r in cutlass.range_constexpr(ROUNDS):
        unit = base + r * CONSUMERS + fresh_thread()
        at = cutlass.min(unit, end - 1)
        weights = tables + (at // 256 - begin // 256) * per_pair
        acc = cute.make_rmem_tensor(4, Float32)
        acc.fill(0.0)
        for k in cutlass.range_constexpr(FEW):
            if k < more[NUM_SPLITS]:
                w = load2(weights + k * 2)
                for e in cutlass.range_constexpr(4):
                    acc[e] = acc[e] + w[e % 2] * part[e, FEW * r + k]
        row, place = unit_place(c, at, rank)
        rows = tail[ROWS] if unit < end else Int32(0)
        lane = fresh_thread() % 32
        store_unit(c, g, acc, tail[OUT_ROW], rows, row, column(c, place), lane)
