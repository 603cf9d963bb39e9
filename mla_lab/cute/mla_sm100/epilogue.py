"""The end of a work tile: O from tensor memory, divided by the row sums, to out or to a partial."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.feature_operands import with_scales, with_sink
from ..common.fp8 import join_two, round_two
from ..common.ptx_sm90 import LN2, pack2, pick
from ..common.ptx_sm100 import load_columns
from ..rows_on_m.epilogue_store import inverse_sum, store_row_lse
from ..rows_on_m.params import LATENT
from ..split_merge.keep_ab_cooperative import add_to_counter
from ..split_merge.keep_ab_rows import store_row_partial
from .params import ROWS, SOFTMAX_BARRIER, V_COLUMNS, Cta

#: columns at a time
STEP = 32


def packed(dtype, values):
    """Words of neighbouring columns in the output type."""
    if dtype.width == 16:
        return [pack2(values[c], values[c + 1], dtype) for c in range(0, len(values), 2)]
    halves = [round_two(values[c], values[c + 1]) for c in range(0, len(values), 2)]
    return [join_two(halves[i], halves[i + 1]) for i in range(0, len(halves), 2)]


@cute.jit
def store_out(cta: Cta, work, thread, source, factor):
    """The thread's 256 columns, 16 bytes at a time."""
    cfg, g = cta.cfg, cta.g
    row = thread % ROWS
    for step in cutlass.range(V_COLUMNS // STEP, unroll=1):
        values = load_columns(source + step * STEP, STEP)
        words = packed(cfg.out_element, [v * factor for v in values])
        if work.first_row + row < work.num_rows:
            column = thread // ROWS * V_COLUMNS + step * STEP
            offset = cute.assume((work.global_row + row) * LATENT + column, divby=16)
            for i in cutlass.range_constexpr(0, len(words), 4):
                piece = cute.make_rmem_tensor(4, Int32)
                for e in cutlass.range_constexpr(4):
                    piece[e] = words[i + e]
                at = g.mO.iterator + (offset + i * 32 // cfg.out_element.width)
                pointer = cute.recast_ptr(at.align(16), dtype=Int32)
                cute.autovec_copy(piece, cute.make_tensor(pointer, cute.make_layout(4)))


@cute.jit
def epilogue(cta: Cta, work, thread, source, row_max, total):
    """One row, 256 columns by a thread; `total` is relative to `row_max` (log2 units)."""
    cfg, g = cta.cfg, cta.g
    row = thread % ROWS
    lse = (row_max + cute.math.log2(total, fastmath=True)) * Float32(LN2)
    if work.slot >= 0:
        inverse = inverse_sum(total)
        slot = work.slot * cfg.cluster + cta.rank
        store_row_partial(g.mO_partial, slot, thread, source, inverse, lse)
        SOFTMAX_BARRIER.sync()
        if thread == 0:
            add_to_counter(cta, work, cta.rank, "release")
    else:
        whole = with_sink(cfg, g, total, row_max, work.first_row + row)
        inverse = pick(total <= 0.0, Float32(0.0), cute.arch.rcp_approx(whole))
        store_out(cta, work, thread, source, inverse * with_scales(cfg, g).out_scale)
        if thread < ROWS:
            store_row_lse(cta, work, row, lse)
