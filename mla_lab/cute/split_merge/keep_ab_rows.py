"""Store of partials from tensor memory, in the layout of `keep_ab_partials`: a thread has one row.

Thread t has row t % 64 and columns 256 (t / 64) + 0 .. 255. A strip, 16 rows x 16 columns, is of 16
neighbouring lanes; lanes l and l + 8 exchange half of their columns, so that each has two rows of
the other columns, 16 bytes of a strip.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from ..common.ptx_sm90 import pack2, pick
from ..common.ptx_sm100 import load_columns
from .keep_ab_partials import REGION, ROW_WORDS, UNITS_PER_STRIP, scales_within, words_at

ROWS, COLUMNS, STRIP_COLUMNS = 64, 256, 16
#: columns at a time
STEP = 32


@cute.jit
def row_scales(source, inverse):
    """Powers of two that take the thread's columns into the range of fp16, and back."""
    total = Float32(0.0)
    for step in cutlass.range(COLUMNS // STEP, unroll=1):
        values = load_columns(source + step * STEP, STEP)
        for v in values:
            total = total + cute.math.absf(v)
    return scales_within(total * inverse)


@cute.jit
def store_strip_rows(to: cute.Pointer, values, second):
    """A thread's 16 columns of a strip: two pieces of 16 bytes of two rows each. `second`: the
    thread has the greater of the two rows."""
    words = [pack2(values[2 * i], values[2 * i + 1], Float16) for i in range(STRIP_COLUMNS // 2)]
    for q in cutlass.range_constexpr(2):
        piece = cute.make_rmem_tensor(4, Int32)
        for unit in cutlass.range_constexpr(UNITS_PER_STRIP):
            low, high = words[4 * unit + q], words[4 * unit + 2 + q]
            got = cute.arch.shuffle_sync_bfly(pick(second, low, high), offset=8)
            kept = pick(second, high, low)
            piece[2 * unit] = pick(second, got, kept)
            piece[2 * unit + 1] = pick(second, kept, got)
        at = cute.recast_ptr(words_at(to + 4 * q, 4).iterator, dtype=Int32)
        cute.autovec_copy(piece, cute.make_tensor(at, cute.make_layout(4)))


@cute.jit
def store_row_partial(partials: cute.Tensor, slot, thread, source, inverse, lse):
    """O at tensor-memory address `source` times `inverse` as fp16, with its scale and the lse, to
    region `slot`."""
    row, half = thread % ROWS, thread // ROWS
    group, place = row // 16, row % 8
    second = row % 16 >= 8
    region = partials.iterator + slot * REGION
    up, down = row_scales(source, inverse)
    factor = inverse * up
    values = region + (REGION // 2 + ROW_WORDS * group + 2 * place + row % 16 // 8)
    cute.arch.store(values + 16 * (1 + half), down)
    if half == 0:
        cute.arch.store(values, lse)
    strips = COLUMNS // STRIP_COLUMNS
    lane = 4 * place + pick(second, Int32(2), Int32(0))
    to = region + ((group * 2 + half) * strips * 128 + 4 * lane)
    for step in cutlass.range(COLUMNS // STEP, unroll=1):
        columns = [v * factor for v in load_columns(source + step * STEP, STEP)]
        for i in cutlass.range_constexpr(STEP // STRIP_COLUMNS):
            part = columns[STRIP_COLUMNS * i : STRIP_COLUMNS * (i + 1)]
            store_strip_rows(to + (step * (STEP // STRIP_COLUMNS) + i) * 128, part, second)
